"""The data of a forward (base, window, segment) and the state of a memory, with rings of entries as the usual one."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from cacheformers.modeling.search.store import Ring, stacked


@dataclass(frozen=True)
class BaseShape:
    """The sizes of a base model, and what its attention can do."""

    model_type: str
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab_size: int
    max_positions: int
    rotary: bool
    sliding_window: int | None = None

    @property
    def description(self) -> str:
        """A few words by which messages tell bases apart."""
        return f"{self.model_type}, {self.layers} layers of {self.hidden_size}"


EVERYTHING = 2**40  # tokens that stay visible where nothing goes


@dataclass(frozen=True)
class LocalWindow:
    """The tokens that self-attention sees besides the open segment.

    Attributes:
        segment_tokens: tokens after which a segment closes (n).
        kept_tokens: newest tokens of closed segments that stay visible (W); 0 for the papers' `segment` window.
        sink_tokens: first tokens of the document, which always stay visible.
        memory_tokens: positions of memory tokens, before and behind a segment together.
    """

    segment_tokens: int
    kept_tokens: int = 0
    sink_tokens: int = 0
    memory_tokens: int = 0

    @property
    def positions(self) -> int:
        """Positions that the base model must have."""
        return self.segment_tokens + self.kept_tokens + self.sink_tokens + self.memory_tokens

    @property
    def empties(self) -> bool:
        """Whether nothing is visible beside the open segment, and nothing looks at it again."""
        return self.kept_tokens == 0 and self.sink_tokens == 0 and self.memory_tokens == 0

    @property
    def unbounded(self) -> bool:
        """Whether self-attention sees everything that was read."""
        return self.positions >= EVERYTHING


class SegmentCall:
    """One forward over new columns in which no row's segment closes: the data that layers read, and their scratch.

    All attention modules get the same object, as the keyword `memory_state`. It is not a dataclass, because FSDP passes
    each layer a copy of those.

    Attributes:
        memory: the cache that stores what this forward leaves behind.
        reading: what the method reads and leaves behind (`MemoryState.begin`).
        local: the cache that self-attention reads.
        real: which new columns are tokens and not padding, `[rows, time]`.
        open: which columns, old and new, belong to each row's open segment, `[rows, columns + time]`.
        visible: which columns, old and new, hold a token that self-attention may see, `[rows, columns + time]`.
        padded: whether a column, old or new, holds no token for one of the rows.
        positions: position of each column in its row's local window, `[rows, columns + time]`.
        window_tokens: number of tokens of closed segments that each row still sees (without sinks), `[rows]`.
        ids: of the new columns, `[rows, time]`.
        earlier: hidden states of the pieces before this one; None if another piece follows.
        keep: how many of the last hidden states are wanted; None for all.
        start: columns of the whole forward before this piece.
        returned: whether the caller gets the memory back (not with use_cache=False, unless it was passed in).
        reached: whether it came as far as an attention module, to which some bases pass no keywords on.
        memory_tokens: what the new columns are instead of text: memory tokens that are "read" by the next segment, as
            columns before it, or that "write" behind a segment which closes, and leave no columns; "" for text.
        forgets: whether local keys and values are dropped at the end (each forward is a segment, and use_cache=False).
        rotate: turns keys `[rows, heads, columns, d_head]` of a layer by `[rows, columns]` positions; None without
            rotation.
    """

    def __init__(self, memory: Any, reading: Any, local: Any, real: Tensor, ids: Tensor) -> None:
        self.memory, self.reading, self.local, self.real, self.ids = memory, reading, local, real, ids
        timeline = memory.timeline
        self.open = torch.cat([timeline.open, real], 1)
        self.visible = torch.cat([timeline.used, real], 1)
        self.padded = not bool(self.visible.all())
        self.positions = torch.cat([timeline.position, timeline.new_positions(real)], 1)
        self.window_tokens: list[int] = (timeline.kept & ~timeline.sink).sum(1).tolist()
        self.rotate: Callable[[Tensor, Tensor, int], Tensor] | None = None
        self.earlier: list[Tensor] | None = None
        self.keep: int | None = None
        self.start = 0
        self.returned = True
        self.reached = False
        self.forgets = False
        self.memory_tokens = ""
        self.scratch: dict[str, Any] = {}


@dataclass(frozen=True)
class Gold:
    """The places of the answers to the questions of the next forward, which retrieval should find.

    Attributes:
        asking: which of the next columns are a question or its answer, bool `[rows, time]`.
        passages: of each row, which tokens of its document hold the answer.
    """

    asking: Tensor
    passages: Sequence[Sequence[range]]

    def numbers(self, row: int) -> Tensor:
        """The numbers of the tokens that hold a row's answer, `[tokens]`."""
        return torch.tensor(sorted({number for passage in self.passages[row] for number in passage}), dtype=torch.long)


