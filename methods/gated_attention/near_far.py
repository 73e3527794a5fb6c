"""Attention to a near window and to everything before it, which reads each key once.

Queries are taken in tiles. For a tile that begins at token s, window w and query t:

    near     t - w < j <= t     a band of the last keys
    far      j <= t - w         keys before s - w, which every query of the tile sees, and a small triangle

Each part is a softmax with its log-sum-exp, by which parts are merged. No n x n matrix is made.

Queries `[rows, heads, time, d]` are of the last tokens, keys and values `[rows, kv_heads, total, d]` of all tokens.
Gates `[rows, 1 or kv_heads or heads, time]` are shares of global attention. A window includes the token itself.

With `far_distance` tokens see what is far by queries and keys of its own; the others are then needed of windows alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cacheformers.modeling.attention import by_head, by_kv_head, fused_on_cpu

TILE = 192  # queries


class Part(NamedTuple):
    """A softmax over some keys: output `[..., queries, d]` and log-sum-exp `[..., queries]`, in float32 or better."""

    output: Tensor
    lse: Tensor

    def joined(self, other: Part, share: Tensor | None = None) -> Tensor:
        """Return the output over both sets of keys, mixed with this part's own by `share` `[..., queries]`."""
        weight = torch.sigmoid(other.lse - self.lse)
        weight = (weight if share is None else share * weight)[..., None]
        return torch.lerp(self.output, other.output, weight)


class Operands(NamedTuple):
    """Queries of the last tokens, and keys and values of all tokens."""

    queries: Tensor
    keys: Tensor
    values: Tensor


def softmax_part(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, bias: Tensor | None) -> Part:
    """Compute one softmax: without a gradient on the CPU fused, otherwise from the scores of a tile.

    Args:
        bias: 0 for keys that a query sees, at least one each, and -inf for the others, `[queries, keys]`.
    """
    exact = torch.promote_types(queries.dtype, torch.float32)
    if queries.device.type == "cpu" and keys.shape[-1] == values.shape[-1] and not torch.is_grad_enabled():
        output, lse = fused_on_cpu(queries, keys, values, scaling, bias)
        return Part(output.to(exact), lse.to(exact))
    scores = (queries @ keys.mT).to(exact) * scaling
    if bias is not None:
        scores = scores + bias
    return Part((torch.softmax(scores, -1).to(values.dtype) @ values).to(exact), torch.logsumexp(scores, -1))


def tiles(first: int, total: int, window: int) -> Iterator[tuple[int, int]]:
    """Yield tiles (start, end) from `first` on. The tokens of a tile all have something far, or none has."""
    start = first
    while start < total:
        end = min(start + TILE, total)
        if start < window:
            end = min(end, window)
        yield start, end
        start = end


def bias_of(seen: Tensor, like: Tensor) -> Tensor:
    """Return 0 where a key is seen and -inf elsewhere, in the dtype of `like`."""
    return like.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)


class Bands:
    """The biases by which queries see their window. Tiles of one shape share a bias."""

    def __init__(self, window: int, like: Tensor) -> None:
        self.window, self.like = window, like
        self.made: dict[tuple[int, int], Tensor] = {}

    def bias(self, start: int, end: int, near: int) -> Tensor | None:
        """Return the bias of queries start to end and keys from `near` on, `[queries, keys]`; None for one query."""
        if end - start == 1:
            return None
        shape = (end - start, start - near)
        if shape not in self.made:
            time = torch.arange(near, end, device=self.like.device)
            back = time[start - near :, None] - time
            self.made[shape] = bias_of((back >= 0) & (back < self.window), self.like)
        return self.made[shape]


