"""A training run: the model, what changes while it is trained, and how both are written down and restored.

A resumed run goes on as if it had never stopped: weights, optimizer, lanes, memories and random numbers come back.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from cacheformers.common.files import sync, write_tensors
from cacheformers.modeling.memory import joined, part
from cacheformers.training.checkpoints import CheckpointError, Checkpoints
from cacheformers.training.lanes import Group

Trained = PeftModel | PreTrainedModel

OPTIMIZER, OWN = "optimizer.safetensors", "process-{:05d}.safetensors"
# Whole tensors on the host, on the first process, whatever the model is divided into.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """The run was asked to stop before its last step, and has written a checkpoint."""


class ProcessLost(RuntimeError):
    """Another process of the run has died, so this one cannot go on."""


class Stopping:
    """Notice when a run should stop: its time is up, or a first Ctrl-C or SIGTERM came. A second signal interrupts.

    Args:
        minutes: after which to stop; None for never.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self.deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self.signaled = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signaled = True
        signal.signal(number, self._before[number])

    @property
    def wanted(self) -> bool:
        """Whether this process was asked to stop."""
        return self.signaled or time.monotonic() >= self.deadline


@dataclass
class History:
    """What a run has done so far; it is part of each checkpoint.

    Attributes:
        losses: nats per token of each step.
        tokens: number of tokens read as inputs.
        seconds: of training, over all interruptions.
        log: one entry every `log_every` steps: rates, gradient norm, statistics of the memory.
    """

    losses: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of steps done."""
        return len(self.losses)


@dataclass
class TrainingRun:
    """A run: the model as Accelerate prepared it, and everything that changes while it is trained.

    Attributes:
        trained: the model without Accelerate's wrapper.
        settings: what a run that goes on from this one's checkpoints must share.
        steps: number of steps of the whole run.
    """

    accelerator: Accelerator
    model: nn.Module
    trained: Trained
    optimizer: Any  # torch's, perhaps inside Accelerate's wrapper
    groups: list[Group]
    checkpoints: Checkpoints
    settings: dict[str, Any]
    steps: int
    history: History

    def save(self, needed: bool) -> None:
        """Write a checkpoint. Every process must call this.

        Args:
            needed: raise CheckpointError where it cannot be written. Otherwise that is printed, and training goes on.
        """
        weights = trained_state(self.trained)
        held: Any = get_optimizer_state_dict(self.trained, inner(self.optimizer), options=WHOLE)
        moments = joined(**held.get("state", {}))  # `parameter.key`

        def write(folder: Path) -> None:
            if self.accelerator.is_main_process:
                self.trained.save_pretrained(str(folder), state_dict=dict(weights))  # transformers empties it
                for path in folder.iterdir():
                    sync(path)
                write_tensors(folder / OPTIMIZER, moments)
            write_own(folder, self.groups, self.accelerator.process_index)

        contents = {"settings": self.settings, "history": asdict(self.history)}
        try:
            self.checkpoints.save(self.history.steps, write, contents)
        except CheckpointError as error:
            if needed:
                raise
            # Flushed, so that in a file it stands before what goes to stderr later.
            self.accelerator.print(f"{error} Training goes on; the next try is at the next checkpoint.", flush=True)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint. Every process must call this."""
        restore_shared(path, self.trained, self.optimizer)
        restore_own(path, self.groups, self.accelerator.process_index, self.accelerator.device)
        self.history = History(**self.checkpoints.load(path)["history"])
        self.release_documents()

    def release_documents(self) -> None:
        """Free documents that all lanes of this process have finished."""
        documents = self.groups[0].lanes.documents
        documents.release(min(position for group in self.groups for position in group.lanes.position))

    def not_finite(self, suspects: list[int], loss: float) -> str:
        """Describe a loss or gradient that is NaN or infinite. Every process must call this.

        Args:
            suspects: documents of this process that may be the cause.
        """
        documents = self.groups[0].lanes.documents
        names = gather_object([documents.name(document) for document in suspects])
        number = self.history.steps + 1
        what = f"The loss of step {number} is {loss}."
        if math.isfinite(loss):
            what = f"The gradient of step {number} is not finite (its loss is {loss:.4f})."
        good = self.checkpoints.newest()
        kept = f"The last good checkpoint is {good}." if good else "There is no checkpoint yet, and nothing was saved."
        return (
            f"{what} Read: {'; '.join(names)}. {kept} Look at these documents, try lower rates (--gate_factor first) "
            "or, instead of float16, bfloat16."
        )

    def left(self) -> str:
        """Say what is left of a run that an error ends, maybe in this process alone: nothing here waits for others."""
        done = f"Stopped after step {self.history.steps}."
        if not self.checkpoints.paths():
            return f"{done} There is no checkpoint yet, and nothing was saved."
        return (
            f"{done} Mend what the message names, and go on with --resume: the newest checkpoint is in "
            f"{self.checkpoints.folder}."
        )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Raise ProcessLost, which says what to do, where the network reports that another process is gone."""
        try:
            yield
        except RuntimeError as error:
            words = ("gloo", "NCCL", "Connection closed", "Connection reset")
            lost = isinstance(error, torch.distributed.DistError) or any(word in str(error) for word in words)
            if self.accelerator.num_processes == 1 or isinstance(error, CheckpointError) or not lost:
                raise
            raise ProcessLost(
                f"Process {self.accelerator.process_index} of {self.accelerator.num_processes} stopped after step "
                f"{self.history.steps}: another process is gone (its own output says why). Start all of them again "
                f"with --resume: the newest checkpoint is in {self.checkpoints.folder}."
            ) from error


def saved_as(model: Trained) -> tuple[str, str]:
    """Return the names that `save_pretrained` gives to a model's weights and to its configuration."""
    if isinstance(model, PeftModel):
        return "adapter_model.safetensors", "adapter_config.json"
    return "model.safetensors", "config.json"


