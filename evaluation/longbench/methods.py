"""The methods that are compared: their options, the prompts and the model of each, and the settings on record."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from torch import nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from cacheformers.common.base_model import ModelOptions, base_config, base_identity, short_name, weights_identity
from cacheformers.common.documents import fingerprint
from cacheformers.common.recipe import option
from cacheformers.evaluation.loading import config_options, counted_positions, load, memory_config
from cacheformers.evaluation.longbench.prompts import (
    Encoded,
    Prompt,
    after_context,
    cut_beginning,
    cut_middle,
    encode,
    fill,
    in_chat,
)
from cacheformers.evaluation.longbench.records import Record
from cacheformers.evaluation.longbench.retrieval import Retriever, check_retriever, retrieved
from cacheformers.evaluation.longbench.tasks import MAX_LENGTHS, Task
from cacheformers.modeling.architectures import WholeConfig
from cacheformers.modeling.method import retrieving_methods
from cacheformers.modeling.origin import tokenizer_hash

METHODS = ("truncation", "full", "retrieval", "position-interpolation", "memory")
# What self-attention sees once the memory has read the context -> the method whose prompt that is.
MEMORY_PROMPTS = {
    "question": None,
    "cut": "truncation",
    "tail": "tail",
    "retrieved": "retrieval",
    "recalled": "recalled",
    "hybrid": "hybrid",
}
RECALLING = ("recalled", "hybrid")  # in these the memory has a say
MEMORY_CONTENTS = ("own", "none", "other", "shuffled")


@dataclass
class AnsweringOptions:
    """Which methods answer, and how prompts are made and answered; ValueError for a wrong name or number."""

    _argument_group_name = "methods"
    methods: list[str] = option(
        help="Which methods are run, one after the other: 'truncation' (base model, prompts cut in the middle), 'full' "
        "(base model, whole prompts), 'retrieval' (base model, the chunks nearest the question), "
        "'position-interpolation' (base model with scaled rotary positions), 'memory' (a model with a memory: the "
        "context is read in segments, then the question)."
    )
    adapter: str | None = option(
        None,
        help="Adapter folder or Hub id. One with a memory is for the method 'memory', any other for the other methods.",
    )
    chat: bool = option(
        False,
        help="Put prompts into the tokenizer's chat template (LongBench: but for the tasks that the official code "
        "excepts). For chat models.",
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
    text_order: bool = option(
        False,
        help="Retrieval: show chunks in the order of the text, for questions about what came last. Default: "
        "nearest first, as the official code does.",
    )
    rope_factor: float | None = option(None, help="Position interpolation: by how much positions are squeezed.")
    cache_size: int | None = option(
        None, help="Memory: entries that it holds. Default: as many as the adapter was trained with."
    )
    memories: str | None = option(
        None,
        help="Memory: folder that keeps a memory file of every text that is read. Runs of the same adapter with other "
        "prompts or contents then read nothing again. Grows by as much as the memories take.",
    )
    forget: bool = option(
        False, help="Memory: let it forget the beginning of contexts that it cannot hold. Default: that is an error."
    )
    memory_prompt: str = option(
        "question",
        help="Memory: what self-attention sees after the whole context was read: 'question' (the question alone), "
        "'cut' (the prompt of truncation, cut in the middle), 'tail' (the prompt's last tokens), 'retrieved' (the "
        "prompt of retrieval), 'recalled' (as 'retrieved', with the chunks whose entries in the memory are nearest the "
        "question), 'hybrid' (by both ranks). All but 'question' are cut to --max_length, and then nothing else is.",
    )
    memory_content: str = option(
        "own",
        help="Memory, to control what it is good for: 'own' (the record's context is read), 'none' (nothing is), "
        "'other' (the context of the task's next record), 'shuffled' (its own, its segments in a random order).",
    )
    overwrite: bool = option(False, help="Start anew: delete a method's predictions that are there, of all tasks.")
    plots: bool = option(True, help="Draw plots (needs matplotlib).")

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise ValueError(f"methods: {', '.join(unknown)} is none of {', '.join(METHODS)}.")
        for name, known in (("memory_prompt", MEMORY_PROMPTS), ("memory_content", MEMORY_CONTENTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")
        if self.memory_prompt in RECALLING and self.memory_content not in ("own", "other"):
            raise ValueError(
                f"memory_prompt {self.memory_prompt!r} needs a memory that holds a text: with memory_content "
                f"{self.memory_content!r}, use memory_prompt 'cut'."
            )
        given = asdict(self)
        for name, least in (("max_length", 2), ("batch", 1), ("chunk_words", 1), ("chunks", 1), ("cache_size", 1)):
            if given[name] is not None and given[name] < least:
                raise ValueError(f"{name} must be at least {least}, got {given[name]}.")
        if "position-interpolation" in self.methods and (self.rope_factor is None or self.rope_factor <= 1):
            raise ValueError("position-interpolation needs --rope_factor greater than 1, such as 4.")

    @property
    def common(self) -> dict[str, Any]:
        """What predictions of every method depend on, for JSON."""
        return {"chat": self.chat, "batch": self.batch}


@dataclass(kw_only=True)
class LongBenchOptions(AnsweringOptions):
    """LongBench's data, and how they are answered; ValueError for a wrong name or number."""

    _argument_group_name = "LongBench"
    data: str = option(
        help="LongBench: a folder with TASK.jsonl, .jsonl.gz or .parquet for each task, or a dataset of the Hub."
    )
    output: str = option("runs/longbench", help="Folder for predictions, results, tables and plots.")
    tasks: list[str] | None = option(None, help="Tasks by name. Default: all.")
    longbench_e: bool = option(False, help="LongBench-E: 13 tasks with records of all lengths, from TASK_e files.")
    limit: int | None = option(
        None, help="Only this many records of each task. A larger limit later goes on from those that are answered."
    )
    seed: int | None = option(None, help="With limit: a random choice of records. Default: the first ones.")
    prompts: str | None = option(
        None, help="The official config/dataset2prompt.json. Default: templates of the installed lm-eval."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}.")
        if self.seed is not None and self.limit is None:
            raise ValueError("seed is for the choice of records: give --limit, too.")

    @property
    def common(self) -> dict[str, Any]:
        return {**super().common, "longbench_e": self.longbench_e}


