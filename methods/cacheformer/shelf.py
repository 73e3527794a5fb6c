"""A shelf: the vectors of rows that grow, of which copies share what they had in common.

Questions about a text, beams and copies of a memory go on from the same vectors. So a shelf that others hold, too, is
never copied: its first columns become `shared`, which nobody writes to, and each goes on in vectors of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

AHEAD = 4  # a fourth more room is made where there is none left: texts of a million tokens take gigabytes
AFTER = 64  # so much of a text is room for a question and its answer
Where = tuple[int, int] | Tensor


@dataclass(frozen=True)
class Shelf:
    """Vectors of every row, `[rows, kv_heads, columns, width]`. Each row is written at its own place.

    Attributes:
        own: the vectors after the shared ones, `[rows, kv_heads, allocated, width]`.
        private: no other state uses the room after a row's last vector, so new vectors may be written there in place.
        shared: its first `begin` columns are those of rows, and other states may hold them, too,
            `[texts, kv_heads, allocated, width]`; None for none.
        text: by row, which of `shared` it begins with.
    """

    own: Tensor
    private: bool = False
    shared: Tensor | None = None
    begin: int = 0
    text: tuple[int, ...] = ()

    @property
    def shape(self) -> torch.Size:
        """The shape of `whole`."""
        rows, kv_heads, columns, width = self.own.shape
        return torch.Size((rows, kv_heads, self.begin + columns, width))

    @property
    def dtype(self) -> torch.dtype:
        return self.own.dtype

    @property
    def requires_grad(self) -> bool:
        return self.own.requires_grad or (self.shared is not None and self.shared.requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes of all vectors; shared ones count once."""
        return self.own.nbytes + (0 if self.shared is None else self.shared.nbytes)

    @property
    def whole(self) -> Tensor:
        """All vectors in one tensor, a copy where some are shared."""
        if self.shared is None:
            return self.own
        return torch.cat([self.rows_of(self.shared[:, :, : self.begin]), self.own], 2)

    def rows_of(self, shared: Tensor) -> Tensor:
        """Return the part of `shared` with which each row begins, without a copy where all begin with the same."""
        return shared.expand(len(self.own), *shared.shape[1:]) if len(shared) == 1 else shared[list(self.text)]

    def cut(self, columns: int) -> Shelf:
        """Show the first columns alone."""
        return replace(self, own=self.own[:, :, : max(columns - self.begin, 0)], begin=min(self.begin, columns))

    def change(self, function: Callable[[Tensor], Tensor]) -> Shelf:
        """Apply a function to every tensor."""
        shared = None if self.shared is None else function(self.shared)
        return replace(self, own=function(self.own), private=False, shared=shared)

    def split(self, columns: int) -> Shelf:
        """Share the first columns of all rows from now on, if none are shared yet."""
        columns = min(columns, self.own.shape[2])  # some kinds of representatives have no values
        if self.shared is not None or columns == 0:
            return self
        return Shelf(self.own[:, :, columns:], False, self.own, columns, tuple(range(len(self.own))))

    def select(self, rows: Sequence[int], columns: Sequence[int]) -> Shelf:
        """Make row i what row `rows[i]` was; rows that are taken several times share what they hold.

        Args:
            columns: how many vectors each row holds, before.
        """
        old, own = self, self.own
        if len(set(rows)) < len(rows):
            held = [columns[row] for row in rows]
            old = self.split(min(held))
            own = old.own[:, :, : max(held) - old.begin]  # without room
        own = own[torch.tensor(rows, dtype=torch.long, device=own.device)]
        if old.shared is None:
            return Shelf(own, private=True)
        texts = [old.text[row] for row in rows]
        used = sorted(set(texts))
        shared = old.shared if len(used) == len(old.shared) else old.shared[used]
        return Shelf(own, True, shared, old.begin, tuple(used.index(text) for text in texts))

    def written(self, starts: Sequence[int], new: Tensor, most: int | None = None, expected: int = 0) -> Shelf:
        """Write `[rows, kv_heads, count, width]` from each row's start on (one start holds for all rows).

        In place where possible, but never with gradients on, because a graph may need the old content.

        Args:
            most: vectors of a row for which room is made ahead; None without a bound.
            expected: vectors that a row is going to have. Room is made for them at once, and for what may follow them,
                because growing takes the old vectors and the new ones at the same time.
        """
        new = new.to(self.own.dtype)
        if torch.is_grad_enabled():
            return Shelf(put(self.whole, starts, new))
        mine = self.private and self.own.is_inference() == torch.is_inference_mode_enabled()
        old = self if mine else self.split(min(starts))
        begins = [start - old.begin for start in starts]
        own, needed = old.own, max(begins) + new.shape[2]
        if not mine:
            own = own[:, :, : max(begins)]
        if needed > own.shape[2]:
            room = own.shape[2] + own.shape[2] // AHEAD
            if expected - old.begin >= needed:
                room = expected - old.begin + expected // AFTER
            room = max(needed, room if most is None else min(room, most - old.begin))
            own = torch.cat([own, own.new_zeros(*own.shape[:2], room - own.shape[2], own.shape[3])], 2)
        write(own, begins, new)
        return replace(old, own=own, private=True)

    def forgotten(self, sinks: int, fewer: Tensor, left: Tensor) -> Shelf:
        """Leave out the next `fewer` vectors after the sinks; `left` remain. Both by row, `[rows, 1]`."""
        where = after_sinks(left, fewer, sinks, self.own.shape[1])
        return Shelf(take(self, slice(None), where)[:, :, 0], private=not torch.is_grad_enabled())


