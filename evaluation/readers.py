"""Ways to read a group of documents segment by segment: with a memory, with a damaged one, or without.

Documents of a group are rows of a batch, longest first, and each begins at its beginning. Rows are padded on the right,
where causality keeps it out of what is scored; a document that has ended leaves the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from cacheformers.modeling.attach import active_options, find_decoder, new_memory, unwrap
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.memories.base import LocalWindow
from cacheformers.modeling.models.modeling_cacheformer import CacheFormerForCausalLM
from cacheformers.modeling.rotary import rotation
from cacheformers.training.lanes import IGNORED
from cacheformers.training.loss import token_losses


class Reader(Protocol):
    """Reads a group of documents."""

    @property
    def together(self) -> int:
        """How many documents it reads in one group; 0: as many as are wanted."""

    def read(self, model: nn.Module, ids: list[Tensor], segment_tokens: int) -> Iterator[Tensor]:
        """Losses of one segment after the other, `[rows, time]`; rows are fewer when documents have ended.

        Args:
            ids: of each document, `[tokens]`, longest first.
        """


@dataclass(frozen=True)
class Remembering:
    """Reads with the active memory adapter.

    Args:
        cache_size: entries that the memory may hold, instead of the configured number; 0 switches it off.
    """

    cache_size: int | None = None
    together: int = 0

    def read(self, model: nn.Module, ids: list[Tensor], segment_tokens: int) -> Iterator[Tensor]:
        memory = new_memory(model, len(ids), self.cache_size)
        for start in range(0, len(ids[0]) - 1, segment_tokens):
            going = unfinished(ids, start)
            if len(going) < memory.batch_size:
                memory.select(range(len(going)))
            inputs, labels = segment(going, start, segment_tokens)
            yield losses(model, inputs, labels, past_key_values=memory, use_cache=not memory.state.forward_is_segment)


@dataclass(frozen=True)
class Damaged:
    """Reads with a full memory that is damaged during each forward, and only then.

    Args:
        damage: a context manager of the memory and the number of the segment, see `evaluation/controls.py`.
        together: documents that the damage needs side by side.

    Documents stay in their group until the longest ends; one that has ended keeps its entries.
    """

    damage: Callable[[MemoryCache, int], AbstractContextManager[None]]
    together: int = 0

    def read(self, model: nn.Module, ids: list[Tensor], segment_tokens: int) -> Iterator[Tensor]:
        memory = new_memory(model, len(ids))
        rotate = rotation(find_decoder(unwrap(model)))
        for start in range(0, len(ids[0]) - 1, segment_tokens):
            inputs, labels = segment(ids, start, segment_tokens)
            real = labels != IGNORED
            # What is full enters its own document's memory now, so that nothing is stored during the damage.
            memory.close(memory.timeline.full_rows(), rotate)
            with self.damage(memory, start // segment_tokens):
                yield losses(
                    model, inputs, labels, attention_mask=None if bool(real.all()) else real, past_key_values=memory
                )


@dataclass(frozen=True)
class Forgetting:
    """Reads by self-attention alone; an active memory adapter is there with an empty memory.

    Args:
        context_tokens: so many tokens before each segment are read again with it, and are not scored.
    """

    context_tokens: int = 0
    together: int = 0

    def read(self, model: nn.Module, ids: list[Tensor], segment_tokens: int) -> Iterator[Tensor]:
        remembers = has_memory(model)
        for start in range(0, len(ids[0]) - 1, segment_tokens):
            inputs, labels = segment(unfinished(ids, start), start, segment_tokens, self.context_tokens)
            memory = one_segment(model, *inputs.shape) if remembers else None
            yield losses(model, inputs, labels, past_key_values=memory, use_cache=remembers)


@dataclass(frozen=True)
class Decoding:
    """Reads on through a document with the decoding state of a CacheFormer model."""

    together: int = 0

    def read(self, model: nn.Module, ids: list[Tensor], segment_tokens: int) -> Iterator[Tensor]:
        cacheformer = unwrap(model)
        assert isinstance(cacheformer, CacheFormerForCausalLM)
        cache = cacheformer.model.new_cache(len(ids))
        for start in range(0, len(ids[0]) - 1, segment_tokens):
            going = unfinished(ids, start)
            cache.select(range(len(going)))
            inputs, labels = segment(going, start, segment_tokens)
            yield losses(model, inputs, labels, past_key_values=cache, use_cache=True)


def has_memory(model: nn.Module) -> bool:
    """Whether a memory adapter, or a memory of the model's own, is active; a CacheFormer model is its own attention."""
    model = unwrap(model)
    return not isinstance(model, CacheFormerForCausalLM) and active_options(find_decoder(model)) is not None


def one_segment(model: nn.Module, rows: int, tokens: int) -> MemoryCache:
    """A memory that holds nothing, for a single segment of so many tokens."""
    empty = new_memory(model, rows, 0)
    return MemoryCache(empty.state, LocalWindow(tokens), rows, empty.signature)


def unfinished(ids: Sequence[Tensor], start: int) -> list[Tensor]:
    """The documents that have inputs from `start` on."""
    return [row for row in ids if len(row) - 1 > start]


def segment(ids: Sequence[Tensor], start: int, length: int, context: int = 0) -> tuple[Tensor, Tensor]:
    """The segment from `start` on: inputs `[rows, context + time]` with tokens before it, labels `[rows, time]`."""
    inputs = [row[:-1][max(start - context, 0) : start + length] for row in ids]
    labels = [row[1:][start : start + length] for row in ids]
    return pad_sequence(inputs, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=IGNORED)


def losses(model: nn.Module, inputs: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """One forward, and the losses of the last positions, which have the labels `[rows, time]`."""
    device = next(model.parameters()).device
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    output = model(input_ids=inputs.to(device), logits_to_keep=labels.shape[1], **options)
    return token_losses(output.logits, labels.to(device))