@dataclass(frozen=True)
class Method:
    """A way to answer questions about long texts.

    Attributes:
        title: its name in folders and tables.
        adapter: what is put on the base model.
        max_length: prompts are cut in the middle to this many tokens; None: they are not.
        positions: prompt and answer must fit into this many; None: they need not.
        capacity: tokens that the memory can hold; None: any number. Where it is set, `positions` is None.
        shown: the method whose prompt self-attention sees after the memory has read. None: the question alone.
        content: what the memory reads, one of `MEMORY_CONTENTS`.
        segment_tokens: of the memory.
        cache_size: entries that it holds, instead of the configured number.
    """

    name: str
    title: str
    adapter: str | None
    max_length: int | None
    positions: int | None = None
    capacity: int | None = None
    shown: Method | None = None
    content: str = "own"
    segment_tokens: int = 0
    cache_size: int | None = None

    @property
    def retrieves(self) -> bool:
        return self.name in ("retrieval", "hybrid") or (self.shown is not None and self.shown.retrieves)

    @property
    def recalls(self) -> bool:
        """Whether the memory has a say in which chunks are shown."""
        return self.shown is not None and self.shown.name in RECALLING

    @property
    def remembers(self) -> bool:
        return self.name == "memory"

    @property
    def always_cuts(self) -> bool:
        return self.name in ("truncation", "retrieval", "tail", *RECALLING)

    def room(self, task: Task) -> int | None:
        """Return how many tokens a prompt may have (of a memory: before the question); None for any number."""
        return self.capacity if self.positions is None else self.positions - task.new_tokens


def make_method(
    name: str, options: AnsweringOptions, base: str, config: PretrainedConfig, adapter: PeftConfig | None
) -> Method:
    """Make one of `METHODS` for a base model, from its and the adapter's configurations.

    Raises:
        ImportError, OSError, ValueError: it is not possible with this base model, this adapter or these options.
    """
    memory = memory_config(config, adapter)
    model = short_name(base)
    if name == "memory":
        if memory is None:
            raise ValueError("The method memory takes a model with a memory: give an --adapter that has one.")
        configured = getattr(memory, "cache_size", None)
        if configured is None and options.cache_size is not None:
            raise ValueError("cache_size is for a memory of limited size, which this model does not have.")
        unlimited = options.forget or options.memory_content == "none"
        held = None if unlimited else options.cache_size or configured
        title = f"{short_name(options.adapter) if options.adapter else model}-memory"
        title += "" if options.memory_prompt == "question" else f"-{options.memory_prompt}"
        title += "" if options.memory_content == "own" else f"-{options.memory_content}"
        own = Method(name, title, options.adapter, options.max_length, counted_positions(config, memory), held)
        segment_tokens = config_options(config, memory).segment_tokens
        own = replace(own, content=options.memory_content, segment_tokens=segment_tokens, cache_size=options.cache_size)
        return own if options.memory_prompt == "question" else with_prompt(own, options, config, memory)
    if memory is config:
        raise ValueError(f"{base} has a memory that cannot be taken off: only the method memory can use it.")
    used = options.adapter if memory is None else None
    title = f"{short_name(used) if used else model}-{name}"
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
    return Method(name, title, used, max_length or official_limit(positions), positions)


