"""The optimizer: gates, memory and all other weights each have their own rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_cosine_schedule_with_warmup

from cacheformers.modeling.attach import attention_modules, find_decoder, unwrap
from cacheformers.modeling.method import MemoryMethod, MethodOnLayer

OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "adafactor": Adafactor}


@dataclass(frozen=True)
class Rates:
    """Learning rates and weight decay.

    Attributes:
        weights: of whatever is outside the memory: LoRA's matrices, or all of a model.
        memory: of the memory's projections and norms.
        gate: of the gates, which start at zero and scale what the memory adds, so they must move much faster; and of
            what `hit_scores` adds.
        beta: of Infini-attention's shares, one number a head (the paper's rate for them is 0.01).
        weight_decay: of matrices; gates, shares, norms and biases have none.
    """

    weights: float
    memory: float
    gate: float
    weight_decay: float = 0.0
    beta: float = 0.01


def parameter_groups(model: nn.Module, rates: Rates) -> list[dict[str, object]]:
    """Trained parameters by rate and decay, named after what they hold.

    Raises:
        ValueError: nothing is trained.
    """
    groups: dict[tuple[str, float], list[nn.Parameter]] = {}
    memory_rates = rates_of_parts(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = kind_of(name, memory_rates)
            decay = rates.weight_decay if parameter.dim() > 1 and kind in ("memory", "weights") else 0.0
            groups.setdefault((kind, decay), []).append(parameter)
    if not groups:
        raise ValueError("The model has no parameter to train.")
    return [
        {"name": kind, "params": parameters, "lr": getattr(rates, kind), "weight_decay": decay}
        for (kind, decay), parameters in groups.items()
    ]


def rates_of_parts(model: nn.Module) -> Mapping[str, str]:
    """The rate of each part of the model's memory that does not have the memory's own (`MemoryMethod.rates`)."""
    on_layers = (module for module in model.modules() if isinstance(module, MethodOnLayer))
    return next((module.method.rates for module in on_layers), {})


def kind_of(name: str, rates: Mapping[str, str]) -> str:
    """Which of the rates a parameter has, by its name in an adapter (`...memory.lora_mem_gate...`) or a model."""
    _, inside, part = name.rpartition(".memory.")
    return rates.get(part.removeprefix("lora_mem_").partition(".")[0], "memory") if inside else "weights"


def make_optimizer(model: nn.Module, rates: Rates, name: str = "adamw") -> Optimizer:
    """The optimizer `name` ('adamw' or 'adafactor')."""
    return OPTIMIZERS[name](parameter_groups(model, rates))  # type: ignore[call-arg]


def make_schedule(optimizer: Optimizer, steps: int, warmup_steps: int, done: int = 0) -> LRScheduler:
    """A linear warm-up and a cosine to zero, as it stands after `done` steps."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return get_cosine_schedule_with_warmup(optimizer, warmup_steps, steps, last_epoch=done - 1)


def freeze_idle_gates(model: nn.Module, memory: Any) -> None:
    """Leave gates of layers with fixed heads untrained: nobody asks them, and DDP would wait for their gradients.

    Args:
        memory: the options of the model's memory.
    """
    method: MemoryMethod | None = getattr(memory, "method", None)
    if method is not None and method.frozen_layers(memory):
        attentions = attention_modules(find_decoder(unwrap(model)))
        for layer in method.frozen_layers(memory):
            attentions[layer].get_submodule("memory").requires_grad_(False)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
