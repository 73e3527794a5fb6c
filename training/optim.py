"""The optimiser: gates, memory and all other weights each have their own rate."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_cosine_schedule_with_warmup

from cacheformers.modeling.attach import attention_modules, find_decoder, unwrap
from cacheformers.modeling.memories.gated_attention import GatedAttentionOptions

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


# Part of a memory -> the rate that it has; other parts have `memory`. Token gates are layers that see states.
RATES = {"gate": "gate", "scores": "gate", "beta": "beta"}


def parameter_groups(model: nn.Module, rates: Rates) -> list[dict[str, object]]:
    """Trained parameters by rate and decay, named after what they hold.

    Raises:
        ValueError: nothing is trained.
    """
    groups: dict[tuple[str, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = kind_of(name)
            decay = rates.weight_decay if parameter.dim() > 1 and kind in ("memory", "weights") else 0.0
            groups.setdefault((kind, decay), []).append(parameter)
    if not groups:
        raise ValueError("The model has no parameter to train.")
    return [
        {"name": kind, "params": parameters, "lr": getattr(rates, kind), "weight_decay": decay}
        for (kind, decay), parameters in groups.items()
    ]


def kind_of(name: str) -> str:
    """Which of the rates a parameter has, by its name in an adapter (`...memory.lora_mem_gate...`) or a model."""
    _, inside, part = name.rpartition(".memory.")
    return RATES.get(part.removeprefix("lora_mem_").partition(".")[0], "memory") if inside else "weights"


def make_optimizer(model: nn.Module, rates: Rates, name: str = "adamw") -> Optimizer:
    """The optimiser `name` ('adamw' or 'adafactor')."""
    return OPTIMIZERS[name](parameter_groups(model, rates))  # type: ignore[call-arg]


def make_schedule(optimizer: Optimizer, steps: int, warmup_steps: int, done: int = 0) -> LRScheduler:
    """A linear warm-up and a cosine to zero, as it stands after `done` steps."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return get_cosine_schedule_with_warmup(optimizer, warmup_steps, steps, last_epoch=done - 1)


def freeze_idle_gates(model: nn.Module, memory: object) -> None:
    """Leave gates of layers with fixed heads untrained: nobody asks them, and DDP would wait for their gradients.

    Args:
        memory: the options of the model's memory.
    """
    if isinstance(memory, GatedAttentionOptions):
        attentions = attention_modules(find_decoder(unwrap(model)))
        for layer, _ in memory.far_heads:
            attentions[layer].get_submodule("memory").requires_grad_(False)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
