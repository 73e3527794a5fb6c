"""`MemoryCache`: the memory and the local keys and values of every layer, in one cache for `generate()`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from cacheformers.modeling.files.save import save_memory
from cacheformers.modeling.memory import LocalWindow, MemoryState, SegmentCall, joined, keep_columns, part
from cacheformers.modeling.origin import Origin
from cacheformers.modeling.search.store import stacked
from cacheformers.modeling.timeline import SeenIds, Timeline


class LocalCache(Cache):
    """The cache of one forward: keys and values of the visible columns, never written in place.

    Activation checkpointing runs a layer twice; both runs read the same `past` and stage the same result.

    Args:
        past: keys and values `[rows, kv_heads, columns, d_head]` by layer.
        stage: keep keys and values for later forwards.
        elsewhere: layers whose earlier keys and values are held by the memory's state instead.
    """

    def __init__(
        self,
        past: dict[int, tuple[Tensor, Tensor]],
        columns: int,
        stage: bool,
        elsewhere: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.past, self.columns, self.stage, self.elsewhere = past, columns, stage, elsewhere
        self.staged: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx in self.elsewhere:
            return key_states, value_states
        if self.columns:
            keys, values = self.past[layer_idx]  # perhaps read in another precision, and loaded
            key_states = torch.cat([keys.to(key_states.dtype), key_states], dim=-2)
            value_states = torch.cat([values.to(value_states.dtype), value_states], dim=-2)
        if self.stage:
            self.staged[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def held(self, new: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Return keys and values for later forwards, by layer; those that did not run have zeros in the new columns."""
        resting = {layer: pair for layer, pair in self.past.items() if self.stage and layer not in self.staged}
        padding = (0, 0, 0, new)
        return self.staged | {
            layer: (F.pad(keys, padding), F.pad(values, padding)) for layer, (keys, values) in resting.items()
        }

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1


CANNOT_FORGET = "This method cannot forget tokens. To go back, clone() the memory before they are read."
Rotate = Callable[[Tensor, Tensor, int], Tensor]  # keys, positions, layer


