"""The settings of Neurocache, and their values on one base model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cacheformers.modeling.memory import LocalWindow
from cacheformers.modeling.method import (
    STORE_DTYPES,
    LocalWindowOptions,
    LocalWindowSettings,
    SearchSettings,
    StoreOptions,
    check_at_least,
    check_choices,
    check_layers,
    setting,
)
from cacheformers.modeling.search import get_search
from cacheformers.modeling.search.store import SCALE_BYTES


@dataclass(repr=False)  # transformers prints a configuration
class NeurocacheSettings(SearchSettings, LocalWindowSettings):
    """Fields of `NeurocacheAdapterConfig` and `NeurocacheConfig`. Layers count from 0."""

    cache_size: int = setting(16384, "Entries that a document may keep (m); the oldest are dropped first.", free=True)
    cache_dtype: str | None = setting(
        None,
        "Precision of what is stored. Default: float32 on the CPU, bfloat16 on a GPU. 'int8': 8 bits a number and a "
        "scale for each entry, a quarter of float32's bytes, to read with; train with another.",
        free=True,
    )
    compression_factor: int = setting(4, "Hidden size over entry size (h/d). 1 stores states as they are.")
    topk: int = setting(16, "Entries that each token retrieves (k).", free=True)
    neighborhood_size: int = setting(2, "Entries that each hit brings along in time order (w): 1 or even.", free=True)
    context_size: int = setting(2, "A token attends to what the last c tokens of its segment retrieved (c).", free=True)
    retrieval_map: dict[int, int] | None = setting(
        None, "Retrieval layer -> layer whose states are stored. Default: three quarters up, onto itself."
    )
    attention_layers: list[int] | None = setting(
        None, "Layers with cache attention. Default: from the lowest retrieval layer to the top."
    )
    similarity: str = setting("l2", "'l2' (nearest) or 'dot' (largest inner product).")
    exclude_window: bool = setting(False, "Do not retrieve entries whose tokens a sliding window still shows.")
    gate: str = setting(
        "zero",
        "'zero': a gate per head, 0 at first, so adaptation starts at the base. 'none': as published.",
        free=True,
    )
    hit_scores: bool = setting(
        False,
        "Beyond the paper: cache attention knows how near each hit was and a state's place beside it, and can attend "
        "to nothing. Measured better where it was tried.",
    )
    hit_order: bool = setting(
        False,
        "Beyond the paper, with hit_scores: cache attention also knows which of a token's hits are newer, for "
        "questions about the latest of several facts.",
    )
    retrieval_weight: float = setting(
        0.0,
        "Beyond the paper: weight, in `memory.state.loss`, of a contrastive loss by which questions learn to "
        "retrieve the passages that hold their answers, where training data say which (see `retrieval_loss`).",
        free=True,
    )
    compatibility: str | None = setting(
        None,
        "For checkpoints of the published package: 'reference' computes what it computes, 'reference-fixed-heads' the "
        "same with its head axis corrected. Neither is causal across chunks or exact. Only rows without padding, read "
        "without beams, give the package's numbers.",
    )

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]  # of the adapter config or configuration
        self.retrieval_map = layer_numbers(self.retrieval_map)


@dataclass(kw_only=True)
class NeurocacheOptions(StoreOptions, NeurocacheSettings, LocalWindowOptions):
    """`NeurocacheSettings` resolved against a base model; ValueError if an option does not fit it or leaks."""

    retrieval_map: tuple[tuple[int, int], ...]  # type: ignore[assignment]  # resolved
    attention_layers: tuple[int, ...]  # type: ignore[assignment]  # resolved

    def __post_init__(self) -> None:
        if self.retrieval_map is None:
            self.retrieval_map = ((3 * self.base.layers // 4,) * 2,)
        elif isinstance(self.retrieval_map, Mapping):
            self.retrieval_map = tuple(sorted(self.retrieval_map.items()))
        if not self.retrieval_map or self.attention_layers in ([], ()):
            raise ValueError("retrieval_map and attention_layers need at least one layer each.")
        if self.attention_layers is None:
            self.attention_layers = tuple(range(self.first_layer, self.base.layers))
        elif len(set(self.attention_layers)) != len(self.attention_layers):
            raise ValueError(f"attention_layers {list(self.attention_layers)} names a layer twice.")
        self.attention_layers = tuple(sorted(self.attention_layers))
        size = self.base.hidden_size
        check_layers(self.layers, self.base)
        for retrieval, storing in self.retrieval_map:
            if storing < retrieval:
                raise ValueError(
                    f"retrieval_map {{{retrieval}: {storing}}}: the storing layer comes before the retrieval layer, so "
                    "a search could find states of its own segment (the future leaks). Store at the retrieval layer or "
                    "above it."
                )
        lowest = self.first_layer
        if min(self.attention_layers) < lowest:
            raise ValueError(
                f"attention_layers {list(self.attention_layers)}: nothing has been retrieved before layer {lowest}. "
                "Attend at the lowest retrieval layer or above it."
            )
        check_at_least(1, self, "cache_size", "compression_factor", "topk", "neighborhood_size", "context_size")
        check_at_least(0, self, "retrieval_weight")
        if self.retrieval_weight and self.compression_factor == 1:
            raise ValueError("retrieval_weight trains the compression W_p, which a compression_factor of 1 lacks.")
        if size % self.compression_factor:
            raise ValueError(f"compression_factor {self.compression_factor} does not divide the hidden size {size}.")
        if self.topk > self.cache_size or self.neighborhood_size > self.cache_size:
            raise ValueError(
                f"topk {self.topk} and neighborhood_size {self.neighborhood_size} must not exceed cache_size "
                f"{self.cache_size}."
            )
        if self.neighborhood_size > 1 and self.neighborhood_size % 2:
            raise ValueError(f"neighborhood_size must be 1 or even, got {self.neighborhood_size}.")
        check_choices(
            self,
            similarity=("l2", "dot"),
            gate=("zero", "none"),
            cache_dtype=(*STORE_DTYPES, "int8"),
            compatibility=(None, "reference", "reference-fixed-heads"),
        )
        if self.compatibility is None:
            self.check_local_window()
        buckets = min(max(self.topk, 512), self.cache_size)
        if self.compatibility is not None and self.cache_size % buckets:
            raise ValueError(
                f"The published package needs a cache_size that its {buckets} buckets divide, got {self.cache_size}."
            )
        if self.hit_order and not self.hit_scores:
            raise ValueError("hit_order is a part of hit_scores: set hit_scores=True, too.")
        if self.compatibility is not None and self.hit_scores:
            raise ValueError("compatibility modes compute what was published: set hit_scores=False.")
        if self.compatibility is not None and self.cache_dtype == "int8":
            raise ValueError("compatibility modes compute what was published, which has no int8: set cache_dtype=None.")
        get_search(self.search)

    @property
    def width(self) -> int:
        """The size d of an entry."""
        return self.base.hidden_size // self.compression_factor

    @property
    def entry_numbers(self) -> int:
        """The size of one token's entries in all layers that store; in int8 with the bytes of their scales."""
        size = self.width + (SCALE_BYTES if self.cache_dtype == "int8" else 0)
        return size * len({storing for _, storing in self.retrieval_map})

    @property
    def window(self) -> LocalWindow:
        """The tokens that self-attention sees: everything with `compatibility`."""
        if self.compatibility is not None:
            return LocalWindow(2**62)
        return super().window

    @property
    def near_tokens(self) -> int | None:
        """The first segment; None with `compatibility`, where only a memory of the caller is read."""
        return self.segment_tokens if self.compatibility is None else None

    @property
    def first_layer(self) -> int:
        """The lowest retrieval layer, which holds W_p and its norm."""
        return min(retrieval for retrieval, _ in self.retrieval_map)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that retrieve, store or attend."""
        return tuple(sorted({*sum(self.retrieval_map, ()), *self.attention_layers}))

    def source(self, layer: int) -> int:
        """Return the retrieval layer whose states an attention layer reads: the last one at or below it."""
        return max(retrieval for retrieval, _ in self.retrieval_map if retrieval <= layer)


def layer_numbers(retrieval_map: Any) -> dict[int, int] | None:
    """Turn the keys of a retrieval map from JSON text into numbers; raise ValueError if it does not map layers."""
    if retrieval_map is None:
        return None
    if isinstance(retrieval_map, Mapping):
        sides = [str(side) for pair in retrieval_map.items() for side in pair]
        if all(re.fullmatch(r"-?\d+", side) for side in sides):
            return {int(retrieval): int(storing) for retrieval, storing in retrieval_map.items()}
    raise ValueError(
        "retrieval_map must be a map from layers to layers such as {22: 22} (search at layer 22 what layer 22 stored), "
        f"got {retrieval_map!r}."
    )
