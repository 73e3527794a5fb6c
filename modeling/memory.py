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

from cacheformers.modeling.search.store import Ring


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
    """

    segment_tokens: int
    kept_tokens: int = 0
    sink_tokens: int = 0

    @property
    def positions(self) -> int:
        """Positions that the base model must have."""
        return self.segment_tokens + self.kept_tokens + self.sink_tokens

    @property
    def unbounded(self) -> bool:
        """Whether self-attention sees everything that was read."""
        return self.positions >= EVERYTHING


class SegmentCall:
    """One forward over new columns in which no row's segment closes: what layers read, and their scratch.

    All attention modules get the same object, as the keyword `memory_state`. It is not a dataclass, because FSDP passes
    each layer a copy of those.

    Attributes:
        memory: the cache that stores what this forward leaves behind.
        reading: what the method reads and leaves behind (`MemoryState.begin`).
        local: the cache that self-attention reads.
        real: which new columns are tokens and not padding, `[rows, time]`.
        open: which columns, old and new, belong to each row's open segment, `[rows, columns + time]`.
        visible: which columns, old and new, hold a token that self-attention may see, `[rows, columns + time]`.
        positions: position of each column in its row's local window, `[rows, columns + time]`.
        window_tokens: number of tokens of closed segments that each row still sees (without sinks), `[rows]`.
        ids: of the new columns, `[rows, time]`.
        earlier: hidden states of the pieces before this one; None if another piece follows.
        keep: how many of the last hidden states are wanted; None for all.
        returned: whether the caller gets the memory back (not with use_cache=False, unless it was passed in).
        forgets: whether local keys and values are dropped at the end (each forward is a segment, and use_cache=False).
        rotate: turns keys `[rows, heads, columns, d_head]` by `[rows, columns]` positions; None without rotation.
    """

    def __init__(self, memory: Any, reading: Any, local: Any, real: Tensor, ids: Tensor) -> None:
        self.memory, self.reading, self.local, self.real, self.ids = memory, reading, local, real, ids
        timeline = memory.timeline
        self.open = torch.cat([timeline.open, real], 1)
        self.visible = torch.cat([timeline.used, real], 1)
        self.positions = torch.cat([timeline.position, timeline.new_positions(real)], 1)
        self.window_tokens: list[int] = (timeline.kept & ~timeline.sink).sum(1).tolist()
        self.rotate: Callable[[Tensor, Tensor], Tensor] | None = None
        self.earlier: list[Tensor] | None = None
        self.keep: int | None = None
        self.returned = True
        self.forgets = False
        self.scratch: dict[str, Any] = {}

    @property
    def padded(self) -> bool:
        """Whether a column, old or new, holds no token for one of the rows."""
        return not bool(self.visible.all())


@dataclass(frozen=True)
class Gold:
    """Where the answers to what the next forward asks are: what retrieval should find.

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

    Attributes:
        forward_is_segment: each forward is one segment, whatever its length.
        rings: stores that get one entry per token, by layer; `state_dict` names their tensors `rings.LAYER...`. Files
            hold them in pieces, and the rest of a state as a whole.
        own_layers: layers whose visible keys and values are held by the state instead of the local cache.
        loss: what the method adds to the loss of the last forward; None for nothing.
        can_crop: the last tokens of open segments can be removed.
        gold: where the answers to what the next forward asks are; None where nobody knows.
        retrieves: tokens look up single tokens of the document, which `retrieved` returns.
    """

    forward_is_segment = False
    can_crop = True
    retrieves = False
    own_layers: frozenset[int] = frozenset()
    loss: Tensor | None = None
    gold: Gold | None = None
    rings: dict[int, Ring] = {}

    @abstractmethod
    def begin(self) -> Any:
        """Return what one forward reads: a frozen view of the memory, and room for what the forward leaves behind."""

    @abstractmethod
    def end(self, reading: Any) -> None:
        """Append what a forward left behind as new columns."""

    @abstractmethod
    def check(self, row: int, columns: Tensor) -> None:
        """Raise ValueError if `commit` with the same arguments would store NaN or Inf."""

    @abstractmethod
    def commit(self, row: int, columns: Tensor) -> None:
        """Move one row's open segment into the memory; `columns` `[length]` are its tokens in order."""

    def detach(self) -> None:  # noqa: B027  # most states hold no graph
        """Cut the autograd graph of held tensors (at the end of every top-level forward)."""

    def kept(self, row: int, closed: int) -> int:
        """Count the newest of a row's `closed` tokens of closed segments that can still be read; by default all."""
        return closed

    def retrieved(self) -> dict[int, Tensor]:
        """Return the numbers of the document's tokens that the newest columns retrieved, -1 for none.

        Returns:
            `[rows, columns, places]` by layer: at least the columns of the last forward; empty before the first.
        """
        return {}

    @abstractmethod
    def keep(self, columns: Tensor) -> None:
        """Keep only the columns `[rows, kept]`, chosen for each row."""

    @abstractmethod
    def reset(self, rows: Sequence[int]) -> None:
        """Forget what the given rows, possibly none, have read."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was; a row may be taken several times."""

    @abstractmethod
    def clone(self) -> MemoryState:
        """Return an independent copy."""

    @abstractmethod
    def to(self, device: torch.device | str) -> None:
        """Move every tensor."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all tensors."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return all tensors by name."""

    @abstractmethod
    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Take over the `state_dict` of a state with the same options and number of rows."""


def joined(**parts: Mapping[Any, Tensor]) -> dict[str, Tensor]:
    """Join the tensors of several parts in one dictionary, with keys `part.key`."""
    return {f"{part}.{key}": tensor for part, tensors in parts.items() for key, tensor in tensors.items()}


def part(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors of one part of a `joined` dictionary, with the part's own keys."""
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}


