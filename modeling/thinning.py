"""Memories of entries, put together into one that is searched as a whole, or thinned to a number of bytes.

An entry is what a method stores of one token, in every layer that stores. A memory that is thinned holds fewer entries
than the text has tokens, and counts as having read that many; where each of them is in the text is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.origin import Source
from cacheformers.modeling.search.store import unpacked

OVERHEAD, OVERHEAD_OF_LAYER = 8 * 2**10, 2**11  # bytes of an index and of headers of files
NEAR = 8  # tokens around a hit that are used with it
RULES = ("oldest", "unused", "merge")


@dataclass(frozen=True)
class Entries:
    """Entries of one document, oldest first.

    Attributes:
        stores: keys `[entries, width]`, in float32 if they were int8, and values or None, by layer.
        source: the text, with a place for each entry; None if it was not saved.
    """

    stores: dict[int, tuple[Tensor, Tensor | None]]
    source: Source | None

    @classmethod
    def of(cls, memory: MemoryCache) -> Entries:
        """Return copies of the entries of a memory; raise ValueError where it has none that are searched."""
        check_searched(memory)
        stores, source = {}, memory.origin.sources[0]
        for layer, ring in memory.state.rings.items():
            found = ring.entries(0)
            keys = unpacked(torch.cat(found.spans))
            places = torch.arange(found.first, found.first + len(keys), device=keys.device) % max(ring.capacity, 1)
            stores[layer] = keys, None if ring.values is None else ring.values[ring.owner[0], places]
        if source is not None:
            source = source.covering(found.first + len(keys))
            source = replace(source, offsets=source.offsets[found.first : found.first + len(keys)])
        return cls(stores, source)

    @property
    def count(self) -> int:
        return len(next(iter(self.stores.values()))[0])

    def take(self, chosen: Tensor) -> Entries:
        """Keep the chosen entries, numbers in ascending order."""
        stores = {
            layer: (keys[chosen.to(keys.device)], None if values is None else values[chosen.to(values.device)])
            for layer, (keys, values) in self.stores.items()
        }
        source = self.source and replace(self.source, offsets=self.source.offsets[chosen])
        return Entries(stores, source)

    def followed_by(self, more: Entries) -> Entries:
        """Append the entries of another document; of texts nothing is kept."""
        stores = {}
        for layer, (keys, values) in self.stores.items():
            other, others = more.stores[layer]
            together = None if values is None or others is None else torch.cat([values, others])
            stores[layer] = torch.cat([keys, other]), together
        return Entries(stores, None)

    def in_memory(self, like: MemoryCache, capacity: int) -> MemoryCache:
        """Make a memory of these entries; local keys and values are left out."""
        memory = like.clone()
        memory.forget_columns()
        for layer, ring in memory.state.rings.items():
            keys, values = self.stores[layer]
            ring.capacity, ring.written, ring.owner, ring.index = capacity, [self.count], [0], [{}]
            ring.keys, ring.values = ring.stored(keys)[None], None if values is None else values[None]
        memory.timeline.tokens_read = [self.count]
        memory.origin.sources, memory.origin.saved = [self.source], ""
        return memory


def check_searched(memory: MemoryCache) -> None:
    """Raise ValueError unless a memory is one document's, all of it in entries that are searched."""
    if not (memory.state.retrieves and memory.state.rings):
        raise ValueError(
            f"The method {memory.signature['method']} keeps no entry for each token that is searched. Its memories "
            "cannot be searched together, nor thinned: ask them one by one. Neurocache, the Memorizing Transformer and "
            "retrieval heads can do both."
        )
    if memory.batch_size != 1:
        raise ValueError(f"The memory holds {memory.batch_size} documents: choose one with memory.select([row]).")
    if bool(memory.timeline.open.any()):
        raise ValueError("A segment is open, which is not in the memory yet: read() with flush=True first.")


def together(memories: Sequence[MemoryCache]) -> MemoryCache:
    """Put memories into one, whose entries are searched as one store; it cannot be saved.

    `memory.origin.parts` names the texts, so that passages can be traced to them.

    Raises:
        ValueError: none is given, or they are of different models, adapters or tokenizers, or of a method that does
            not search.
    """
    if not memories:
        raise ValueError("There is no memory to ask.")
    first, parts, start = memories[0], [], 0
    found: Entries | None = None
    for memory in memories:
        if described(memory) != described(first):
            raise ValueError(
                "These memories were read with different models, adapters or tokenizers, so their entries mean "
                "different things: ask them apart."
            )
        here = Entries.of(memory)
        parts.append((start, here.source))
        start += here.count
        found = here if found is None else found.followed_by(here)
    assert found is not None
    capacity = start + max(ring.capacity for ring in first.state.rings.values())  # what is said finds room behind them
    joint = found.in_memory(first, capacity)
    joint.origin.sources, joint.origin.parts, joint.options = [None], tuple(parts), None
    joint.state.starts = tuple(number for number, _ in parts)
    return joint


def described(memory: MemoryCache) -> list[object]:
    """What must be the same in memories that are searched together."""
    origin, rings = memory.origin, memory.state.rings
    kinds = {layer: (ring.keys.dtype, ring.values is None) for layer, ring in rings.items()}
    return [memory.signature, memory.fingerprint, origin.identity, origin.tokenizer, kinds]


