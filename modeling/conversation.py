"""`Conversation`: questions about what a memory has read, each of which follows on the ones before."""

from __future__ import annotations

import copy
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from cacheformers.modeling.architectures import find_decoder, unwrap
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.method import active_options, required_options, retrieving_methods
from cacheformers.modeling.offloading import device_of
from cacheformers.modeling.origin import Source, tokenizer_hash
from cacheformers.modeling.segments import new_memory
from cacheformers.modeling.trace import Passage, Trace, passages

ANSWER = "<<the answer>>"  # stands for an answer in a chat template
PASSAGE, SHOWN = 40, 3  # tokens of a passage that question and answer retrieved, and how many are kept
TOKEN_PASSAGE, TOKEN_SHOWN = 16, 2  # the same for one token of the answer
CONVERSATION = "the conversation"  # the document of passages in earlier questions and answers


@dataclass(frozen=True)
class Answer:
    """An answer, and with `explain=True` what was retrieved for it.

    Attributes:
        tokens: ids of the answer, with the one that ended it.
        finished: it ended by itself, before `max_new_tokens`.
        prompt_tokens: ids that were read for it: the question with what the chat template puts around it.
        passages: for each token of the answer, the passages that were retrieved most often when it was chosen.
        retrieved_most: the passages that question and answer together retrieved most often.
        asked: for each token of the question except the last, the numbers of all tokens that it retrieved.
        retrieved: for each token of the answer, the numbers of all tokens that were retrieved when it was chosen.
        retrieves: what a token retrieves in each layer, in words.
    """

    question: str
    text: str
    tokens: list[int]
    finished: bool
    prompt_tokens: int
    passages: list[list[Passage]] = field(default_factory=list)
    retrieved_most: list[Passage] = field(default_factory=list)
    asked: list[Tensor] = field(default_factory=list)
    retrieved: list[Tensor] = field(default_factory=list)
    retrieves: str = ""


