"""The store that is searched: a ring of entries for every row of a batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Entries:
    """What a search looks through: one row's entries, oldest first.

    Attributes:
        spans: one or two tensors `[count_i, width]`; together, in this order, they are the entries from the oldest to
            the newest. Two where the ring's seam lies between them.
        first: lifelong number of the oldest entry (how many were dropped before it since the last reset).
        index: scratch of the row's store where an approximate back end keeps its index between calls.
    """

    spans: tuple[Tensor, ...]
    first: int = 0
    index: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(len(span) for span in self.spans)

    def oldest(self, count: int) -> Entries:
        """The oldest `count` of them."""
        spans, left = [], max(count, 0)
        for span in self.spans:
            spans.append(span[:left])
            left -= len(spans[-1])
        return Entries(tuple(spans), self.first, self.index)


class Ring:
    """First-in-first-out store of at most `capacity` entries a row (Neurocache, section 3.1).

    Rows of the batch share a physical row until one of them writes (`owner`), so that beams cost nothing. Memory is
    allocated geometrically up to the capacity. Writing happens in place, except while an autograd graph may still
    read the tensors: then they are copied first.

    Args:
        rows: number of batch rows.
        capacity: most entries a row keeps; 0 keeps none.
        width: size of an entry.
        value_width: size of the second tensor kept beside each entry (training re-encodes from it), None for none.
        dtype, device: of both tensors.
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
        self.capacity = capacity
        self.keys = torch.zeros(rows, 0, width, dtype=dtype, device=device)  # [physical rows, allocated, width]
        self.values = None if value_width is None else self.keys.new_zeros(rows, 0, value_width)
        self.written = [0] * rows  # entries ever written, per physical row
        self.owner = list(range(rows))  # batch row -> physical row
        self.index: list[dict[str, Any]] = [{} for _ in range(rows)]
        self._read_by_graph = False

    @property
    def rows(self) -> int:
        return len(self.owner)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + (0 if self.values is None else self.values.nbytes)

    def count(self, row: int) -> int:
        """Number of entries that batch row `row` holds."""
        return min(self.written[self.owner[row]], self.capacity)

    def view(self) -> Ring:
        """A frozen look at the store: later writes to `self` do not change it while gradients are being recorded."""
        view = copy.copy(self)
        view.written, view.owner, view.index = list(self.written), list(self.owner), list(self.index)
        self._read_by_graph = self._read_by_graph or torch.is_grad_enabled()
        return view

    def entries(self, row: int) -> Entries:
        """The entries of one batch row, oldest first."""
        physical = self.owner[row]
        keys, written = self.keys[physical], self.written[physical]
        if written <= self.capacity:
            return Entries((keys[:written],), 0, self.index[physical])
        seam = written % self.capacity
        spans = (keys[seam:], keys[:seam]) if seam else (keys,)
        return Entries(spans, written - self.capacity, self.index[physical])

    def slots(self, hits: Tensor) -> Tensor:
        """Where entries lie in `keys.flatten(0, 1)`: `hits` `[rows, ...]` counts from each row's oldest entry."""
        written = torch.tensor([self.written[physical] for physical in self.owner])
        seam = torch.where(written > self.capacity, written % max(self.capacity, 1), 0)
        allocated = self.keys.shape[1]
        shape = (-1, *[1] * (hits.dim() - 1))
        start = (torch.tensor(self.owner) * allocated).view(shape).to(hits.device)
        return start + (hits.clamp(min=0) + seam.view(shape).to(hits.device)) % max(allocated, 1)

    def append(self, row: int, keys: Tensor, values: Tensor | None = None) -> None:
        """Write entries `[time, width]` (and values `[time, value_width]`) of one batch row; the oldest make room."""
        if (values is None) != (self.values is None):
            raise ValueError("pass values if, and only if, this store keeps values beside its entries")
        length = len(keys)
        if length == 0 or self.capacity == 0:
            return
        physical = self._own(row)
        self._grow(min(self.written[physical] + length, self.capacity))
        if self._read_by_graph or self.keys.is_inference():
            self.keys = self.keys.clone()
            self.values = None if self.values is None else self.values.clone()
            self._read_by_graph = False
        skipped = max(length - self.capacity, 0)
        start = (self.written[physical] + skipped) % self.capacity
        head = min(length - skipped, self.capacity - start)
        for store, new in ((self.keys, keys), (self.values, values)):
            if store is None or new is None:
                continue
            new = new[skipped:].detach().to(store)
            store[physical, start : start + head] = new[:head]
            store[physical, : len(new) - head] = new[head:]
        self.written[physical] += length

    def _own(self, row: int) -> int:
        """Give a batch row a physical row of its own if it shares one."""
        physical = self.owner[row]
        if self.owner.count(physical) == 1:
            return physical
        unused = sorted(set(range(len(self.written))) - set(self.owner))
        if unused:
            fresh = unused[0]
            if self._read_by_graph:
                self.keys = self.keys.clone()
                self.values = None if self.values is None else self.values.clone()
                self._read_by_graph = False
            self.keys[fresh] = self.keys[physical]
            if self.values is not None:
                self.values[fresh] = self.values[physical]
            self.written[fresh], self.index[fresh] = self.written[physical], {}
        else:
            fresh = len(self.written)
            self.keys = torch.cat([self.keys, self.keys[physical : physical + 1]])
            if self.values is not None:
                self.values = torch.cat([self.values, self.values[physical : physical + 1]])
            self.written.append(self.written[physical])
            self.index.append({})
        self.owner[row] = fresh
        return fresh

    def _grow(self, needed: int) -> None:
        allocated = self.keys.shape[1]
        if needed <= allocated:
            return
        extra = min(max(2 * allocated, needed), self.capacity) - allocated
        self.keys = torch.cat([self.keys, self.keys.new_zeros(len(self.keys), extra, self.keys.shape[2])], 1)
        if self.values is not None:
            padding = self.values.new_zeros(len(self.values), extra, self.values.shape[2])
            self.values = torch.cat([self.values, padding], 1)
        self._read_by_graph = False

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
            self.keys = self.keys[keep]
            self.values = None if self.values is None else self.values[keep]
            self.written, self.index = [self.written[i] for i in used], [self.index[i] for i in used]
            self.owner = [used.index(physical) for physical in self.owner]

    def clone(self) -> Ring:
        """An independent copy (the indexes of approximate back ends are built anew)."""
        twin = copy.copy(self)
        twin.keys = self.keys.clone()
        twin.values = None if self.values is None else self.values.clone()
        twin.written, twin.owner, twin.index = list(self.written), list(self.owner), [{} for _ in self.index]
        twin._read_by_graph = False
        return twin

    def state_dict(self) -> dict[str, Tensor]:
        """Everything but the indexes of approximate back ends, which are built anew."""
        held = {"keys": self.keys, "written": torch.tensor(self.written), "owner": torch.tensor(self.owner)}
        return held if self.values is None else {**held, "values": self.values}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Take over what the `state_dict` of a ring with the same arguments returned.

        Raises:
            ValueError: tensors of other sizes or precision, or values on one side only.
        """
        for name, own in (("keys", self.keys), ("values", self.values)):
            saved = tensors.get(name)
            if (own is None) != (saved is None):
                raise ValueError(
                    f"Of two stores only one keeps {name}: saved {saved is not None}, here {own is not None}."
                )
            if own is None or saved is None:
                continue
            if saved.dtype != own.dtype or saved.dim() != 3 or saved.shape[2] != own.shape[2]:
                raise ValueError(
                    f"The saved store holds {name} of width {saved.shape[-1]} in {saved.dtype}, this one of width "
                    f"{own.shape[2]} in {own.dtype}."
                )
            if saved.shape[1] > self.capacity:
                raise ValueError(
                    f"The saved store has {saved.shape[1]} entries a row, this one room for {self.capacity}."
                )
        self.keys = tensors["keys"].to(self.keys.device)
        self.values = None if self.values is None else tensors["values"].to(self.values.device)
        self.written, self.owner = tensors["written"].tolist(), tensors["owner"].tolist()
        self.index = [{} for _ in self.written]
        self._read_by_graph = False

    def to(self, device: torch.device | str) -> None:
        self.keys = self.keys.to(device)
        self.values = None if self.values is None else self.values.to(device)
