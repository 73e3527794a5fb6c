"""The methods that are compared: their options, the prompts and the model of each, and the settings on record."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from cacheformers.common.base_model import ModelOptions, base_config, base_identity, weights_identity
from cacheformers.common.recipe import option
from cacheformers.evaluation.loading import counted_positions, load, memory_config
from cacheformers.evaluation.longbench.prompts import Encoded, Prompt, after_context, cut_middle, encode, fill, in_chat
from cacheformers.evaluation.longbench.records import Record
from cacheformers.evaluation.longbench.retrieval import Retriever, check_retriever, retrieved
from cacheformers.evaluation.longbench.tasks import MAX_LENGTHS, TASKS, Task

METHODS = ("truncation", "full", "retrieval", "position-interpolation", "memory")


@dataclass
class LongBenchOptions:
    """Data, methods, and how prompts are made and answered; ValueError for a wrong name or number."""

    data: str = option(
        help="LongBench: a folder with TASK.jsonl, .jsonl.gz or .parquet for each task, or a dataset of the Hub."
    )
    methods: list[str] = option(
        help="Which methods are run, one after the other: 'truncation' (base model, prompts cut in the middle), 'full' "
        "(base model, whole prompts), 'retrieval' (base model, the chunks nearest the question), "
        "'position-interpolation' (base model with scaled rotary positions), 'memory' (a model with a memory: the "
        "context is read in segments, then the question)."
    )
    output: str = option("runs/longbench", help="Folder for predictions, results, tables and plots.")
    adapter: str | None = option(
        None,
        help="Adapter folder or Hub id. One with a memory is for the method 'memory', any other for the other methods.",
    )
    tasks: list[str] | None = option(None, help="Tasks by name. Default: all.")
    longbench_e: bool = option(False, help="LongBench-E: 13 tasks with records of all lengths, from TASK_e files.")
    limit: int | None = option(
        None, help="Only this many records of each task. A larger limit later goes on from those that are answered."
    )
    seed: int | None = option(None, help="With limit: a random choice of records. Default: the first ones.")
    prompts: str | None = option(
        None, help="The official config/dataset2prompt.json. Default: templates of the installed lm-eval."
    )
    chat: bool = option(
        False,
        help="Put prompts into the tokenizer's chat template, but for the tasks that the official code excepts. For "
        "chat models.",
    )
    max_length: int | None = option(
        None,
        help="Cut longer prompts in the middle to N tokens. Default: for truncation and retrieval the official "
        "limit of a model with as many positions (3500 of 4096, 7500 of 8192, ...); for other methods no limit.",
    )
    batch: int = option(1, help="Records answered together. Which ones does not depend on the number of processes.")
    retriever: str = option("bm25", help="'bm25', or an encoder for embeddings: a folder or a Hub id.")
    chunk_words: int = option(200, help="Retrieval: words (Chinese: characters) of a chunk.")
    chunks: int = option(7, help="Retrieval: how many chunks the prompt gets.")
    rope_factor: float | None = option(None, help="Position interpolation: by how much positions are squeezed.")
    forget: bool = option(
        False, help="Memory: let it forget the beginning of contexts that it cannot hold. Default: that is an error."
    )
    overwrite: bool = option(False, help="Start anew where there are predictions of other settings.")
    plots: bool = option(True, help="Draw plots (needs matplotlib).")

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise ValueError(f"methods: {', '.join(unknown)} is none of {', '.join(METHODS)}.")
        given = asdict(self)
        for name, least in (("limit", 1), ("max_length", 2), ("batch", 1), ("chunk_words", 1), ("chunks", 1)):
            if given[name] is not None and given[name] < least:
                raise ValueError(f"{name} must be at least {least}, got {given[name]}.")
        if self.seed is not None and self.limit is None:
            raise ValueError("seed is for the choice of records: give --limit, too.")
        if "position-interpolation" in self.methods and (self.rope_factor is None or self.rope_factor <= 1):
            raise ValueError("position-interpolation needs --rope_factor greater than 1, such as 4.")


@dataclass
class CompareOptions:
    """Results side by side."""

    compare: list[str] = option(
        help="Nothing is run: put these result.json files side by side, each compared with the first one."
    )
    output: str | None = option(None, help="Folder for table.md and plots. Default: print the table only.")


LongBenchOptions._argument_group_name = "LongBench"  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Method:
    """A way to answer questions about long texts.

    Attributes:
        title: its name in folders and tables.
        adapter: what is put on the base model.
        max_length: prompts are cut in the middle to this many tokens; None: they are not.
        positions: prompt and answer must fit into this many; None: they need not.
        capacity: tokens that the memory can hold; None: any number. Where it is set, `positions` is None.
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
    """Make one of `METHODS` for a base model, from its and the adapter's configurations.

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
    """Load the model that a method takes, for evaluation."""
    changes = {}
    if method.name == "position-interpolation":
        plain = base_config(model.base).rope_parameters
        changes["rope_parameters"] = {**plain, "rope_type": "linear", "factor": options.rope_factor}
    return load(model, method.adapter, device, **changes)


@dataclass(frozen=True)
class PromptMaker:
    """Makes the prompts of a method."""

    method: Method
    options: LongBenchOptions
    tokenizer: PreTrainedTokenizerBase
    templates: Mapping[str, str]
    retriever: Retriever | None = None

    def using(self, retriever: Retriever | None) -> PromptMaker:
        """Return the same with a retriever."""
        return replace(self, retriever=retriever)

    def __call__(self, record: Record) -> Encoded:
        """Return what the model reads of a record."""
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
        """Cut the prompt to a limit as the official code does, and tokenize it again, in its chat template."""
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


CUT = "in the middle, as the official code does; then again, shorter, until prompt and answer fit"


def model_settings(model: ModelOptions, config: PretrainedConfig, adapter: str | None) -> dict[str, Any]:
    """Describe what answers, for JSON; `adapter` is what `adapter_identity` returns."""
    return {
        "base": Path(model.base).name,
        "base_config": base_identity(config),
        "base_weights": weights_identity(model.base, config),
        "adapter": adapter,
        "dtype": model.dtype,
        "quantize": model.quantize,
        "attn_implementation": model.attn_implementation,
    }


def method_settings(method: Method, answering: dict[str, Any], options: LongBenchOptions) -> dict[str, Any]:
    """Describe everything that predictions depend on, except the records, for JSON.

    Args:
        answering: base and adapter (`model_settings`).
    """
    more: dict[str, Any] = {}
    if method.name == "retrieval":
        more = {name: getattr(options, name) for name in ("retriever", "chunk_words", "chunks")}
        if options.retriever != "bm25":
            encoder = AutoConfig.from_pretrained(options.retriever)
            more["retriever_weights"] = weights_identity(options.retriever, encoder)
    elif method.name == "position-interpolation":
        more = {"rope_factor": options.rope_factor}
    elif method.remembers:
        more = {"forget": options.forget}
    return {
        "method": method.name,
        **answering,
        "adapter": answering["adapter"] if method.adapter is not None else None,
        "chat": options.chat,
        "max_length": method.max_length,
        "cut": None if method.max_length is None else CUT,
        "batch": options.batch,
        "longbench_e": options.longbench_e,
        **more,
    }


def adapter_identity(adapter: str | None) -> str | None:
    """Hash the files of an adapter, which may be a folder or a Hub id."""
    if adapter is None:
        return None
    digest = hashlib.sha256()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        digest.update(Path(str(cached_file(adapter, name))).read_bytes())
    return digest.hexdigest()[:16]
