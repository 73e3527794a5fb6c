"""How good a search was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cacheformers.modeling.search.base import SIMILARITIES, between

if TYPE_CHECKING:
    from cacheformers.modeling.search.store import Entries

TOLERANCE = 1e-6
# Scores in float64 at a time, `[queries, entries]`.
PART = 1 << 22


@torch.no_grad()
def recall(hits: Tensor, queries: Tensor, entries: Entries, topk: int, similarity: str) -> float:
    """Share of the `topk` nearest entries that a search found, judged in float64.

    A hit counts, once, if its squared distance is at most that of the k-th nearest entry + 1e-6 (|q|² + |e|²); for
    `"dot"`, if its inner product is at least the k-th greatest - 1e-6 (|q|² + |e|²).

    Args:
        hits: `[n, topk]`, counted from the oldest entry; negative where nothing was found.
        queries: `[n, width]`.
        entries: what was searched, or what should have been (the float32 entries of a bfloat16 store).
        topk: how many were asked for.
        similarity: `"l2"` or `"dot"`.
    """
    if similarity not in SIMILARITIES:
        raise ValueError(f"similarity is {similarity!r}, it must be one of {', '.join(SIMILARITIES)}")
    count = entries.count
    wanted = min(topk, count)
    if not wanted or not len(queries):
        return 1.0
    stored = between(entries, 0, count).double()
    lengths = stored.square().sum(1)
    good = 0
    rows = max(PART // count, 1)
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