def trained_state(model: Trained) -> dict[str, Tensor]:
    """Return everything trained, by name, on the first process at least. Every process must call this.

    Parts of a memory that `freeze_idle_gates` left out are there, too: who loads the file expects them.
    """
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad or ".memory." in name
    }
    if not any(isinstance(parameter, DTensor) for parameter in trained.values()):
        # A module of bitsandbytes may lack an attribute that its state dict names, so ask for none.
        return {name: parameter.detach() for name, parameter in trained.items()}
    state = get_model_state_dict(model, options=WHOLE)  # without what is frozen, which may be a large base
    # A frozen weight that is tied to another one is in there under its second name.
    found: dict[str, Tensor] = {name: state[name] for name in trained if name in state}  # type: ignore[misc]  # all values are tensors
    for name, parameter in trained.items():
        if not parameter.requires_grad:
            found[name] = parameter.full_tensor().cpu() if isinstance(parameter, DTensor) else parameter.detach()
    return found


def save_trained(folder: Path, model: Trained, weights: dict[str, Tensor]) -> None:
    """Put a finished adapter or model into a folder, so that an interruption never leaves half of it there."""
    _, config = saved_as(model)
    with TemporaryDirectory(dir=folder, prefix=".saving-") as draft:
        model.save_pretrained(draft, state_dict=dict(weights))
        # Without its configuration there is no adapter or model: the old one goes first and the new one comes last.
        (folder / config).unlink(missing_ok=True)
        for path in sorted(Path(draft).iterdir(), key=lambda path: path.name == config):
            sync(path)
            os.replace(path, folder / path.name)
    sync(folder)


def restore_shared(folder: Path, model: Trained, optimizer: Any) -> None:
    """Load the weights and moments of a checkpoint into a model and an optimizer. Every process must call this.

    Raises:
        ValueError: the file lacks a tensor.
    """
    weights_file, _ = saved_as(model)
    path = folder / weights_file
    saved = load_file(path)
    names = {name: saved_name(name, model) for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = [name for name, key in names.items() if key not in saved]
    if missing:
        raise ValueError(f"{path} has no tensor for {', '.join(missing[:5])}.")
    weights: Any = {name: saved[key] for name, key in names.items()}
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, strict=False))

    moments = load_file(folder / OPTIMIZER)
    optimizer = inner(optimizer)
    fresh: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(ignore_frozen_params=True))
    state: Any = {
        # A parameter that has had no gradient yet has no moments: its count and sums are still 0.
        name: {key: moments.get(f"{name}.{key}", torch.zeros_like(value)) for key, value in held.items()}
        for name, held in fresh["state"].items()
    }
    set_optimizer_state_dict(
        model, optimizer, {**fresh, "state": state}, options=StateDictOptions(full_state_dict=True)
    )


def inner(optimizer: Any) -> Optimizer:
    """Return torch's optimizer inside Accelerate's wrapper."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def saved_name(name: str, model: Trained) -> str:
    """Return a parameter's name in the file of weights; in an adapter's file the adapter's own name is left out."""
    if not isinstance(model, PeftModel):
        return name
    adapter = model.active_adapter
    return name.replace(f".{adapter}.", ".").removesuffix(f".{adapter}")


def write_own(folder: Path, groups: list[Group], process: int) -> None:
    """Write one process's file: the places of its lanes, their memories, and its random numbers."""
    memories = {f"memory.{i}": group.memory.state_dict() for i, group in enumerate(groups) if group.memory is not None}
    lanes = json.dumps([group.lanes.state_dict() for group in groups])
    random = {"cpu": torch.get_rng_state()}  # dropout draws from it
    if torch.cuda.is_available():
        random["cuda"] = torch.cuda.get_rng_state()
    write_tensors(folder / OWN.format(process), joined(random=random, **memories), {"lanes": lanes})


def restore_own(folder: Path, groups: list[Group], process: int, device: torch.device) -> None:
    """Load what this process's `write_own` wrote."""
    path = folder / OWN.format(process)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        lanes = json.loads(file.metadata()["lanes"])
    for i, group in enumerate(groups):
        group.lanes.load_state_dict(lanes[i])
        if group.memory is not None:
            group.memory.load_state_dict(part(tensors, f"memory.{i}"), device)
    random = part(tensors, "random")
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])
