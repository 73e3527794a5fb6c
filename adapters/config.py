"""What a user configures: one PEFT config class a method."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from peft import LoraConfig

from cacheformers.hub.card import refresh_card
from cacheformers.modeling.memories.base import BaseShape
from cacheformers.modeling.memories.cacheformer_memory import CacheFormerOnBaseSettings
from cacheformers.modeling.memories.gated_attention import GatedAttentionSettings
from cacheformers.modeling.memories.infini_attention import InfiniAttentionSettings
from cacheformers.modeling.memories.memorizing import MemorizingSettings
from cacheformers.modeling.memories.neurocache_options import NeurocacheSettings, layer_numbers
from cacheformers.modeling.memories.windowed import WindowedSettings


class MemoryPeftType(StrEnum):
    """PEFT types of this package (PEFT's own enumeration is closed)."""

    NEUROCACHE = "NEUROCACHE"
    WINDOWED = "WINDOWED"
    MEMORIZING = "MEMORIZING"
    INFINI_ATTENTION = "INFINI_ATTENTION"
    GATED_ATTENTION = "GATED_ATTENTION"
    CACHEFORMER = "CACHEFORMER"


@dataclass
class MemoryAdapterConfig(LoraConfig):
    """What every method's config has: LoRA's fields, with defaults for training beside a memory.

    `target_modules` defaults to the feed-forward block of the layers that the method changes, as in Neurocache's paper;
    `target_modules=[]` trains no LoRA at all.
    """

    kind: ClassVar[MemoryPeftType]

    r: int = field(default=16, metadata={"help": "Rank of LoRA."})
    lora_alpha: int = field(default=32, metadata={"help": "LoRA's scaling is lora_alpha / r."})
    task_type: str | None = field(  # type: ignore[assignment]  # PEFT says TaskType, and takes its values
        default="CAUSAL_LM", metadata={"help": "What PEFT takes the model for; a memory is for language models."}
    )
    made_for: str | None = field(
        default=None, metadata={"help": "What the base model is that the adapter was made for. Fills in by itself."}
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
        """Remember what a new adapter is made for; check that one from a file is put on such a base.

        Raises:
            ValueError: it was made for another; names both.
        """
        if self.inference_mode and self.made_for not in (None, base.description):
            theirs = self.base_model_name_or_path or "a base without a name"
            here = getattr(model, "name_or_path", "") or type(model).__name__
            raise ValueError(
                f"This adapter was made for {theirs} ({self.made_for}), and this base is {here} ({base.description}). "
                "Load the base that it was made for. (A new adapter from its config needs inference_mode=False.)"
            )
        self.made_for = base.description

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save it as `adapter_config.json`, with a model card; a card that a person wrote stays."""
        super().save_pretrained(save_directory, **kwargs)
        refresh_card(Path(save_directory))


@dataclass
class NeurocacheAdapterConfig(NeurocacheSettings, MemoryAdapterConfig):
    """Neurocache beside LoRA, in one adapter (Safaya & Yuret 2024, arXiv 2407.02486).

    Every field of `NeurocacheSettings` and of `LoraConfig` applies.
    """

    kind = MemoryPeftType.NEUROCACHE

    def __post_init__(self) -> None:
        super().__post_init__()
        self.retrieval_map = layer_numbers(self.retrieval_map)


@dataclass
class WindowedAdapterConfig(WindowedSettings, MemoryAdapterConfig):
    """LoRA on a base that sees a local window alone, to compare memories with.

    Every field of `WindowedSettings` and of `LoraConfig` applies.
    """

    kind = MemoryPeftType.WINDOWED


@dataclass
class MemorizingAdapterConfig(MemorizingSettings, MemoryAdapterConfig):
    """A Memorizing Transformer's memory beside LoRA (Wu et al. 2022, arXiv 2203.08913).

    Every field of `MemorizingSettings` and of `LoraConfig` applies.
    """

    kind = MemoryPeftType.MEMORIZING


@dataclass
class InfiniAttentionAdapterConfig(InfiniAttentionSettings, MemoryAdapterConfig):
    """Infini-attention beside LoRA (Munkhdalai et al. 2024, arXiv 2404.07143).

    Every field of `InfiniAttentionSettings` and of `LoraConfig` applies.
    """

    kind = MemoryPeftType.INFINI_ATTENTION


@dataclass
class GatedAttentionAdapterConfig(GatedAttentionSettings, MemoryAdapterConfig):
    """Gated attention beside LoRA (Liao & Chang, MIT 6.7960 course report).

    Every field of `GatedAttentionSettings` and of `LoraConfig` applies.
    """

    kind = MemoryPeftType.GATED_ATTENTION


@dataclass
class CacheFormerAdapterConfig(CacheFormerOnBaseSettings, MemoryAdapterConfig):
    """CacheFormer's attention in place of a base's own, beside LoRA (Singh & Mahmood 2025, arXiv 2504.13981).

    Every field of `CacheFormerOnBaseSettings` and of `LoraConfig` applies.
    """

    kind = MemoryPeftType.CACHEFORMER
