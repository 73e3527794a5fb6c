"""The store that is searched: a ring of entries for every row of a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Entries:
    """One row's entries, oldest first.

    Attributes:
        spans: one or two tensors `[count_i, width]`, which in this order are all entries; `packed` in int8. They are
            two if the ring's seam is between them.
        first: lifelong number of the oldest entry (the number of entries dropped since the last reset).
        index: scratch of the row's store, where back ends keep what they need between calls.
    """

    spans: tuple[Tensor, ...]
    first: int = 0
    index: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(len(span) for span in self.spans)

    def oldest(self, count: int) -> Entries:
        """Return the oldest `count` entries."""
        spans, left = [], max(count, 0)
        for span in self.spans:
            spans.append(span[:left])
            left -= len(spans[-1])
        return Entries(tuple(spans), self.first, self.index)


SCALE_BYTES = 4  # of a float32


def as_int8(entries: Tensor) -> tuple[Tensor, Tensor]:
    """Round entries `[..., width]` to 8 bits; return them and the scale of each, `[..., 1]` in float32."""
    exact = entries.float()
    scale = exact.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (exact / scale).round().to(torch.int8), scale


def packed(entries: Tensor) -> Tensor:
    """Round entries `[..., width]` to 8 bits, with the bytes of their scales behind them: `[..., width + 4]`, int8."""
    rounded, scale = as_int8(entries)
    return torch.cat([rounded, compact(scale).view(torch.int8)], -1)


def unpacked(stored: Tensor) -> Tensor:
    """Return `packed` entries as float32 `[..., width]`, and others as they are."""
    if stored.dtype != torch.int8:
        return stored
    return stored[..., :-SCALE_BYTES] * compact(stored[..., -SCALE_BYTES:]).view(torch.float32)


def compact(tensor: Tensor) -> Tensor:
    """Copy a tensor, so that its bytes can be viewed in another dtype."""
    return tensor.clone(memory_format=torch.contiguous_format)


class Ring:
    """First-in-first-out store of at most `capacity` entries per row (Neurocache, section 3.1).

    Batch rows share a physical row until one of them writes (`owner`), so that beams cost nothing. Allocated memory
    doubles up to the capacity. Writes are in place, except while an autograd graph or a clone may still read the
    tensors: then they are copied first.

    Args:
        rows: number of batch rows.
        width: size of an entry.
        value_width: size of the second tensor stored with each entry (training encodes it again), None for none.
        dtype, device: of both tensors. In int8 each entry is `packed`, and there are no values.
    """

    def __init__(
        self,
        rows: int,
        capacity: int,
        width: int,
        value_width: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity, self.width = capacity, width
        stored = width + SCALE_BYTES if dtype == torch.int8 else width
        self.keys = torch.zeros(rows, 0, stored, dtype=dtype, device=device)  # [physical rows, allocated, width]
        self.values = None if value_width is None else self.keys.new_zeros(rows, 0, value_width)
        self.written = [0] * rows  # entries ever written, per physical row
        self.owner = list(range(rows))  # batch row -> physical row
        self.index: list[dict[str, Any]] = [{} for _ in range(rows)]
        self._shared = False

    @property
    def rows(self) -> int:
        return len(self.owner)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + (0 if self.values is None else self.values.nbytes)

    @property
    def column_dtype(self) -> torch.dtype:
        """The dtype of entries before they are written."""
        return torch.float32 if self.keys.dtype == torch.int8 else self.keys.dtype

    def stored(self, entries: Tensor) -> Tensor:
        """Return entries `[..., width]` as they are stored."""
        return packed(entries).to(self.keys.device) if self.keys.dtype == torch.int8 else entries.to(self.keys)

    def count(self, row: int) -> int:
        """Return the number of entries of a batch row."""
        return min(self.written[self.owner[row]], self.capacity)

    def view(self) -> Ring:
        """Return a view of the store that later writes to `self` do not change while gradients are recorded."""
        view = copy.copy(self)
        view.written, view.owner, view.index = list(self.written), list(self.owner), list(self.index)
        self._shared = self._shared or torch.is_grad_enabled()
        return view

    def entries(self, row: int) -> Entries:
        """Return the entries of one batch row."""
        physical = self.owner[row]
        keys, written = self.keys[physical], self.written[physical]
        if written <= self.capacity:
            return Entries((keys[:written],), 0, self.index[physical])
        seam = written % self.capacity
        spans = (keys[seam:], keys[:seam]) if seam else (keys,)
        return Entries(spans, written - self.capacity, self.index[physical])

    def sharing(self) -> list[list[int]]:
        """Return the batch rows that share each physical row."""
        used = sorted(set(self.owner))
        return [[row for row in range(self.rows) if self.owner[row] == physical] for physical in used]

    def slots(self, hits: Tensor) -> Tensor:
        """Return where hits `[rows, ...]`, counted from each row's oldest entry, are in `keys.flatten(0, 1)`."""
        written = torch.tensor([self.written[physical] for physical in self.owner])
        seam = torch.where(written > self.capacity, written % max(self.capacity, 1), 0)
        allocated = self.keys.shape[1]
        shape = (-1, *[1] * (hits.dim() - 1))
        start = (torch.tensor(self.owner) * allocated).view(shape).to(hits.device)
        return start + (hits.clamp(min=0) + seam.view(shape).to(hits.device)) % max(allocated, 1)

    def append(self, row: int, keys: Tensor, values: Tensor | None = None) -> None:
        """Write entries `[time, width]` (and values `[time, value_width]`) of one batch row over its oldest ones."""
        length = len(keys)
        if length == 0 or self.capacity == 0:
            return
        physical = self._own(row)
        needed, allocated = min(self.written[physical] + length, self.capacity), self.keys.shape[1]
        if needed > allocated:
            extra = min(max(2 * allocated, needed), self.capacity) - allocated
            self._replace(lambda store: F.pad(store, (0, 0, 0, extra)))
        self._make_writable()
        skipped = max(length - self.capacity, 0)
        start = (self.written[physical] + skipped) % self.capacity
        head = min(length - skipped, self.capacity - start)
        for store, new in ((self.keys, keys), (self.values, values)):
            if store is None or new is None:
                continue
            new = self.stored(new[skipped:].detach())
            store[physical, start : start + head] = new[:head]
            store[physical, : len(new) - head] = new[head:]
        self.written[physical] += length

    def _own(self, row: int) -> int:
        """Give a batch row that shares its physical row a copy of it, and return the row's number."""
        physical = self.owner[row]
        if self.owner.count(physical) == 1:
            return physical
        unused = sorted(set(range(len(self.written))) - set(self.owner))
        if unused:
            fresh = unused[0]
            self._make_writable()
            self.keys[fresh] = self.keys[physical]
            if self.values is not None:
                self.values[fresh] = self.values[physical]
            self.written[fresh], self.index[fresh] = self.written[physical], {}
        else:
            fresh = len(self.written)
            self._replace(lambda store: torch.cat([store, store[physical : physical + 1]]))
            self.written.append(self.written[physical])
            self.index.append({})
        self.owner[row] = fresh
        return fresh

    def _make_writable(self) -> None:
        if self._shared or self.keys.is_inference():
            self._replace(torch.clone)

    def _replace(self, make: Callable[[Tensor], Tensor]) -> None:
        """Replace both tensors by new ones, which nothing else reads."""
        self.keys = make(self.keys)
        self.values = None if self.values is None else make(self.values)
        self._shared = False

    def reset(self, rows: Sequence[int]) -> None:
        """Forget everything of the given batch rows."""
        for row in rows:
            if self.owner.count(self.owner[row]) > 1:
                self._own(row)
            self.written[self.owner[row]] = 0
            self.index[self.owner[row]] = {}

    def select(self, rows: Sequence[int]) -> None:
        """Make batch row i what batch row `rows[i]` was; rows may repeat (they share) or be left out."""
        self.owner = [self.owner[row] for row in rows]
        used = sorted(set(self.owner))
        if len(used) < len(self.written) and len(self.owner) <= len(used):
            keep = torch.tensor(used, dtype=torch.long, device=self.keys.device)
            self._replace(lambda store: store[keep])
            self.written, self.index = [self.written[i] for i in used], [self.index[i] for i in used]
            self.owner = [used.index(physical) for physical in self.owner]

    def clone(self) -> Ring:
        """Return an independent copy, without indexes of back ends; tensors are copied when either of them writes."""
        self._shared = True
        twin = copy.copy(self)
        twin.written, twin.owner, twin.index = list(self.written), list(self.owner), [{} for _ in self.index]
        return twin

    def join(self, others: Sequence[Ring]) -> None:
        """Append the batch rows of other rings with the same arguments."""
        rings = [self, *others]
        self.keys = stacked([ring.keys for ring in rings])
        values = [ring.values for ring in rings if ring.values is not None]
        self.values = stacked(values) if values else None
        self.owner = [
            sum(len(r.written) for r in rings[:place]) + row for place, ring in enumerate(rings) for row in ring.owner
        ]
        self.written = [count for ring in rings for count in ring.written]
        self.index = [{} for _ in self.written]
        self._shared = False

    def state_dict(self) -> dict[str, Tensor]:
        """Return all tensors; the indexes of back ends are built again."""
        held = {"keys": self.keys, "written": torch.tensor(self.written), "owner": torch.tensor(self.owner)}
        return held if self.values is None else {**held, "values": self.values}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Take over the `state_dict` of a ring with the same arguments; raise ValueError for one with others."""
        for name, own in (("keys", self.keys), ("values", self.values)):
            saved = tensors.get(name)
            if own is None and saved is None:
                continue
            if own is None or saved is None or saved.dtype != own.dtype or saved.shape[2:] != own.shape[2:]:
                there, here = (None if store is None else (store.dtype, *store.shape[2:]) for store in (saved, own))
                raise ValueError(f"The saved store holds {name} of another kind or width: {there}, here {here}.")
            if saved.shape[1] > self.capacity:
                raise ValueError(
                    f"The saved store has {saved.shape[1]} entries a row, this one room for {self.capacity}."
                )
        self.keys = tensors["keys"].to(self.keys.device)
        self.values = None if self.values is None else tensors["values"].to(self.values.device)
        self.written, self.owner = tensors["written"].tolist(), tensors["owner"].tolist()
        self.index = [{} for _ in self.written]
        self._shared = False

    def to(self, device: torch.device | str) -> None:
        self.keys = self.keys.to(device)
        self.values = None if self.values is None else self.values.to(device)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate rows `[rows, ...]`, with zeros at the end of those that are shorter than others in a dimension."""
    sizes = [max(lengths) for lengths in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    together = tensors[0].new_zeros(sum(len(tensor) for tensor in tensors), *sizes)
    start = 0
    for tensor in tensors:
        place = tuple(slice(length) for length in tensor.shape[1:])
        together[(slice(start, start + len(tensor)), *place)] = tensor
        start += len(tensor)
    return together


def vectors(store: Tensor, size: int) -> Tensor:
    """View a store `[rows, allocated, n * size]` as vectors `[rows * allocated * n, size]`; an empty one as zeros."""
    return store.new_zeros(store.shape[-1] // size, size) if store.shape[1] == 0 else store.reshape(-1, size)
