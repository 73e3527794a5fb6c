"""The methods that are compared: what each makes of a record, and what model it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cacheformers.evaluation.longbench.options import LongBenchOptions
from cacheformers.evaluation.longbench.prompts import Encoded, Prompt, after_context, cut_middle, encode, fill, in_chat
from cacheformers.evaluation.longbench.records import Record
from cacheformers.evaluation.longbench.retrieval import Retriever, check_retriever, retrieved
from cacheformers.evaluation.longbench.tasks import MAX_LENGTHS, TASKS, Task
from cacheformers.evaluation.remembering import counted_positions, memory_config
from cacheformers.training.base_model import ModelOptions, base_config, load_base


@dataclass(frozen=True)
class Method:
    """A way to answer questions about long texts.

    Attributes:
        title: what folders and tables call it.
        adapter: what is put on the base model.
        max_length: prompts are cut in the middle to so many tokens; None: they are not.
        positions: prompt and answer must fit into this many; None: they need not.
        capacity: tokens that the memory can hold; None: any number. It goes with no `positions`.
    """

    name: str
    title: str
    adapter: str | None
    max_length: int | None
    positions: int | None = None
    capacity: int | None = None

    @property
    def remembers(self) -> bool:
        return self.name == "memory"

    @property
    def always_cuts(self) -> bool:
        return self.name in ("truncation", "retrieval")

    def room(self, task: str) -> int | None:
        """Return how many tokens a prompt may have (of a memory: before the question); None for any number."""
        return self.capacity if self.positions is None else self.positions - TASKS[task].new_tokens


def make_method(
    name: str, options: LongBenchOptions, base: str, config: PretrainedConfig, adapter: PeftConfig | None
) -> Method:
    """One of `METHODS` for one base model.

    Args:
        config, adapter: configurations of the base model and of the adapter.

    Raises:
        ImportError, OSError, ValueError: it is not possible with this base model, this adapter or these options.
    """
    memory = memory_config(config, adapter)
    has_memory, built_in = memory is not None and memory is adapter, memory is config
    model = Path(base).name
    if name == "memory":
        if not has_memory and not built_in:
            raise ValueError("The method memory takes a model with a memory: give an --adapter that has one.")
        held = None if options.forget else getattr(adapter if has_memory else config, "cache_size", None)
        title = f"{Path(options.adapter).name if options.adapter else model}-memory"
        positions = counted_positions(config, memory)
        return Method(name, title, options.adapter, options.max_length, positions, held)
    if built_in:
        raise ValueError(f"{base} has a memory that cannot be taken off: only the method memory can use it.")
    used = None if has_memory else options.adapter
    title = f"{Path(used).name if used else model}-{name}"
    positions, max_length = config.get_text_config().max_position_embeddings, options.max_length
    if name == "position-interpolation":
        if (getattr(config, "rope_parameters", None) or {}).get("rope_type") != "default":
            raise ValueError(f"position-interpolation needs unscaled rotary positions, which {base} has not.")
        assert options.rope_factor is not None
        return Method(name, title, used, max_length, int(options.rope_factor * positions))
    if name == "full":
        return Method(name, title, used, max_length, positions)
    if name == "retrieval":
        check_retriever(options.retriever)
        title += "-bm25" if options.retriever == "bm25" else "-embeddings"
    if max_length is None and positions not in MAX_LENGTHS:
        raise ValueError(f"There is no official limit for a model of {positions:,} positions: give --max_length.")
    return Method(name, title, used, max_length or MAX_LENGTHS[positions], positions)


def load_model(method: Method, model: ModelOptions, options: LongBenchOptions, device: torch.device) -> nn.Module:
    """The model that a method takes, for evaluation."""
    changes = {}
    if method.name == "position-interpolation":
        plain = base_config(model.base).rope_parameters
        changes["rope_parameters"] = {**plain, "rope_type": "linear", "factor": options.rope_factor}
    loaded: PreTrainedModel | PeftModel = load_base(model, device, **changes)[0]
    if method.adapter is not None:
        loaded = PeftModel.from_pretrained(loaded, method.adapter)
    return loaded.eval()


@dataclass(frozen=True)
class PromptMaker:
    """Makes the prompts of a method."""

    method: Method
    options: LongBenchOptions
    tokenizer: PreTrainedTokenizerBase
    templates: Mapping[str, str]
    retriever: Retriever | None = None

    def using(self, retriever: Retriever | None) -> PromptMaker:
        """The same with a retriever."""
        return replace(self, retriever=retriever)

    def __call__(self, record: Record) -> Encoded:
        """What the model reads of a record."""
        template, context = self.templates[record.task], None
        if self.retriever is not None:
            query = record.input.strip() or after_context(template, record)
            context = retrieved(record.context, query, self.retriever, self.options.chunk_words, self.options.chunks)
        prompt, limit, room = fill(template, record, context), self.method.max_length, self.method.room(record.task)
        found = self.encoded(prompt, record.task, limit)
        if limit is None or room is None or limit > room:
            return found  # it has not grown too long by being cut: `check` says what else is wrong
        while (taken := self.taken(found)) > room and limit > 2:
            limit = max(2, min(limit - 1, limit * room // taken))
            found = replace(self.encoded(prompt, record.task, limit), cut=limit)
        return found

    def encoded(self, prompt: Prompt, task: str, limit: int | None) -> Encoded:
        """The prompt as the official code cuts it to a limit, in its chat template, tokenized again."""
        if limit is not None:
            prompt = cut_middle(prompt, self.tokenizer, limit)
        if self.options.chat and TASKS[task].chat:
            prompt = in_chat(prompt, self.tokenizer)
        return encode(prompt, self.tokenizer, split=self.method.remembers)

    def taken(self, prompt: Encoded) -> int:
        """Return how much of the method's room a prompt takes."""
        return len(prompt.ids) if self.method.positions is not None else prompt.question

    def check(self, record: Record) -> None:
        """Raise ValueError if a record's prompt does not fit."""
        method, what = self.method, f"{record.task}, record {record.id}"
        encoded = self(record)
        if method.positions is not None:
            needed = len(encoded.ids) + TASKS[record.task].new_tokens
            if needed > method.positions:
                raise ValueError(
                    f"{what}: prompt and answer take {needed:,} positions, with the method {method.name} the model has "
                    f"{method.positions:,}. Cut prompts with --max_length, or use another method."
                )
        if method.capacity is not None and encoded.question > method.capacity:
            raise ValueError(
                f"{what}: {encoded.question:,} tokens stand before the question, but the memory holds "
                f"{method.capacity:,}. Cut prompts with --max_length, let it forget their beginning with --forget, or "
                "use an adapter with a larger cache_size."
            )


def check_limit(maker: PromptMaker, tasks: list[Task]) -> None:
    """Raise ValueError if prompts that a method always cuts, and their answers, do not fit the model's positions."""
    method, longest, turn = maker.method, max(task.new_tokens for task in tasks), 0
    assert method.max_length is not None and method.positions is not None
    if maker.options.chat:
        turn = len(encode(in_chat(fill("{context}", EMPTY), maker.tokenizer), maker.tokenizer).ids)
    if method.max_length + turn + longest > method.positions:
        raise ValueError(
            f"max_length {method.max_length:,}, {turn} tokens of chat template and answers of {longest} tokens exceed "
            f"the {method.positions:,} positions of the model: give a smaller --max_length."
        )


EMPTY = Record("", "", "", "-", [], 0, None)
