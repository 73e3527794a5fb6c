"""The options of a training run, and which of them a resumed run must share."""

from __future__ import annotations

import math
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from cacheformers.common.recipe import option
from cacheformers.methods import DEFAULT
from cacheformers.modeling.method import METHODS, is_method

# Where things are may differ when a run goes on; what they hold may not.
PLACES = ("base", "train", "questions", "output", "device", "init", "model_config", "tokenizer")

FINISHED = {"an adapter": "adapter_config.json", "a model": "config.json"}  # files without which there is none

POSITIVE = (
    *("steps", "lanes", "accumulation", "backprop_segments", "clip"),
    *("keep_checkpoints", "log_every", "stop_after", "estimate_processes", "start_segments"),
)
NOT_NEGATIVE = (
    *("seed", "lora_rate", "lora_from_layer", "memory_rate", "gate_factor", "weight_decay", "checkpoint_every"),
)


@dataclass
class TrainOptions:
    """What is trained, and how."""

    _argument_group_name = "training"
    output: str = option(
        help="Folder for the adapter or model, its tokenizer, train_result.json, plots and checkpoints."
    )
    method: str = option(
        DEFAULT,
        help=f"The memory to train beside LoRA: {', '.join(METHODS)}; this help shows the options of the one that "
        "--method names. 'lora' trains no memory: the same LoRA on the same "
        "segments in the same order, to compare with; the options are those of the method that the recipe names.",
    )
    seed: int = option(0, help="Fixes the adapter's random start and the order of documents.")
    steps: int = option(1000, help="Optimizer steps.")
    lanes: int = option(
        1,
        help="Documents read side by side, over all processes. Each lane keeps a memory of its own; each step reads "
        "its next segment.",
    )
    accumulation: int = option(
        1,
        help="Read a process's lanes in this many batches a step, one after another: the same gradients, less memory.",
    )
    backprop_segments: int = option(
        1, help="Segments that each lane reads in a step; gradients go back through the local window to the first."
    )

    start_from: str | None = option(
        None,
        help="A folder that an earlier run wrote: start from its weights, for example to go on with other documents. "
        "An adapter must have the same method, memory and LoRA; a model from scratch the same weights, while switches "
        "of --model_config may differ. Default: as memory_start says, or random weights.",
    )
    memory_start: str = option(
        "copies",
        help="What the memory's new projections start from. 'copies': W_k and W_v are the first columns of the layer's "
        "own, W_p is random (paper). 'states' (Neurocache): the base reads start_segments segments; W_p takes the "
        "main directions of its states, and W_k and W_v are the layer's own over what an entry tells of them.",
    )
    start_segments: int = option(8, help="With memory_start 'states': segments that the base reads for it.")
    lora_targets: list[str] | None = option(
        None,
        help="Linear layers that LoRA adapts, by name, in the layers that lora_layers says. Default: those of the "
        "feed-forward block. 'none': no LoRA.",
    )
    lora_layers: Literal["memory", "all"] = option(
        "memory",
        help="Layers with LoRA: those that the method changes, or all of the base, as LoRA that 'cacheformers attach' "
        "has put under a memory may have.",
    )
    lora_dropout: float = option(0.0, help="Dropout of LoRA's inputs.")
    optimizer: Literal["adamw", "adafactor"] = option(
        "adamw", help="'adafactor' keeps far less per trained parameter than AdamW's two moments."
    )
    lora_rate: float = option(3e-4, help="Peak learning rate of LoRA.")
    lora_from_layer: int = option(
        0,
        help="The lowest layer whose LoRA learns; LoRA below it stays as --start_from has it. From the layer above the "
        "highest of --heads on, what retrieval heads find stays the same.",
    )
    memory_rate: float = option(3e-4, help="Peak learning rate of the memory's projections.")
    gate_factor: float = option(
        30.0, help="The gates' peak rate is memory_rate times this: from zero they have far to go."
    )
    weight_decay: float = option(0.0, help="Weight decay of matrices; gates and norms have none.")
    warmup: float = option(0.1, help="Share of the steps in which rates rise; then they fall on a cosine to zero.")
    clip: float = option(1.0, help="Gradients are scaled down to this norm.")
    activation_checkpointing: bool = option(
        False, help="Compute activations twice instead of keeping them: less memory, about a third more time."
    )


