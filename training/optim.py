"""The optimiser: gates, memory and LoRA each have their own rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_cosine_schedule_with_warmup


@dataclass(frozen=True)
class Rates:
    """Learning rates and weight decay.

    Attributes:
        lora: of LoRA's matrices, and of whatever else is trained.
        memory: of the memory's projections and norms.
        gate: of the gates. They start at zero and scale what the memory adds, so they must move much faster.
        weight_decay: of matrices; gates, norms and biases have none.
    """

    lora: float
    memory: float
    gate: float
    weight_decay: float = 0.0


def parameter_groups(model: nn.Module, rates: Rates) -> list[dict[str, object]]:
    """Trained parameters by rate and decay, named after what they hold.

    Raises:
        ValueError: nothing is trained.
    """
    groups: dict[tuple[str, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = "gate" if "lora_mem_gate" in name else "memory" if "lora_mem_" in name else "lora"
            decay = rates.weight_decay if parameter.dim() > 1 and kind != "gate" else 0.0
            groups.setdefault((kind, decay), []).append(parameter)
    if not groups:
        raise ValueError("The model has no parameter to train.")
    return [
        {"name": kind, "params": parameters, "lr": getattr(rates, kind), "weight_decay": decay}
        for (kind, decay), parameters in groups.items()
    ]


def make_optimizer(model: nn.Module, rates: Rates, steps: int, warmup_steps: int) -> tuple[Optimizer, LRScheduler]:
    """AdamW, with a linear warm-up and a cosine to zero."""
    optimizer = AdamW(parameter_groups(model, rates))
    return optimizer, get_cosine_schedule_with_warmup(optimizer, warmup_steps, steps)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale gradients down to a total norm of at most `max_norm`; returns the norm that they had."""
    return float(torch.nn.utils.clip_grad_norm_(trained_parameters(model), max_norm))
