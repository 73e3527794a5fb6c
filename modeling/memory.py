"""What every memory method is given and what it must offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cacheformers.modeling.search.store import Ring


@dataclass(frozen=True)
class BaseShape:
    """What a memory must know of the base model."""

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
        """How messages tell bases apart."""
        return f"{self.model_type}, {self.layers} layers of {self.hidden_size}"


EVERYTHING = 2**40  # tokens that stay visible where nothing goes


@dataclass(frozen=True)
class LocalWindow:
    """What self-attention sees besides the open segment.

    Attributes:
        segment_tokens: tokens after which a segment closes (n).
        kept_tokens: newest tokens of closed segments that stay visible (W); 0 is the papers' `segment` window.
        sink_tokens: first tokens of the document that stay visible for ever.
    """

    segment_tokens: int
    kept_tokens: int = 0
    sink_tokens: int = 0

    @property
    def positions(self) -> int:
        """How many positions the base model must offer."""
        return self.segment_tokens + self.kept_tokens + self.sink_tokens

    @property
    def unbounded(self) -> bool:
        """Whether self-attention sees everything that was read."""
        return self.positions >= EVERYTHING


class SegmentCall:
    """One forward over new columns in which no row's segment closes: what layers read, and their scratch.

    It reaches the attention modules as the keyword `memory_state`, all of them the same one: no dataclass, because FSDP
    hands each layer a copy of those.

    Attributes:
        memory: the cache that takes up what this forward leaves behind.
        reading: the method's own part (`MemoryState.begin`).
        local: the cache that self-attention reads.
        real: which new columns are tokens and not padding, `[rows, time]`.
        open: which columns, old and new, belong to each row's open segment, `[rows, columns + time]`.
        visible: which columns, old and new, hold a token that self-attention may see, `[rows, columns + time]`.
        positions: position of each column in its row's local window, `[rows, columns + time]`.
        window_tokens: how many tokens of closed segments each row still sees (sinks apart), `[rows]`.
        ids: of the new columns, `[rows, time]`.
        earlier: hidden states of the pieces before this one; None if another piece follows.
        keep: how many of the last hidden states are wanted; None for all.
        returned: whether the caller gets the memory back (not with use_cache=False, unless it was passed in).
        forgets: whether local keys and values go when it ends (each forward is a segment, and use_cache=False).
        rotate: turns keys `[rows, heads, columns, d_head]` by `[rows, columns]` positions; None where keys carry none.
    """

    def __init__(
        self,
        memory: Any,
        reading: Any,
        local: Any,
        real: Tensor,
        open: Tensor,
        visible: Tensor,
        positions: Tensor,
        window_tokens: list[int],
        ids: Tensor,
    ) -> None:
        self.memory, self.reading, self.local = memory, reading, local
        self.real, self.open, self.visible, self.positions = real, open, visible, positions
        self.window_tokens, self.ids = window_tokens, ids
        self.rotate: Callable[[Tensor, Tensor], Tensor] | None = None
        self.earlier: list[Tensor] | None = None
        self.keep: int | None = None
        self.returned = True
        self.forgets = False
        self.scratch: dict[str, Any] = {}

    @property
    def padded(self) -> bool:
        """Whether some column, old or new, holds nothing for some row."""
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


class MemoryOptions(Protocol):
    """A method's options, resolved against a base model."""

    @property
    def window(self) -> Any: ...

    @property
    def signature(self) -> dict[str, Any]: ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with a memory."""

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers whose output the method changes: LoRA's, unless others are named."""

    @property
    def near_tokens(self) -> int | None:
        """How many tokens a text may have before the memory is read; None if there is nothing to train for that."""

    def new_state(
        self, rows: int, devices: dict[int, torch.device], dtype: torch.dtype, keep_values: bool, cache_size: int | None
    ) -> Any: ...


