"""transformers' own server (`transformers serve`) with one model that is loaded already.

Left to itself it looks a model's class up in transformers alone, and so loads no model of this package and no adapter.
Importing this module takes the packages of the extra `serve`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from fastapi import HTTPException
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager, TimedModel
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import BaseHandler, GenerationState, Modality

from cacheformers.modeling.architectures import find_decoder, unwrap
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.method import required_options

SHOWN: ContextVar[str] = ContextVar("passages of a request", default="")


def make_app(
    name: str, model: Any, tokenizer: PreTrainedTokenizerFast, passages: Callable[[str], str] | None = None
) -> Any:
    """Make the server's FastAPI application for one model, which clients call `name`.

    It generates in one thread: requests at the same time wait for each other.

    Args:
        passages: takes a question; returns the text to put before it.
    """
    manager, state = OneModel(name, model, tokenizer), GenerationState()
    chats, responses = Chats(manager, state), Responses(manager, state)
    chats.passages = responses.passages = passages
    chats.apart = responses.apart = str(tokenizer.chat_template).endswith(QUESTIONS)
    return build_server(
        manager,
        chats,
        completion_handler=CompletionHandler(manager, state),
        response_handler=responses,
        transcription_handler=TranscriptionHandler(manager, state),
        systemone_handler=SystemOneHandler(manager, state),
        generation_state=state,
    )


class ShowsPassages:
    """A handler of requests that puts passages before the last question of a conversation.

    They are searched for in the thread that generates, so that the server takes other requests meanwhile.
    """

    passages: Callable[[str], str] | None = None
    apart = False  # the chat template is `QUESTIONS`, in which text before a question is a message of its own

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer a request; HTTP 400 for a question that is too long."""
        handler: Any = self
        if self.passages is not None:
            handler._validate_request(body)
            SHOWN.set(await self.search(handler._resolve_model(body)[0], self.messages(body)))
        return await super().handle_request(body, request_id)  # type: ignore[misc]  # a mixin

    async def search(self, model: str, given: list[dict[str, Any]]) -> str:
        """Find passages for the last question of a conversation, with a model of this name; empty without one."""
        handler: Any = self
        messages = BaseHandler.get_processor_inputs_from_messages(given, Modality.LLM)
        place = last_question(messages)
        if place is None:
            return ""
        try:
            manager = handler.generation_state.get_manager(model)
            found: str = await manager.async_submit(self.passages, messages[place]["content"])
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        return found

    def messages(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of a request."""
        raise NotImplementedError

    def get_processor_inputs_from_messages(self, *given: Any) -> list[dict[str, Any]]:
        """Return the messages of a request, whose contents are text, with the passages."""
        messages = BaseHandler.get_processor_inputs_from_messages(*given)
        shown, place = SHOWN.get(), last_question(messages)
        if not shown or place is None:
            return messages
        if self.apart:
            messages.insert(place, {"role": "system", "content": f"{shown}\n"})
        else:
            messages[place]["content"] = f"{shown}\n\n{messages[place]['content']}"
        return messages


def last_question(messages: list[dict[str, Any]]) -> int | None:
    """Return the place of the last message of a user that says something; None if there is none."""
    asked = [
        place for place, message in enumerate(messages) if message["role"] == "user" and message["content"].strip()
    ]
    return asked[-1] if asked else None


class Chats(ShowsPassages, ChatCompletionHandler):
    """Answers /v1/chat/completions."""

    def messages(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = body["messages"]
        return found


class Responses(ShowsPassages, ResponseHandler):
    """Answers /v1/responses."""

    def messages(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        return self._normalize_input(body)


class OneModel(ModelManager):
    """Answers with the model that it is given, and neither loads another one nor lets go of this one."""

    def __init__(self, name: str, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.force_model = name  # requests for another model are refused
        self.loaded_models[self.process_model_name(name)] = TimedModel(model, -1, tokenizer)

    def load_model_and_processor(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
        """Return the model and its tokenizer; ValueError for another name."""
        if model_id_and_revision not in self.loaded_models:
            raise ValueError(f"This server has one model, {self.force_model}.")
        return super().load_model_and_processor(model_id_and_revision)

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]  # was static
        """List the one model."""
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "cacheformers"}]

    def shutdown(self) -> None:
        """Keep the model: any client may ask for `/reset`."""


class FromMemory:
    """A model whose every `generate` starts from a copy of one memory; in everything else it is the model."""

    def __init__(self, model: Any, memory: MemoryCache) -> None:
        positions = required_options(find_decoder(unwrap(model))).base.max_positions
        # Passages are seen whole.
        self._model, self._memory = model, memory.clone() if memory.state.attends else memory.with_window(positions)
        self._memory.forget_ids()  # a memory that has answered before would wait for the ids of that conversation

    def generate(self, **options: Any) -> Any:
        """Generate after the memory. A request holds all turns of its conversation: the copy has read none of them.

        Where attention does not see the memory, an answer ends with the base's positions at the latest.

        Raises:
            ValueError: there, the conversation with its passages leaves no position for an answer.
        """
        config = options.get("generation_config")
        if config is not None and not self._memory.state.attends:
            room = self._memory.window.segment_tokens - options["input_ids"].shape[1]
            if room < 1:
                raise ValueError("The conversation is too long: with its passages it leaves no room for an answer.")
            config.max_new_tokens = min(room, config.max_new_tokens or room)  # of this request alone
        return self._model.generate(past_key_values=self._memory.clone(), **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


# What `cacheformers ask` writes around questions where a tokenizer has no chat template. Templates lose bare line ends.
QUESTIONS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ ' ' + message.content }}"
    "{% elif message.role == 'user' %}{{ '\n' + 'Question: ' + message.content + '\n' + 'Answer:' }}"
    "{% else %}{{ message.content + '\n' }}{% endif %}{% endfor %}"
)


def give_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer without a chat template the form in which `cacheformers ask` writes questions."""
    if tokenizer.chat_template is None:
        beginning: Any = tokenizer.convert_ids_to_tokens(tokenizer("").input_ids)  # nothing else adds special tokens
        tokenizer.chat_template = "".join(beginning) + QUESTIONS
