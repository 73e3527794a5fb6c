"""What a user sets of Neurocache, and what that means on one base model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from cacheformers.modeling.memories.base import BaseShape, LocalWindow, MemoryState
from cacheformers.modeling.memories.checks import check_at_least, check_choices
from cacheformers.modeling.memories.rings import STORE_DTYPES, StoreOptions
from cacheformers.modeling.memories.settings import LocalWindowOptions, LocalWindowSettings
from cacheformers.modeling.search import get_search


@dataclass(repr=False)  # transformers prints a configuration
class NeurocacheSettings(LocalWindowSettings):
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
        default="auto",
        metadata={"help": "'auto', 'exact', 'faiss', 'bfloat16', or 'faiss:' and a faiss index factory string."},
    )
    cache_dtype: str | None = field(
        default=None, metadata={"help": "Entries' dtype. Default: float32 on the CPU, bfloat16 on a GPU."}
    )
    compatibility: str | None = field(
        default=None,
        metadata={
            "help": "'reference' computes what the published package computes, 'reference-fixed-heads' the same with "
            "its head axis corrected. For its checkpoints only: it is neither causal across chunks nor exact. Padding "
            "is stored and retrieved, as published, but not with the published states, and beams keep their own "
            "stores: only rows without padding, read without beams, give the package's numbers."
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
        options = self.chosen(NeurocacheSettings)
        options["retrieval_map"] = tuple(sorted(retrieval_map.items()))
        options["attention_layers"] = tuple(sorted(attention_layers))
        return NeurocacheOptions(base=base, **options)


@dataclass(frozen=True, kw_only=True)
class NeurocacheOptions(StoreOptions, LocalWindowOptions):
    """The method's options, resolved against a base model (see `NeurocacheSettings` for each one's meaning).

    Raises:
        ValueError: an option that does not fit the base model, or that would let a token see its future.
    """

    retrieval_map: tuple[tuple[int, int], ...]
    attention_layers: tuple[int, ...]
    cache_size: int = 16384
    compression_factor: int = 4
    topk: int = 16
    neighborhood_size: int = 2
    context_size: int = 2
    similarity: str = "l2"
    exclude_window: bool = False
    gate: Literal["zero", "none"] = "zero"
    hit_scores: bool = False
    search: str = "auto"
    cache_dtype: str | None = None
    compatibility: str | None = None

    def __post_init__(self) -> None:
        layers, size = self.base.layers, self.base.hidden_size
        wrong = [layer for layer in {*sum(self.retrieval_map, ()), *self.attention_layers} if not 0 <= layer < layers]
        if wrong:
            raise ValueError(f"Layers {sorted(wrong)} do not exist: this base model has layers 0 to {layers - 1}.")
        if not self.retrieval_map or not self.attention_layers:
            raise ValueError("retrieval_map and attention_layers need at least one layer each.")
        for retrieval, storing in self.retrieval_map:
            if storing < retrieval:
                raise ValueError(
                    f"retrieval_map {{{retrieval}: {storing}}}: the storing layer comes before the retrieval layer, so "
                    "a search could find states of its own segment (the future leaks). Store at the retrieval layer or "
                    "above it."
                )
        lowest = min(retrieval for retrieval, _ in self.retrieval_map)
        if min(self.attention_layers) < lowest:
            raise ValueError(
                f"attention_layers {list(self.attention_layers)}: nothing has been retrieved before layer {lowest}. "
                "Attend at the lowest retrieval layer or above it."
            )
        check_at_least(1, self, "cache_size", "compression_factor", "topk")
        check_at_least(1, self, "neighborhood_size", "context_size")
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
            cache_dtype=STORE_DTYPES,
            compatibility=(None, "reference", "reference-fixed-heads"),
        )
        if self.compatibility is None:
            self.check_local_window()
        buckets = min(max(self.topk, 512), self.cache_size)
        if self.compatibility is not None and self.cache_size % buckets:
            raise ValueError(
                f"The published package needs a cache_size that its {buckets} buckets divide, got {self.cache_size}."
            )
        if self.compatibility is not None and self.hit_scores:
            raise ValueError("compatibility modes compute what was published: set hit_scores=False.")
        get_search(self.search)

    @property
    def width(self) -> int:
        """Size d of an entry."""
        return self.base.hidden_size // self.compression_factor

    @property
    def window(self) -> LocalWindow:
        """What self-attention sees."""
        if self.compatibility is not None:
            return LocalWindow(2**62)
        return super().window

    @property
    def near_tokens(self) -> int | None:
        """The first segment; in the reference modes rows have no segments, and only a caller's memory is read."""
        return self.segment_tokens if self.compatibility is None else None

    @property
    def first_layer(self) -> int:
        """The lowest retrieval layer; W_p and its norm are kept there."""
        return min(retrieval for retrieval, _ in self.retrieval_map)

    @property
    def layers(self) -> tuple[int, ...]:
        """Every layer that takes part."""
        return tuple(sorted({*sum(self.retrieval_map, ()), *self.attention_layers}))

    def source(self, layer: int) -> int:
        """The retrieval layer whose states an attention layer reads: the last one at or below it."""
        return max(retrieval for retrieval, _ in self.retrieval_map if retrieval <= layer)

    @property
    def signature(self) -> dict[str, Any]:
        """What two models must share to exchange a memory."""
        options = asdict(self)
        for free in ("cache_size", "search", "cache_dtype", "gate", "topk", "neighborhood_size", "context_size"):
            del options[free]
        return {"method": "neurocache", **options}

    def new_state(
        self,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool,
        cache_size: int | None = None,
    ) -> MemoryState:
        """An empty memory.

        Args:
            devices: of each augmented layer.
            dtype: of the model's activations.
            keep_values: keep x beside each entry, from which training re-encodes it.
            cache_size: another number of entries than the configured one (0: nothing is remembered).
        """
        # These build on the options.
        from cacheformers.modeling.memories.neurocache import NeurocacheState
        from cacheformers.modeling.memories.neurocache_reference import ReferenceState

        if self.compatibility is not None:
            if cache_size is not None:
                raise ValueError("compatibility modes have the cache_size of their configuration.")
            return ReferenceState(self, rows, devices, dtype, keep_values)
        return NeurocacheState(self, rows, devices, dtype, keep_values, cache_size)


def layer_numbers(retrieval_map: Any) -> dict[int, int] | None:
    """Give a retrieval map numbers for keys, which JSON turns into text.

    Raises:
        ValueError: it is not a map from layers to layers.
    """
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
