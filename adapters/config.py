"""What a user configures: one PEFT config class a method."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from peft import LoraConfig

from cacheformers.hub.card import refresh_card
from cacheformers.modeling.memories.neurocache_options import NeurocacheSettings, layer_numbers


class MemoryPeftType(StrEnum):
    """PEFT types of this package (PEFT's own enumeration is closed)."""

    NEUROCACHE = "NEUROCACHE"


@dataclass
class NeurocacheAdapterConfig(NeurocacheSettings, LoraConfig):
    """Neurocache beside LoRA, in one adapter (Safaya & Yuret 2024, arXiv 2407.02486).

    Every field of `NeurocacheSettings` and of `LoraConfig` applies. `target_modules` defaults to the feed-forward block
    of the augmented layers, as in the paper; `target_modules=[]` trains no LoRA at all.
    """

    r: int = field(default=16, metadata={"help": "Rank of LoRA."})
    lora_alpha: int = field(default=32, metadata={"help": "LoRA's scaling is lora_alpha / r."})

    def __post_init__(self) -> None:
        no_lora = self.target_modules is not None and not self.target_modules
        super().__post_init__()  # type: ignore[no-untyped-call]  # PEFT leaves it without types
        if no_lora:
            self.target_modules = "dummy-target-modules"
        self.peft_type = MemoryPeftType.NEUROCACHE
        self.retrieval_map = layer_numbers(self.retrieval_map)
        if self.use_dora:
            raise ValueError("DoRA is not supported beside a memory: set use_dora=False.")

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save it as `adapter_config.json`, with a model card; a card that a person wrote stays."""
        super().save_pretrained(save_directory, **kwargs)
        refresh_card(Path(save_directory))
