"""The PEFT config that every memory method extends with its own settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from peft import LoraConfig

from cacheformers.modeling.saving import saved


class MemoryPeftType(str):
    """A PEFT type of this package. PEFT's own enumeration is closed; PEFT and transformers only read `value`."""

    @property
    def value(self) -> str:
        return str(self)


@dataclass
class MemoryAdapterConfig(LoraConfig):
    """What every method's config has: LoRA's fields, with defaults for training beside a memory.

    `target_modules` defaults to the feed-forward block of the layers that the method changes, as in Neurocache's paper;
    `target_modules=[]` trains no LoRA at all.
    """

    kind: ClassVar[MemoryPeftType]  # set when the method is registered

    r: int = field(default=16, metadata={"help": "Rank of LoRA."})
    lora_alpha: int = field(default=32, metadata={"help": "LoRA's scaling is lora_alpha / r."})

    def __post_init__(self) -> None:
        no_lora = self.target_modules is not None and not self.target_modules
        super().__post_init__()  # type: ignore[no-untyped-call]  # PEFT leaves it without types
        if no_lora:
            self.target_modules = "dummy-target-modules"
        self.peft_type = self.kind
        if self.use_dora:
            raise ValueError("DoRA is not supported beside a memory: set use_dora=False.")

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save it as `adapter_config.json`, with a model card; a card that a person wrote stays."""
        super().save_pretrained(save_directory, **kwargs)
        saved(save_directory)