class MemoryState(ABC):
    """One method's memory for a batch of rows, which only `commit` fills.

    `MemoryCache` calls `begin` before a forward, `end` after it, and `commit` when a row's segment closes. Data of open
    segments is held in columns, the same columns in which `MemoryCache` holds local keys and values.

    Args:
        names: of `tensors`.

    Attributes:
        tensors: what is held by name and layer, `[rows, ...]`; a method may hold more (see `change`).
        forward_is_segment: each forward is one segment, whatever its length.
        rings: stores that get one entry per token, by layer; `state_dict` names their tensors `rings.LAYER...`. Files
            hold them in pieces, and the rest of a state as a whole.
        key_size: numbers of one vector, where a key in `rings` is several side by side; None for one.
        own_layers: layers whose visible keys and values are held by the state instead of the local cache.
        loss: what the method adds to the loss of the last forward; None for nothing.
        can_crop: the last tokens of open segments can be removed.
        gold: places of the answers to the questions of the next forward; None if that is not known.
        retrieves: tokens look up tokens of the document, which `retrieved` returns.
        attends: attention sees what the memory holds. Otherwise the memory only finds passages of the text, and answers
            nothing unless they are put before the question.
        retrieved_tokens: consecutive tokens that are looked up together; `retrieved` returns the first of them.
        starts: numbers of the first tokens of texts: attention sinks, which say nothing of their text.
        memory_tokens: memory tokens that run through all layers behind a segment when it closes, and leave behind what
            `commit` stores; 0 for none. Such a state holds no columns of open segments.
        off: it was made with cache_size 0, and remembers nothing.
        reading: read() is reading a text, so what comes next is no question about it.
        expected_tokens: how many tokens a row will have read at most when read() is done, so that room can be made at
            once; 0 where that is not known.
    """

    forward_is_segment = False
    can_crop = True
    retrieves = False
    attends = True
    retrieved_tokens = 1
    starts: tuple[int, ...] = (0,)
    memory_tokens = 0
    off = False
    reading = False
    expected_tokens = 0
    own_layers: frozenset[int] = frozenset()
    loss: Tensor | None = None
    gold: Gold | None = None
    rings: dict[int, Ring] = {}
    key_size: int | None = None

    def __init__(self, *names: str) -> None:
        self.tensors: dict[str, dict[int, Tensor]] = {name: {} for name in names}

    @abstractmethod
    def begin(self) -> Any:
        """Return what one forward reads: a frozen view of the memory, and room for what the forward leaves behind."""

    @abstractmethod
    def end(self, reading: Any) -> None:
        """Take up what a forward left behind, as new columns."""

    def check(self, row: int, columns: Tensor) -> None:  # noqa: B027  # as in `commit`
        """Raise ValueError if `commit` with the same arguments would store NaN or Inf."""

    def commit(self, row: int, columns: Tensor) -> None:  # noqa: B027  # some methods store at the end of a forward
        """Move one row's open segment into the memory; `columns` `[length]` are its tokens in order."""

    def write(self, rows: Sequence[int], hidden: Tensor, reading: Any) -> None:
        """Take up what memory tokens found behind the segments of rows that close next.

        Args:
            hidden: their last hidden states, `[all rows, tokens, h]`.
            reading: what their forward read and left behind (`begin`).
        """
        raise NotImplementedError

    def reads_tokens(self, closed: int) -> bool:
        """Whether memory tokens come before a segment that follows `closed` others."""
        return False

    def loss_targets(self, read: Sequence[int], new: Sequence[int]) -> int:
        """Count the tokens over which `loss` of the next forward is a mean; by default there is no such loss.

        Args:
            read, new: tokens that each row has read before, and reads in that forward.
        """
        return 0

    def detach(self) -> None:  # noqa: B027  # most states hold no graph
        """Cut the autograd graph of held tensors (at the end of every top-level forward)."""

    def kept(self, row: int, closed: int) -> int:
        """Count the newest of a row's `closed` tokens of closed segments that can still be read; by default all."""
        return closed

    @property
    def top_layer(self) -> int | None:
        """The highest layer whose states are stored when segments close; None if it may be any layer."""
        return None

    def retrieved(self) -> dict[int, Tensor]:
        """Return the numbers of the document's tokens that the newest columns retrieved, -1 for none.

        Returns:
            `[rows, columns, places]` by layer: at least the columns of the last forward; empty before the first.
        """
        return {}

    def nearness(self, asked: int, read: int) -> Tensor:
        """Return how near the newest tokens of the first row are to each token that it read before them.

        By default 1 for what a token retrieved and 0 for the rest.

        Args:
            asked: number of the newest tokens.
            read: number of the tokens before them.

        Returns:
            `[asked, read]`, float32 on the CPU, from -1 to 1; the least for tokens that the memory does not hold.
        """
        near = torch.zeros(asked, read + 1)
        for numbers in self.retrieved().values():
            found = numbers[0, -asked:].cpu()
            near.scatter_(1, found.masked_fill((found < 0) | (found > read), read), 1.0)
        return near[:, :read]

    def span_scores(self, asked: int, before: int, read: int, spans: Sequence[tuple[int, int]]) -> Tensor:
        """Score parts of what the first row has read by how near they are to its newest tokens, a query.

        By default late interaction: the sum over the query's tokens of the nearest token of a part.

        Args:
            asked: number of the newest tokens, the query.
            before: number of the tokens before them that came with it.
            read: number of the tokens before those.
            spans: first and last + 1 of each part's tokens.

        Returns:
            `[spans]`, float32; an empty span has -1 for each of the query's tokens.
        """
        near = self.nearness(asked, read)
        parts = [near[:, start:end] for start, end in spans]
        return torch.stack([part.amax(1).sum() if part.shape[1] else near.new_tensor(-len(near)) for part in parts])

    def keep(self, columns: Tensor) -> None:  # noqa: B027  # some methods have no columns
        """Keep only the columns `[rows, kept]`, chosen for each row."""

    @abstractmethod
    def reset(self, rows: Sequence[int]) -> None:
        """Forget what the given rows, possibly none, have read."""

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by a function of it, in new dictionaries."""
        self.tensors = {
            name: {layer: function(tensor) for layer, tensor in held.items()} for name, held in self.tensors.items()
        }

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was; a row may be taken several times."""
        self.change(lambda tensor: tensor[torch.tensor(rows, dtype=torch.long, device=tensor.device)])

    def join(self, others: Sequence[Self]) -> None:
        """Append the rows of other states with the same options, which hold as many columns."""
        self.tensors = {
            name: {
                layer: stacked([tensor, *(other.tensors[name][layer] for other in others)])
                for layer, tensor in held.items()
            }
            for name, held in self.tensors.items()
        }

    def clone(self) -> Self:
        """Return an independent copy; tensors that are never changed in place may be shared."""
        twin = copy.copy(self)
        twin.change(lambda tensor: tensor)
        return twin

    def to(self, device: torch.device | str) -> None:
        """Move every tensor."""
        self.change(lambda tensor: tensor.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for held in self.tensors.values() for tensor in held.values())

    def state_dict(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return joined(**self.tensors)

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Take over the `state_dict` of a state with the same options and number of rows."""
        self.tensors = {
            name: {int(layer): tensor.to(self.device(int(layer))) for layer, tensor in part(tensors, name).items()}
            for name in self.tensors
        }

    def device(self, layer: int) -> torch.device:
        """Return the device on which a layer's `tensors` are."""
        raise NotImplementedError


def joined(**parts: Mapping[Any, Tensor]) -> dict[str, Tensor]:
    """Join the tensors of several parts in one dictionary, with keys `part.key`."""
    return {f"{part}.{key}": tensor for part, tensors in parts.items() for key, tensor in tensors.items()}


def part(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors of one part of a `joined` dictionary, with the part's own keys."""
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}


def keep_columns(tensor: Tensor, columns: Tensor, dim: int) -> Tensor:
    """Select columns `[rows, kept]`, chosen for each row, along dimension `dim` of `[rows, ...]`."""
    shape = [1] * tensor.dim()
    shape[0], shape[dim] = columns.shape
    size = list(tensor.shape)
    size[dim] = columns.shape[1]
    return tensor.gather(dim, columns.to(tensor.device).view(shape).expand(size))


@dataclass
class Reading:
    """Data that one forward reads, by layer, and leaves behind, by name (`keys`, `values`, ...) and layer.

    A state takes up what has a name of its `tensors`.
    """

    stores: dict[int, Any]
    new: dict[str, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))


