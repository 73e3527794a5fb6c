"""`MemoryCache`: the local keys and values of every layer and the memory, in one cache that `generate()` understands.

Rows of a batch share one axis of columns. A column holds, for each row, a token of its open segment, a token of an
earlier segment that the local window keeps, or nothing. Boundaries are each row's own; columns are only storage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from cacheformers.modeling.memories.base import LocalWindow, MemoryState, SegmentCall, keep_columns


class LocalCache(Cache):
    """What the decoder sees during one forward: keys and values of the visible columns, never written in place.

    Activation checkpointing runs a layer twice; both runs read the same `past` and stage the same result.
    """

    def __init__(self, past: dict[int, tuple[Tensor, Tensor]], columns: int, stage: bool) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.past, self.columns, self.stage = past, columns, stage
        self.staged: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.columns:
            past_keys, past_values = self.past[layer_idx]
            key_states = torch.cat([past_keys, key_states], dim=-2)
            value_states = torch.cat([past_values, value_states], dim=-2)
        if self.stage:
            self.staged[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1


Rotate = Callable[[Tensor, Tensor], Tensor]


class MemoryCache(Cache):
    """Local keys and values of every layer, and the memory of the augmented ones, of a batch of documents.

    Made by `cacheformers.read`, or by the first forward that is given none. It is passed as `past_key_values`, comes
    back in the output, and is changed in place like every transformers cache; `clone()` first to ask more than once.

    Args:
        state: the method's memory.
        window: the local window.
        signature: what a model must have to use this memory (compared before each forward).
    """

    def __init__(
        self,
        state: MemoryState,
        window: LocalWindow,
        batch_size: int,
        signature: dict[str, Any],
    ) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.state, self.window, self.signature = state, window, signature
        self.local: dict[int, tuple[Tensor, Tensor]] = {}
        self._clear(batch_size)
        self.tokens_read = [0] * batch_size
        self.closed = [0] * batch_size
        self.visible = 0

    def _clear(self, batch_size: int) -> None:
        self.open = torch.zeros(batch_size, 0, dtype=torch.bool)  # column belongs to the open segment
        self.kept = torch.zeros(batch_size, 0, dtype=torch.bool)  # column of a closed segment, still visible
        self.sink = torch.zeros(batch_size, 0, dtype=torch.bool)  # kept for ever
        self.position = torch.zeros(batch_size, 0, dtype=torch.long)

    # What transformers asks of a cache

    @property
    def batch_size(self) -> int:
        return len(self.open)

    @property
    def columns(self) -> int:
        return self.open.shape[1]

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.visible > 0

    def __len__(self) -> int:
        return len(self.local)

    def __repr__(self) -> str:
        read = ", ".join(str(tokens) for tokens in self.tokens_read)
        return f"MemoryCache(tokens_read=[{read}], nbytes={self.nbytes:,})"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the id stream seen since the last `read()` (what `generate` may not feed again)."""
        return self.visible

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name of older transformers releases

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError(
            "A MemoryCache was given to a model without an active memory adapter. Enable the adapter, or pass a "
            "plain cache."
        )

    def activate_past_recording(self) -> None:
        raise ValueError("Assisted decoding cannot undo what a memory has read: call generate() without an assistant.")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.expand(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.select(indices.tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns; they must all belong to open segments.

        Raises:
            ValueError: a positive number, or columns that were moved into the memory.
        """
        removed = -tokens_to_remove
        if removed < 0:
            raise ValueError(f"crop() takes minus the number of tokens to remove, got {tokens_to_remove}.")
        if removed == 0:
            return
        if removed > self.columns or removed > self.visible or not bool(self.open[:, -removed:].all()):
            raise ValueError(
                f"Cannot forget the last {removed} tokens: some are in the memory already, or are padding. Only tokens "
                "of the open segment can be removed. Assisted decoding needs more: generate without an assistant."
            )
        left = torch.arange(self.columns - removed).expand(self.batch_size, -1)
        self._keep_columns(left)
        self.visible -= removed
        self.tokens_read = [tokens - removed for tokens in self.tokens_read]

    # Rows

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was. Rows may be left out, and taken several times (they share the memory)."""
        rows = list(rows)
        index = torch.tensor(rows, dtype=torch.long)
        self.state.select(rows)
        self.open, self.kept = self.open[index], self.kept[index]
        self.sink, self.position = self.sink[index], self.position[index]
        self.tokens_read = [self.tokens_read[row] for row in rows]
        self.closed = [self.closed[row] for row in rows]
        self.local = {
            layer: (keys[index.to(keys.device)], values[index.to(values.device)])
            for layer, (keys, values) in self.local.items()
        }

    def expand(self, repeats: int) -> None:
        """Repeat every row `repeats` times in place (row 0, row 0, ..., row 1, ...), as `generate` does with beams."""
        self.select([row for row in range(self.batch_size) for _ in range(repeats)])

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Forget everything that the given rows (default: all) have read; a new document can begin there."""
        if rows is None:
            rows = range(self.batch_size)
            self.forget_columns()
        rows = list(rows)
        self.state.reset(rows)
        for row in rows:
            self.open[row] = self.kept[row] = self.sink[row] = False
            self.tokens_read[row] = self.closed[row] = 0
        self._drop_unused_columns()

    def clone(self) -> MemoryCache:
        """An independent copy: generate from it and the original stays as it is."""
        twin = copy.copy(self)
        twin.state = self.state.clone()
        twin.open, twin.kept = self.open.clone(), self.kept.clone()
        twin.sink, twin.position = self.sink.clone(), self.position.clone()
        twin.local = dict(self.local)  # never written in place
        twin.tokens_read, twin.closed = list(self.tokens_read), list(self.closed)
        return twin

    def to(self, device: torch.device | str) -> MemoryCache:
        """Move every tensor to a device, in place."""
        self.state.to(device)
        self.local = {layer: (k.to(device), v.to(device)) for layer, (k, v) in self.local.items()}
        return self

    @property
    def nbytes(self) -> int:
        """Bytes held: the memory, what waits in open segments, and local keys and values."""
        return self.state.nbytes + sum(keys.nbytes + values.nbytes for keys, values in self.local.values())

    # Segments

    def open_tokens(self) -> list[int]:
        """Tokens in each row's open segment."""
        return self.open.sum(1).tolist()

    def pieces(self, real: Tensor) -> list[tuple[int, int]]:
        """Cut new columns (start, end) wherever a row begins a new segment.

        Args:
            real: which of the new columns are tokens, `[rows, time]`.
        """
        token = self.open.sum(1, keepdim=True) + real.cumsum(1)  # the how-many-eth of its row's open segment
        segment = (token - 1).clamp(min=0) // self.window.segment_tokens
        begins = torch.cat([torch.zeros_like(segment[:, :1]), segment], 1).diff(dim=1) > 0
        starts = sorted({0, *begins.any(0).nonzero()[:, 0].tolist()})
        return list(zip(starts, [*starts[1:], real.shape[1]], strict=True))

    def close_full(self, rotate: Rotate | None) -> None:
        """Close every segment that has all its tokens (before the next forward)."""
        self.close(
            [row for row, tokens in enumerate(self.open_tokens()) if tokens >= self.window.segment_tokens], rotate
        )

    def close(self, rows: Sequence[int], rotate: Rotate | None) -> None:
        """Move the open segments of the given rows into the memory.

        Args:
            rotate: turns keys `[rows, heads, columns, dim]` by `[rows, columns]` positions; None where keys carry none.
        """
        for row in rows:
            columns = self.open[row].nonzero()[:, 0]
            if not len(columns):
                continue
            self.state.commit(row, columns)
            self.closed[row] += 1
            self._move_window(row, rotate)
        self._drop_unused_columns()

    def _move_window(self, row: int, rotate: Rotate | None) -> None:
        """After closing: choose the columns that stay visible and give them the positions before the new segment."""
        window, before = self.window, self.position[row].clone()
        first_segment = self.closed[row] == 1
        seen = (self.kept[row] | self.open[row]).nonzero()[:, 0]
        if first_segment and window.sink_tokens:
            self.sink[row, seen[: window.sink_tokens]] = True
        recent = seen[~self.sink[row, seen]]
        recent = recent[len(recent) - window.kept_tokens :] if window.kept_tokens < len(recent) else recent
        self.open[row] = False
        self.kept[row] = self.sink[row]
        self.kept[row, recent] = True
        stay = self.kept[row].nonzero()[:, 0]
        self.position[row, stay] = torch.arange(len(stay))
        shift = torch.where(self.kept[row], self.position[row] - before, 0)
        if not len(stay):
            return
        for layer, (keys, values) in self.local.items():
            moved = keys[row : row + 1].detach()
            if rotate is not None:
                moved = rotate(moved, shift[None])
            self.local[layer] = (with_row(keys, row, moved), with_row(values, row, values[row : row + 1].detach()))

    def _drop_unused_columns(self) -> None:
        """Forget columns that no row sees; pack the rows when gaps make the columns more than twice what is needed."""
        if not self.columns:
            return
        used = self.kept | self.open
        most = int(used.sum(1).max())
        any_used = used.any(0).nonzero()[:, 0]
        if not len(any_used):
            self._keep_columns(torch.zeros(self.batch_size, 0, dtype=torch.long))
        elif self.columns > 2 * max(most, self.window.segment_tokens):
            order = torch.argsort(used.long(), dim=1, stable=True)  # unused columns first: rows end flush right
            self._keep_columns(order[:, self.columns - most :])
        elif any_used[0] > 0:
            self._keep_columns(torch.arange(int(any_used[0]), self.columns).expand(self.batch_size, -1))

    def _keep_columns(self, columns: Tensor) -> None:
        self.open, self.kept = self.open.gather(1, columns), self.kept.gather(1, columns)
        self.sink, self.position = self.sink.gather(1, columns), self.position.gather(1, columns)
        self.state.keep(columns)
        self.local = {
            layer: (keep_columns(keys, columns, 2), keep_columns(values, columns, 2))
            for layer, (keys, values) in self.local.items()
        }

    def begin_forward(self, continues: bool) -> None:
        """Where each forward is a segment of its own, one that keeps no cache begins a new local window."""
        if self.state.forward_is_segment and not continues:
            self.forget_columns()

    def forget_columns(self) -> None:
        """Forget local keys and values and what open segments hold; the memory stays."""
        self.local = {}
        self._clear(self.batch_size)
        self.state.keep(torch.zeros(self.batch_size, 0, dtype=torch.long))
        self.visible = 0

    def begin(self, real: Tensor) -> SegmentCall:
        """Prepare a forward over new columns `[rows, time]` in which no segment closes."""
        self._drop_unused_columns()
        kept = self.kept.sum(1, keepdim=True)
        rank = self.open.sum(1, keepdim=True) + real.cumsum(1) - 1
        full = bool((rank[:, -1] + 1 == self.window.segment_tokens).all())
        nothing_stays = self.window.kept_tokens == 0 and self.window.sink_tokens == 0
        spared = torch.is_grad_enabled() and full and nothing_stays  # a training step need not keep what closes next
        return SegmentCall(
            memory=self,
            reading=self.state.begin(),
            local=LocalCache(self.local, self.columns, stage=not spared),
            real=real,
            open=torch.cat([self.open, real], 1),
            visible=torch.cat([self.open | self.kept, real], 1),
            positions=torch.cat([self.position, torch.where(real, kept + rank, 0)], 1),
            window_tokens=(self.kept & ~self.sink).sum(1).tolist(),
        )

    def end(self, call: SegmentCall) -> None:
        """Take up what a forward left behind: new columns, waiting in their rows' open segments."""
        none = torch.zeros_like(call.real)
        self.open = call.open
        self.kept, self.sink = torch.cat([self.kept, none], 1), torch.cat([self.sink, none], 1)
        self.position = call.positions
        self.local = call.local.staged
        self.state.end(call.reading)
        self.tokens_read = [have + new for have, new in zip(self.tokens_read, call.real.sum(1).tolist(), strict=True)]
        self.visible += call.real.shape[1]

    def detach(self) -> None:
        """Cut the autograd graph of local keys and values (done at the end of every top-level forward)."""
        self.local = {layer: (keys.detach(), values.detach()) for layer, (keys, values) in self.local.items()}


def with_row(tensor: Tensor, row: int, replacement: Tensor) -> Tensor:
    """`tensor` with one row replaced, the others' autograd graph kept."""
    return torch.cat([tensor[:row], replacement, tensor[row + 1 :]])