def with_prompt(method: Method, options: AnsweringOptions, config: PretrainedConfig, memory: Any) -> Method:
    """Return a method with a memory whose prompt is another method's, after the whole context was read.

    Raises:
        ValueError: self-attention of this memory sees more than a prompt.
    """
    if isinstance(config, WholeConfig) or config_options(config, memory).window.unbounded:
        raise ValueError(
            f"memory_prompt {options.memory_prompt!r}: self-attention of this method sees more than the open segment, "
            "so a prompt has no window of its own. Leave it out."
        )
    if options.memory_prompt in RECALLING and not config_options(config, memory).retrieves:
        raise ValueError(
            f"memory_prompt {options.memory_prompt!r}: this memory's method retrieves nothing, so it cannot recall "
            f"passages. {retrieving_methods()} can."
        )
    name = MEMORY_PROMPTS[options.memory_prompt]
    assert name is not None
    if name in ("retrieval", "hybrid"):
        check_retriever(options.retriever)
    positions = config.get_text_config().max_position_embeddings
    shown = Method(name, name, None, options.max_length or official_limit(positions), positions)
    if name in RECALLING:
        shown = replace(shown, content=options.memory_content)
    return replace(method, max_length=None, shown=shown)


def official_limit(positions: int) -> int:
    """Return the official limit of prompts for this number of positions; raise ValueError if there is none."""
    if positions not in MAX_LENGTHS:
        raise ValueError(f"There is no official limit for a model of {positions:,} positions: give --max_length.")
    return MAX_LENGTHS[positions]