def one_pass(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    gates: Tensor,
    window: int,
    scaling: float,
    far: Operands | None = None,
) -> Tensor:
    """Mix local and global attention by gates, without a gradient, `[rows, heads, time, d]`.

    Where a gate is 0 nothing far is read.

    Args:
        far: by which tokens see what is far; by default queries, keys and values. With it, keys and values may begin
            with the first query's window.
    """
    far = Operands(queries, keys, values) if far is None else far
    total, heads = far.keys.shape[2], queries.shape[1]
    first, gone = total - queries.shape[2], total - keys.shape[2]
    bands = Bands(window, queries)
    output = queries.new_empty(*queries.shape[:3], values.shape[-1])
    for start, end in tiles(first, total, window):
        now, from_near = slice(start - first, end - first), max(start - window + 1, 0)
        band = slice(from_near - gone, end - gone)
        bias = bands.bias(start, end, from_near)
        near = attention(queries[:, :, now], keys[:, :, band], values[:, :, band], scaling, bias)
        mixed = output[:, :, now]
        mixed.copy_(near.output)
        if start < window:
            continue
        gate, asked = gates[:, :, now], far.queries[:, :, now]
        for rows, channels, chosen in open_queries(gate > 0):
            mine = slice(channels.start * heads // gate.shape[1], channels.stop * heads // gate.shape[1])
            here = slice(None) if len(chosen) == end - start else chosen
            rest = far_part(
                asked[rows, mine, here], far.keys[rows], far.values[rows], mine, heads, start, window, chosen, scaling
            )
            alone = Part(near.output[rows, mine, here], near.lse[rows, mine, here])
            share = gate[rows, channels, here].to(rest.lse.dtype)
            share = share.repeat_interleave(rest.lse.shape[1] // share.shape[1], 1)
            mixed[rows, mine, here] = alone.joined(rest, share).to(output.dtype)
    return output


def open_queries(is_open: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield rows, channels and queries of open gates `[rows, channels, queries]`: all at once where all are open."""
    rows, channels, queries = is_open.shape
    if bool(is_open.all()):
        yield slice(0, rows), slice(0, channels), torch.arange(queries, device=is_open.device)
        return
    for row in range(rows):
        for channel in range(channels):
            chosen = is_open[row, channel].nonzero()[:, 0]
            if len(chosen):
                yield slice(row, row + 1), slice(channel, channel + 1), chosen


def attention(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, bias: Tensor | None) -> Part:
    """Compute `softmax_part` for grouped queries `[rows, heads, queries, d]`, without repeating keys."""
    kv_heads, count = keys.shape[1], queries.shape[2]
    if bias is not None:
        bias = bias.repeat(queries.shape[1] // kv_heads, 1)
    part = softmax_part(by_kv_head(queries, kv_heads), keys, values, scaling, bias)
    return Part(by_head(part.output, count), by_head(part.lse[..., None], count)[..., 0])


def far_part(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mine: slice,
    heads: int,
    start: int,
    window: int,
    chosen: Tensor,
    scaling: float,
) -> Part:
    """Compute the softmax over what is far from some queries of the tile that begins at token `start`.

    Args:
        mine: which of the `heads` query heads ask.
        chosen: places of the queries in their tile.
    """
    kv_heads = keys.shape[1]
    shared_heads = slice(mine.start * kv_heads // heads, -(-mine.stop * kv_heads // heads))
    keys, values = keys[:, shared_heads], values[:, shared_heads]
    last = int(chosen[-1])
    border = start - window if last else start - window + 1  # keys before are far from all queries
    shared = attention(queries, keys[:, :, :border], values[:, :, :border], scaling, None) if border else None
    if not last:
        assert shared is not None
        return shared
    end = border + last + 1
    triangle = torch.arange(last + 1, device=chosen.device) <= chosen[:, None]
    bias = bias_of(triangle, queries)
    rest = attention(queries, keys[:, :, border:end], values[:, :, border:end], scaling, bias)
    return rest if shared is None else Part(shared.joined(rest), torch.logaddexp(shared.lse, rest.lse))


def two_passes(queries: Tensor, keys: Tensor, values: Tensor, gates: Tensor, window: int, scaling: float) -> Tensor:
    """Compute `one_pass` with gradients, by two fused attentions; near keys are read twice."""
    everything = windowed(queries, keys, values, None, scaling)
    near = everything if keys.shape[2] <= window else windowed(queries, keys, values, window, scaling)
    share = gates.repeat_interleave(queries.shape[1] // gates.shape[1], 1)[..., None]
    return ((1 - share) * near + share * everything).to(queries.dtype)


def windowed(queries: Tensor, keys: Tensor, values: Tensor, window: int | None, scaling: float) -> Tensor:
    """Compute causal attention to a window, or to everything (None)."""
    total = keys.shape[2]
    first = total - queries.shape[2]
    if window is None and first == 0:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
    bands, outputs = Bands(window or total, queries), []
    for start, end in tiles(first, total, window or 1):
        near = 0 if window is None else max(start - window + 1, 0)
        outputs.append(
            F.scaled_dot_product_attention(
                queries[:, :, start - first : end - first],
                keys[:, :, near:end],
                values[:, :, near:end],
                attn_mask=bands.bias(start, end, near),
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(outputs, 2)


def tile_by_tile(
    queries: Tensor, keys: Tensor, values: Tensor, gates: Tensor, window: int, scaling: float, far: Operands
) -> Tensor:
    """Compute `one_pass` with `far` and with gradients; the scores of a tile are computed again for them."""
    total = far.keys.shape[2]
    first, gone = total - queries.shape[2], total - keys.shape[2]
    bands, outputs = Bands(window, queries), []
    shares = gates.repeat_interleave(queries.shape[1] // gates.shape[1], 1)
    for start, end in tiles(first, total, window):
        now, from_near = slice(start - first, end - first), max(start - window + 1, 0)
        band, rest = slice(from_near - gone, end - gone), None
        near = Operands(queries[:, :, now], keys[:, :, band], values[:, :, band])
        if start >= window:
            before = slice(0, end - window)
            rest = Operands(far.queries[:, :, now], far.keys[:, :, before], far.values[:, :, before])
        output = checkpoint(
            mixed_tile,
            near,
            bands.bias(start, end, from_near),
            rest,
            shares[:, :, now],
            scaling,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        outputs.append(output.to(queries.dtype))
    return torch.cat(outputs, 2)


def mixed_tile(near: Operands, bias: Tensor | None, far: Operands | None, share: Tensor, scaling: float) -> Tensor:
    """Mix what a tile's queries see near and far, `[rows, heads, queries, d]`, in float32 or better.

    Args:
        bias: of near keys, see `softmax_part`.
        far: the last query sees all of its keys, and each query before it one key less; None for nothing far.
        share: of global attention, `[rows, heads, queries]`.
    """
    part = attention(*near, scaling, bias)
    if far is None:
        return part.joined(part, share)  # so that gates have a gradient, of 0, in every forward
    time, count = far.queries.shape[2], far.keys.shape[2]
    place = torch.arange(count, device=share.device)
    seen = place <= place[count - time :, None]
    return part.joined(attention(*far, scaling, bias_of(seen, far.queries)), share)
