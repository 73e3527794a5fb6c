"""One process or several: how Accelerate is set up, what is refused, and how the model is divided."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, GradientAccumulationPlugin, LoggerType, parse_flag_from_env
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from cacheformers.modeling.architectures import find_decoder, unwrap
from cacheformers.modeling.method import active_memories
from cacheformers.training.settings import RunOptions, TrainOptions


def make_accelerator(device: str, output: str, run: RunOptions, precision: str = "float32") -> Accelerator:
    """Set up Accelerate for the processes that the launcher has started.

    Args:
        precision: "bf16" for autocast of every forward; "float32" to compute in the dtype of the weights.

    Raises:
        ValueError: a tracker is not installed, or Accelerate's configuration asks for what is not supported.
    """
    known = get_available_trackers()
    missing = [name for name in run.trackers or [] if name in LoggerType and LoggerType(name) not in known]
    if missing:
        raise ValueError(f"trackers: {', '.join(missing)} is not installed. Run: pip install {' '.join(missing)}")
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError("DeepSpeed is not supported: start with torchrun, and use --sharding fsdp2 to save memory.")
    accelerator = Accelerator(
        # Without this, each process on a machine without accelerators would believe that it is alone.
        cpu=device == "cpu" or not torch.accelerator.is_available(),
        # The recipe decides both, whatever `accelerate config` has set.
        mixed_precision="bf16" if precision == "bf16" else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        log_with=run.trackers,
        project_dir=str(Path(output) / "logs"),
    )
    accelerator.wait_for_everyone()  # so that a process that finds an error and leaves was there when others joined
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError("Leave fsdp_config out of Accelerate's configuration: FSDP2 is --sharding fsdp2 here.")
    return accelerator


def check_division(
    processes: int,
    train: TrainOptions,
    sharding: str,
    quantize: str,
    memory_tokens: bool = False,
    more_forwards: str | None = None,
) -> None:
    """Raise ValueError if this number of processes cannot share a run with these options.

    Args:
        memory_tokens: the method runs memory tokens whenever a row's segment closes.
        more_forwards: the option by which there are further forwards for some rows.
    """
    if train.lanes % (processes * train.accumulation):
        raise ValueError(
            f"lanes {train.lanes} must be a multiple of {processes} process(es) x accumulation {train.accumulation}."
        )
    if sharding == "none":
        return
    if processes == 1:
        raise ValueError("--sharding fsdp2 divides the model among processes: start it with torchrun, or leave it out.")
    if train.optimizer == "adafactor":
        raise ValueError("torch's Adafactor cannot work on divided parameters: use --optimizer adamw with fsdp2.")
    if train.backprop_segments > 1:
        raise ValueError(
            "--sharding fsdp2 needs backprop_segments 1: documents end at different places, and all processes must "
            "make the same number of forwards."
        )
    if memory_tokens:
        raise ValueError(
            "--sharding fsdp2 cannot train this method: its memory tokens run whenever a document's segment closes, "
            "and all processes must make the same number of forwards. Leave --sharding out: each process then has the "
            "whole model (DDP)."
        )
    if more_forwards is not None:
        raise ValueError(
            f"--sharding fsdp2 cannot train with {more_forwards}: the model then runs once more for some rows, and all "
            "processes must make the same number of forwards. Leave --sharding out: each process then has the whole "
            "model (DDP)."
        )
    if quantize != "none":
        raise ValueError("--sharding fsdp2 cannot divide quantized weights: use --quantize none, or DDP.")


def prepare(
    accelerator: Accelerator, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer], sharding: str
) -> tuple[nn.Module, Any]:
    """Return the model and its optimizer, wrapped or divided for the number of processes."""
    if sharding == "fsdp2":
        shard(model, accelerator.device, accelerator.num_processes)
        return model, make_optimizer(model)
    prepared: tuple[nn.Module, Any] = accelerator.prepare(model, make_optimizer(model))
    return prepared


def shard(model: nn.Module, device: torch.device, processes: int) -> None:
    """Divide weights, gradients and optimizer among all processes (FSDP2), in place; layers are gathered one by one.

    torch's own call is used because Accelerate leaves FSDP out on CPUs, where the tests need it.
    """
    mesh = init_device_mesh(device.type, (processes,))
    decoder = find_decoder(unwrap(model))
    memories = active_memories(decoder)
    # Higher layers encode with the lowest memory's projection, so that layer must stay gathered until they are done.
    shared = None if not memories else decoder.layers[memories[0].layer]  # type: ignore[index]  # a list of modules
    for layer in decoder.layers:  # type: ignore[union-attr]  # a list of modules
        fully_shard(layer, mesh=mesh, reshard_after_forward=layer is not shared)
    fully_shard(model, mesh=mesh)


def total(accelerator: Accelerator, *numbers: float) -> list[float]:
    """Return each number's sum over all processes."""
    if accelerator.num_processes == 1:
        return list(numbers)
    sums: list[float] = accelerator.reduce(
        torch.tensor(numbers, dtype=torch.float64, device=accelerator.device)
    ).tolist()
    return sums