def load_model(method: Method, model: ModelOptions, options: AnsweringOptions, device: torch.device) -> nn.Module:
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
    options: AnsweringOptions
    tokenizer: PreTrainedTokenizerBase
    templates: Mapping[str, str]
    retriever: Retriever | None = None
    records: Mapping[str, list[Record]] = field(default_factory=dict)

    def __call__(self, record: Record) -> Encoded:
        """Return what the model reads of a record."""
        whole = self.whole(record)
        if self.method.shown is None:
            return whole
        shown = replace(self, method=self.method.shown)(record)
        return replace(whole, shown=shown, cut=shown.cut)

    def whole(self, record: Record) -> Encoded:
        """Return the prompt of a record, with what the memory reads in place of its context."""
        template, context = self.templates[record.form.name], None
        asked, name = record.input.strip(), self.method.name
        # Without a question there is nothing to recall by, so the prompt is cut.
        if self.retriever is not None and (name == "retrieval" or (name in RECALLING and asked)):
            query, how = asked or after_context(template, record), self.options
            context = retrieved(self.source(record), query, self.retriever, how.chunk_words, how.chunks, how.text_order)
        elif self.method.content == "other":
            context = self.source(record)
        prompt, limit, room = fill(template, record, context), self.method.max_length, self.method.room(record.form)
        found = self.encoded(prompt, record, limit)
        if limit is not None and room is not None and limit <= room:
            while (taken := self.taken(found)) > room and limit > 2:
                limit = max(2, min(limit - 1, limit * room // taken))
                found = replace(self.encoded(prompt, record, limit), cut=limit)
        # Otherwise it has not grown too long by being cut: `check` says what else is wrong.
        return shuffled(found, record, self.method.segment_tokens) if self.method.content == "shuffled" else found

    def encoded(self, prompt: Prompt, record: Record, limit: int | None) -> Encoded:
        """Cut the prompt to a limit as the official code does, and tokenize it again, in its chat template."""
        whole = prompt
        if limit is not None:
            cut = cut_beginning if self.method.name == "tail" else cut_middle
            prompt = cut(prompt, self.tokenizer, limit)
        known = self.method.remembers and self.method.content == "own" and prompt is whole
        if self.options.chat and record.form.chat:
            prompt = in_chat(prompt, self.tokenizer)
        start = prompt.question - len(record.context)
        gold = [(start + first, start + last) for first, last in record.gold if known]
        return encode(prompt, self.tokenizer, self.method.remembers or self.options.memory_prompt != "question", gold)

    @property
    def turn(self) -> int:
        """The tokens that a chat template puts around a prompt."""
        return len(encode(in_chat(Prompt("-", 1), self.tokenizer), self.tokenizer).ids) if self.options.chat else 0

    def source(self, record: Record) -> str:
        """Return the text that is read for a record."""
        return self.after(record).context if self.method.content == "other" else record.context

    def after(self, record: Record) -> Record:
        """Return the next record of a task (cyclically) that has another context; raise ValueError if none has."""
        own = self.records[record.task]
        place = next(number for number, other in enumerate(own) if other.id == record.id)
        for other in [*own[place:], *own[:place]]:
            if other.context != record.context:
                return other
        raise ValueError(f"memory_content 'other': the records of {record.task} all have the same context.")

    def taken(self, prompt: Encoded) -> int:
        """Return how much of the method's room a prompt takes."""
        return len(prompt.ids) if self.method.positions is not None else prompt.question

    def check(self, record: Record) -> None:
        """Raise ValueError if a record's prompt does not fit (what is always cut is not looked at)."""
        method, what = self.method, f"{record.task}, record {record.id}"
        encoded = self.whole(record)
        if method.positions is not None:
            needed = len(encoded.ids) + record.form.new_tokens
            if needed > method.positions:
                raise ValueError(
                    f"{what}: prompt and answer take {needed:,} positions, with the method {method.name} the model has "
                    f"{method.positions:,}. Cut prompts with --max_length, or use another method."
                )
        if method.capacity is not None and encoded.question > method.capacity:
            raise ValueError(
                f"{what}: {encoded.question:,} tokens stand before the question, but the memory holds "
                f"{method.capacity:,}. Give a larger --cache_size, cut prompts with --max_length, or let it "
                "forget their beginning with --forget."
            )


def shuffled(prompt: Encoded, record: Record, segment_tokens: int) -> Encoded:
    """Put the segments of what a memory reads into another order, always the same for a record."""
    pieces = [prompt.read[start : start + segment_tokens] for start in range(0, prompt.question, segment_tokens)]
    random.Random(record.id).shuffle(pieces)
    return replace(prompt, ids=[*chain(*pieces), *prompt.ids[prompt.question :]])


def check_limit(maker: PromptMaker, tasks: list[Task]) -> None:
    """Raise ValueError if prompts that are always cut, and their answers, do not fit the model's positions."""
    method, longest = maker.method.shown or maker.method, max(task.new_tokens for task in tasks)
    if not method.always_cuts:
        return
    assert method.max_length is not None and method.positions is not None
    turn = maker.turn
    if method.max_length + turn + longest > method.positions:
        raise ValueError(
            f"max_length {method.max_length:,}, {turn} tokens of chat template and answers of {longest} tokens exceed "
            f"the {method.positions:,} positions of the model: give a smaller --max_length."
        )


CUT = "in the middle, as the official code does; then again, shorter, until prompt and answer fit"


def model_settings(
    model: ModelOptions, config: PretrainedConfig, adapter: str | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Describe what answers, for JSON: the base, and a hash of the files of an adapter (a folder or a Hub id)."""
    try:
        generation = GenerationConfig.from_pretrained(model.base).to_diff_dict()
    except OSError:  # it has none
        generation = {}
    digest = hashlib.sha256()
    for name in ("adapter_config.json", "adapter_model.safetensors") if adapter is not None else ():
        digest.update(Path(str(cached_file(str(adapter), name))).read_bytes())
    return {
        "base": short_name(model.base),
        "base_config": base_identity(config),
        "base_weights": weights_identity(model.base, config),
        "adapter": None if adapter is None else digest.hexdigest()[:16],
        **{name: getattr(model, name) for name in ("dtype", "quantize", "attn_implementation")},
        "tokenizer": fingerprint([tokenizer_hash(tokenizer), tokenizer.chat_template]),
        "generation_config": fingerprint({name: str(value) for name, value in generation.items()}),
    }


CHUNKS = ("chunk_words", "chunks", "text_order")  # which options say how passages are shown


def method_settings(method: Method, answering: dict[str, Any], options: AnsweringOptions) -> dict[str, Any]:
    """Describe what predictions depend on, except the records, for JSON, from `model_settings` and the options."""
    more: dict[str, Any] = {}
    if method.name == "recalled":
        more = {name: getattr(options, name) for name in CHUNKS}
    elif method.retrieves and not method.remembers:
        more = {name: getattr(options, name) for name in ("retriever", *CHUNKS)}
        if options.retriever != "bm25":
            encoder = AutoConfig.from_pretrained(options.retriever)
            more["retriever_weights"] = weights_identity(options.retriever, encoder)
    elif method.name == "position-interpolation":
        more = {"rope_factor": options.rope_factor}
    elif method.remembers:
        more = {"forget": options.forget}
        if method.cache_size is not None:
            more["cache_size"] = method.cache_size
        if method.shown is not None:
            more["memory_prompt"] = method_settings(method.shown, answering, options)
        if method.content != "own":
            more["memory_content"] = method.content
        if method.content == "other" and hasattr(options, "records"):
            more["records"] = options.records  # the last one's other text is the first one's
    return {
        "method": method.name,
        **answering,
        "adapter": answering["adapter"] if method.adapter is not None else None,
        "max_length": method.max_length,
        "cut": None if method.max_length is None else CUT,
        **options.common,
        **more,
    }
