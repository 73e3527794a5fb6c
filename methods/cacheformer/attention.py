"""CacheFormer's attention to whole documents, for training and for reading without a state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cacheformers.methods.cacheformer.cacheformer import (
    CacheFormerOptions,
    CacheFormerParts,
    Projected,
    Rotate,
    normed,
    pool,
)
from cacheformers.methods.cacheformer.selection import Chooser
from cacheformers.methods.cacheformer.tiles import Run, Stores, TiledAttention
from cacheformers.modeling.search.store import packed


def attend(
    options: CacheFormerOptions,
    parts: CacheFormerParts,
    projected: Projected,
    rotate: Rotate | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Attend to whole documents, `[rows, heads, time, head_dim]`; zeros for padding.

    Args:
        rotate: turns unrotated keys to positions; only used with `pretrained`.
        documents: each token's document, -1 for padding, `[rows, time]`. The tokens of a document are consecutive;
            windows, segments and blocks count from its first token. None: each row is a document.
    """
    if documents is None:
        return attend_rows(options, parts, projected, rotate)[0]
    rows, heads, time, width = projected.q.shape
    output = projected.q.new_zeros(rows * time, heads, width)
    for places, real in document_batches(documents, alike=not options.causal):

        def gather(tensor: Tensor, places: Tensor = places) -> Tensor:
            return tensor.transpose(1, 2).flatten(0, 1)[places.to(tensor.device)].transpose(1, 2)

        read, _ = attend_rows(options, parts, projected.each(gather), rotate)
        here = real.nonzero(as_tuple=True)
        found = read.transpose(1, 2)[tuple(place.to(read.device) for place in here)]
        output = output.index_copy(0, places[here].to(output.device), found)
    return output.unflatten(0, (rows, time)).transpose(1, 2)


def selected_segments(
    options: CacheFormerOptions, parts: CacheFormerParts, projected: Projected, rotate: Rotate | None = None
) -> Tensor:
    """Return the segments that each token retrieves, `[rows, kv_heads, time, topk * neighbors]`, -1 for none."""
    return attend_rows(options, parts, projected, rotate)[1].chosen()


def attend_rows(
    options: CacheFormerOptions, parts: CacheFormerParts, projected: Projected, rotate: Rotate | None
) -> tuple[Tensor, Run]:
    """Attend where each row is a document that begins in the first column. Columns after it do no harm."""
    q = projected.q
    chooser = Chooser(options, len(q), q.device, q.dtype) if options.cache else None
    run = Run(options, (0,), q.shape[2], projected.scale, chooser, None, projected.asking(options), rotate)
    stores = make_stores(options, parts, projected, rotate)
    read: Tensor = TiledAttention.apply(run, q, projected.gates(parts), *stores)  # type: ignore[no-untyped-call]  # torch's
    return read, run


def make_stores(
    options: CacheFormerOptions, parts: CacheFormerParts, projected: Projected, rotate: Rotate | None
) -> Stores:
    """Norm the tokens, and compress every complete segment."""
    keys, values = projected.k, projected.v
    source = projected.pooled_keys(options)
    size, half, time = options.pool_tokens, options.pool_tokens // 2, keys.shape[2]

    strengths = projected.strengths(options)

    def compress(shift: int) -> tuple[Tensor, Tensor | None]:
        count = (time + shift) // size

        def cut(tokens: Tensor) -> Tensor:
            padded = F.pad(tokens, (0, 0, shift, 0)) if shift else tokens
            # Contiguous: otherwise every product would keep a copy of its own for its gradient.
            return padded[:, :, : count * size].contiguous().unflatten(2, (count, size))

        numbers = torch.arange(count, device=keys.device)[None]
        pooled_values = None if values is None else cut(values)
        queries = None if strengths is None else cut(strengths)
        return pool(options, parts, cut(source), pooled_values, numbers, shift > 0, rotate, queries)

    nothing = (keys[:, :, :0], None if values is None else keys[:, :, :0])
    long = compress(0) if options.long or options.cache else nothing
    overlap = compress(half) if options.overlap else nothing
    near_keys = normed(parts.local_norm, keys).contiguous()
    stores = Stores(near_keys, long[0], overlap[0])
    if options.rounds:
        stores = stores._replace(cache_keys=packed(near_keys.detach()))
    if values is None:
        return stores
    near = normed(parts.local_norm, values).contiguous()
    kept = packed(near.detach()) if options.rounds else None
    return stores._replace(values=near, long_values=long[1], overlap_values=overlap[1], cache_values=kept)


def document_batches(documents: Tensor, alike: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Batch documents of about the same length, one document per row.

    Args:
        documents: each token's document, `[rows, time]`, -1 for padding.
        alike: batch only documents of the same length, for a rule that would look beyond the end of a shorter one.

    Returns:
        For each batch: places in the flattened `[rows * time]`, and which of them are real, `[documents, longest]`, on
        the host. At least half of a batch is real.
    """
    numbers = documents.cpu()
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    ends = torch.cat([starts[1:], torch.tensor([numbers.numel()])])
    real = numbers.flatten()[starts] >= 0
    lengths, order = (ends - starts)[real].sort(descending=True)
    starts = starts[real][order]
    batches = []
    while len(lengths):
        longest = int(lengths[0])
        count = int((lengths * (1 if alike else 2) >= longest).sum())
        column = torch.arange(longest)
        inside = column < lengths[:count, None]
        batches.append((starts[:count, None] + column.minimum(lengths[:count, None] - 1), inside))
        starts, lengths = starts[count:], lengths[count:]
    return batches
