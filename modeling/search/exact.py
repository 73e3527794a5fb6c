"""Exact search: a matrix product in tiles with a running top-k."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cacheformers.modeling.search.base import Search, between, result_dtype

if TYPE_CHECKING:
    from cacheformers.modeling.search.store import Entries

# Limits of one tile's buffers; with their temporaries they stay below 64 MiB together.
ENTRY_BYTES = 8 << 20
SCORE_BYTES = 16 << 20
MAX_TILE = 16896
# Equal entries must get equal scores wherever they lie, or the oldest would not win a tie. Matrix products round the
# same way in every column if all tiles have one shape without a remainder: a multiple of common kernels' widths
# (24, 48, 128), and start at an aligned address.
TILE_UNIT = 384
ALIGNMENT = 64
# Products are summed in pieces of this many dimensions: one long float32 sum, as CUDA kernels do it, errs by more than
# the 1e-6 (|q|² + |e|²) that tells neighbours in a tight cluster apart (seen at 1,024 dimensions). The product with a
# single vector is summed in several lanes anyway.
DEPTH = 64
DEPTH_OF_ONE_QUERY = 256


class ExactSearch(Search):
    """Looks at every entry; extra memory at most 64 MiB, however many queries and entries (see `tile_shape`)."""

    def find(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        shape, device = (len(queries), topk), queries.device
        dtype = torch.float64 if _rounds_products(device) else result_dtype(queries)
        scores = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        hits = torch.full(shape, -1, dtype=torch.int64, device=device)
        rows, width = tile_shape(len(queries), entries.count, queries.shape[1], topk, dtype)
        depth = DEPTH if len(queries) > 1 else DEPTH_OF_ONE_QUERY
        buffer = torch.empty(rows, width, dtype=dtype, device=device)
        for start, count, tile in _tiles(entries, width, dtype):
            bias = tile.new_zeros(width) if similarity == "dot" else -torch.linalg.vector_norm(tile, dim=1).square()
            bias[count:] = -torch.inf
            for low in range(0, len(queries), rows):
                part = slice(low, low + rows)
                some = queries[part].to(dtype)
                found = buffer[: len(some)].copy_(bias)
                for left, right in zip(some.split(depth, 1), tile.split(depth, 1), strict=True):
                    found.addmm_(left, right.T, alpha=1 if similarity == "dot" else 2)
                values, columns = top_columns(found, topk)
                # What was found before is older and comes first, so a stable sort keeps ties in order.
                merged, order = torch.cat([scores[part], values], 1).sort(dim=1, descending=True, stable=True)
                scores[part] = merged[:, :topk]
                hits[part] = torch.cat([hits[part], columns + start], 1).gather(1, order[:, :topk])
        return scores.to(result_dtype(queries)), hits


def tile_shape(queries: int, entries: int, width: int, topk: int, dtype: torch.dtype) -> tuple[int, int]:
    """How many queries and how many entries one tile has."""
    most = min(MAX_TILE, ENTRY_BYTES // (width * dtype.itemsize)) // TILE_UNIT * TILE_UNIT
    tiles = -(-entries // max(most, TILE_UNIT))
    columns = -(-entries // (tiles * TILE_UNIT)) * TILE_UNIT
    # Merging a row takes some 64 bytes a hit.
    rows = min(SCORE_BYTES // max(columns * dtype.itemsize, 64 * topk), ENTRY_BYTES // (width * dtype.itemsize))
    return max(min(rows, queries), 1), columns


def top_columns(scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The best `topk` columns of each row of `scores` `[rows, width]`: by score, then leftmost first."""
    topk = min(topk, scores.shape[1])
    values, columns = scores.topk(min(topk + 1, scores.shape[1]))
    tied = ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -torch.inf)).any(1).nonzero()[:, 0]
    values, columns = values[:, :topk], columns[:, :topk]
    for rows in tied.split(max(len(scores) // 4, 1)):
        columns[rows] = _leftmost(scores[rows], values[rows], columns[rows])
    return values, columns


def _leftmost(scores: Tensor, values: Tensor, columns: Tensor) -> Tensor:
    """Put `columns` `[rows, k]` of the best `values` in order where some are equal; topk takes any of equal scores."""
    width, topk = scores.shape[1], columns.shape[1]
    last = values[:, -1:]
    place = torch.arange(width, dtype=torch.int32, device=scores.device)
    equal = torch.where(scores == last, place, width).topk(topk, largest=False).values.clamp(max=width - 1)
    rank = torch.arange(topk, device=scores.device) - (values > last).sum(1, keepdim=True)
    columns = torch.where(rank < 0, columns, equal.gather(1, rank.clamp(min=0)).long()).sort(dim=1).values
    order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True).indices
    return columns.gather(1, order)


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
