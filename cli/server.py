"""transformers' own server (`transformers serve`) with one model that is loaded already.

Left to itself it looks a model's class up in transformers alone, and so loads no model of this package and no adapter.
Importing this module takes the packages of the extra `serve`.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager, TimedModel
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerationState

from cacheformers.modeling.cache import MemoryCache


def make_app(name: str, model: Any, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Make the server's FastAPI application for one model, which clients call `name`.

    It generates in one thread: requests at the same time wait for each other.
    """
    manager, state = OneModel(name, model, tokenizer), GenerationState()
    return build_server(
        manager,
        ChatCompletionHandler(manager, state),
        completion_handler=CompletionHandler(manager, state),
        response_handler=ResponseHandler(manager, state),
        transcription_handler=TranscriptionHandler(manager, state),
        systemone_handler=SystemOneHandler(manager, state),
        generation_state=state,
    )


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
        self._model, self._memory = model, memory.clone()
        self._memory.forget_ids()  # a memory that has answered before would wait for the ids of that conversation

    def generate(self, **options: Any) -> Any:
        """Generate after the memory. A request holds all turns of its conversation: the copy has read none of them."""
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