def thin(
    memory: MemoryCache, most_bytes: int, rule: str = "oldest", int8: bool = True, used: Tensor | None = None
) -> MemoryCache:
    """Return a memory with as many entries as fit a number of bytes on disk, the text with their places included.

    Args:
        rule: which entries go. "oldest"; "unused": those that were retrieved least; "merge": neighbors that are most
            alike become one, their mean.
        int8: the memory will be saved with `int8=True`.
        used: with "unused", how often each token was retrieved, `[tokens read]`, for example by questions
            (`retrievals`).

    Raises:
        ValueError: a method that does not search, an unknown rule, or too few bytes for a single entry.
    """
    if rule not in RULES:
        raise ValueError(f"There is no rule {rule!r}: choose one of {', '.join(RULES)}.")
    if rule == "unused" and used is None:
        raise ValueError("The rule 'unused' needs to know what is used: give questions to ask first.")
    entries = Entries.of(memory)
    stored = {ring.keys.dtype for ring in memory.state.rings.values()}
    count = fitting(entries, most_bytes, int8 or torch.int8 in stored)
    if count < entries.count:
        if rule == "merge":
            entries = merged(entries, count, memory.state.key_size)
        elif rule == "oldest":
            entries = entries.take(torch.arange(entries.count - count, entries.count))
        else:
            assert used is not None
            entries = entries.take(most_used(used[memory.tokens_read[0] - entries.count :], count))
    return entries.in_memory(memory, max(ring.capacity for ring in memory.state.rings.values()))


def fitting(entries: Entries, most_bytes: int, int8: bool) -> int:
    """Count the entries that fit; raise ValueError if none does."""
    each, fixed = 0, OVERHEAD + OVERHEAD_OF_LAYER * len(entries.stores)
    for stores in entries.stores.values():
        for store in stores:
            if store is not None:
                each += store.shape[1] + 4 if int8 else store.shape[1] * store.element_size()
    if entries.source is not None:
        each += 8
        fixed += len(entries.source.text.encode("utf-8", "surrogatepass"))
    count = (most_bytes - fixed) // each
    if count < 1:
        raise ValueError(
            f"{most_bytes:,} bytes hold no entry: {fixed:,} are for text and index, and {each:,} for each entry."
        )
    return min(count, entries.count)


def most_used(used: Tensor, count: int) -> Tensor:
    """Return the numbers of the entries that were retrieved most, they or those near them; the newest of equal ones."""
    near = F.max_pool1d(used.float()[None], 2 * NEAR + 1, 1, NEAR)[0]
    order = torch.arange(len(used)).flip(0)
    return order[near.flip(0).argsort(descending=True, stable=True)[:count]].sort().values


def merged(entries: Entries, count: int, size: int | None) -> Entries:
    """Merge neighbors until `count` entries are left, those first whose keys are most alike.

    Args:
        size: numbers of one vector among the keys (keys of several heads are side by side); None: all of them.
    """
    weights = torch.ones(entries.count)  # tokens of each entry
    while entries.count > count:
        alike = [
            F.cosine_similarity(keys[:-1].float(), keys[1:].float(), dim=-1) for keys, _ in entries.stores.values()
        ]
        left = pairs(torch.stack([layer.cpu() for layer in alike]).mean(0), entries.count - count)
        right = left + 1
        share = weights[left] / (weights[left] + weights[right])
        stores = {
            layer: (
                with_means(keys, left, share, size or keys.shape[1]),
                None if values is None else with_means(values, left, share, None),
            )
            for layer, (keys, values) in entries.stores.items()
        }
        source = entries.source
        if source is not None:
            offsets = source.offsets.clone()
            offsets[left, 1] = offsets[right, 1]
            source = replace(source, offsets=offsets)
        weights[left] += weights[right]
        keep = torch.ones(entries.count, dtype=torch.bool)
        keep[right] = False
        entries, weights = Entries(stores, source).take(keep.nonzero()[:, 0]), weights[keep]
    return entries


def with_means(store: Tensor, left: Tensor, share: Tensor, size: int | None) -> Tensor:
    """Put the mean of each pair of neighbors in the place of the left one.

    Args:
        store: `[entries, width]`.
        left: numbers of the left ones, `[pairs]`.
        share: weight of the left ones in the mean, `[pairs]`.
        size: numbers of one vector; its mean gets the mean length, as a mean is shorter than what it is made of. None:
            it stays as it is.
    """
    left, share = left.to(store.device), share.to(store.device)[:, None]
    one, other = store[left].float(), store[left + 1].float()
    both = share * one + (1 - share) * other
    if size is not None:
        lengths = [states.unflatten(1, (-1, size)).norm(dim=-1, keepdim=True) for states in (one, other, both)]
        wanted = share[..., None] * lengths[0] + (1 - share[..., None]) * lengths[1]
        both = (both.unflatten(1, (-1, size)) * wanted / lengths[2].clamp(min=1e-12)).flatten(1)
    return store.index_copy(0, left, both.to(store.dtype))


def pairs(alike: Tensor, most: int) -> Tensor:
    """Choose pairs of neighbors that share no entry, the most alike first; return their left numbers, ascending.

    Args:
        alike: of each entry but the last with the next one, `[entries - 1]`.
    """
    taken = torch.zeros(len(alike) + 1, dtype=torch.bool)
    left: list[int] = []
    for place in alike.argsort(descending=True, stable=True).tolist():
        if len(left) == most:
            break
        if not (taken[place] or taken[place + 1]):
            taken[place] = taken[place + 1] = True
            left.append(place)
    return torch.tensor(sorted(left), dtype=torch.long)


def retrievals(retrieved: Sequence[Tensor], tokens: int) -> Tensor:
    """Count how often each of the first `tokens` tokens was retrieved, `[tokens]`."""
    numbers = torch.cat(list(retrieved)) if retrieved else torch.zeros(0, dtype=torch.long)
    return torch.bincount(numbers[numbers < tokens], minlength=tokens)
