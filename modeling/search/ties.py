"""Ties: entries that rounding cannot tell apart count as equally near, and of these the oldest are found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cacheformers.modeling.search.base import between, ranked, result_dtype
from cacheformers.modeling.search.nearest import top_columns

if TYPE_CHECKING:
    from cacheformers.modeling.search.store import Entries

# Scores that differ by at most this share of |q|² + |e|² are equal: a model that reads the same text in other pieces
# gives states that differ in their last bits. Below the 1e-6 by which `recall` judges.
EQUAL = {torch.float32: 2.0**-20, torch.float64: 2.0**-47}
# The first search is off by about one share itself, so it leaves everything within this many to the second one.
DOUBTFUL = 4
# Bytes of scores in float64 at a time, and half as many of entries.
BYTES = 8 << 20


def settle(
    queries: Tensor, entries: Entries, scores: Tensor, hits: Tensor, topk: int, similarity: str
) -> tuple[Tensor, Tensor]:
    """Give the last places to the oldest of the entries that are equally near, whatever the first search rounded.

    Queries whose last hit is clearly nearer than the next entry keep their hits. The others are searched again with
    scores in float64.

    Args:
        scores, hits: the best `topk + 1`, `[n, topk + 1]`; one column less where there are no more entries.

    Returns:
        Scores and hits `[n, topk]`.
    """
    if scores.shape[1] == topk:
        return scores, hits
    last = gathered(entries, hits[:, topk - 1].clamp(min=0)).to(scores.dtype)
    size = queries.to(scores.dtype).square().sum(1) + last.square().sum(1)
    doubtful = scores[:, topk - 1] - scores[:, topk] <= DOUBTFUL * EQUAL[result_dtype(queries)] * size
    scores, hits = scores[:, :topk].clone(), hits[:, :topk].clone()
    for rows in doubtful.nonzero()[:, 0].split(max(BYTES // (8 * entries.count), 1)):
        better, oldest = _oldest_of_equal(queries[rows], entries, topk, similarity)
        scores[rows], hits[rows] = better.to(scores.dtype), oldest
    return scores, hits


def _oldest_of_equal(queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
    """The entries that are clearly nearer than the k-th, and the oldest of those that are as near as it."""
    exact = queries.double()
    scores, size = exact.new_empty(len(exact), entries.count), exact.new_empty(len(exact), entries.count)
    step = max(BYTES // (16 * exact.shape[1]), 1)
    for start in range(0, entries.count, step):
        part = between(entries, start, min(start + step, entries.count)).double()
        scores[:, start : start + step] = exact @ part.T
        size[:, start : start + step] = torch.linalg.vector_norm(part, dim=1).square()
    if similarity == "l2":
        scores.mul_(2).sub_(size)
    last = scores.topk(topk).values[:, -1:]
    size.add_(exact.square().sum(1, keepdim=True)).mul_(EQUAL[result_dtype(queries)])
    scores = torch.where((scores - last).abs_() <= size, last, scores)
    del size  # the search for the oldest needs room
    hits = top_columns(scores, topk)[1]
    # Entry by entry: in a matrix product equal entries can get scores that differ in the last bit.
    vectors = gathered(entries, hits.flatten()).double().unflatten(0, hits.shape)
    scores = (vectors * exact[:, None]).sum(2)
    return ranked(scores if similarity == "dot" else 2 * scores - vectors.square().sum(2), hits, topk)


def gathered(entries: Entries, numbers: Tensor) -> Tensor:
    """Entries `[count, width]` by their numbers, counted from the oldest."""
    first, *rest = [span for span in entries.spans if len(span)]
    later = numbers >= len(first)
    found = first[numbers.masked_fill(later, 0)]
    for second in rest:
        found[later] = second[numbers[later] - len(first)]
    return found
