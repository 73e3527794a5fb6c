"""What a user configures: one PEFT config class a method."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from peft import LoraConfig

from cacheformers.hub.card import refresh_card
from cacheformers.modeling.memories.base import BaseShape
from cacheformers.modeling.memories.neurocache import NeurocacheOptions


class MemoryPeftType(StrEnum):
    """PEFT types of this package (PEFT's own enumeration is closed)."""

    NEUROCACHE = "NEUROCACHE"


@dataclass
class NeurocacheAdapterConfig(LoraConfig):
    """Neurocache beside LoRA, in one adapter (Safaya & Yuret 2024, arXiv 2407.02486).

    Every field of `LoraConfig` applies. `target_modules` defaults to the feed-forward block of the augmented layers, as
    in the paper; `target_modules=[]` trains no LoRA at all. Layers count from 0.
    """

    cache_size: int = field(default=16384, metadata={"help": "Entries a document may keep (m); the oldest go first."})
    compression_factor: int = field(
        default=4, metadata={"help": "Hidden size over entry size (h/d). 1 stores states as they are."}
    )
    topk: int = field(default=16, metadata={"help": "Entries that each token retrieves (k)."})
    neighborhood_size: int = field(
        default=2, metadata={"help": "Entries that each hit brings along in time order (w): 1 or even."}
    )
    context_size: int = field(
        default=2, metadata={"help": "A token attends to what the last c tokens of its segment retrieved (c)."}
    )
    retrieval_map: dict[int, int] | None = field(
        default=None,
        metadata={"help": "Retrieval layer -> layer whose states are stored. Default: three quarters up, onto itself."},
    )
    attention_layers: list[int] | None = field(
        default=None,
        metadata={"help": "Layers with cache attention. Default: from the lowest retrieval layer to the top."},
    )
    similarity: str = field(default="l2", metadata={"help": "'l2' (nearest) or 'dot' (largest inner product)."})
    segment_tokens: int = field(default=1024, metadata={"help": "Tokens after which a segment enters the memory (n)."})
    local_window: str = field(
        default="segment",
        metadata={
            "help": "'segment': self-attention sees the open segment only (paper). 'sliding': also the last "
            "window_tokens tokens before it, with moved rotary positions."
        },
    )
    window_tokens: int | None = field(
        default=None, metadata={"help": "Tokens that a sliding window keeps (W). Default: segment_tokens."}
    )
    sink_tokens: int = field(
        default=0, metadata={"help": "First tokens of a document whose keys and values every segment keeps seeing."}
    )
    exclude_window: bool = field(
        default=False, metadata={"help": "Do not retrieve entries whose tokens a sliding window still shows."}
    )
    gate: str = field(
        default="zero",
        metadata={
            "help": "'zero': a gate per head, 0 at first, so adaptation starts at the base. 'none': as published."
        },
    )
    search: str = field(
        default="auto", metadata={"help": "'auto', 'exact', 'faiss', or 'faiss:' and a faiss index factory string."}
    )
    cache_dtype: str | None = field(
        default=None, metadata={"help": "Entries' dtype. Default: float32 on the CPU, bfloat16 on a GPU."}
    )
    compatibility: str | None = field(
        default=None,
        metadata={
            "help": "'reference' computes what the published package computes, 'reference-fixed-heads' the same with "
            "its head axis corrected. For its checkpoints only: it is neither causal across chunks nor exact."
        },
    )
    r: int = field(default=16, metadata={"help": "Rank of LoRA."})
    lora_alpha: int = field(default=32, metadata={"help": "LoRA's scaling is lora_alpha / r."})

    def __post_init__(self) -> None:
        no_lora = self.target_modules is not None and not self.target_modules
        super().__post_init__()  # type: ignore[no-untyped-call]  # PEFT leaves it without types
        if no_lora:
            self.target_modules = "dummy-target-modules"
        self.peft_type = MemoryPeftType.NEUROCACHE
        if self.retrieval_map is not None:
            self.retrieval_map = {int(retrieval): int(storing) for retrieval, storing in self.retrieval_map.items()}
        if self.use_dora:
            raise ValueError("DoRA is not supported beside a memory: set use_dora=False.")

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save it as `adapter_config.json`, with a model card; a card that a person wrote stays."""
        super().save_pretrained(save_directory, **kwargs)
        refresh_card(Path(save_directory))

    def resolve(self, base: BaseShape) -> NeurocacheOptions:
        """The method's options for one base model.

        Raises:
            ValueError: an option that does not fit the base model.
        """
        retrieval_map = self.retrieval_map
        if retrieval_map is None:
            layer = 3 * base.layers // 4
            retrieval_map = {layer: layer}
        attention_layers = self.attention_layers
        if attention_layers is None:
            attention_layers = list(range(min(retrieval_map, default=0), base.layers))
        if self.attention_layers is not None and len(set(attention_layers)) != len(attention_layers):
            raise ValueError(f"attention_layers {attention_layers} names a layer twice.")
        return NeurocacheOptions(
            base=base,
            retrieval_map=tuple(sorted(retrieval_map.items())),
            attention_layers=tuple(sorted(attention_layers)),
            cache_size=self.cache_size,
            compression_factor=self.compression_factor,
            topk=self.topk,
            neighborhood_size=self.neighborhood_size,
            context_size=self.context_size,
            similarity=self.similarity,
            segment_tokens=self.segment_tokens,
            local_window=self.local_window,  # type: ignore[arg-type]
            window_tokens=self.segment_tokens if self.window_tokens is None else self.window_tokens,
            sink_tokens=self.sink_tokens,
            exclude_window=self.exclude_window,
            gate=self.gate,  # type: ignore[arg-type]
            search=self.search,
            cache_dtype=self.cache_dtype,
            compatibility=self.compatibility,
        )
