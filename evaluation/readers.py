"""Ways to read a group of documents segment by segment: with a memory, with a damaged one, or without.

The documents of a group are the rows of a batch, longest first, and are read from their beginning. Rows are padded on
the right, where padding cannot change a score; a document that has ended leaves the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from cacheformers.common.loss import IGNORED, token_losses
from cacheformers.modeling.architectures import find_decoder, is_whole, unwrap
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.memory import LocalWindow
from cacheformers.modeling.method import active_options
from cacheformers.modeling.segments import close_segments, new_memory


class Reader(Protocol):
    """Reads a group of documents."""

    @property
    def together(self) -> int:
        """Return how many documents it reads in one group; 0 for any number."""

    def read(self, model: nn.Module, ids: list[Tensor], segment_tokens: int) -> Iterator[Tensor]:
        """Yield the losses of one segment after the other, `[rows, time]`; rows of ended documents may be left out.

        Args:
            ids: of each document, `[tokens]`, longest first.
        """


@dataclass(frozen=True)
class Remembering:
    """Reads with the active memory adapter, or with the decoding state of a model whose own attention is its memory.

    Args:
        cache_size: entries that the memory may hold, instead of the configured number; 0 turns it off.
    """

    cache_size: int | None = None
    together: int = 0

    def read(self, model: nn.Module, ids: list[Tensor], segment_tokens: int) -> Iterator[Tensor]:
        memory = new_memory(model, len(ids), self.cache_size)
        kept = not memory.state.forward_is_segment
        for start in range(0, len(ids[0]) - 1, segment_tokens):
            going = unfinished(ids, start)
            if len(going) < memory.batch_size:
                memory.select(range(len(going)))
            inputs, labels = segment(going, start, segment_tokens)
            yield losses(model, inputs, labels, past_key_values=memory, use_cache=kept)


@dataclass(frozen=True)
class Damaged:
    """Reads with a full memory that is damaged during each forward, and only then.

    Args:
        damage: a context manager of the memory and the number of the segment, such as `shuffled`.
        together: documents that the damage needs side by side.

    Documents stay in their group until the longest ends; one that has ended keeps its entries.
    """

    damage: Callable[[MemoryCache, int], AbstractContextManager[None]]
    together: int = 0

    def read(self, model: nn.Module, ids: list[Tensor], segment_tokens: int) -> Iterator[Tensor]:
        memory = new_memory(model, len(ids))
        decoder = find_decoder(unwrap(model))
        for start in range(0, len(ids[0]) - 1, segment_tokens):
            inputs, labels = segment(ids, start, segment_tokens)
            real = labels != IGNORED
            # What is full enters its own document's memory now, so that nothing is stored during the damage.
            close_segments(decoder, memory, memory.timeline.full_rows())
            with self.damage(memory, start // segment_tokens):
                yield losses(
                    model, inputs, labels, attention_mask=None if bool(real.all()) else real, past_key_values=memory
                )


@dataclass(frozen=True)
class Forgetting:
    """Reads by self-attention alone; an active memory adapter has an empty memory.

    Args:
        context_tokens: number of tokens before each segment that are read again with it, and not scored.
    """

    context_tokens: int = 0
    together: int = 0

    def read(self, model: nn.Module, ids: list[Tensor], segment_tokens: int) -> Iterator[Tensor]:
        remembers = has_memory(model)
        for start in range(0, len(ids[0]) - 1, segment_tokens):
            inputs, labels = segment(unfinished(ids, start), start, segment_tokens, self.context_tokens)
            memory = None
            if remembers:  # an empty one, for a single segment of all these tokens
                empty = new_memory(model, len(inputs), 0)
                memory = MemoryCache(empty.state, LocalWindow(inputs.shape[1]), len(inputs), empty.signature)
            yield losses(model, inputs, labels, past_key_values=memory, use_cache=remembers)


def has_memory(model: nn.Module) -> bool:
    """Return whether a memory on a base is active, an adapter's or a model's own."""
    model = unwrap(model)
    return not is_whole(model) and active_options(find_decoder(model)) is not None


def unfinished(ids: Sequence[Tensor], start: int) -> list[Tensor]:
    """Return the documents that have inputs from `start` on."""
    return [row for row in ids if len(row) - 1 > start]


def segment(ids: Sequence[Tensor], start: int, length: int, context: int = 0) -> tuple[Tensor, Tensor]:
    """Return the segment from `start` on: inputs `[rows, context + time]`, labels `[rows, time]`."""
    inputs = [row[:-1][max(start - context, 0) : start + length] for row in ids]
    labels = [row[1:][start : start + length] for row in ids]
    return pad_sequence(inputs, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=IGNORED)


def losses(model: nn.Module, inputs: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Return the losses of one forward at the last positions, which have the labels `[rows, time]`."""
    device = next(model.parameters()).device
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    output = model(input_ids=inputs.to(device), logits_to_keep=labels.shape[1], **options)
    return token_losses(output.logits, labels.to(device))


@contextmanager
def other_document(memory: MemoryCache, segment: int) -> Iterator[None]:
    """Let every row read the entries of the next row (the last row those of the first), never its own.

    It reads all that the other document has written by this segment: as many as its own store holds, or fewer once the
    other document has ended (its last, partial segment is never stored).
    """
    owners = [(ring, ring.owner) for ring in memory.state.rings.values()]
    for ring, owner in owners:
        ring.owner = [*owner[1:], owner[0]]
    try:
        yield
    finally:
        for ring, owner in owners:
            ring.owner = owner


@contextmanager
def shuffled(memory: MemoryCache, segment: int) -> Iterator[None]:
    """Let every row read its own entries in a random order, drawn anew for each segment.

    A search finds the same entries, so of each hit's neighborhood the hit is right and the neighbors are wrong: this
    shows what neighbors are worth, not what retrieval is worth.
    """
    stores = [(ring, ring.keys, ring.index) for ring in memory.state.rings.values()]
    for ring, _, _ in stores:
        ring.keys, ring.index = ring.keys.clone(), [{} for _ in ring.index]  # an index knows the old order
        for row, physical in enumerate(ring.owner):
            order = torch.from_numpy(np.random.default_rng(segment).permutation(ring.count(row)))
            ring.keys[physical, : len(order)] = ring.keys[physical, order.to(ring.keys.device)]
    try:
        yield
    finally:
        for ring, keys, index in stores:
            ring.keys, ring.index = keys, index


def window_of_equal_bytes(options: Any, device: torch.device, dtype: torch.dtype) -> int:
    """Return the number of tokens whose keys and values in all layers take the bytes of a full memory."""
    base = options.base
    store_bytes = options.cache_size * options.entry_numbers * options.store_dtype(device, dtype).itemsize
    return store_bytes // (2 * base.layers * base.kv_heads * base.head_dim * dtype.itemsize)


def free_positions(options: Any) -> int:
    """Return how many more tokens than the configured ones a window may show, by the base model's positions."""
    return options.base.max_positions - options.segment_tokens - options.window.kept_tokens
