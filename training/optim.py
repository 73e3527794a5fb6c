"""The optimizer, in which gates, memory and all other weights have their own learning rates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_cosine_schedule_with_warmup

from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap
from cacheformers.modeling.method import MemoryMethod, MethodOnLayer

OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "adafactor": Adafactor}


@dataclass(frozen=True)
class Rates:
    """Learning rates and weight decay.

    Attributes:
        weights: everything outside the memory: LoRA's matrices, or all of a model.
        memory: the memory's projections and norms.
        gate: gates, which start at zero and scale what the memory adds, so they must move much faster; and the
            parameters of `hit_scores`.
        beta: Infini-attention's shares, one number per head (the paper's rate for them is 0.01).
        weight_decay: matrices; gates, shares, norms and biases have none.
        lowest: layers below it keep their LoRA. Its rate is zero (`kept`); what requires no gradient is not saved.
    """

    weights: float
    memory: float
    gate: float
    weight_decay: float = 0.0
    beta: float = 0.01
    lowest: int = 0
    kept: ClassVar[float] = 0.0


def parameter_groups(model: nn.Module, rates: Rates) -> list[dict[str, object]]:
    """Group trained parameters by rate and decay, each named after its rate; raise ValueError for none."""
    groups: dict[tuple[str, float], list[nn.Parameter]] = {}
    on_layers = (module for module in model.modules() if isinstance(module, MethodOnLayer))
    rates_of_parts = next((module.method.rates for module in on_layers), {})
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = kind_of(name, rates_of_parts)
            if kind == "weights" and layer_of(name) < rates.lowest:
                kind = "kept"
            decay = rates.weight_decay if parameter.dim() > 1 and kind in ("memory", "weights") else 0.0
            groups.setdefault((kind, decay), []).append(parameter)
    if not groups:
        raise ValueError("The model has no parameter to train.")
    return [
        {"name": kind, "params": parameters, "lr": getattr(rates, kind), "weight_decay": decay}
        for (kind, decay), parameters in groups.items()
    ]


def kind_of(name: str, rates: Mapping[str, str]) -> str:
    """Return the rate of a parameter by its name in an adapter (`...memory.lora_mem_gate...`) or a model.

    Args:
        rates: of parts that do not have the memory's own rate (`MemoryMethod.rates`).
    """
    _, inside, part = name.rpartition(".memory.")
    return rates.get(part.removeprefix("lora_mem_").partition(".")[0], "memory") if inside else "weights"


def layer_of(name: str) -> float:
    """Return the number of the decoder's layer that a parameter is in; infinity for one outside the layers."""
    number = re.search(r"\.layers\.(\d+)\.", name)
    return inf if number is None else int(number[1])


def make_optimizer(model: nn.Module, rates: Rates, name: str = "adamw") -> Optimizer:
    """Make the optimizer `name`, a key of `OPTIMIZERS`."""
    return OPTIMIZERS[name](parameter_groups(model, rates))  # type: ignore[call-arg]  # constructors differ


def make_schedule(optimizer: Optimizer, steps: int, warmup_steps: int, done: int = 0) -> LRScheduler:
    """Make a schedule of a linear warm-up and a cosine to zero, set to where it is after `done` steps."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return get_cosine_schedule_with_warmup(optimizer, warmup_steps, steps, last_epoch=done - 1)


def freeze_idle_gates(model: nn.Module, memory: Any) -> None:
    """Freeze parts that no forward uses (gates of fixed heads, by the memory's options): DDP would wait for them."""
    method: MemoryMethod | None = getattr(memory, "method", None)
    if method is not None and method.frozen_layers(memory):
        attentions = attention_modules(find_decoder(unwrap(model)))
        for layer in method.frozen_layers(memory):
            attentions[layer].get_submodule("memory").requires_grad_(False)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