def put(vectors: Tensor, starts: Sequence[int], new: Tensor) -> Tensor:
    """Return a new tensor with `new` from each row's start on."""
    if len(starts) == 1:
        return torch.cat([vectors[:, :, : starts[0]], new], 2)
    missing = max(max(starts) + new.shape[2] - vectors.shape[2], 0)
    rows, kv_heads, _, width = vectors.shape
    vectors = torch.cat([vectors, vectors.new_zeros(rows, kv_heads, missing, width)], 2)
    write(vectors, starts, new)
    return vectors


def write(vectors: Tensor, starts: Sequence[int], new: Tensor) -> None:
    """Write from each row's start on, in place."""
    count = new.shape[2]
    if len(starts) == 1:
        vectors[:, :, starts[0] : starts[0] + count] = new
        return
    places = (torch.tensor(starts)[:, None] + torch.arange(count)).to(new.device)
    row = torch.arange(len(starts), device=new.device)[:, None]
    vectors[row, :, places] = new.transpose(1, 2)


def after_sinks(count: Tensor, hidden: Tensor, sinks: int, kv_heads: int) -> Tensor:
    """Return where `count` columns are, if `hidden` after the sinks are left out, `[rows or 1, kv_heads, 1, columns]`.

    Both are `[rows or 1, 1]`; rows with fewer columns than others repeat their last.
    """
    columns = torch.arange(int(count.max())).minimum((count - 1).clamp(min=0))
    columns = torch.where(columns < sinks, columns, columns + hidden)
    return columns[:, None, None].expand(-1, kv_heads, -1, -1)


def take(store: Tensor | Shelf, heads: slice, where: Where) -> Tensor:
    """Take columns of some heads of a store `[rows, kv_heads, tokens, width]`, for each part of a tile.

    Args:
        where: (start, end), the same for all; or the columns' numbers, `[rows or 1, some kv_heads, parts, columns]`.

    Returns:
        `[rows, some kv_heads, parts, columns, width]`
    """
    if isinstance(store, Tensor):
        return take_columns(store, heads, where)
    if store.shared is None:
        return take_columns(store.own, heads, where)
    begin = store.begin
    if isinstance(where, tuple):
        old = store.rows_of(take_columns(store.shared, heads, (where[0], min(where[1], begin))))
        own = take_columns(store.own, heads, (max(where[0] - begin, 0), max(where[1] - begin, 0)))
        return torch.cat([old, own], 3)
    old = take_columns(store.shared, heads, where.clamp(max=begin - 1), store.text)
    if not store.own.shape[2]:
        return old
    own = take_columns(store.own, heads, (where - begin).clamp(min=0))
    return torch.where((where < begin).to(own.device)[..., None], old, own)


def take_columns(store: Tensor, heads: slice, where: Where, rows: Sequence[int] | None = None) -> Tensor:
    """`take` from a tensor; `rows` says which of its rows each row takes from, None for its own."""
    if isinstance(where, tuple):
        return store[:, heads, None, where[0] : where[1]]
    places = flat_places(store, heads, where, rows)
    return store.flatten(0, 2).index_select(0, places.flatten()).unflatten(0, places.shape)


def add(gradient: Tensor, heads: slice, where: Where, added: Tensor) -> None:
    """Add to columns of a contiguous gradient: the inverse of `take`."""
    if isinstance(where, tuple):
        gradient[:, heads, where[0] : where[1]] += added[:, :, 0]
    else:
        index = flat_places(gradient, heads, where).flatten()[:, None].expand(-1, added.shape[-1])
        gradient.view(-1, gradient.shape[-1]).scatter_add_(0, index, added.flatten(0, -2))


def flat_places(store: Tensor, heads: slice, where: Tensor, of: Sequence[int] | None = None) -> Tensor:
    """Number columns `[rows or 1, some kv_heads, parts, columns]` of a store whose first three dimensions are one."""
    rows, kv_heads, tokens = store.shape[:3]
    begins = torch.arange(0, rows * kv_heads * tokens, tokens, device=store.device).view(rows, kv_heads)[:, heads]
    if of is not None:
        begins = begins[list(of)]
    return where.to(store.device) + begins[..., None, None]