class ColumnState(MemoryState):
    """A state whose `tensors` are columns of open segments, `keys`, `values` and others.

    Attributes:
        columns_dim: the dimension of columns in `tensors`.
    """

    columns_dim = 1

    def __init__(self, *beside: str) -> None:
        super().__init__("keys", "values", *beside)

    def end(self, reading: Any) -> None:
        for name, held in self.tensors.items():
            for layer, tensor in reading.new[name].items():
                held[layer] = torch.cat([held[layer], tensor], self.columns_dim) if layer in held else tensor

    def check(self, row: int, columns: Tensor) -> None:
        for held in (self.tensors["keys"], self.tensors["values"]):
            for layer, tensor in held.items():
                stored = tensor[row].index_select(self.columns_dim - 1, columns.to(tensor.device))
                if not bool(torch.isfinite(stored).all()):
                    raise ValueError(
                        f"The open segment of row {row} holds NaN or Inf in layer {layer}; nothing was stored, and the "
                        "memory is unchanged. Check the model's weights and dtype (float16 overflows in "
                        f"many models: use bfloat16), then go on from a clone() taken before, or reset([{row}])."
                    )

    def keep(self, columns: Tensor) -> None:
        for held in self.tensors.values():
            held.update({layer: keep_columns(tensor, columns, self.columns_dim) for layer, tensor in held.items()})


