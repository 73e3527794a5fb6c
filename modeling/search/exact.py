"""Exact search: candidates by the products of a matrix multiplication, chosen among by scores in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cacheformers.modeling.search.base import Search, ranked, result_dtype
from cacheformers.modeling.search.store import Entries, unpacked


class Sizes(NamedTuple):
    """How much is worked on at a time.

    Attributes:
        scores: bytes of the scores of a tile.
        rows: queries searched together.
        found: bytes that the blocks with their candidates may take.
        numbers: of entries that are converted to the products' precision, or compared in float64.
        ties: bytes of scores in float64, and half as many of entries, where more are tied than there are candidates.
    """

    scores: int
    rows: int
    found: int
    numbers: int
    ties: int


# What is at work stays in the processor's cache: with all temporaries below 64 MiB.
ON_CPU = Sizes(scores=16 << 20, rows=512, found=16 << 20, numbers=1 << 16, ties=8 << 20)
# A GPU takes as long to start a small product as for a large one: with all temporaries below 1 GiB.
ON_GPU = Sizes(scores=256 << 20, rows=4096, found=128 << 20, numbers=1 << 24, ties=128 << 20)
# Entries of a block, of which only the greatest score is looked at if it cannot be among the best, and for each hit
# that many blocks at least.
BLOCK, BLOCKS = 16, 4
# Candidates of a query beyond its `topk` hits: where rounding or ties leave more, it is searched again.
SPARE = 256
# Scores that differ by at most this share of |q|² + |e|² are equal: a model that reads the same text in other pieces
# computes states that differ in their last bits. The tolerance of `recall`, 1e-6, is larger.
EQUAL = {torch.float32: 2.0**-20, torch.float64: 2.0**-47}
# faiss errs by about one such share, so `settle` leaves differences of up to this many to a search in float64.
DOUBTFUL = 4


class ExactSearch(Search):
    """Compares every entry, with at most 64 MiB of extra memory, on a GPU 1 GiB, for any number of both."""

    def find(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if _rounds_products(queries.device) else result_dtype(queries)
        return nearest(queries, entries, topk, similarity, dtype)


def sizes_on(device: torch.device) -> Sizes:
    """Return how much a device works on at a time."""
    return ON_CPU if device.type == "cpu" else ON_GPU


def nearest(queries: Tensor, entries: Entries, topk: int, similarity: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Search with products in `dtype`, and where they leave too many candidates, in float64.

    Of equally near entries the oldest take the last places.

    Returns:
        Scores and hits `[n, topk]`, as `Search`.
    """
    sizes = sizes_on(queries.device)
    most = max(min(sizes.rows, sizes.found // (BLOCK * (topk + SPARE) * dtype.itemsize)), 1)
    if len(queries) > most:
        found = [nearest(part, entries, topk, similarity, dtype) for part in queries.split(most)]
        return torch.cat([scores for scores, _ in found]), torch.cat([hits for _, hits in found])
    lengths, equal = squared_lengths(entries), EQUAL[result_dtype(queries)]
    own = queries.double().square().sum(1)
    size = 2 * own if similarity == "l2" else own + lengths.nan_to_num(0, 0).max()
    row, entry, last = _candidates(queries.to(dtype), entries, topk, similarity, lengths, size, equal)
    first = torch.searchsorted(row, torch.arange(len(queries), device=row.device))
    column = torch.arange(len(row), device=row.device) - first[row]
    width = max(int(column.max()) + 1 if len(row) else 0, topk)
    scores = own.new_full((len(queries), width), -torch.inf)
    hits = row.new_full((len(queries), width), -1)
    scores[row, column], hits[row, column] = _scores(queries, entries, row, entry, similarity), entry
    if width > topk:
        kth, following = scores.topk(topk + 1).values[:, -2:].unbind(1)
        tied = (kth - following <= 4 * equal * (size - kth if similarity == "l2" else size)).nonzero()[:, 0]
        if len(tied):
            some = scores[tied]
            chosen = _oldest(some, equal * (own[tied, None] + lengths[hits[tied].clamp(min=0)]), topk)
            scores[tied] = torch.full_like(some, -torch.inf).scatter(1, chosen, some.gather(1, chosen))
    # Columns are in order of age.
    scores, order = scores.to(result_dtype(queries)).sort(dim=1, descending=True, stable=True)
    scores, hits = scores[:, :topk], hits.gather(1, order[:, :topk])
    again = last.isposinf().nonzero()[:, 0]
    if len(again) and dtype == torch.float32:
        scores[again], hits[again] = nearest(queries[again], entries, topk, similarity, torch.float64)
    elif len(again):
        for few in again.split(max(sizes.ties // (8 * entries.count), 1)):
            scores[few], hits[few] = _oldest_of_equal(queries[few], entries, topk, similarity)
    return scores, hits


def _candidates(
    queries: Tensor, entries: Entries, topk: int, similarity: str, lengths: Tensor, size: Tensor, equal: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which entries may be among the `topk` nearest of which query.

    The score of the k-th nearest is not below `last`, the k-th greatest of the blocks' maxima. In any order of its sum
    a product errs by at most r |q| |e|, r about d times the unit of rounding. An entry as near as the k-th is for
    `"l2"` not longer than |q| + sqrt(|q|² - last). So neither rounding nor a tie lets the score of one fall below
    `last - (16 r + 4 equal) (2 |q|² - last)`, for `"dot"` with the greatest |q|² + |e|² in the last bracket.

    Args:
        lengths: of the entries, squared, `[count]`.
        size: for `"l2"` 2 |q|², for `"dot"` |q|² and the greatest length, `[n]`.

    Returns:
        Queries and entries of these pairs, by query, then age; and for each query `last`, infinite where there were too
        many pairs, which are left out.
    """
    rows, dtype = len(queries), queries.dtype
    bytes_of_all = entries.count * rows * queries.element_size()
    columns = -(-entries.count // -(-bytes_of_all // sizes_on(queries.device).scores))
    depth = min(max(columns // (BLOCKS * topk), 1), BLOCK)
    wide = max(columns // (depth * BLOCKS * topk), 1)
    blocks = -(-columns // (depth * wide)) * wide
    tile = queries.new_empty(depth, blocks * rows)  # a column of it is a block: entries that are `blocks` apart
    scores = tile.view(-1, rows)
    rounding = (queries.shape[1] + 8) * torch.finfo(dtype).eps / 2
    share = 16 * rounding + 4 * equal
    right, bias = queries.T, lengths.to(dtype).neg()[:, None] if similarity == "l2" else None
    best = queries.new_empty(0, rows)
    pairs: tuple[Tensor, ...] = ()
    for start in range(0, entries.count, len(scores)):
        _multiply(right, entries, start, bias, scores)
        maxima = tile.amax(0)
        widest = maxima.view(wide, -1).amax(0) if wide > 1 else maxima
        if widest.isnan().any():
            tile.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
            maxima = tile.amax(0)
            widest = maxima.view(wide, -1).amax(0)
        widest = widest.view(-1, rows)
        best = (torch.cat([best, widest]) if start else widest).topk(topk, dim=0).values
        last = best[-1]
        floor = last - share * (size - last if similarity == "l2" else size)
        floor = floor.to(dtype).clamp_(min=torch.finfo(dtype).min)
        block, row = (maxima.view(blocks, rows) >= floor).nonzero().unbind(1)
        if len(row) > rows * (topk + SPARE):
            row, block = _bounded((row, block), best, topk)
        found = tile.index_select(1, block * rows + row)
        place, pair = (found >= floor[row]).nonzero().unbind(1)
        new = row[pair], start + place * blocks + block[pair], found[place, pair]
        if start:
            pairs = tuple(torch.cat(both) for both in zip(pairs, new, strict=True))
            above = pairs[2] >= floor[pairs[0]]
            pairs = tuple(one[above] for one in pairs)
        pairs = _bounded(pairs if start else new, best, topk)
    numbers = (pairs[0] * entries.count + pairs[1]).sort().values
    return numbers // entries.count, numbers % entries.count, best[-1]


def _bounded(pairs: tuple[Tensor, ...], best: Tensor, topk: int) -> tuple[Tensor, ...]:
    """Leave out all pairs of rows with too many, and mark these rows by infinity in `best`."""
    row = pairs[0]
    if len(row) <= topk + SPARE:
        return pairs
    many = torch.bincount(row, minlength=best.shape[1]) > topk + SPARE
    if not many.any():
        return pairs
    best.masked_fill_(many, torch.inf)
    kept = ~many[row]
    return tuple(one[kept] for one in pairs)


def _multiply(right: Tensor, entries: Entries, start: int, bias: Tensor | None, scores: Tensor) -> None:
    """Write the scores of the entries from `start` on, `[count, n]`; -inf where there are no more."""
    stop = min(start + len(scores), entries.count)
    if stop - start < len(scores):
        scores[stop - start :] = -torch.inf
    for first, part in _parts(entries, start, stop, right.dtype):
        out = scores[first - start : first - start + len(part)]
        if bias is None:
            torch.mm(part, right, out=out)
        else:
            torch.addmm(bias[first : first + len(part)], part, right, alpha=2, out=out)


def _parts(entries: Entries, start: int, stop: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yield (first entry, entries `[count, d]`) in `dtype`, from `start` to `stop`: views where possible."""
    first = 0
    for span in entries.spans:
        end = min(stop - first, len(span))
        size = end if span.dtype == dtype else max(sizes_on(span.device).numbers // span.shape[1], 1)
        for low in range(max(start - first, 0), end, max(size, 1)):
            yield first + low, unpacked(span[low : min(low + size, end)]).to(dtype)
        first += len(span)


def squared_lengths(entries: Entries) -> Tensor:
    """Return the squared lengths of the entries, `[count]` in float64.

    A decoding step would take as long for them as for its products. So they are kept in `entries.index`, by the
    entries' lifelong numbers.
    """
    first, end = entries.first, entries.first + entries.count
    start, known = entries.index.get("lengths", (first, None))
    if known is None or known.device != entries.spans[0].device or not start <= first <= start + len(known):
        start, known = first, entries.spans[0].new_empty(0, dtype=torch.float64)
    if end > start + len(known):
        known = known[first - start :]
        parts = _parts(entries, len(known), entries.count, torch.float64)
        start, known = first, torch.cat([known, *(part.square().sum(1) for _, part in parts)])
        entries.index["lengths"] = (start, known)
    return known[first - start : end - start]


def _scores(queries: Tensor, entries: Entries, row: Tensor, entry: Tensor, similarity: str) -> Tensor:
    """Return the scores of pairs of a query and an entry in float64.

    Entry by entry: in a matrix product equal entries can get scores that differ in the last bit.
    """
    found = []
    step = max(sizes_on(queries.device).numbers // queries.shape[1], 1)
    for low in range(0, len(row), step):
        asked = queries.index_select(0, row[low : low + step]).double()
        vectors = gathered(entries, entry[low : low + step]).double()
        if similarity == "l2":
            asked.mul_(2).sub_(vectors)
        found.append(asked.mul_(vectors).sum(1))
    return torch.cat(found) if found else queries.new_empty(0, dtype=torch.float64)


def _oldest(scores: Tensor, size: Tensor, topk: int) -> Tensor:
    """Return the columns `[n, topk]` of scores clearly above the k-th, and the leftmost of those that differ from it
    by at most `size`."""
    last, size = scores.topk(topk).values[:, -1:], size.nan_to_num(0, 0)
    rank = (scores > last + size).byte() + (scores >= last - size)
    return rank.sort(dim=1, descending=True, stable=True).indices[:, :topk].sort(dim=1).values


def _rounds_products(device: torch.device) -> bool:
    """Whether float32 matrix products are set to TF32 or bfloat16, which would lose near neighbors."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("ieee", "none")


def settle(
    queries: Tensor, entries: Entries, scores: Tensor, hits: Tensor, topk: int, similarity: str
) -> tuple[Tensor, Tensor]:
    """Give the last places to the oldest of equally near entries, independent of the first search's rounding.

    Queries whose last hit is clearly nearer than the next entry keep their hits. For the others, search again with
    products in float64.

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
    tied = doubtful.nonzero()[:, 0]
    if len(tied):
        scores[tied], hits[tied] = nearest(queries[tied], entries, topk, similarity, torch.float64)
    return scores, hits


def _oldest_of_equal(queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
    """Search among all entries where more are tied than there are candidates."""
    exact = queries.double()
    scores, size = exact.new_empty(len(exact), entries.count), squared_lengths(entries).expand(len(exact), -1)
    for start, part in _parts(entries, 0, entries.count, torch.float64):
        scores[:, start : start + len(part)] = exact @ part.T
    if similarity == "l2":
        scores.mul_(2).sub_(size)
    scores.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
    size = (size + exact.square().sum(1, keepdim=True)).mul_(EQUAL[result_dtype(queries)])
    hits = _oldest(scores, size, topk)
    rows = torch.arange(len(exact), device=hits.device).repeat_interleave(topk)
    best = _scores(exact, entries, rows, hits.flatten(), similarity).view_as(hits).to(result_dtype(queries))
    return ranked(best, hits, topk)


def gathered(entries: Entries, numbers: Tensor) -> Tensor:
    """Return entries `[count, width]` by their numbers, counted from the oldest."""
    first, *rest = [span for span in entries.spans if len(span)]
    if not rest:
        return unpacked(first.index_select(0, numbers))
    later = numbers >= len(first)
    found = first.index_select(0, numbers.masked_fill(later, 0))
    for second in rest:
        found[later] = second.index_select(0, numbers[later] - len(first))
    return unpacked(found)