class Conversation:
    """Questions and answers after what a memory has read.

    The ids of all turns are one stream, as in one long `generate`: each question in the tokenizer's chat template (or
    "Question: ... Answer:" without one), each answer as it was generated. They fill the local window and enter the
    memory when their segments close. The memory that is passed stays as it is. Several conversations may use one model,
    also in several threads at once.

    Args:
        model: a causal language model, with a memory or without one.
        tokenizer: the one that the memory was read with.
        memory: of one document; None begins with an empty one.
        messages: what was said before the first question, as dictionaries with `role` and `content`; it needs a chat
            template.
        shown: text that is put before the first question.

    Attributes:
        turns: the answers so far.
        ids: every id since the memory was read, the answers' too (not the ones that end them).
        cache: what the conversation has read so far; None if nothing.
        follows: each question follows on the ones before; otherwise it is asked by itself.
        asking: how many of a prompt's last tokens are the question, if it has `shown` before it; None for all.

    Raises:
        ValueError: a memory of several documents or read with another tokenizer, or messages without a chat template.
    """

    follows = True
    asking: int | None = None

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        memory: MemoryCache | None = None,
        messages: Sequence[dict[str, str]] = (),
        shown: str = "",
    ) -> None:
        decoder = find_decoder(unwrap(model))
        if memory is None and active_options(decoder) is not None:
            memory = new_memory(model, 1)
        if memory is not None and memory.batch_size != 1:
            raise ValueError(
                f"A conversation is about one document, and the memory holds {memory.batch_size}: choose one with "
                "memory.select([row])."
            )
        if memory is not None and memory.origin.tokenizer not in ("", tokenizer_hash(tokenizer)):
            raise ValueError("The memory was read with another tokenizer: pass that of its base model.")
        if messages and tokenizer.chat_template is None:
            raise ValueError(
                "This tokenizer has no chat template, so earlier messages cannot be told apart: ask alone."
            )
        self.model: Any = model
        self.tokenizer, self.memory, self.messages, self.shown = tokenizer, memory, list(messages), shown
        self.device = device_of(decoder)
        self._busy = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget the conversation; what the memory has read stays."""
        self.turns: list[Answer] = []
        self.ids: list[int] = []
        self.cache: Any = self.memory

    @property
    def retrieves(self) -> bool:
        """Whether tokens are looked up in the memory, so that answers can be explained."""
        return self.memory is not None and self.memory.state.retrieves

    @overload
    def ask(
        self,
        question: str,
        *,
        max_new_tokens: int = ...,
        stream: Literal[False] = ...,
        explain: bool = ...,
        **options: Any,
    ) -> Answer: ...

    @overload
    def ask(
        self, question: str, *, max_new_tokens: int = ..., stream: Literal[True], explain: bool = ..., **options: Any
    ) -> Generator[str, None, None]: ...

    def ask(
        self,
        question: str,
        *,
        max_new_tokens: int = 256,
        stream: bool = False,
        explain: bool = False,
        **options: Any,
    ) -> Answer | Generator[str, None, None]:
        """Answer a question that may refer to earlier ones.

        If an error is raised, the conversation is as it was before the question.

        Args:
            stream: return the pieces of the answer's text as they come. Generation runs in a thread of its own. At the
                end the answer is in `turns`; who stops taking pieces stops the answer, and what there is counts.
            explain: say for each token of the answer which passages were retrieved.
            options: of `generate`; without any the likeliest token is taken (`do_sample=False`).

        Raises:
            ValueError: an empty question, `explain` with a method that does not retrieve, several answers at once, and
                the errors of `generate`.
            RuntimeError: the conversation is answering another question, in another thread.
        """
        if not question.strip():
            raise ValueError("There is an empty question.")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
        if explain and not self.retrieves:
            raise ValueError(
                "What was retrieved cannot be shown: this memory's method retrieves nothing. It is for "
                f"{retrieving_methods()}."
            )
        if options.get("num_beams", 1) != 1 or options.get("num_return_sequences", 1) != 1:
            raise ValueError("A conversation has one answer a question: leave num_beams and num_return_sequences out.")
        options = {"do_sample": False, **options, "max_new_tokens": max_new_tokens}
        return self._stream(question, explain, options) if stream else self._answer(question, explain, options)

    def prompt(self, question: str) -> list[int]:
        """Return the ids that a question adds after the stream so far."""
        if self.turns:
            return follow_up(self.tokenizer, question)
        return opening(self.tokenizer, question, self.messages, self.shown)

    def _stream(self, question: str, explain: bool, options: dict[str, Any]) -> Generator[str, None, None]:
        """Answer in another thread, and yield its text."""
        streamer: Any = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        stop = Stop()
        criteria = [*(options.get("stopping_criteria") or []), stop]
        options = {**options, "streamer": streamer, "stopping_criteria": StoppingCriteriaList(criteria)}
        with ThreadPoolExecutor(1, "conversation") as pool:
            answer = pool.submit(self._answer, question, explain, options)
            answer.add_done_callback(lambda _: streamer.end())
            try:
                yield from filter(None, streamer)
            finally:
                stop.set()
                answer.result()

    def _answer(self, question: str, explain: bool, options: dict[str, Any]) -> Answer:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("This conversation is answering a question already: wait for it, or begin another one.")
        try:
            return self._generate(question, explain, options)
        finally:
            self._busy.release()

    def _generate(self, question: str, explain: bool, options: dict[str, Any]) -> Answer:
        """Generate from a copy of the cache, which takes its place when the answer is there."""
        new = self.prompt(question)
        ids = torch.tensor([self.ids + new], device=self.device)
        cache = cache_copy(self.cache)
        if isinstance(cache, MemoryCache) and not self.turns:
            cache.forget_ids()
        trace = Trace(cache, self.asking) if explain else None
        processors = [*(options.pop("logits_processor", None) or []), *([trace] if trace else [])]
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            logits_processor=LogitsProcessorList(processors),
            **{**options, "return_dict_in_generate": True},
        )
        tokens = output.sequences[0, ids.shape[1] :].tolist()
        finished = bool(tokens) and tokens[-1] in end_tokens(self.model, options)
        # The last token has not been read yet. The next question brings the end of the answer with it.
        stream = self.ids + new + (tokens[:-1] if finished else tokens)
        answer = Answer(
            question,
            str(self.tokenizer.decode(tokens, skip_special_tokens=True)),
            tokens,
            finished,
            len(new),
            **({} if trace is None else self._explained(trace, stream)),
        )
        self.cache, self.ids = output.past_key_values, stream
        self.turns.append(answer)
        return answer

    def _explained(self, trace: Trace, stream: list[int]) -> dict[str, Any]:
        texts, together = self._texts(stream), trace.memory.state.retrieved_tokens
        # Passages are whole multiples of what is retrieved together.
        long, short = (-(-tokens // together) * together for tokens in (PASSAGE, TOKEN_PASSAGE))
        return {
            "passages": [passages([found], texts, short, TOKEN_SHOWN) for found in trace.chosen],
            "retrieved_most": passages(trace.asked + trace.chosen, texts, long, SHOWN),
            "retrieves": required_options(find_decoder(unwrap(self.model))).retrieves,
            "asked": trace.asked,
            "retrieved": trace.chosen,
        }

    def _texts(self, stream: list[int]) -> list[tuple[int, Source | None]]:
        """Return the documents, and the conversation after them, with the numbers of their first tokens."""
        assert self.memory is not None
        read = self.memory.tokens_read[0]
        said = [str(self.tokenizer.decode([token])) for token in stream]
        ends = torch.tensor(list(accumulate(map(len, said))))
        offsets = torch.stack([ends - torch.tensor([len(word) for word in said]), ends], 1).int()
        return [*self.memory.origin.texts(0), (read, Source(CONVERSATION, "".join(said), offsets))]


class Stop(StoppingCriteria):
    """Ends `generate` after the token that is being chosen, once it is `set()`."""

    def __init__(self) -> None:
        self.set = (wanted := threading.Event()).set
        self.wanted = wanted

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self.wanted.is_set(), device=input_ids.device)


def cache_copy(cache: Any) -> Any:
    """Return a copy of a memory or another cache from which generation may go on."""
    return cache.clone() if hasattr(cache, "clone") else copy.deepcopy(cache)


def end_tokens(model: Any, options: dict[str, Any]) -> list[int]:
    """Return the ids that end an answer."""
    config = options.get("generation_config") or model.generation_config
    ends = options.get("eos_token_id", config.eos_token_id)
    return ends if isinstance(ends, list) else [ends]


def opening(
    tokenizer: PreTrainedTokenizerBase, question: str, messages: Sequence[dict[str, str]] = (), shown: str = ""
) -> list[int]:
    """Encode the first question of a conversation, after earlier messages, in the chat template if there is one.

    Args:
        shown: text before the question.
    """
    shown = f"{shown}\n\n" if shown else ""
    if tokenizer.chat_template is None:
        ids: list[int] = tokenizer(f"{shown}\nQuestion: {question}\nAnswer:").input_ids
        return ids
    turns = [*messages, {"role": "user", "content": shown + question}]
    chat: Any = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return encoded(tokenizer, chat)


def follow_up(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Encode what comes after an answer: its end, and the next question."""
    if tokenizer.chat_template is None:
        return encoded(tokenizer, f"\nQuestion: {question}\nAnswer:")
    turns = [("user", "?"), ("assistant", ANSWER), ("user", question)]
    chat: Any = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], add_generation_prompt=True, tokenize=False
    )
    before, _, after = chat.partition(ANSWER)
    if before == chat:
        raise ValueError("This tokenizer's chat template leaves answers out, so nothing can be asked after one.")
    return encoded(tokenizer, after)


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode text that has its special tokens already."""
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
