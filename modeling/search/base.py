"""The interface of nearest-neighbor search, and how well a search did."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from cacheformers.modeling.search.store import Entries, unpacked

SIMILARITIES = ("l2", "dot")
TOLERANCE = 1e-6
# Scores in float64 at a time, `[queries, entries]`.
RECALL_SCORES = 1 << 22


class Search(ABC):
    """Finds the nearest of one row's entries for each query.

    A search has no state: a back end keeps its data between calls in `entries.index`.
    """

    @torch.no_grad()
    def __call__(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        """Find the `topk` nearest entries of each query.

        Args:
            queries: `[n, width]`.
            entries: one row's entries.
            topk: how many to find.
            similarity: `"l2"` or `"dot"`.

        Returns:
            Scores `[n, topk]`, best first: the inner product q·e for `"dot"`, and 2 q·e - |e|² for `"l2"`, which is the
            negative squared distance plus the constant |q|². float32, or float64 if the queries are.
            Hits `[n, topk]`, int64, counted from the oldest entry (0). Of entries with equal scores the oldest comes
            first, and an exact search treats scores as equal that differ only by rounding (`exact.settle`). Where fewer
            entries are found, the hit is -1 and its score -inf; an exact search finds `min(topk, entries.count)`, an
            approximate one may find fewer.
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
        # NaN counts as not found, too.
        missing = ~(scores > -torch.inf)
        return scores.masked_fill_(missing, -torch.inf), hits.masked_fill_(missing, -1)

    @abstractmethod
    def find(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        """Search as in `__call__`, with at least one query and `1 <= topk <= entries.count`."""


def result_dtype(queries: Tensor) -> torch.dtype:
    """Return the precision of scores: float32, or float64 for float64 queries."""
    return torch.float64 if queries.dtype == torch.float64 else torch.float32


def between(entries: Entries, start: int, stop: int) -> Tensor:
    """Return entries `start` to `stop` (from the oldest), `[stop - start, width]`; int8 and across the seam a copy."""
    parts, seen = [], 0
    for span in entries.spans:
        part = span[max(start - seen, 0) : max(stop - seen, 0)]
        if len(part):
            parts.append(part)
        seen += len(span)
    return unpacked(parts[0] if len(parts) == 1 else torch.cat(parts))


def ranked(scores: Tensor, hits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return the best `topk` of candidates `[n, candidates]`: by score, then oldest entry first. Sorts in place."""
    # Sorting takes long, and most rows come in order, without equal scores.
    rows = (~(scores[:, 1:] < scores[:, :-1])).any(1).nonzero()[:, 0]
    if len(rows):
        some, by_age = hits[rows].sort(dim=1)
        best, by_score = scores[rows].gather(1, by_age).sort(dim=1, descending=True, stable=True)
        scores[rows], hits[rows] = best, some.gather(1, by_score)
    return scores[:, :topk], hits[:, :topk]


@torch.no_grad()
def recall(hits: Tensor, queries: Tensor, entries: Entries, topk: int, similarity: str) -> float:
    """Return the share of the `topk` nearest entries that a search found, judged in float64.

    A hit counts, once, if its squared distance is at most that of the k-th nearest entry + 1e-6 (|q|² + |e|²); for
    `"dot"`, if its inner product is at least the k-th greatest - 1e-6 (|q|² + |e|²).

    Args:
        hits: `[n, topk]`, counted from the oldest entry; negative where nothing was found.
        queries: `[n, width]`.
        entries: the searched ones, or more exact ones (the float32 entries of a bfloat16 or int8 store).
    """
    count = entries.count
    wanted = min(topk, count)
    if not wanted or not len(queries):
        return 1.0
    stored = between(entries, 0, count).double()
    lengths = stored.square().sum(1)
    good = 0
    rows = max(RECALL_SCORES // count, 1)
    for part, found in zip(queries.double().split(rows), hits.split(rows), strict=True):
        scores = part @ stored.T
        if similarity == "l2":
            scores = 2 * scores - lengths
        last = scores.topk(wanted).values[:, -1:]
        enough = scores >= last - TOLERANCE * (part.square().sum(1, keepdim=True) + lengths)
        valid = (found >= 0) & (found < count)
        seen = torch.zeros_like(enough, dtype=torch.int8)
        seen.scatter_reduce_(1, found.clamp(0, count - 1), valid.to(torch.int8), "amax")
        good += int((enough & seen.bool()).sum())
    return good / (len(queries) * wanted)
