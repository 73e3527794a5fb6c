"""Search with bfloat16 products: on processors that have them (AMX, AVX512-BF16, GPUs) a fraction of float32's time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cacheformers.modeling.search.base import Search, between, ranked, result_dtype
from cacheformers.modeling.search.exact import ExactSearch, tile_shape
from cacheformers.modeling.search.nearest import Nearest

if TYPE_CHECKING:
    from cacheformers.modeling.search.store import Entries

# How many are scored again in float32 for each one that is asked for: bfloat16 cannot tell close ones apart.
CANDIDATES = 3
# Bytes of candidates that are scored again at a time.
AGAIN_BYTES = 16 << 20


class RoundedSearch(Search):
    """Looks at every entry in bfloat16, and at the best `CANDIDATES * topk` again in float32.

    Not exact: queries and sums are rounded to 8 bits before the candidates are chosen. For a bfloat16 store.
    """

    def find(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        wanted = min(CANDIDATES * topk, entries.count)
        if queries.dtype == torch.float64 or wanted == entries.count:
            return ExactSearch().find(queries, entries, topk, similarity)
        left = _query_columns(queries.float(), similarity)
        rows, columns = tile_shape(len(left), entries.count, left.shape[1], wanted, torch.bfloat16)
        buffer = left.new_empty(rows, columns)
        parts = left.split(rows)
        nearest = [Nearest(len(part), wanted, left.dtype, left.device, oldest_first=False) for part in parts]
        for start in range(0, entries.count, columns):
            right = _entry_columns(between(entries, start, min(start + columns, entries.count)), columns, similarity)
            for part, best in zip(parts, nearest, strict=True):
                scores = torch.mm(part, right.T, out=buffer[: len(part)])
                scores[:, entries.count - start :] = -torch.inf
                best.add(scores, start)
        hits = torch.cat([best.best()[1] for best in nearest])
        return _again(queries, entries, hits, topk, similarity)


def _query_columns(queries: Tensor, similarity: str) -> Tensor:
    """What stands on the left of the product, bfloat16 `[n, columns]`; for L2 the product is -|q - e|².

    Lengths take two columns, so that they are rounded to 16 bits: nothing but the product itself is rounded to 8.
    """
    rounded = queries.bfloat16()
    if similarity == "dot":
        return rounded
    ones = rounded.new_ones(len(rounded), 2)
    return torch.cat([2 * rounded, _minus_squares(rounded), ones], 1)


def _entry_columns(entries: Tensor, count: int, similarity: str) -> Tensor:
    """What stands on the right, bfloat16 `[count, columns]`; rows beyond the entries are zeros."""
    rounded = entries.bfloat16()
    if similarity == "l2":
        ones = rounded.new_ones(len(rounded), 2)
        rounded = torch.cat([rounded, ones, _minus_squares(rounded)], 1)
    return (
        rounded
        if len(rounded) == count
        else torch.cat([rounded, rounded.new_zeros(count - len(rounded), rounded.shape[1])])
    )


def _minus_squares(vectors: Tensor) -> Tensor:
    """-|v|² as the sum of two bfloat16 columns `[n, 2]`."""
    squares = -torch.linalg.vector_norm(vectors, dim=1, keepdim=True, dtype=torch.float32).square()
    high = squares.bfloat16()
    return torch.cat([high, (squares - high).bfloat16()], 1)


def _again(queries: Tensor, entries: Entries, hits: Tensor, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
    """The best of the candidates `[n, candidates]`, scored in float32."""
    scores = []
    size = max(AGAIN_BYTES // (4 * hits.shape[1] * queries.shape[1]), 1)
    for asked, found in zip(queries.split(size), hits.split(size), strict=True):
        vectors = _gathered(entries, found.flatten()).unflatten(0, found.shape).to(result_dtype(queries))
        products = (vectors @ asked.to(vectors.dtype)[:, :, None])[:, :, 0]
        scores.append(products if similarity == "dot" else 2 * products - vectors.square().sum(2))
    return ranked(torch.cat(scores), hits, topk)


def _gathered(entries: Entries, numbers: Tensor) -> Tensor:
    """Entries `[count, width]` by their numbers, counted from the oldest."""
    first = entries.spans[0]
    if len(entries.spans) == 1:
        return first[numbers]
    later = numbers >= len(first)
    found = first[numbers.masked_fill(later, 0)]
    found[later] = entries.spans[1][numbers[later] - len(first)]
    return found
