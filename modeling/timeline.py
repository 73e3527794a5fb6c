"""Which column of the local window holds which token of which row, and which ids each row has seen.

Rows of a batch share one axis of columns. A column holds, for each row, a token of its open segment, a token of an
earlier segment that the local window keeps, or nothing (padding, or a row that paused). Each row has its own segment
boundaries; columns are only storage.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from cacheformers.modeling.memory import LocalWindow, keep_columns


class Timeline:
    """The columns of a batch, on the host.

    Attributes:
        open: whether a column belongs to the row's open segment, `[rows, columns]`.
        kept: whether a column is of a closed segment and still visible, `[rows, columns]`.
        sink: whether a kept column is not text of the window but a sink, which always stays, or a memory token.
        memory: whether a kept column is a memory token, which stays until the segment after it closes.
        position: of the token in its row's local window, `[rows, columns]`.
        closed: number of segments that each row has closed.
        tokens_read: number of tokens that each row has read.
    """

    COLUMNS = ("open", "kept", "sink", "position", "memory")
    ROWS = ("closed", "tokens_read")

    def __init__(self, rows: int, window: LocalWindow) -> None:
        self.window = window
        self.closed, self.tokens_read = [0] * rows, [0] * rows
        self.clear(rows)

    def clear(self, rows: int) -> None:
        """Forget every column."""
        self.open = torch.zeros(rows, 0, dtype=torch.bool)
        self.kept, self.sink, self.memory = self.open.clone(), self.open.clone(), self.open.clone()
        self.position = torch.zeros(rows, 0, dtype=torch.long)

    @property
    def rows(self) -> int:
        return len(self.open)

    @property
    def columns(self) -> int:
        return self.open.shape[1]

    @property
    def used(self) -> Tensor:
        """Whether a column holds a token that the row still sees, `[rows, columns]`."""
        return self.open | self.kept

    def clone(self) -> Timeline:
        return copy.deepcopy(self)

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything as tensors."""
        columns = self.COLUMNS if self.window.memory_tokens else self.COLUMNS[:-1]  # the other methods have none
        return {
            **{name: getattr(self, name) for name in columns},
            **{name: torch.tensor(getattr(self, name)) for name in self.ROWS},
        }

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Take over a `state_dict`."""
        for name in self.COLUMNS:
            setattr(self, name, tensors[name] if name in tensors else torch.zeros_like(self.open))
        for name in self.ROWS:
            setattr(self, name, tensors[name].tolist())

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was."""
        index = torch.tensor(rows, dtype=torch.long)
        for name in self.COLUMNS:
            setattr(self, name, getattr(self, name)[index])
        self.closed, self.tokens_read = [self.closed[i] for i in rows], [self.tokens_read[i] for i in rows]

    def join(self, others: Sequence[Timeline]) -> None:
        """Append the rows of others, which have as many columns."""
        for name in self.COLUMNS:
            setattr(self, name, torch.cat([getattr(timeline, name) for timeline in (self, *others)]))
        for name in self.ROWS:
            setattr(self, name, [count for timeline in (self, *others) for count in getattr(timeline, name)])

    def leave_inference(self) -> None:
        """Copy tensors that were made in inference mode, which cannot be written in place outside of it."""
        for name in self.COLUMNS:
            tensor = getattr(self, name)
            if tensor.is_inference():
                setattr(self, name, tensor.clone())

    def unuse_first(self, columns: int) -> None:
        """Mark the first columns as unused, in every row."""
        self.leave_inference()
        for name in ("open", "kept", "sink", "memory"):
            getattr(self, name)[:, :columns] = False

    def keep(self, columns: Tensor) -> None:
        """Keep only the columns `[rows, kept]`, chosen for each row."""
        for name in self.COLUMNS:
            setattr(self, name, getattr(self, name).gather(1, columns))

    def reset(self, rows: Sequence[int]) -> None:
        """Forget what the given rows have read."""
        self.leave_inference()
        for row in rows:
            self.open[row] = self.kept[row] = self.sink[row] = self.memory[row] = False
            self.closed[row] = self.tokens_read[row] = 0

    def pieces(self, real: Tensor) -> list[tuple[int, int]]:
        """Cut new columns (start, end) wherever a row begins a new segment.

        Args:
            real: which of the new columns are tokens, `[rows, time]`.
        """
        if int(self.open.sum(1).max()) + real.shape[1] <= self.window.segment_tokens:
            return [(0, real.shape[1])]
        token = self.open.sum(1, keepdim=True) + real.cumsum(1)  # its number in the row's open segment
        segment = (token - 1).clamp(min=0) // self.window.segment_tokens
        begins = torch.cat([torch.zeros_like(segment[:, :1]), segment], 1).diff(dim=1) > 0
        starts = sorted({0, *begins.any(0).nonzero()[:, 0].tolist()})
        return list(zip(starts, [*starts[1:], real.shape[1]], strict=True))

    def full_rows(self) -> list[int]:
        """Return the rows whose open segment is full."""
        return (self.open.sum(1) >= self.window.segment_tokens).nonzero()[:, 0].tolist()

    def close(self, row: int) -> Tensor:
        """End a row's segment: choose the tokens that stay visible, and move them before the next segment.

        Returns:
            The number of positions by which each column moved, `[columns]`.
        """
        self.leave_inference()
        self.kept[row] &= ~self.memory[row]
        self.sink[row] &= ~self.memory[row]
        self.memory[row] = False
        before, seen = self.position[row].clone(), self.used[row].nonzero()[:, 0]
        if self.closed[row] == 0:
            self.sink[row, seen[: self.window.sink_tokens]] = True
        self.closed[row] += 1
        recent = seen[~self.sink[row, seen]]
        recent = recent[max(len(recent) - self.window.kept_tokens, 0) :]
        self.open[row] = False
        self.kept[row] = self.sink[row]
        self.kept[row, recent] = True
        stay = self.kept[row].nonzero()[:, 0]
        self.position[row, stay] = torch.arange(len(stay))
        return torch.where(self.kept[row], self.position[row] - before, 0)

    def drop(self, row: int) -> None:
        """Forget a row's open segment."""
        self.leave_inference()
        self.tokens_read[row] -= int(self.open[row].sum())
        self.open[row] = False

    def needed(self) -> Tensor | None:
        """Return the columns to keep, `[rows, kept]`, None for all; pack rows when half of the columns are unused."""
        if not self.columns:
            return None
        used = self.used
        most = int(used.sum(1).max())
        if self.columns > 2 * max(most, self.window.segment_tokens):
            order = torch.argsort(used.long(), dim=1, stable=True)  # unused columns first: rows align on the right
            return order[:, self.columns - most :]
        first = int(used.any(0).long().argmax()) if most else self.columns
        return torch.arange(first, self.columns).expand(self.rows, -1) if first else None

    def new_positions(self, real: Tensor) -> Tensor:
        """Return the positions of new columns in their rows' windows, `[rows, time]`; 0 for padding."""
        before = self.used.sum(1, keepdim=True)
        return torch.where(real, before + real.cumsum(1) - 1, 0)

    def append(self, real: Tensor, position: Tensor) -> None:
        """Add columns that were read."""
        none = torch.zeros_like(real)
        self._add(open=real, kept=none, sink=none, position=position, memory=none)
        self.tokens_read = [have + new for have, new in zip(self.tokens_read, real.sum(1).tolist(), strict=True)]

    def append_memory(self, real: Tensor, position: Tensor) -> None:
        """Add columns of memory tokens."""
        self._add(open=torch.zeros_like(real), kept=real, sink=real, position=position, memory=real)

    def _add(self, **columns: Tensor) -> None:
        for name in self.COLUMNS:
            setattr(self, name, torch.cat([getattr(self, name), columns[name]], 1))

    def remove_last(self, columns: int) -> None:
        """Remove the last columns, which all hold tokens of open segments."""
        self.keep(torch.arange(self.columns - columns).expand(self.rows, -1))
        self.tokens_read = [tokens - columns for tokens in self.tokens_read]


