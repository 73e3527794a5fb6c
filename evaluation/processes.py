"""The processes of an evaluation, and what they hold."""

from __future__ import annotations

import resource
from datetime import timedelta

import torch
from accelerate import PartialState
from torch import nn


def make_state(device: str) -> PartialState:
    """However many processes the launcher has started, each with a device of its own."""
    state = PartialState(
        cpu=device == "cpu" or not torch.accelerator.is_available(),
        timeout=timedelta(days=7),  # those that are done first wait for the others
    )
    state.wait_for_everyone()  # so that a process that finds an error and leaves was there when others joined
    return state


def peak_bytes(model: nn.Module) -> int:
    """The most memory so far: of the GPU, or of the process on a CPU."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
