"""A recipe's options, and everything about them that can be wrong, found before a model is loaded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from cacheformers.common.base_model import StartOptions, base_config, check_end
from cacheformers.common.documents import DataOptions, DocumentRow, Documents, check_lengths, open_documents
from cacheformers.common.recipe import RecipeParser
from cacheformers.evaluation.held_out import HeldOut, held_out
from cacheformers.evaluation.model import EvalOptions, check_evaluation
from cacheformers.hub.card import is_local
from cacheformers.hub.push import check_repo, create_repo
from cacheformers.modeling.inputs import refuse_looking_ahead
from cacheformers.training.adapter import Adaptation, adapter_config
from cacheformers.training.checkpoints import Checkpoints
from cacheformers.training.estimate import Estimate, Work, estimate
from cacheformers.training.lessons import (
    LessonOptions,
    Lessons,
    check_lessons,
    more_forwards,
    question_room,
    teacher_room,
)
from cacheformers.training.methods import MethodOptions, chosen_options, names, of_other_methods
from cacheformers.training.processes import check_division, make_accelerator
from cacheformers.training.scratch import OF_ADAPTERS, Scratch, ScratchOptions
from cacheformers.training.settings import (
    HubOptions,
    RunOptions,
    TrainOptions,
    check_output,
    check_resumable,
    check_train_options,
    default_settings,
    resumed_settings,
)

Subject = Adaptation | Scratch


@dataclass
class Options:
    """A recipe: its options by topic."""

    model: StartOptions
    data: DataOptions
    train: TrainOptions
    run: RunOptions
    evaluation: EvalOptions
    hub: HubOptions
    lessons: LessonOptions
    scratch: ScratchOptions
    memory: MethodOptions


@dataclass
class Plan:
    """A checked recipe: everything that it needs except the model's weights.

    Attributes:
        subject: what is trained.
        settings: what a run that goes on from this one's checkpoints must share.
        resumed: the checkpoint to go on from.
    """

    options: Options
    subject: Subject
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    documents: DocumentRow
    valid: list[HeldOut]
    checkpoints: Checkpoints
    settings: dict[str, Any]
    resumed: Path | None


def make_parser(arguments: Sequence[str] = (), description: str = "") -> RecipeParser:
    """Return the parser of all options, among them those of the method that the arguments choose."""
    memory = chosen_options(arguments)
    topics = get_type_hints(Options)
    return RecipeParser([*topics.values()][:-1] + [memory], description, of_other_methods(memory))


def check_given(options: Options, given: Collection[str]) -> None:
    """Raise ValueError if options that would have no effect are among the given names."""
    useless = [(names(ScratchOptions), "only with --init scratch.")]
    if options.model.init == "scratch":
        useless = [
            (names(type(options.memory)), "with --init scratch the memory's options stand in the --model_config."),
            (set(OF_ADAPTERS), "only with --init pretrained (a model from scratch has no base or LoRA)."),
        ]
    for those, why in useless:
        if those & set(given):
            raise ValueError(f"{', '.join(sorted(those & set(given)))}: {why}")


def make_plan(options: Options) -> Plan:
    """Check everything that can be wrong before a model is loaded.

    Raises:
        OSError, ValueError, ImportError, CheckpointError: something is wrong; the message says what to do.
    """
    train, run = options.train, options.run
    check_train_options(train, run)
    check_output(train.output, run)
    subject: Subject = (
        Scratch(options.model, train, options.scratch)
        if options.model.init == "scratch"
        else Adaptation(options.model, train, options.memory)
    )
    accelerator = make_accelerator(options.model.device, train.output, run, precision=options.scratch.precision)
    tokens = subject.remembers and subject.memory.window.memory_tokens > 0
    more = more_forwards(options.lessons)
    check_division(accelerator.num_processes, train, run.sharding, options.model.quantize, tokens, more)
    tokenizer = subject.tokenizer(accelerator)
    if subject.remembers:
        refuse_looking_ahead(subject.memory)
    check_lengths(options.data, subject.memory)
    documents = train_documents(options, tokenizer, subject.memory, accelerator.num_processes)
    documents.check(subject.memory.segment_tokens)
    valid = valid_documents(options, tokenizer)
    if valid:
        check_evaluation(valid, options.evaluation, subject.memory)
    settings = resumed_settings(
        options.data,
        train,
        options.lessons,
        documents=documents.identity(),
        processes=accelerator.num_processes,
        deepspeed=False,  # earlier versions had it; their other checkpoints say this, and go on
        **subject.settings(),
    )
    checkpoints = Checkpoints(Path(train.output) / "checkpoints", run.keep_checkpoints)
    resumed = checkpoints.newest() if run.resume else None
    if resumed is not None:
        defaults = default_settings(train, options.lessons, options.memory)
        newer = {name: value for name, value in defaults.items() if name in settings}
        newer |= {name: settings[name] for name in ("base_weights",) if name in settings}  # not in earlier versions
        check_resumable({**newer, **checkpoints.load(resumed)["settings"]}, settings, str(resumed))
    elif run.resume and checkpoints.paths():
        raise ValueError(
            f"All checkpoints in {checkpoints.folder} are damaged: look why, or start anew with --overwrite."
        )
    check_hub(options.hub, subject.base)  # in every process: they all stop, or none
    checkpoints.claim()
    return Plan(options, subject, accelerator, tokenizer, documents, valid, checkpoints, settings, resumed)


def train_documents(
    options: Options, tokenizer: PreTrainedTokenizerBase, memory: Any, processes: int = 1
) -> DocumentRow:
    """Return what is trained on with these options of a memory: documents, and questions if there are some."""
    rows = options.train.lanes // (processes * options.train.accumulation)
    check_lessons(options.lessons, memory, rows, remembers=options.train.method != "lora", lanes=options.train.lanes)
    documents = open_documents(options.data.train, tokenizer, options.data)
    if options.lessons.questions is None:
        return documents
    if options.model.init == "pretrained":
        check_end(options.model.base, tokenizer)
    room, most = question_room(options.lessons, memory), teacher_room(options.lessons, memory)
    seed, bounded = options.train.seed, memory.window.unbounded
    return Lessons(options.lessons, documents, tokenizer, room, teacher_tokens=most, seed=seed, bounded=bounded)


def valid_documents(options: Options, tokenizer: PreTrainedTokenizerBase) -> list[HeldOut]:
    """Return the held-out documents; none if no evaluation is wanted."""
    wanted = options.evaluation
    if wanted.valid is None:
        return []
    least = options.data.min_tokens if wanted.valid_min_tokens is None else wanted.valid_min_tokens
    data = replace(options.data, stream=False, label_field=None, min_tokens=least)
    documents = open_documents(wanted.valid, tokenizer, data, split="validation")
    assert isinstance(documents, Documents)
    return held_out(documents, wanted.valid_documents, wanted.valid_tokens)


def check_hub(options: HubOptions, base: str | None) -> None:
    """Create the repository that the result will be pushed to, before the training.

    Raises:
        HubError, ValueError: it cannot be created, holds the other kind, or nobody else could load the result.
    """
    if options.push_to_hub is None:
        return
    if base is not None and options.hub_base_model is None and is_local(base):
        raise ValueError(
            f"--push_to_hub: nobody else can load an adapter whose base is the local folder {base}. Name the base's "
            "Hub id: --hub_base_model owner/name (push the base first, if it is not there)."
        )
    repo_id = create_repo(options.push_to_hub, options.hub_private)
    if not options.hub_allow_mixed:
        check_repo("model" if base is None else "adapter", repo_id)


def estimated(options: Options) -> Estimate:
    """Estimate the memory of a training step from the base's configuration alone."""
    base, train = base_config(options.model.base), options.train
    check_train_options(train, options.run)
    adapter, memory = adapter_config(base, train, options.memory)
    processes, lessons = options.run.estimate_processes, options.lessons
    tokens = train.method != "lora" and memory.window.memory_tokens > 0
    more = more_forwards(lessons)
    check_division(processes, train, options.run.sharding, options.model.quantize, tokens, more)
    dtype: Any = (base.dtype or torch.float32) if options.model.dtype == "auto" else getattr(torch, options.model.dtype)
    most = lessons.longest_context if lessons.questions else options.data.max_tokens
    same = ("accumulation", "backprop_segments", "optimizer", "activation_checkpointing")
    work = Work(
        lanes=train.lanes // processes,
        segment_tokens=memory.segment_tokens,
        questions=lessons.questions_per_step if lessons.questions else 1,
        question_tokens=question_room(lessons, memory) if lessons.questions else 0,
        backprop_context=lessons.backprop_context if lessons.questions else 0,
        max_tokens=most,
        dtype=dtype,
        quantize=None if options.model.quantize == "none" else options.model.quantize,
        processes=processes,
        sharding=None if options.run.sharding == "none" else options.run.sharding,
        device_type="cpu" if options.model.device == "cpu" else "cuda",
        **{name: getattr(train, name) for name in same},
    )
    return estimate(base, adapter, work)