class SeenIds:
    """The ids that each row has seen since the last `read()`, as one number per row.

    `generate` skips as many ids of a prompt as the cache has seen, whatever they were. To tell whether they were the
    same, this adds up a hash of every id and its place. A sum takes 8 bytes, and the last ids can be subtracted.

    Attributes:
        total: sum of the hashes of the row's ids, `[rows]`; None if unknown (memories from older files).
        recent: hashes of the columns that are held, 0 for padding, `[rows, columns]`.
    """

    def __init__(self, rows: int) -> None:
        self.total: Tensor | None = torch.zeros(rows, dtype=torch.long)
        self.recent = torch.zeros(rows, 0, dtype=torch.long)

    def append(self, ids: Tensor, real: Tensor, tokens_read: Sequence[int]) -> None:
        """Add new columns.

        Args:
            ids: `[rows, time]`.
            real: which of them are tokens, `[rows, time]`.
            tokens_read: tokens that each row had read before.
        """
        new = hashes(ids, real, torch.tensor(tokens_read))
        self.recent = torch.cat([self.recent.to(ids.device), new], 1)
        if self.total is not None:
            self.total = self.total.to(ids.device) + new.sum(1)

    def agree_with(self, ids: Tensor, real: Tensor, tokens_read: Sequence[int]) -> bool:
        """Whether the rows have seen exactly these ids `[rows, time]`.

        Args:
            tokens_read: tokens that each row has read by now.
        """
        if self.total is None:
            return True
        found = hashes(ids, real, torch.tensor(tokens_read) - real.sum(1).cpu())
        return bool((found.sum(1) == self.total.to(ids.device)).all())

    def remove_last(self, columns: int) -> None:
        """Subtract the last columns from the total (`keep` removes the columns)."""
        if self.total is not None:
            self.total = self.total - self.recent[:, -columns:].sum(1)

    def keep(self, columns: Tensor) -> None:
        """Keep only the columns `[rows, kept]`, chosen for each row."""
        self.recent = keep_columns(self.recent, columns, 1)

    def forget(self) -> None:
        """Forget all ids."""
        self.total = torch.zeros(len(self.recent), dtype=torch.long)

    def reset(self, rows: Sequence[int]) -> None:
        """Forget the ids of the given rows."""
        if self.total is not None:
            self.total = self.total.clone()
            self.total[list(rows)] = 0

    def select(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        self.recent = self.recent[rows.to(self.recent.device)]
        if self.total is not None:
            self.total = self.total[rows.to(self.total.device)]

    def join(self, others: Sequence[SeenIds]) -> None:
        """Append the rows of others, which have as many columns, and forget all ids."""
        self.recent = torch.cat([self.recent, *(other.recent.to(self.recent.device) for other in others)])
        self.forget()

    def clone(self) -> SeenIds:
        return copy.copy(self)  # its tensors are replaced, never changed in place

    def state_dict(self) -> dict[str, Tensor]:
        return {"recent": self.recent} if self.total is None else {"recent": self.recent, "total": self.total}

    def load_state_dict(self, tensors: dict[str, Tensor], rows: int, columns: int) -> None:
        """Take over a `state_dict`; older files hold none."""
        self.recent = tensors.get("recent", torch.zeros(rows, columns, dtype=torch.long))
        self.total = tensors.get("total")


def hashes(ids: Tensor, real: Tensor, before: Tensor) -> Tensor:
    """Hash every id with its place, `[rows, time]`, 0 for padding; sums and products wrap around at 64 bits.

    Args:
        ids, real: `[rows, time]`.
        before: tokens of each row before these, `[rows]`, on the host.
    """
    place = (before[:, None] + real.cpu().cumsum(1)).to(ids.device)
    mixed = ids.long() * 0x1E3779B97F4A7C15 + place * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 29)) * 0x14D049BB133111EB
    return torch.where(real.to(ids.device), mixed ^ (mixed >> 32), 0)
