"""What a memory has kept of what it read, in words."""

from __future__ import annotations

from cacheformers.modeling.cache import MemoryCache


def kept(memory: MemoryCache) -> str:
    """How much a memory of one document keeps of it."""
    read, held = memory.tokens_read[0], memory.tokens_kept[0]
    if held == read:
        return f"{read:,} tokens read, and the memory keeps all of them."
    return f"{read:,} tokens read, of which the memory keeps the newest {held:,}{remedy(memory, read)}."


def remedy(memory: MemoryCache, tokens: int) -> str:
    """The --cache-size that keeps that many tokens and its bytes, in parentheses; empty where no size does."""
    rings = memory.state.rings.values()
    if not rings:
        return ""
    stores = [store for ring in rings for store in (ring.keys, ring.values) if store is not None]
    entry = sum(store.shape[2] * store.element_size() for store in stores)
    return f" (to keep all, read with --overwrite --cache-size {tokens}: {tokens * entry / 2**20:.1f} MiB)"