def by_layer(tensors: Mapping[str, Tensor], device: torch.device | str) -> dict[int, Tensor]:
    """Return tensors by layer number, on a device."""
    return {int(layer): tensor.to(device) for layer, tensor in tensors.items()}


def keep_columns(tensor: Tensor, columns: Tensor, dim: int) -> Tensor:
    """Select columns `[rows, kept]`, chosen for each row, along dimension `dim` of `[rows, ...]`."""
    shape = [1] * tensor.dim()
    shape[0], shape[dim] = columns.shape
    size = list(tensor.shape)
    size[dim] = columns.shape[1]
    return tensor.gather(dim, columns.to(tensor.device).view(shape).expand(size))


@dataclass
class RingReading:
    """What one forward reads, and what it leaves behind, by name (`keys`, `values`, ...) and layer."""

    stores: dict[int, Ring]
    new: dict[str, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))


class RingState(MemoryState):
    """Rings of keys and values, filled when segments close.

    A method whose forwards read or leave behind more than `RingReading` overrides `begin` and `end`.

    Attributes:
        rings: by layer.
        open: by name and layer, `[rows, columns, ...]`. `keys`, and `values` where there are some, enter the ring of
            their layer when a segment closes; the rest is dropped.
    """

    def __init__(self, rings: dict[int, Ring], beside: Sequence[str] = ()) -> None:
        self.rings = rings
        self.open: dict[str, dict[int, Tensor]] = {name: {} for name in ("keys", "values", *beside)}

    def begin(self) -> Any:
        return RingReading({layer: ring.view() for layer, ring in self.rings.items()})

    def end(self, reading: Any) -> None:
        self.add(**reading.new)

    def add(self, **new: Mapping[int, Tensor]) -> None:
        """Append `[rows, time, ...]` as new columns, by name and layer."""
        for name, tensors in new.items():
            held = self.open[name]
            for layer, tensor in tensors.items():
                held[layer] = torch.cat([held[layer], tensor], 1) if layer in held else tensor

    def check(self, row: int, columns: Tensor) -> None:
        for held in (self.open["keys"], self.open["values"]):
            for layer, tensor in held.items():
                if not bool(torch.isfinite(tensor[row, columns.to(tensor.device)]).all()):
                    raise ValueError(
                        f"The open segment of row {row} holds NaN or Inf in layer {layer}; nothing was stored, and the "
                        "memory is unchanged. Check the model's weights and dtype (float16 overflows in "
                        f"many models: use bfloat16), then go on from a clone() taken before, or reset([{row}])."
                    )

    def commit(self, row: int, columns: Tensor) -> None:
        for layer, ring in self.rings.items():
            chosen = columns.to(ring.keys.device)
            values = self.open["values"].get(layer)
            ring.append(row, self.open["keys"][layer][row, chosen], None if values is None else values[row, chosen])

    def kept(self, row: int, closed: int) -> int:
        return min(ring.count(row) for ring in self.rings.values())

    def keep(self, columns: Tensor) -> None:
        for held in self.open.values():
            for layer, tensor in held.items():
                held[layer] = keep_columns(tensor, columns, 1)

    def reset(self, rows: Sequence[int]) -> None:
        for ring in self.rings.values():
            ring.reset(rows)

    def select(self, rows: Sequence[int]) -> None:
        for ring in self.rings.values():
            ring.select(rows)
        for held in self.open.values():
            for layer, tensor in held.items():
                held[layer] = tensor[torch.tensor(rows, device=tensor.device)]

    def clone(self) -> Self:
        twin = copy.copy(self)
        twin.rings = {layer: ring.clone() for layer, ring in self.rings.items()}
        twin.open = {name: dict(held) for name, held in self.open.items()}
        return twin

    def to(self, device: torch.device | str) -> None:
        for ring in self.rings.values():
            ring.to(device)
        for held in self.open.values():
            for layer, tensor in held.items():
                held[layer] = tensor.to(device)

    def state_dict(self) -> dict[str, Tensor]:
        rings = {
            f"{layer}.{name}": held for layer, ring in self.rings.items() for name, held in ring.state_dict().items()
        }
        return joined(rings=rings, **self.open)

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        for layer, ring in self.rings.items():
            ring.load_state_dict(part(tensors, f"rings.{layer}"))
        device = next(iter(self.rings.values())).keys.device
        self.open = {name: by_layer(part(tensors, name), device) for name in self.open}

    @property
    def nbytes(self) -> int:
        waiting = sum(tensor.nbytes for held in self.open.values() for tensor in held.values())
        return waiting + sum(ring.nbytes for ring in self.rings.values())


def token_numbers(ring: Ring, hits: Tensor) -> Tensor:
    """Turn hits `[rows, columns, places]`, counted from a row's oldest entry, into numbers of the document's tokens."""
    first = torch.tensor([ring.entries(row).first for row in range(ring.rows)], device=hits.device)
    return torch.where(hits >= 0, hits + first[:, None, None], hits)
