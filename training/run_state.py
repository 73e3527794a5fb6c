"""What a run writes down to go on as if it had never stopped: weights, optimiser, lanes, memories, random numbers."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from cacheformers.modeling.memories.base import joined, part
from cacheformers.training.checkpoints import sync, write_tensors
from cacheformers.training.groups import Group
from cacheformers.training.subject import Trained
from cacheformers.training.zero_state import find_zero, restore_zero_share, zero_share

OPTIMIZER = "optimizer.safetensors"

# Whole tensors on the host, on the first process, whatever the model is divided into.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)


@dataclass(frozen=True)
class SavedAs:
    """The files of an adapter or a model.

    Attributes:
        weights: what is trained.
        config: without it there is no adapter or model, so it is written last.
    """

    weights: str
    config: str


def saved_as(model: Trained) -> SavedAs:
    """How `save_pretrained` calls a model's files."""
    if isinstance(model, PeftModel):
        return SavedAs("adapter_model.safetensors", "adapter_config.json")
    return SavedAs("model.safetensors", "config.json")


def trained_state(model: Trained) -> dict[str, Tensor]:
    """Return everything trained, by name, on the first process at least. Every process must call this."""
    trained = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not any(isinstance(parameter, DTensor) for parameter in trained.values()):
        return trained  # a module of bitsandbytes may lack an attribute that its state dict names, so ask for none
    state = get_model_state_dict(model, options=WHOLE)
    # A frozen weight that is tied to another one is in there under its second name.
    return {name: tensor for name, tensor in state.items() if name in trained}  # type: ignore[misc]


def optimizer_state(model: Trained, optimizer: Any) -> dict[str, Tensor]:
    """What the optimiser remembers, `parameter.key`, on the first process. Every process must call this."""
    if find_zero(optimizer) is not None:
        return {}
    state: Any = get_optimizer_state_dict(model, inner(optimizer), options=WHOLE)
    return joined(**state.get("state", {}))


def write_shared(folder: Path, model: Trained, weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
    """The first process's files: what is trained, as `save_pretrained` saves it, and the optimiser."""
    model.save_pretrained(str(folder), state_dict=dict(weights))  # transformers empties it
    for path in folder.iterdir():
        sync(path)
    write_tensors(folder / OPTIMIZER, optimizer)


def save_trained(folder: Path, model: Trained, weights: dict[str, Tensor]) -> None:
    """Put a finished adapter or model into a folder; whatever happens meanwhile, no half of it ever stands there."""
    config = saved_as(model).config
    with TemporaryDirectory(dir=folder, prefix=".saving-") as draft:
        model.save_pretrained(draft, state_dict=dict(weights))
        # An earlier one's configuration goes first and the new one comes last.
        (folder / config).unlink(missing_ok=True)
        for path in sorted(Path(draft).iterdir(), key=lambda path: path.name == config):
            sync(path)
            os.replace(path, folder / path.name)
    sync(folder)


def restore_shared(folder: Path, model: Trained, optimizer: Any) -> None:
    """Give a model and an optimiser what `write_shared` wrote. Every process must call this.

    Raises:
        ValueError: the file lacks a tensor.
    """
    path = folder / saved_as(model).weights
    saved = load_file(path)
    names = {name: saved_name(name, model) for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = [name for name, key in names.items() if key not in saved]
    if missing:
        raise ValueError(f"{path} has no tensor for {', '.join(missing[:5])}.")
    weights: Any = {name: saved[key] for name, key in names.items()}
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, strict=False))

    if find_zero(optimizer) is not None:
        return
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
    """torch's optimiser inside the wrappers of Accelerate and DeepSpeed."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def saved_name(name: str, model: Trained) -> str:
    """A parameter's name in the file of weights: that of an adapter without the adapter's own name."""
    if not isinstance(model, PeftModel):
        return name
    adapter = model.active_adapter
    return name.replace(f".{adapter}.", ".").removesuffix(f".{adapter}")


def own_file(process: int) -> str:
    return f"process-{process:05d}.safetensors"


def write_own(folder: Path, groups: list[Group], optimizer: Any, process: int) -> None:
    """One process's file: where its lanes stand, what they remember, its random numbers, its share of ZeRO-2."""
    memories = {str(i): group.memory.state_dict() for i, group in enumerate(groups) if group.memory is not None}
    zero = find_zero(optimizer)
    share = {} if zero is None else zero_share(zero)
    tensors = joined(random=random_state(), zero=share, **{f"memory.{i}": held for i, held in memories.items()})
    lanes = json.dumps([group.lanes.state_dict() for group in groups])
    write_tensors(folder / own_file(process), tensors, {"lanes": lanes})


def restore_own(folder: Path, groups: list[Group], optimizer: Any, process: int, device: torch.device) -> None:
    """Give this process back what its `write_own` wrote."""
    path = folder / own_file(process)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        lanes = json.loads(file.metadata()["lanes"])
    for i, group in enumerate(groups):
        group.lanes.load_state_dict(lanes[i])
        if group.memory is not None:
            group.memory.load_state_dict(part(tensors, f"memory.{i}"), device)
    zero = find_zero(optimizer)
    if zero is not None:
        restore_zero_share(zero, part(tensors, "zero"))
    random = part(tensors, "random")
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])


def random_state() -> dict[str, Tensor]:
    """The states of torch's random numbers, from which dropout draws."""
    held = {"cpu": torch.get_rng_state()}
    return {**held, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else held