class LayerMemory(Protocol):
    """What sits on an attention module under the name `memory`."""

    unread_forwards: int

    @property
    def options(self) -> MemoryOptions | None:
        """Options of the active memory; None while none is active here."""

    @property
    def fingerprint(self) -> tuple[float, ...]:
        """A few trained numbers by which two adapters differ."""

    def check_loaded(self) -> None:
        """Raise if the active adapter lacks tensors."""


class MemoryState(ABC):
    """One method's memory for a batch of rows: explicit, filled only by `commit`.

    `MemoryCache` drives it: `begin` before a forward, `end` after it, `commit` when a row's segment closes. What
    belongs to open segments is held in columns, the same columns in which `MemoryCache` holds local keys and values.

    Attributes:
        forward_is_segment: each forward is a segment of its own, whatever its length.
        rings: stores that get one entry a token, by layer; `state_dict` names their tensors `rings.LAYER...`. Files
            hold them in pieces, and everything else of a state whole.
        own_layers: layers whose visible keys and values the state itself holds, so that the local cache does not.
        loss: what the method adds to the loss of the last forward; None for nothing.
        gold: where the answers to what the next forward asks are; None where nobody knows.
        can_crop: the last tokens of open segments can be taken back.
        retrieves: tokens look up single tokens of the document, which `retrieved` names.
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
        """What one forward reads: a frozen look at the memory, and room for what the forward leaves behind."""

    @abstractmethod
    def end(self, reading: Any) -> None:
        """Append what a forward left behind as new columns."""

    @abstractmethod
    def check(self, row: int, columns: Tensor) -> None:
        """Raise ValueError where `commit` with the same arguments would store what must not be stored."""

    @abstractmethod
    def commit(self, row: int, columns: Tensor) -> None:
        """Move one row's open segment into the memory; `columns` `[length]` are its tokens in order."""

    def detach(self) -> None:  # noqa: B027  # most states hold no graph
        """Cut the autograd graph of what is held (done at the end of every top-level forward)."""

    def kept(self, row: int, closed: int) -> int:
        """Count the newest of a row's `closed` tokens of closed segments that can still be read; by default all."""
        return closed

    def retrieved(self) -> dict[int, Tensor]:
        """Return the numbers of the document's tokens that the newest columns retrieved, -1 for none.

        By layer, `[rows, columns, places]`: at least the columns of the last forward, none before it.
        """
        return {}

    @abstractmethod
    def keep(self, columns: Tensor) -> None:
        """Keep only the columns `[rows, kept]` (each row its own)."""

    @abstractmethod
    def reset(self, rows: Sequence[int]) -> None:
        """Forget what the given rows have read."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was; a row may be taken several times."""

    @abstractmethod
    def clone(self) -> MemoryState:
        """An independent copy."""

    @abstractmethod
    def to(self, device: torch.device | str) -> None:
        """Move every tensor."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of everything held."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Everything held, by name."""

    @abstractmethod
    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state_dict` of a state with the same options and number of rows returned."""


def joined(**parts: Mapping[Any, Tensor]) -> dict[str, Tensor]:
    """Tensors of several parts in one dictionary, `part.key`."""
    return {f"{part}.{key}": tensor for part, tensors in parts.items() for key, tensor in tensors.items()}


def part(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors of one part of a `joined` dictionary, under their own keys."""
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}


def by_layer(tensors: Mapping[str, Tensor], device: torch.device | str) -> dict[int, Tensor]:
    """Tensors whose keys are layer numbers, on a device."""
    return {int(layer): tensor.to(device) for layer, tensor in tensors.items()}


def keep_columns(tensor: Tensor, columns: Tensor, dim: int) -> Tensor:
    """Take columns `[rows, kept]`, each row its own, along dimension `dim` of `[rows, ...]`."""
    shape = [1] * tensor.dim()
    shape[0], shape[dim] = columns.shape
    size = list(tensor.shape)
    size[dim] = columns.shape[1]
    return tensor.gather(dim, columns.to(tensor.device).view(shape).expand(size))