class RingState(ColumnState):
    """Rings of keys and values, which enter the ring of their layer when a segment closes; other columns are dropped.

    A method whose forwards read or leave behind more than `Reading` overrides `begin` and `end`.

    Attributes:
        rings: by layer.
    """

    def __init__(self, rings: dict[int, Ring], beside: Sequence[str] = ()) -> None:
        super().__init__(*beside)
        self.rings = rings

    @property
    def top_layer(self) -> int | None:
        return max(self.rings, default=None)  # None: it stores nothing

    def begin(self) -> Any:
        return Reading({layer: ring.view() for layer, ring in self.rings.items()})

    def commit(self, row: int, columns: Tensor) -> None:
        for layer, ring in self.rings.items():
            chosen = columns.to(ring.keys.device)
            values = self.tensors["values"].get(layer)
            ring.append(row, self.tensors["keys"][layer][row, chosen], None if values is None else values[row, chosen])

    def kept(self, row: int, closed: int) -> int:
        return min((ring.count(row) for ring in self.rings.values()), default=0)

    def reset(self, rows: Sequence[int]) -> None:
        for ring in self.rings.values():
            ring.reset(rows)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        for ring in self.rings.values():
            ring.select(rows)

    def join(self, others: Sequence[Self]) -> None:
        super().join(others)
        for layer, ring in self.rings.items():
            ring.join([other.rings[layer] for other in others])

    def clone(self) -> Self:
        twin = super().clone()
        twin.rings = {layer: ring.clone() for layer, ring in self.rings.items()}
        return twin

    def to(self, device: torch.device | str) -> None:
        super().to(device)
        for ring in self.rings.values():
            ring.to(device)

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(ring.nbytes for ring in self.rings.values())

    def state_dict(self) -> dict[str, Tensor]:
        rings = {str(layer): ring.state_dict() for layer, ring in self.rings.items()}
        return joined(rings=joined(**rings), **self.tensors)

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        for layer, ring in self.rings.items():
            ring.load_state_dict(part(tensors, f"rings.{layer}"))
        super().load_state_dict(tensors)

    def device(self, layer: int) -> torch.device:
        return next(iter(self.rings.values())).keys.device


def token_numbers(ring: Ring, hits: Tensor) -> Tensor:
    """Turn hits `[rows, columns, places]`, counted from a row's oldest entry, into numbers of the document's tokens."""
    first = torch.tensor([ring.entries(row).first for row in range(ring.rows)], device=hits.device)
    return torch.where(hits >= 0, hits + first[:, None, None], hits)


def all_numbers(numbers: Tensor, together: int) -> Tensor:
    """Return the numbers of all tokens that are retrieved by the `numbers` `[..., places]` of the first of each.

    Args:
        together: consecutive tokens that are looked up together (`MemoryState.retrieved_tokens`).

    Returns:
        `[..., places * together]`; -1 stays -1.
    """
    every = numbers[..., None] + torch.arange(together, device=numbers.device)
    return torch.where(numbers[..., None] < 0, -1, every).flatten(-2)


def refuse_not_finite(states: Tensor, real: Tensor) -> None:
    """Raise ValueError if states of new tokens `[rows, time, width]` are NaN or Inf where `real` `[rows, time]`."""
    finite = torch.isfinite(states).all(-1).cpu() | ~real.cpu()
    if not bool(finite.all()):
        rows = (~finite).any(1).nonzero()[:, 0].tolist()
        raise ValueError(
            f"The new tokens of rows {rows} give NaN or Inf, and are not stored. Check the model's weights and dtype "
            "(float16 overflows in many models: use bfloat16)."
        )