@dataclass
class RunOptions:
    """Resuming, stopping, and what is written on the way. None of these changes what is learned."""

    _argument_group_name = "the run: going on, stopping, logging"
    resume: bool = option(
        False, help="Go on from the last good checkpoint in output/checkpoints; start anew if there is none."
    )
    overwrite: bool = option(False, help="Start anew in an output folder that already holds a result or checkpoints.")
    checkpoint_every: int = option(
        500, help="Steps from one checkpoint to the next. 0: only when the run ends or stops."
    )
    keep_checkpoints: int = option(2, help="How many checkpoints are kept; the oldest go first.")
    stop_after: float | None = option(
        None, help="Save a checkpoint and stop after this many minutes of training. Default: when all steps are done."
    )
    log_every: int = option(10, help="Steps from one entry in the log (rates, gates, what is retrieved) to the next.")
    trackers: list[str] | None = option(
        None, help="Where to log beside train_result.json, through Accelerate: tensorboard, wandb, mlflow, ..."
    )
    sharding: Literal["none", "fsdp2"] = option(
        "none",
        help="How several processes hold the model. 'none': each holds all of it (DDP). 'fsdp2': weights, gradients "
        "and optimizer are divided, and gathered a layer at a time.",
    )
    estimate: bool = option(
        False,
        help="Print the number of trained parameters and the peak memory of a step, and stop. Needs no weights or "
        "documents: the step runs on tensors without numbers.",
    )
    estimate_processes: int = option(1, help="With estimate: how many processes the run will have.")


@dataclass
class HubOptions:
    """Where the result is pushed."""

    _argument_group_name = "the Hub"
    push_to_hub: str | None = option(
        None,
        help="Hub repository, owner/name, for the result, its tokenizer, card and plots. Created before training.",
    )
    hub_private: bool = option(False, help="Create the repository as a private one.")
    hub_base_model: str | None = option(
        None, help="Hub id of the base, to be named in the adapter and its card where --base is a local folder."
    )
    hub_allow_mixed: bool = option(
        False, help="Push an adapter into a repository that holds a model, or a model into one that holds an adapter."
    )


def check_train_options(train: TrainOptions, run: RunOptions) -> None:
    """Raise ValueError for an unknown method or a number out of range."""
    if train.method != "lora" and not is_method(train.method):
        raise ValueError(f"method {train.method!r} is not registered: choose one of {', '.join([*METHODS, 'lora'])}.")
    given = {**asdict(train), **asdict(run)}
    for name in POSITIVE:
        if given[name] is not None and not 0 < given[name] < math.inf:
            raise ValueError(f"{name} must be greater than 0, got {given[name]}.")
    for name in NOT_NEGATIVE:
        if not 0 <= given[name] < math.inf:
            raise ValueError(f"{name} must not be negative, got {given[name]}.")
    for name in ("warmup", "lora_dropout"):
        if not 0 <= given[name] < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, got {given[name]}.")
    if train.lora_targets and "none" in train.lora_targets and len(train.lora_targets) > 1:
        raise ValueError("lora_targets: 'none' stands alone; or name the layers.")


def check_output(folder: str, run: RunOptions) -> None:
    """Raise ValueError if an output folder holds a run and the options do not say what to do with it."""
    if run.resume and run.overwrite:
        raise ValueError("Choose one of --resume (go on) and --overwrite (start anew).")
    finished = next((name for name, mark in FINISHED.items() if (Path(folder) / mark).exists()), None)
    if run.resume and finished and not (Path(folder) / "checkpoints").exists():
        raise ValueError(f"{folder} holds {finished} but no checkpoints to go on from: add --overwrite to start anew.")
    if run.resume or run.overwrite:
        return
    if any((Path(folder) / "checkpoints").glob("step-*")):
        raise ValueError(f"{folder} holds checkpoints: add --resume to go on from them, or --overwrite to start anew.")
    if finished:
        raise ValueError(f"{folder} already holds {finished}: choose another --output, or add --overwrite.")


def resumed_settings(*options: Any, **more: Any) -> dict[str, Any]:
    """Collect what a resumed run must share with the run that it continues, as JSON holds it.

    Args:
        options: dataclasses of which all fields count except `PLACES`.
        more: other facts.
    """
    settings = {name: value for group in options for name, value in asdict(group).items() if name not in PLACES}
    return {**settings, **more}


def default_settings(*options: Any) -> dict[str, Any]:
    """Collect the defaults of options: what a checkpoint means that was written before there was one of them."""
    found = {field.name: field.default for group in options for field in fields(group)}
    return {name: value for name, value in found.items() if value is not MISSING and name not in PLACES}


def check_resumable(saved: dict[str, Any], here: dict[str, Any], checkpoint: str) -> None:
    """Raise ValueError that names every setting in which a checkpoint and this run differ."""
    differing = [
        f"{name} ({saved.get(name)!r} in the checkpoint, {here.get(name)!r} here)"
        for name in sorted({*saved, *here})
        if saved.get(name) != here.get(name)
    ]
    if differing:
        raise ValueError(
            f"{checkpoint} was written with other settings: {', '.join(differing)}. Go on with its settings, or start "
            "anew with another --output or with --overwrite."
        )
