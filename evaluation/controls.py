"""What a memory is checked against: the wrong entries, entries in the wrong order, and a longer window instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from cacheformers.modeling.cache import MemoryCache


@contextmanager
def other_document(memory: MemoryCache, segment: int) -> Iterator[None]:
    """Every row reads the entries of the next row (the last row those of the first), never its own.

    It reads all that the other document has written by this segment: as many as its own store holds, or fewer once the
    other document has ended (its last, partial segment is never stored).
    """
    state: Any = memory.state
    owners = {layer: ring.owner for layer, ring in state.rings.items()}
    for ring in state.rings.values():
        ring.owner = [*ring.owner[1:], ring.owner[0]]
    try:
        yield
    finally:
        for layer, ring in state.rings.items():
            ring.owner = owners[layer]


@contextmanager
def shuffled(memory: MemoryCache, segment: int) -> Iterator[None]:
    """Every row reads its own entries in a random order, drawn anew for each segment.

    A search finds the same entries, so of each hit's neighborhood the hit is right and the neighbors are wrong: this
    shows what neighbors are worth, not what retrieval is worth.
    """
    state: Any = memory.state
    stores = {layer: (ring.keys, ring.index) for layer, ring in state.rings.items()}
    for ring in state.rings.values():
        ring.keys, ring.index = ring.keys.clone(), [{} for _ in ring.index]  # an index knows the old order
        for row, physical in enumerate(ring.owner):
            order = torch.from_numpy(np.random.default_rng(segment).permutation(ring.count(row)))
            ring.keys[physical, : len(order)] = ring.keys[physical, order.to(ring.keys.device)]
    try:
        yield
    finally:
        for layer, ring in state.rings.items():
            ring.keys, ring.index = stores[layer]


def window_of_equal_bytes(options: Any, device: torch.device, dtype: torch.dtype) -> int:
    """For how many tokens the keys and values of all layers take the bytes of a full memory.

    Args:
        device, dtype: of the base model.
    """
    base = options.base
    store_bytes = options.cache_size * options.entry_numbers * options.store_dtype(device, dtype).itemsize
    return store_bytes // (2 * base.layers * base.kv_heads * base.head_dim * dtype.itemsize)


def free_positions(options: Any) -> int:
    """How many tokens a window may show besides what the configured one shows, by the base model's positions."""
    return options.base.max_positions - options.segment_tokens - options.window.kept_tokens
