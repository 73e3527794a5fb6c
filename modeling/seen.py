"""Which ids a memory has seen since the last `read()`, as one number a row.

`generate` skips as many ids of a prompt as the cache has seen, whatever they were. To tell whether they were the same,
a memory adds up a hash of every id and its place. That takes 8 bytes a row however long the text, and the last ids can
be taken back.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from cacheformers.modeling.memories.base import keep_columns


class SeenIds:
    """The ids that each row has seen.

    Attributes:
        total: sum of the hashes of the row's ids, `[rows]`; None where it is not known (memories from older files).
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
        """Whether these were the ids, all of them.

        Args:
            tokens_read: tokens that each row has read by now.
        """
        if self.total is None:
            return True
        found = hashes(ids, real, torch.tensor(tokens_read) - real.sum(1).cpu())
        return bool((found.sum(1) == self.total.to(ids.device)).all())

    def remove_last(self, columns: int) -> None:
        """Undo the last columns (the columns themselves go with `keep`)."""
        if self.total is not None:
            self.total = self.total - self.recent[:, -columns:].sum(1)

    def keep(self, columns: Tensor) -> None:
        """Keep only the columns `[rows, kept]`, each row its own."""
        self.recent = keep_columns(self.recent, columns, 1)

    def forget(self) -> None:
        """Nothing has been seen."""
        self.total = torch.zeros(len(self.recent), dtype=torch.long)

    def reset(self, rows: Sequence[int]) -> None:
        """The given rows have seen nothing."""
        if self.total is not None:
            self.total = self.total.clone()
            self.total[list(rows)] = 0

    def select(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        self.recent = self.recent[rows.to(self.recent.device)]
        if self.total is not None:
            self.total = self.total[rows.to(self.total.device)]

    def clone(self) -> SeenIds:
        return copy.copy(self)  # its tensors are replaced, never changed

    def state_dict(self) -> dict[str, Tensor]:
        return {"recent": self.recent} if self.total is None else {"recent": self.recent, "total": self.total}

    def load_state_dict(self, tensors: dict[str, Tensor], rows: int, columns: int) -> None:
        """Take over what `state_dict` returned; nothing is known where that was not kept."""
        self.recent = tensors.get("recent", torch.zeros(rows, columns, dtype=torch.long))
        self.total = tensors.get("total")


def hashes(ids: Tensor, real: Tensor, before: Tensor) -> Tensor:
    """A number for every id at its place, 0 for padding, `[rows, time]`; sums and products wrap around at 64 bits.

    Args:
        ids, real: `[rows, time]`.
        before: tokens of each row before these, `[rows]` on the host.
    """
    place = (before[:, None] + real.cpu().cumsum(1)).to(ids.device)
    mixed = ids.long() * 0x1E3779B97F4A7C15 + place * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 29)) * 0x14D049BB133111EB
    return torch.where(real.to(ids.device), mixed ^ (mixed >> 32), 0)
