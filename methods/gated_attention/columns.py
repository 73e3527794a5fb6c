"""Keys and values of one layer in columns: appended in place where nobody else reads, and read through views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cacheformers.modeling.memory import keep_columns

LEAST_ROOM = 64  # columns


@dataclass
class Storage:
    """Room for keys and values `[rows, kv_heads, capacity, d]`, of which the first `claimed` columns are taken."""

    keys: Tensor
    values: Tensor
    claimed: int


@dataclass(frozen=True)
class Columns:
    """The first `length` columns of a storage. It never changes: appending gives another one.

    Whoever is first to append goes on in the same storage; an older copy that is appended to later moves out of it. So
    copies cost nothing, and a decoding step does not touch the columns before it.

    Attributes:
        dropped: columns before these that have been forgotten.
    """

    storage: Storage
    length: int
    dropped: int = 0

    @property
    def keys(self) -> Tensor:
        """`[rows, kv_heads, length, d]`"""
        return self.storage.keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """`[rows, kv_heads, length, d]`"""
        return self.storage.values[:, :, : self.length]

    @property
    def end(self) -> int:
        """How many columns there have been."""
        return self.dropped + self.length

    @property
    def nbytes(self) -> int:
        return self.storage.keys.nbytes + self.storage.values.nbytes

    @staticmethod
    def of(keys: Tensor, values: Tensor, dropped: int = 0) -> Columns:
        """Columns that are there already."""
        return Columns(Storage(keys, values, keys.shape[2]), keys.shape[2], dropped)

    def appended(self, keys: Tensor, values: Tensor) -> Columns:
        """With new columns `[rows, kv_heads, time, d]`; as a new tensor where a graph may read the old one."""
        if torch.is_grad_enabled():
            return Columns.of(torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2), self.dropped)
        end = self.length + keys.shape[2]
        storage = self.storage
        if storage.claimed != self.length or storage.keys.shape[2] < end or storage.keys.requires_grad:
            room = end + max(end // 4, LEAST_ROOM)
            storage = Storage(grown(self.keys, room), grown(self.values, room), self.length)
        storage.keys[:, :, self.length : end] = keys
        storage.values[:, :, self.length : end] = values
        storage.claimed = end
        return Columns(storage, end, self.dropped)

    def kept(self, columns: Tensor) -> Columns:
        """Only the columns `[rows, kept]`, each row its own. Forgotten columns come back as anything.

        Raises:
            ValueError: the last columns are to be removed, and others before them have been forgotten.
        """
        count = columns.shape[1]
        if count and bool((columns == torch.arange(count, device=columns.device)).all()):
            if self.dropped and count < self.end:
                raise ValueError("Tokens cannot be removed where heads with a window have forgotten what was before.")
            return Columns(self.storage, count - self.dropped, self.dropped)
        chosen = (columns - self.dropped).clamp(min=0)
        return Columns.of(keep_columns(self.keys, chosen, 2), keep_columns(self.values, chosen, 2))

    def without_first(self, columns: int) -> Columns:
        """Copied without the columns before the one of that number."""
        start = columns - self.dropped
        keys, values = self.keys[:, :, start:], self.values[:, :, start:]
        if not torch.is_grad_enabled():
            keys, values = keys.clone(), values.clone()
        return Columns.of(keys, values, columns)

    def each(self, change: Callable[[Tensor], Tensor]) -> Columns:
        """With every tensor changed; the number of columns must stay."""
        return Columns.of(change(self.keys), change(self.values), self.dropped)


def grown(tensor: Tensor, room: int) -> Tensor:
    """A copy with room for more columns."""
    rows, heads, length, width = tensor.shape
    new = tensor.new_empty(rows, heads, room, width)
    new[:, :, :length] = tensor
    return new
