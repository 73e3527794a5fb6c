"""Explicit state of the local window: which column holds which token of which row.

Rows of a batch share one axis of columns. A column holds, for each row, a token of its open segment, a token of an
earlier segment that the local window keeps, or nothing (padding, or a row that paused). Boundaries are each row's own;
columns are only storage.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from cacheformers.modeling.memory import LocalWindow


class Timeline:
    """Bookkeeping of columns, on the host.

    Attributes:
        open: column belongs to the row's open segment, `[rows, columns]`.
        kept: column is of a closed segment and still visible, `[rows, columns]`.
        sink: kept column that stays for ever, `[rows, columns]`.
        position: of the token in its row's local window, `[rows, columns]`.
        closed: segments that each row has closed.
        tokens_read: tokens that each row has read.
    """

    COLUMNS = ("open", "kept", "sink", "position")
    ROWS = ("closed", "tokens_read")

    def __init__(self, rows: int, window: LocalWindow) -> None:
        self.window = window
        self.closed, self.tokens_read = [0] * rows, [0] * rows
        self.clear(rows)

    def clear(self, rows: int) -> None:
        """Forget every column."""
        self.open = torch.zeros(rows, 0, dtype=torch.bool)
        self.kept, self.sink = self.open.clone(), self.open.clone()
        self.position = torch.zeros(rows, 0, dtype=torch.long)

    @property
    def rows(self) -> int:
        return len(self.open)

    @property
    def columns(self) -> int:
        return self.open.shape[1]

    @property
    def used(self) -> Tensor:
        """Column holds a token that the row still sees, `[rows, columns]`."""
        return self.open | self.kept

    def clone(self) -> Timeline:
        twin = copy.copy(self)
        twin.open, twin.kept, twin.sink = self.open.clone(), self.kept.clone(), self.sink.clone()
        twin.position = self.position.clone()
        twin.closed, twin.tokens_read = list(self.closed), list(self.tokens_read)
        return twin

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as tensors."""
        return {
            **{name: getattr(self, name) for name in self.COLUMNS},
            **{name: torch.tensor(getattr(self, name)) for name in self.ROWS},
        }

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state_dict` returned."""
        for name in self.COLUMNS:
            setattr(self, name, tensors[name])
        for name in self.ROWS:
            setattr(self, name, tensors[name].tolist())

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was."""
        index = torch.tensor(rows, dtype=torch.long)
        self.open, self.kept, self.sink = self.open[index], self.kept[index], self.sink[index]
        self.position = self.position[index]
        self.closed, self.tokens_read = [self.closed[i] for i in rows], [self.tokens_read[i] for i in rows]

    def keep(self, columns: Tensor) -> None:
        """Keep only the columns `[rows, kept]`, each row its own."""
        self.open, self.kept = self.open.gather(1, columns), self.kept.gather(1, columns)
        self.sink, self.position = self.sink.gather(1, columns), self.position.gather(1, columns)

    def reset(self, rows: Sequence[int]) -> None:
        """The given rows have read nothing."""
        for row in rows:
            self.open[row] = self.kept[row] = self.sink[row] = False
            self.closed[row] = self.tokens_read[row] = 0

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

    def full_rows(self) -> list[int]:
        """Rows whose open segment has all its tokens."""
        return (self.open.sum(1) >= self.window.segment_tokens).nonzero()[:, 0].tolist()

    def close(self, row: int) -> Tensor:
        """End a row's segment: choose what stays visible, and give it the positions before the next segment.

        Returns:
            By how many positions each column moved, `[columns]`.
        """
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
        self.tokens_read[row] -= int(self.open[row].sum())
        self.open[row] = False

    def needed(self) -> Tensor | None:
        """Columns `[rows, kept]` to keep, None for all. Rows are packed once gaps make the columns twice too many."""
        if not self.columns:
            return None
        used = self.used
        most = int(used.sum(1).max())
        if self.columns > 2 * max(most, self.window.segment_tokens):
            order = torch.argsort(used.long(), dim=1, stable=True)  # unused columns first: rows end flush right
            return order[:, self.columns - most :]
        first = int(used.any(0).long().argmax()) if most else self.columns
        return torch.arange(first, self.columns).expand(self.rows, -1) if first else None

    def new_positions(self, real: Tensor) -> Tensor:
        """Positions of new columns in their rows' windows, `[rows, time]`; 0 for padding."""
        before = self.used.sum(1, keepdim=True)
        return torch.where(real, before + real.cumsum(1) - 1, 0)

    def append(self, real: Tensor, position: Tensor) -> None:
        """Add columns that were read."""
        none = torch.zeros_like(real)
        self.open, self.position = torch.cat([self.open, real], 1), torch.cat([self.position, position], 1)
        self.kept, self.sink = torch.cat([self.kept, none], 1), torch.cat([self.sink, none], 1)
        self.tokens_read = [have + new for have, new in zip(self.tokens_read, real.sum(1).tolist(), strict=True)]

    def remove_last(self, columns: int) -> None:
        """Undo the last columns, which all hold tokens of open segments."""
        self.keep(torch.arange(self.columns - columns).expand(self.rows, -1))
        self.tokens_read = [tokens - columns for tokens in self.tokens_read]
