"""What `transformers.Trainer` and its kin need to train a memory: rates for its parts, and its numbers in the logs."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cacheformers.training import optim
from cacheformers.training.statistics import memory_statistics


def parameter_groups(
    model: nn.Module,
    lora_rate: float = 3e-4,
    memory_rate: float = 1e-3,
    gate_factor: float = 20.0,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Group the trained parameters of a model with a memory for an optimizer: LoRA, memory and gates have own rates.

    At one rate for all, gates hardly leave zero. `train_adapt.py` trains with the same groups;
    these defaults are those of recipes/smollm2_books.yaml.

    Args:
        model: with a memory adapter (PeftModel or not), or a model class of this package.
        lora_rate: of LoRA's matrices and every other trained weight outside the memory.
        memory_rate: of the memory's projections and norms.
        gate_factor: how much faster gates learn than the rest of the memory.
        weight_decay: of matrices; gates, norms and biases have none.

    Returns:
        Groups with `name`, `params`, `lr` and `weight_decay`: `torch.optim.AdamW(parameter_groups(model))`.

    Raises:
        ValueError: the model has nothing to train, or a rate is negative.
    """
    given = {"lora_rate": lora_rate, "memory_rate": memory_rate, "gate_factor": gate_factor}
    for name, value in {**given, "weight_decay": weight_decay}.items():
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}.")
    return optim.parameter_groups(model, optim.Rates(lora_rate, memory_rate, memory_rate * gate_factor, weight_decay))


class MemoryCallback(TrainerCallback):
    """Adds the memory's numbers (gates or shares) to every log of a `Trainer` that holds a loss.

    What tokens retrieve is not among them: a `Trainer` keeps no memory from one row to the next. It
    refuses TRL's packing.
    """

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise ValueError for TRL's `packing`; not every strategy leaves a trace in the inputs of a forward."""
        if getattr(args, "packing", False):
            raise ValueError(
                "packing=True puts several documents into a row, and a document would read the memory of the one "
                "before it: leave packing out, one document a row."
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Add numbers to `logs` and to the newest entry of `state.log_history`."""
        if logs is None or model is None or "loss" not in logs:
            return
        found = {name: value for name, value in memory_statistics(model, []).items() if isinstance(value, float | int)}
        logs.update(found)
        state.log_history[-1].update(found)
