"""The PEFT config that every memory method extends with its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from peft import LoraConfig

from cacheformers.modeling.memory import BaseShape
from cacheformers.modeling.pretrained import saved


class MemoryPeftType(str):
    """A PEFT type of this package. PEFT's enumeration is closed, but PEFT and transformers only read `value`."""

    @property
    def value(self) -> str:
        return str(self)


@dataclass
class MemoryAdapterConfig(LoraConfig):
    """The config of every method: LoRA's fields, with defaults for training together with a memory.

    `target_modules` defaults to the feed-forward block of the layers that the method changes, as in Neurocache's paper;
    `target_modules=[]` trains no LoRA.
    """

    kind: ClassVar[MemoryPeftType]  # set when the method is registered

    r: int = field(default=16, metadata={"help": "Rank of LoRA."})
    lora_alpha: int = field(default=32, metadata={"help": "LoRA's scaling is lora_alpha / r."})
    task_type: str | None = field(  # type: ignore[assignment]  # PEFT says TaskType, and takes its values
        default="CAUSAL_LM", metadata={"help": "The task that PEFT assumes; memories are for language models."}
    )
    made_for: str | None = field(
        default=None,
        metadata={"help": "The kind of base model that the adapter was made for. Set automatically."},
    )

    def __post_init__(self) -> None:
        no_lora = self.target_modules is not None and not self.target_modules
        super().__post_init__()  # type: ignore[no-untyped-call]  # PEFT leaves it without types
        if no_lora:
            self.target_modules = "dummy-target-modules"
        self.peft_type = self.kind
        if self.use_dora:
            raise ValueError("DoRA is not supported beside a memory: set use_dora=False.")

    def check_base(self, model: Any, base: BaseShape) -> None:
        """Store the base of a new adapter; raise ValueError if one from a file was made for another kind of base."""
        if self.inference_mode and self.made_for not in (None, base.description):
            theirs = self.base_model_name_or_path or "a base without a name"
            here = getattr(model, "name_or_path", "") or type(model).__name__
            raise ValueError(
                f"This adapter was made for {theirs} ({self.made_for}), and this base is {here} ({base.description}). "
                "Load the base that it was made for. (A new adapter from its config needs inference_mode=False.)"
            )
        self.made_for = base.description

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save it as `adapter_config.json`, with a model card unless a person has written one."""
        super().save_pretrained(save_directory, **kwargs)
        saved(save_directory)
