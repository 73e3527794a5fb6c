"""The interface of nearest-neighbour search: which stored entries lie nearest to each query."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from cacheformers.modeling.search.store import Entries

SIMILARITIES = ("l2", "dot")


class Search(ABC):
    """Finds, for each query, the nearest of one row's entries.

    A search holds no state of its own: what a back end keeps between calls lives in `entries.index`.
    """

    @torch.no_grad()
    def __call__(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        """Find the `topk` nearest entries of each query.

        Args:
            queries: `[n, width]`.
            entries: what to look through.
            topk: how many to find.
            similarity: `"l2"` or `"dot"`.

        Returns:
            Scores `[n, topk]`, best first: the inner product q·e for `"dot"`, 2 q·e - |e|² for `"l2"`, which is minus
            the squared distance but for the constant |q|². float32, or float64 if the queries are.
            Hits `[n, topk]`, int64, counted from the oldest entry (0). Of entries with the same score the oldest comes
            first; an exact search takes for the last places the oldest of those that only rounding tells apart
            (`ties.py`). Where fewer entries are found, the hit is -1 and its score -inf; an exact search finds
            `min(topk, entries.count)`, an approximate one may miss some.
        """
        if similarity not in SIMILARITIES:
            raise ValueError(f"similarity is {similarity!r}, it must be one of {', '.join(SIMILARITIES)}")
        if topk < 1:
            raise ValueError(f"topk is {topk}, it must be at least 1")
        found = min(topk, entries.count) if len(queries) else 0
        if found:
            # Autocast would round the products to half precision.
            with torch.autocast(queries.device.type, enabled=False):
                scores, hits = self.find(queries.detach(), entries, found, similarity)
        else:
            scores = queries.new_empty(len(queries), 0, dtype=result_dtype(queries))
            hits = torch.empty_like(scores, dtype=torch.int64)
        if found < topk:
            scores = F.pad(scores, (0, topk - found), value=-torch.inf)
            hits = F.pad(hits, (0, topk - found), value=-1)
        # Written so that NaN, too, counts as not found.
        missing = ~(scores > -torch.inf)
        return scores.masked_fill_(missing, -torch.inf), hits.masked_fill_(missing, -1)

    @abstractmethod
    def find(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        """What `__call__` does, with at least one query and `1 <= topk <= entries.count`."""


def result_dtype(queries: Tensor) -> torch.dtype:
    """In which precision scores are returned: float32 at least."""
    return torch.float64 if queries.dtype == torch.float64 else torch.float32


def between(entries: Entries, start: int, stop: int) -> Tensor:
    """Entries `start` to `stop` (counted from the oldest) as `[stop - start, width]`; a copy only across the seam."""
    parts, seen = [], 0
    for span in entries.spans:
        part = span[max(start - seen, 0) : max(stop - seen, 0)]
        if len(part):
            parts.append(part)
        seen += len(span)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def ranked(scores: Tensor, hits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The best `topk` of candidates `[n, candidates]`: by score, then oldest entry first."""
    hits, by_age = hits.sort(dim=1)
    scores, by_score = scores.gather(1, by_age).sort(dim=1, descending=True, stable=True)
    return scores[:, :topk], hits.gather(1, by_score)[:, :topk]
