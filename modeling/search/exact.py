"""Exact search: matrix products in tiles, their best scores so far, and ties that rounding would decide."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cacheformers.modeling.search.base import Search, between, ranked, result_dtype
from cacheformers.modeling.search.store import Entries, unpacked

# Limits of one tile's buffers; with their temporaries they stay below 64 MiB together.
ENTRY_BYTES = 8 << 20
SCORE_BYTES = 17 << 20
MAX_TILE = 16896
# Matrix products of fewer queries are slower, and so are those of fewer entries.
MAX_ROWS = 1024
# Queries that share the preparation of a tile.
GROUP = 4 * MAX_ROWS
# Equal entries must get equal scores in every place, or the oldest would not win a tie. Matrix products round alike in
# every column if all tiles have one shape, a multiple of common kernels' widths (24, 48, 128), and aligned addresses.
TILE_UNIT = 384
ALIGNMENT = 64
# Products are summed in pieces of this many dimensions: one long float32 sum errs by more than the 1e-6 (|q|² + |e|²)
# that tells neighbors in a tight cluster apart (seen at 256 dimensions on CPUs, at 1,024 on CUDA). "dot" errs by half.
# The product with a single vector is summed in several lanes anyway.
DEPTH = {"l2": 64, "dot": 128}
DEPTH_OF_ONE_QUERY = 256
# Up to this many scores are collected and sorted once.
FEW = 1 << 21
# From this many queries on, it is faster to copy each tile with the entries' lengths (`_distances`).
MANY_QUERIES = 64


# Scores that differ by at most this share of |q|² + |e|² are equal: a model that reads the same text in other pieces
# computes states that differ in their last bits. The tolerance of `recall`, 1e-6, is larger.
EQUAL = {torch.float32: 2.0**-20, torch.float64: 2.0**-47}
# The first search errs by about one such share, so it leaves differences of up to this many to the second one.
DOUBTFUL = 4
# Bytes of scores in float64 at a time, and half as many of entries.
TIE_BYTES = 8 << 20
# Columns of a block. Reductions over fewer than 32 are slow on CPUs.
BLOCK = 32
# Tiles of fewer scores are sorted as a whole: searching by blocks would take longer.
FEW = 1 << 17
# Candidates beyond the `topk` best that are collected before sorting.
SPARE = 64


class ExactSearch(Search):
    """Compares every entry, with at most 64 MiB of extra memory for any number of queries and entries."""

    def find(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        # One more than requested, to see whether the last place is tied.
        scores, hits = self._best(queries, entries, min(topk + 1, entries.count), similarity)
        return settle(queries, entries, scores, hits, topk, similarity)

    def _best(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        """Return the best `topk` entries by rounded scores."""
        dtype = torch.float64 if _rounds_products(queries.device) else result_dtype(queries)
        rows, columns = tile_shape(len(queries), entries.count, queries.shape[1], topk, dtype)
        buffer = torch.empty(rows, columns, dtype=dtype, device=queries.device)
        found = []
        for group in queries.split(GROUP):
            parts = [part.to(dtype) for part in group.split(rows)]
            if similarity == "l2" and len(queries) >= MANY_QUERIES:
                tiles = _distances(parts, entries, buffer)
            else:
                tiles = _products(parts, entries, buffer, similarity)
            if len(parts) == 1 and len(queries) * entries.count <= FEW:
                found.append(top_columns(torch.cat([scores.clone() for _, _, scores in tiles], 1), topk))
                continue
            nearest = [Nearest(len(part), topk, dtype, queries.device) for part in parts]
            for place, start, scores in tiles:
                nearest[place].add(scores, start)
            found += [one.best() for one in nearest]
        scores = torch.cat([best for best, _ in found])
        if similarity == "l2" and len(queries) >= MANY_QUERIES:
            scores += _squares(queries.to(dtype))
        return scores.to(result_dtype(queries)), torch.cat([hits for _, hits in found])


def tile_shape(queries: int, entries: int, width: int, topk: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the number of queries and of entries of one tile."""
    # Blocks with candidates take 128 bytes per hit, and the candidates in them as much again.
    most_rows = min(MAX_ROWS, SCORE_BYTES // (256 * topk), ENTRY_BYTES // (width * dtype.itemsize))
    rows = max(-(-queries // -(-queries // max(most_rows, 1))), 1)
    most = min(MAX_TILE, ENTRY_BYTES // (width * dtype.itemsize), SCORE_BYTES // (rows * dtype.itemsize)) // TILE_UNIT
    units = -(-entries // TILE_UNIT)
    # The last tile is filled up, so choose the size that wastes least.
    sizes = range(max(min(most, units), 1), max(min(most, units) // 2, 0), -1)
    return rows, min(sizes, key=lambda size: -(-units // size) * size) * TILE_UNIT


def _products(
    parts: list[Tensor], entries: Entries, buffer: Tensor, similarity: str
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (part of the queries, first entry of the tile, scores `[rows, columns]`), tile by tile."""
    columns = buffer.shape[1]
    depth = DEPTH[similarity] if len(parts[0]) > 1 else DEPTH_OF_ONE_QUERY
    lengths = None if similarity == "dot" else _lengths(entries, parts[0].dtype)
    for start, count, tile in _tiles(entries, columns, parts[0].dtype):
        bias = tile.new_zeros(columns)
        if lengths is not None:
            bias[:count] = -lengths[start : start + count]
        bias[count:] = -torch.inf
        for place, queries in enumerate(parts):
            scores = buffer[: len(queries)].copy_(bias)
            for left, right in zip(queries.split(depth, 1), tile.split(depth, 1), strict=True):
                scores.addmm_(left, right.T, alpha=1 if similarity == "dot" else 2)
            yield place, start, scores


def _distances(parts: list[Tensor], entries: Entries, buffer: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield as `_products`, but scores -|q - e|², each from one matrix product.

    Every piece of the dimensions also holds the squared lengths of queries and entries in it. So the sum of a near
    neighbor is close to zero after every piece, and rounds as little as sums of pieces do.
    """
    dim = parts[0].shape[1]
    pieces = -(-dim // DEPTH["l2"])
    depth = -(-dim // pieces)
    lefts = []
    for part in parts:
        piece = F.pad(part, (0, pieces * depth - dim)).unflatten(1, (pieces, depth))
        lengths = torch.linalg.vector_norm(piece, dim=2, keepdim=True).square()
        lefts.append(torch.cat([-lengths, torch.ones_like(lengths), 2 * piece], 2).flatten(1))
    right = buffer.new_zeros(buffer.shape[1], pieces, depth + 2)
    right[:, :, 0] = 1
    for start in range(0, entries.count, len(right)):
        tile = between(entries, start, min(start + len(right), entries.count)).to(right.dtype)
        if pieces * depth > dim:
            tile = F.pad(tile, (0, pieces * depth - dim))
        piece = tile.unflatten(1, (pieces, depth))
        right[: len(tile), :, 1] = torch.linalg.vector_norm(piece, dim=2).square().neg()
        right[: len(tile), :, 2:] = piece
        right[len(tile) :, :, 1] = -torch.inf
        for number, left in enumerate(lefts):
            yield number, start, torch.mm(left, right.flatten(1).T, out=buffer[: len(left)])


def _lengths(entries: Entries, dtype: torch.dtype) -> Tensor:
    """Return the squared lengths of the entries, `[count]`.

    A decoding step would take as long for them as for its products. So they are kept in `entries.index`, by the
    entries' lifelong numbers, for one dtype and device.
    """
    first, end = entries.first, entries.first + entries.count
    start, known = entries.index.get("lengths", (first, None))
    if known is None or known.dtype != dtype or known.device != entries.spans[0].device:
        start, known = first, entries.spans[0].new_empty(0, dtype=dtype)
    if not start <= first <= start + len(known):
        start, known = first, known[:0]
    if end > start + len(known):
        known = known[first - start :]
        new = [_squares(part.to(dtype))[:, 0] for part in _parts(entries, len(known))]
        start, known = first, torch.cat([known, *new])
        entries.index["lengths"] = (start, known)
    return known[first - start : end - start]


def _parts(entries: Entries, start: int) -> Iterator[Tensor]:
    """Yield the entries from `start` on, in parts small enough to copy."""
    size = max(ENTRY_BYTES // (8 * entries.spans[0].shape[1]), 1)
    for low in range(start, entries.count, size):
        yield between(entries, low, min(low + size, entries.count))


def _squares(vectors: Tensor) -> Tensor:
    """Return squared lengths `[count, 1]`."""
    return torch.linalg.vector_norm(vectors, dim=1, keepdim=True).square()


def _tiles(entries: Entries, width: int, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first entry, entries in it, tile `[width, d]`), oldest first; the next tile may overwrite a tile.

    float32 tiles are views where possible. The last tile is filled up with zeros.
    """
    buffer = None
    for start in range(0, entries.count, width):
        stop = min(start + width, entries.count)
        tile = between(entries, start, stop)
        if tile.dtype != dtype or stop - start < width or tile.data_ptr() % ALIGNMENT:
            buffer = tile.new_empty(width, tile.shape[1], dtype=dtype) if buffer is None else buffer
            buffer[: stop - start] = tile
            buffer[stop - start :] = 0
            tile = buffer
        yield start, stop - start, tile


def _rounds_products(device: torch.device) -> bool:
    """Whether float32 matrix products are set to TF32 or bfloat16, which would lose near neighbors."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("ieee", "none")


def settle(
    queries: Tensor, entries: Entries, scores: Tensor, hits: Tensor, topk: int, similarity: str
) -> tuple[Tensor, Tensor]:
    """Give the last places to the oldest of equally near entries, independent of the first search's rounding.

    Queries whose last hit is clearly nearer than the next entry keep their hits. For the others, search again with
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
    tied = doubtful.nonzero()[:, 0]
    if not len(tied):  # whose `split` would still be one part
        return scores, hits
    for rows in tied.split(max(TIE_BYTES // (8 * entries.count), 1)):
        better, oldest = _oldest_of_equal(queries[rows], entries, topk, similarity)
        scores[rows], hits[rows] = better.to(scores.dtype), oldest
    return scores, hits


def _oldest_of_equal(queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
    """Return the entries that are clearly nearer than the k-th, and the oldest of those as near as it."""
    exact = queries.double()
    scores, size = exact.new_empty(len(exact), entries.count), exact.new_empty(len(exact), entries.count)
    step = max(TIE_BYTES // (16 * exact.shape[1]), 1)
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
    """Return entries `[count, width]` by their numbers, counted from the oldest."""
    first, *rest = [span for span in entries.spans if len(span)]
    if not rest:
        return unpacked(first.index_select(0, numbers))
    later = numbers >= len(first)
    found = first.index_select(0, numbers.masked_fill(later, 0))
    for second in rest:
        found[later] = second[numbers[later] - len(first)]
    return unpacked(found)


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