class DocumentsCache(Cache):
    """A cache whose rows are documents, which come, go and repeat; `generate` skips the ids that they have seen.

    Like every transformers cache it is passed as `past_key_values`, comes back in the output, and changes in place.

    Attributes:
        visible: number of columns of ids that it has seen, including padding.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.visible = 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.visible > 0

    @property
    def tokens_read(self) -> list[int]:
        """Number of tokens that each row has read."""
        raise NotImplementedError

    @property
    def batch_size(self) -> int:
        """Number of rows, a document each."""
        return len(self.tokens_read)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return `visible`."""
        return self.visible

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was. Rows may be left out, or taken several times (they share the memory)."""
        raise NotImplementedError

    def expand(self, repeats: int) -> None:
        """Repeat every row `repeats` times in place (row 0, row 0, ..., row 1, ...), as `generate` does with beams."""
        self.select([row for row in range(self.batch_size) for _ in range(repeats)])

    def match_rows(self, rows: int) -> None:
        """Expand to the rows of a batch, if documents divide them (beams); raise ValueError otherwise."""
        if rows == self.batch_size:
            return
        if rows % self.batch_size:
            raise ValueError(
                f"The memory holds {self.batch_size} documents, the batch has {rows} rows, which it neither equals "
                "nor is a multiple of. Use memory.select(rows) or memory.expand(n)."
            )
        self.expand(rows // self.batch_size)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.expand(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.select(indices.tolist())


def check_blank(cache: Cache | None) -> None:
    """Raise ValueError for any cache but the empty plain one that `generate` passes."""
    if cache is not None and (type(cache) is not DynamicCache or getattr(cache, "offloading", False)):
        raise ValueError(
            f"{type(cache).__name__} (static, quantized, offloaded or assisted) cannot carry a memory: leave "
            "past_key_values and cache_implementation out, or pass a cache that this model returned."
        )
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            "A plain cache that already holds tokens was passed to a model with a memory: their states are not in the "
            "memory. Start without past_key_values, or from cacheformers.read()."
        )


class MemoryCache(DocumentsCache):
    """Local keys and values of every layer, and the memory of augmented layers, for a batch of documents.

    `cacheformers.read` creates it, and so does a forward without one; `clone()` it first to ask more than once.

    Args:
        state: the method's memory.
        window: the local window.
        signature: what a model must have to use this memory (compared before each forward).
    """

    def __init__(self, state: MemoryState, window: LocalWindow, batch_size: int, signature: dict[str, Any]) -> None:
        super().__init__()
        self.state, self.window, self.signature = state, window, signature
        self.timeline = Timeline(batch_size, window)
        self.local: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values [rows, heads, columns, dim]
        self.seen = SeenIds(batch_size)  # ids of the visible columns, since the last read()
        self.fingerprint: tuple[float, ...] = ()  # of the adapter that reads; empty while it is trained
        self.keeps_graph = False  # what the next forward stores stays in the autograd graph
        self.options: Any = None  # of the state, without which it cannot be saved to a file
        self.origin = Origin(sources=[None] * batch_size)

    def __len__(self) -> int:
        return len(self.local)

    def __repr__(self) -> str:
        read, kept = (", ".join(f"{tokens:,}" for tokens in count) for count in (self.tokens_read, self.tokens_kept))
        return f"MemoryCache(tokens_read=[{read}], tokens_kept=[{kept}], nbytes={self.nbytes:,})"

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError(
            "A MemoryCache was given to a model without an active memory adapter. Enable the adapter, or pass a "
            "plain cache."
        )

    def activate_past_recording(self) -> None:
        raise ValueError("Assisted decoding cannot undo what a memory has read: call generate() without an assistant.")

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns; they must all hold tokens of open segments.

        Raises:
            ValueError: a positive number, tokens that are in the memory already, or a method that cannot remove any.
        """
        removed = -tokens_to_remove
        if removed < 0:
            raise ValueError(f"crop() takes minus the number of tokens to remove, got {tokens_to_remove}.")
        if removed == 0:
            return
        if not self.state.can_crop:
            raise ValueError(CANNOT_FORGET)
        if self.columns and not (self.local or self.state.own_layers or self.state.forward_is_segment):
            raise ValueError("A training step does not keep the keys of a full segment, so it cannot be cropped.")
        held = min(self.columns, self.visible)
        if self.state.forward_is_segment or removed > held or not bool(self.timeline.open[:, -removed:].all()):
            raise ValueError(
                f"Cannot forget the last {removed} tokens: some are in the memory already, or are padding. Only tokens "
                "of the open segment can be removed. Assisted decoding needs more: generate without an assistant."
            )
        left = torch.arange(self.columns - removed).expand(self.batch_size, -1)
        self.state.keep(left)  # it may refuse, and then nothing has changed
        self.seen.remove_last(removed)
        self._keep_columns(left)
        self.timeline.remove_last(removed)
        self.visible -= removed

    @property
    def tokens_read(self) -> list[int]:
        """Number of tokens that each row has read."""
        return self.timeline.tokens_read

    @property
    def tokens_kept(self) -> list[int]:
        """Number of each row's newest tokens that later tokens can still read; earlier ones are forgotten.

        A method with entries keeps the open segment and at most `cache_size` entries; a local window keeps the tokens
        that it shows (not counting sinks). Matrices of constant size forget no token, but all tokens share them.
        """
        timeline, kept = self.timeline, []
        shown = bool(self.local) or not self.state.own_layers  # to layers whose keys the state does not hold
        for row, read in enumerate(self.tokens_read):
            waiting = int(timeline.open[row].sum())
            in_window = int((timeline.kept[row] & ~timeline.sink[row]).sum()) if shown else 0
            kept.append(min(read, waiting + max(self.state.kept(row, read - waiting), in_window)))
        return kept

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was. Rows may be left out, or taken several times (they share the memory)."""
        rows = list(rows)
        self.state.select(rows)
        self.timeline.select(rows)
        self.origin.select(rows)
        index = torch.tensor(rows, dtype=torch.long)
        self.seen.select(index)
        self.local = {
            layer: (keys[index.to(keys.device)], values[index.to(values.device)])
            for layer, (keys, values) in self.local.items()
        }

    def join(self, others: Sequence[MemoryCache]) -> None:
        """Append the rows of other memories, so that their documents are a batch. The others stay as they are.

        Raises:
            ValueError: they are of different models, adapters, tokenizers or sizes, or a segment is open in some and
                the others hold no column.
        """
        memories = [self, *(other.clone() for other in others)]
        if any(other.described() != self.described() for other in memories):
            raise ValueError(
                "These memories were read with different models, adapters, tokenizers or cache sizes: a batch is read "
                "by one model."
            )
        columns = [memory.columns for memory in memories]
        if 0 in columns and any(columns):
            raise ValueError(
                "Some of these memories have an open segment, and others hold none: read() with flush=True."
            )
        for memory in memories:
            memory._add_unused(max(columns) - memory.columns)
        first, *rest = memories
        first.state.join([memory.state for memory in rest])
        first.timeline.join([memory.timeline for memory in rest])
        first.origin.join([memory.origin for memory in rest])
        first.seen.join([memory.seen for memory in rest])
        first.visible = 0
        first.local = {
            layer: (
                stacked([memory.local[layer][0] for memory in memories]),
                stacked([memory.local[layer][1] for memory in memories]),
            )
            for layer in first.local
        }

    def described(self) -> list[object]:
        """What is the same in memories whose rows can be a batch."""
        rings = {
            layer: (ring.capacity, ring.keys.dtype, ring.values is None) for layer, ring in self.state.rings.items()
        }
        origin = self.origin
        places = [self.window, self.state.off, rings]
        return [self.signature, self.fingerprint, origin.identity, origin.tokenizer, origin.parts, *places]

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Forget everything that the given rows (default: all) have read, so that new documents can begin there."""
        if rows is None:
            rows = range(self.batch_size)
            self.forget_columns()
        rows = list(rows)
        self.state.reset(rows)
        self.timeline.reset(rows)
        self.origin.reset(rows)
        self.seen.reset(rows)

    def clone(self) -> MemoryCache:
        """Return an independent copy: to generate from it leaves the original unchanged."""
        twin = copy.copy(self)
        twin.state, twin.timeline, twin.origin = self.state.clone(), self.timeline.clone(), self.origin.clone()
        twin.seen = self.seen.clone()
        twin.local = dict(self.local)  # its tensors are never written in place
        return twin

    def to(self, device: torch.device | str) -> MemoryCache:
        """Move every tensor to a device, in place."""
        self.state.to(device)
        self.local = {layer: (keys.to(device), values.to(device)) for layer, (keys, values) in self.local.items()}
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return all tensors by name: the memory, open segments, local keys and values."""
        # Copies: a state may hold the same keys and values, and safetensors refuses tensors that share memory.
        local = {f"{layer}.{side}": pair[side].clone() for layer, pair in self.local.items() for side in (0, 1)}
        state, timeline, seen = self.state.state_dict(), self.timeline.state_dict(), self.seen.state_dict()
        tensors = joined(state=state, timeline=timeline, local=local, seen=seen)
        return {**tensors, "visible": torch.tensor(self.visible)}

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device | str) -> None:
        """Take over a `state_dict`.

        Args:
            device: of local keys and values. (The memory stays on its devices.)

        Raises:
            ValueError: the state is of another number of rows, or of other options.
        """
        rows = len(tensors["timeline.open"])
        if rows != self.batch_size:
            raise ValueError(f"The saved memory holds {rows} documents, this one {self.batch_size}.")
        self.state.load_state_dict(part(tensors, "state"))
        self.timeline.load_state_dict(part(tensors, "timeline"))
        local = part(tensors, "local")
        layers = sorted({int(key.partition(".")[0]) for key in local})
        self.local = {layer: (local[f"{layer}.0"].to(device), local[f"{layer}.1"].to(device)) for layer in layers}
        self.visible = int(tensors["visible"])
        self.seen.load_state_dict(part(tensors, "seen"), rows, self.columns)
        self.origin.saved = ""

    def save(self, path: str | Path, append: bool = False, int8: bool = False) -> None:
        """Save the memory to a folder, from which `cacheformers.load_memory` loads it.

        The folder changes in one step, when everything is on disk.

        Args:
            path: the folder. A memory that it already holds is replaced.
            append: write only what is new since this memory was loaded from this folder, or saved to it.
            int8: round entries to 8 bits, with a scale for each; they are loaded in the precision that they have now.

        Raises:
            MemoryFileError: the folder holds something else, or, with `append`, another memory.
            OSError: the folder cannot be written.
        """
        save_memory(self, Path(path), append, int8)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: the memory, open segments, and local keys and values."""
        return self.state.nbytes + sum(keys.nbytes + values.nbytes for keys, values in self.local.values())

    @property
    def columns(self) -> int:
        """Number of columns held for open segments and the local window."""
        return self.timeline.columns

    def close(self, rows: Sequence[int], rotate: Rotate | None) -> None:
        """Move the open segments of the given rows into the memory; `segments.close_segments` runs memory tokens first.

        Args:
            rotate: turns keys `[rows, heads, columns, dim]` of a layer by `[rows, columns]` positions; None without
                rotation.
        """
        closing = {row: self.timeline.open[row].nonzero()[:, 0] for row in rows}
        closing = {row: columns for row, columns in closing.items() if len(columns)}
        if not torch.is_grad_enabled():  # in training the loss shows NaN, and does so in all processes
            for row, columns in closing.items():
                self.state.check(row, columns)
        for row, columns in closing.items():
            self.state.commit(row, columns)
            self._move_window(row, self.timeline.close(row), rotate)
        self._drop_columns()

    def drop(self, rows: Sequence[int]) -> None:
        """Forget the open segments of the given rows. They do not enter the memory, which stays as it is.

        So a second question can be asked after a first one that is not to be remembered.

        Raises:
            ValueError: a method that cannot remove any tokens has read some.
        """
        if not self.state.can_crop and bool(self.timeline.open[list(rows)].any()):
            raise ValueError(CANNOT_FORGET)
        for row in rows:
            self.timeline.drop(row)
        self._drop_columns()

    def forget_window(self) -> None:
        """Drop open segments as `drop` does, and of the local window all but its sinks."""
        self.drop(range(self.batch_size))
        self.timeline.kept &= self.timeline.sink
        self._drop_columns()

    def with_window(self, tokens: int) -> MemoryCache:
        """Return a copy in which the next `tokens` tokens are one segment, and self-attention sees nothing before it.

        A prompt of that length is seen as the base model sees it, and the memory only adds: with closed gates, what
        follows is what the base model makes of the prompt alone.

        Raises:
            ValueError: a segment is open (read with flush=True first), or self-attention of this method counts on.
        """
        if self.window.unbounded or self.state.forward_is_segment:
            raise ValueError(
                "Self-attention of this method sees more than the open segment, so its prompts have no window of their "
                "own: ask with the question alone."
            )
        if bool(self.timeline.open.any()):
            raise ValueError("A segment is open: read() with flush=True before the prompt.")
        twin = self.clone()
        twin.forget_columns()
        twin.window = LocalWindow(tokens, memory_tokens=self.window.memory_tokens)
        twin.timeline.window = twin.window
        return twin

    def _move_window(self, row: int, shift: Tensor, rotate: Rotate | None) -> None:
        """Cut the graph of a row's closed segment, and turn the kept keys to their new positions."""
        if not bool(self.timeline.kept[row].any()):
            return
        local, self.local = self.local, {}  # a forward that is run again, by checkpointing, may read the old dictionary
        for layer, (keys, values) in local.items():
            moved = keys[row : row + 1].detach()
            if rotate is not None and bool(shift.any()):
                moved = rotate(moved, shift[None], layer)
            self.local[layer] = (with_row(keys, row, moved), with_row(values, row, values[row : row + 1].detach()))

    def _add_unused(self, columns: int) -> None:
        """Put columns that hold nothing before all others."""
        if columns:
            first = torch.cat([torch.zeros(columns, dtype=torch.long), torch.arange(self.columns)])
            first = first.expand(self.batch_size, -1)
            self.timeline.keep(first)
            self.timeline.unuse_first(columns)
            self._keep_columns(first)

    def _drop_columns(self) -> None:
        columns = self.timeline.needed()
        if columns is not None:
            self.timeline.keep(columns)
            self._keep_columns(columns)

    def _keep_columns(self, columns: Tensor) -> None:
        self.state.keep(columns)
        self.seen.keep(columns)
        self.local = {
            layer: (keep_columns(keys, columns, 2), keep_columns(values, columns, 2))
            for layer, (keys, values) in self.local.items()
            if columns.shape[1]
        }

    def count(self, real: Tensor, ids: Tensor) -> None:
        """Count columns that a model without a base has read; its state alone holds them.

        Args:
            real: which of them are tokens, `[rows, time]`.
            ids: `[rows, time]`; `generate` compares its prompt with them.
        """
        self.seen.append(ids, real, self.tokens_read)
        self.seen.keep(torch.zeros(self.batch_size, 0, dtype=torch.long))
        self.visible += real.shape[1]
        read = zip(self.tokens_read, real.sum(1).tolist(), strict=True)
        self.timeline.tokens_read = [before + new for before, new in read]

    def forget_columns(self) -> None:
        """Drop local keys and values and open segments; the memory stays."""
        self.timeline.clear(self.batch_size)
        self._keep_columns(torch.zeros(self.batch_size, 0, dtype=torch.long))
        self.forget_ids()

    def forget_ids(self) -> None:
        """Begin a new stream of ids, of which `generate` skips none."""
        self.visible = 0
        self.seen.forget()

    def begin(self, real: Tensor, ids: Tensor | None = None) -> SegmentCall:
        """Prepare a forward over new columns in which no segment closes.

        Args:
            real: which of them are tokens, `[rows, time]`.
            ids: `[rows, time]`; `generate` compares its prompt with them.
        """
        self._drop_columns()
        window = self.window
        full = bool((self.timeline.open.sum(1) + real.sum(1) == window.segment_tokens).all())
        spared = torch.is_grad_enabled() and full and window.empties  # a training step does not read these keys again
        local = LocalCache(self.local, self.columns, not spared, self.state.own_layers)
        return SegmentCall(self, self.state.begin(), local, real, real.long() if ids is None else ids)

    def end(self, call: SegmentCall) -> None:
        """Store what a forward left behind: new columns of open segments, or of memory tokens before them."""
        if call.memory_tokens == "write":
            return
        if call.memory_tokens == "read":
            self.seen.append(call.ids, torch.zeros_like(call.real), self.tokens_read)
            self.timeline.append_memory(call.real, call.positions[:, self.columns :])
            self.local = call.local.staged
            return
        self.seen.append(call.ids, call.real, self.tokens_read)
        self.timeline.append(call.real, call.positions[:, self.columns :])
        self.local = call.local.held(call.real.shape[1])
        self.state.end(call.reading)
        self.visible += call.real.shape[1]

    def detach(self) -> None:
        """Cut the autograd graph of all tensors (at the end of every top-level forward, unless it `keeps_graph`)."""
        self.state.detach()
        if torch.is_grad_enabled():  # otherwise there is none
            self.local = {layer: (keys.detach(), values.detach()) for layer, (keys, values) in self.local.items()}


def with_row(tensor: Tensor, row: int, replacement: Tensor) -> Tensor:
    """Replace one row of a tensor; the other rows keep their autograd graph."""
    return torch.cat([tensor[:row], replacement, tensor[row + 1 :]])
