"""The best of scores that come tile by tile, searching only blocks of columns whose maximum can still win."""

from __future__ import annotations

import torch
from torch import Tensor

# Columns of a block. Reductions over fewer than 32 are slow on CPUs.
BLOCK = 32
# Tiles of fewer scores are sorted as a whole: searching by blocks would take longer.
FEW = 1 << 17
# Candidates beyond the `topk` best that are collected before sorting.
SPARE = 64


class Nearest:
    """The best `topk` scores of each of `rows` queries, and the entries they belong to.

    Tiles must come oldest entry first. A score that is not greater than `topk` older ones (`floor`) cannot be among the
    best; candidates above it are collected in order of age, and sorted when there is no more room.
    """

    def __init__(self, rows: int, topk: int, dtype: torch.dtype, device: torch.device) -> None:
        self.topk, self.spare = topk, max(SPARE, topk)
        self.scores = torch.full((rows, topk + self.spare), -torch.inf, dtype=dtype, device=device)
        self.hits = torch.full(self.scores.shape, -1, dtype=torch.int64, device=device)
        self.used = torch.zeros(rows, dtype=torch.int64, device=device)  # candidates of each row
        self.floor = torch.full((rows, 1), -torch.inf, dtype=dtype, device=device)

    def add(self, scores: Tensor, start: int) -> None:
        """Add contiguous `scores` `[rows, columns]` of the entries from `start` on, in whole blocks of columns."""
        blocks = scores.unflatten(1, (-1, BLOCK))
        if scores.numel() < FEW or blocks.shape[1] <= self.topk:
            self._put_best(scores, start, torch.arange(len(scores), device=scores.device))
            return
        maxima, floor = blocks.amax(2), self.floor
        # A block with NaN is searched, too.
        row, block = (~(maxima <= floor)).nonzero().unbind(1)
        if len(row) > self.topk * len(scores):
            best = maxima.topk(self.topk + 1).values
            last = best[:, self.topk - 1 : self.topk]
            # Of several blocks with this maximum, it is unknown which hold the oldest entries.
            tied = (best[:, self.topk :] == last) & (last > floor)
            self._put_best(scores, start, tied.nonzero()[:, 0])
            self.floor = torch.maximum(floor, last)
            floor = torch.maximum(floor, last.nextafter(last.new_tensor(-torch.inf))).masked_fill(tied, torch.inf)
            row, block = (~(maxima <= floor)).nonzero().unbind(1)
        found = blocks.flatten(0, 1).index_select(0, row * blocks.shape[1] + block)  # [blocks to search, BLOCK]
        pair, place = (found > floor[row]).nonzero().unbind(1)
        counts = torch.bincount(row[pair], minlength=len(scores))
        if int(counts.max()) > self.spare:
            crowded = counts > self.spare
            self._put_best(scores, start, crowded.nonzero()[:, 0])
            left = ~crowded[row[pair]]
            pair, place, counts = pair[left], place[left], counts.masked_fill(crowded, 0)
        self._put(counts, row[pair], found[pair, place], block[pair] * BLOCK + place + start)

    def best(self) -> tuple[Tensor, Tensor]:
        """Return scores and entries `[rows, topk]`: best first, of equals the oldest first; -inf if there are fewer."""
        self._sort()
        return self.scores[:, : self.topk], self.hits[:, : self.topk]

    def _put_best(self, scores: Tensor, start: int, rows: Tensor) -> None:
        """Add the best of some `rows` of `scores` as candidates, even below the floor."""
        for some in rows.split(max(len(scores) // 4, 1)) if len(rows) < len(scores) else [rows]:
            part = scores if len(some) == len(scores) else scores[some]
            values, columns = top_columns(part, self.topk)
            columns, by_age = columns.sort(dim=1)
            counts = torch.zeros_like(self.used).index_fill_(0, some, columns.shape[1])
            row = some[:, None].expand_as(columns).flatten()
            self._put(counts, row, values.gather(1, by_age).flatten(), columns.flatten() + start)

    def _put(self, counts: Tensor, row: Tensor, values: Tensor, hits: Tensor) -> None:
        """Add candidates: their number in each row, `counts` `[rows]`; the others `[candidates]`, by row, then age."""
        width = self.scores.shape[1]
        if int((self.used + counts).max()) > width:
            self._sort()
        first = self.used + counts - counts.cumsum(0) + width * torch.arange(len(counts), device=row.device)
        place = first[row] + torch.arange(len(row), device=row.device)
        self.scores.view(-1)[place] = values
        self.hits.view(-1)[place] = hits
        self.used += counts

    def _sort(self) -> None:
        values, places = top_columns(self.scores, self.topk)
        hits = self.hits.gather(1, places)
        self.scores[:, : self.topk], self.hits[:, : self.topk] = values, hits
        self.scores[:, self.topk :] = -torch.inf
        self.used.fill_(self.topk)
        self.floor = torch.maximum(self.floor, values[:, -1:])


def top_columns(scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return the best `topk` columns of each row of `scores` `[rows, width]`: by score, then leftmost first."""
    topk = min(topk, scores.shape[1])
    values, columns = scores.topk(min(topk + 1, scores.shape[1]))
    tied = ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -torch.inf)).any(1).nonzero()[:, 0]
    values, columns = values[:, :topk], columns[:, :topk]
    for rows in tied.split(max(len(scores) // 4, 1)) if len(tied) else ():
        columns[rows] = _leftmost(scores[rows], values[rows], columns[rows])
    return values, columns


def _leftmost(scores: Tensor, values: Tensor, columns: Tensor) -> Tensor:
    """Choose and order `columns` `[rows, k]` of the best `values` where some are equal; topk takes any of these."""
    width, topk = scores.shape[1], columns.shape[1]
    last = values[:, -1:]
    place = torch.arange(width, dtype=torch.int32, device=scores.device)
    equal = torch.where(scores == last, place, width).topk(topk, largest=False).values.clamp(max=width - 1)
    rank = torch.arange(topk, device=scores.device) - (values > last).sum(1, keepdim=True)
    columns = torch.where(rank < 0, columns, equal.gather(1, rank.clamp(min=0)).long()).sort(dim=1).values
    order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True).indices
    return columns.gather(1, order)
