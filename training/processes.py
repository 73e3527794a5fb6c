"""One process or many: how Accelerate is told, and how a model is prepared for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, GradientAccumulationPlugin, LoggerType, parse_flag_from_env
from torch import nn
from torch.optim import Optimizer

from cacheformers.training.settings import RunOptions, TrainOptions
from cacheformers.training.sharding import shard


def make_accelerator(device: str, output: str, run: RunOptions, precision: str = "float32") -> Accelerator:
    """Accelerate, for however many processes the launcher has started.

    Args:
        precision: "bf16" for autocast of every forward; "float32" to compute as the weights are held.

    Raises:
        ValueError: a tracker that does not exist or is not installed.
    """
    known = get_available_trackers()
    missing = [name for name in run.trackers or [] if name in LoggerType and LoggerType(name) not in known]
    if missing:
        raise ValueError(f"trackers: {', '.join(missing)} is not installed. Run: pip install {' '.join(missing)}")
    accelerator = Accelerator(
        # Without this, processes on a machine without accelerators would each believe that they are alone.
        cpu=device == "cpu" or not torch.accelerator.is_available(),
        # What `accelerate config` may have set: the recipe decides both.
        mixed_precision="bf16" if precision == "bf16" else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        log_with=run.trackers,
        project_dir=str(Path(output) / "logs"),
    )
    accelerator.wait_for_everyone()  # so that a process that finds an error and leaves was there when others joined
    return accelerator


def uses_deepspeed(accelerator: Accelerator) -> bool:
    return bool(accelerator.distributed_type == DistributedType.DEEPSPEED)


def check_processes(accelerator: Accelerator, train: TrainOptions, sharding: str, quantize: str) -> None:
    """Raise ValueError where these options and the way in which processes were started do not fit."""
    check_division(accelerator.num_processes, train, sharding, quantize)
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError("Leave fsdp_config out of Accelerate's configuration: FSDP2 is --sharding fsdp2 here.")
    if not uses_deepspeed(accelerator):
        if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
            raise ValueError("DeepSpeed needs GPUs: here Accelerate would leave it out without a word. Use torchrun.")
        return
    plugin = accelerator.state.deepspeed_plugin
    if plugin.zero_stage > 2:
        raise ValueError(f"DeepSpeed ZeRO-{plugin.zero_stage} is not supported: use ZeRO-2, or --sharding fsdp2.")
    if train.accumulation > 1 or plugin.gradient_accumulation_steps not in (1, "auto"):
        raise ValueError("With DeepSpeed, accumulation must be 1: start more processes, or use --sharding fsdp2.")
    if sharding != "none":
        raise ValueError("Choose one of DeepSpeed and --sharding fsdp2.")


def check_division(processes: int, train: TrainOptions, sharding: str, quantize: str) -> None:
    """Raise ValueError where so many processes cannot share the work of a run with these options."""
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
    if quantize != "none":
        raise ValueError("--sharding fsdp2 cannot divide quantized weights: use --quantize none, or DDP.")


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    make: Callable[[nn.Module], Optimizer],
    sharding: str,
    train: TrainOptions,
) -> tuple[nn.Module, Any]:
    """A model and its optimizer as this number of processes needs them.

    Args:
        make: makes the optimizer of a model.
    """
    if sharding == "fsdp2":
        shard(model, accelerator.device, accelerator.num_processes)
        return model, make(model)
    if uses_deepspeed(accelerator):
        accelerator.state.deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": train.lanes // accelerator.num_processes,
            "gradient_clipping": train.clip,
            "zero_allow_untested_optimizer": True,
        }
    prepared: tuple[nn.Module, Any] = accelerator.prepare(model, make(model))
    return prepared
