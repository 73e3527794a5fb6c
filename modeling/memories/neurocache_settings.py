"""What a user sets of Neurocache, whichever way it sits on a base model: the options before they meet one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from cacheformers.modeling.memories.base import BaseShape
from cacheformers.modeling.memories.neurocache import NeurocacheOptions


@dataclass
class NeurocacheSettings:
    """Fields of `NeurocacheAdapterConfig` and `NeurocacheConfig`. Layers count from 0."""

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
    hit_scores: bool = field(
        default=False,
        metadata={
            "help": "Beyond the paper: cache attention knows how near each hit was and where a state stands beside it, "
            "and can attend to nothing. Measured better where it was tried."
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
        options = {field.name: getattr(self, field.name) for field in fields(NeurocacheSettings)}
        options["retrieval_map"] = tuple(sorted(retrieval_map.items()))
        options["attention_layers"] = tuple(sorted(attention_layers))
        options["window_tokens"] = self.segment_tokens if self.window_tokens is None else self.window_tokens
        return NeurocacheOptions(base=base, **options)


def layer_numbers(retrieval_map: Mapping[Any, Any] | None) -> dict[int, int] | None:
    """A retrieval map with numbers for keys, which JSON turns into text."""
    if retrieval_map is None:
        return None
    return {int(retrieval): int(storing) for retrieval, storing in retrieval_map.items()}
