"""Exact search: matrix products in tiles with a running top-k."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from cacheformers.modeling.search.base import Search, between, result_dtype
from cacheformers.modeling.search.nearest import Nearest, top_columns
from cacheformers.modeling.search.ties import settle

if TYPE_CHECKING:
    from cacheformers.modeling.search.store import Entries

# Limits of one tile's buffers; with their temporaries they stay below 64 MiB together.
ENTRY_BYTES = 8 << 20
SCORE_BYTES = 17 << 20
MAX_TILE = 16896
# Matrix products of fewer queries are slower, and so are those of fewer entries.
MAX_ROWS = 1024
# So many queries share what the preparation of a tile costs.
GROUP = 4 * MAX_ROWS
# Equal entries must get equal scores wherever they lie, or the oldest would not win a tie. Matrix products round the
# same way in every column if all tiles have one shape without a remainder: a multiple of common kernels' widths
# (24, 48, 128), and start at an aligned address.
TILE_UNIT = 384
ALIGNMENT = 64
# Products are summed in pieces of this many dimensions: one long float32 sum errs by more than the 1e-6 (|q|² + |e|²)
# that tells neighbours in a tight cluster apart (seen at 256 dimensions on CPUs, at 1,024 on CUDA). "dot" errs by half.
# The product with a single vector is summed in several lanes anyway.
DEPTH = {"l2": 64, "dot": 128}
DEPTH_OF_ONE_QUERY = 256
# So few scores are put together and sorted once.
FEW = 1 << 21
# With so many queries it pays to copy each tile with the entries' lengths (`_distances`).
MANY_QUERIES = 64


class ExactSearch(Search):
    """Looks at every entry; extra memory at most 64 MiB, however many queries and entries (see `tile_shape`)."""

    def find(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        # One more than asked for, to see whether the last place is tied.
        scores, hits = self._best(queries, entries, min(topk + 1, entries.count), similarity)
        return settle(queries, entries, scores, hits, topk, similarity)

    def _best(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        """The best `topk` entries by rounded scores."""
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
    """How many queries and how many entries one tile has."""
    # Blocks that are looked into take 128 bytes a hit, and as much again for the candidates in them.
    most_rows = min(MAX_ROWS, SCORE_BYTES // (256 * topk), ENTRY_BYTES // (width * dtype.itemsize))
    rows = max(-(-queries // -(-queries // max(most_rows, 1))), 1)
    most = min(MAX_TILE, ENTRY_BYTES // (width * dtype.itemsize), SCORE_BYTES // (rows * dtype.itemsize)) // TILE_UNIT
    units = -(-entries // TILE_UNIT)
    # The last tile is filled up: the size that wastes least.
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
    """As `_products`, but scores are -|q - e|² and come of one matrix product.

    Beside every piece of the dimensions lie the squared lengths of queries and entries in it. So the sum of a near
    neighbour is close to zero after every piece, and rounds as little as sums of pieces do.
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
    """Squared lengths of the entries `[count]`: a decoding step would take as long for them as for its products.

    They are kept beside the store, by the entries' lifelong numbers, until another dtype or device asks.
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
    """Entries from `start` on, so many at a time that a copy of them is small."""
    size = max(ENTRY_BYTES // (8 * entries.spans[0].shape[1]), 1)
    for low in range(start, entries.count, size):
        yield between(entries, low, min(low + size, entries.count))


def _squares(vectors: Tensor) -> Tensor:
    """Squared lengths `[count, 1]`."""
    return torch.linalg.vector_norm(vectors, dim=1, keepdim=True).square()


def _tiles(entries: Entries, width: int, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first entry, entries in it, tile `[width, d]`), oldest first; each tile is gone when the next one comes.

    float32 tiles are views where they can be. The rest of the last tile is zeros.
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
    """Whether float32 matrix products are set to TF32 or bfloat16, which would lose near neighbours."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("ieee", "none")
