"""Which segments CacheFormer's cache retrieves: top k by score, their neighbours, replacements for duplicates."""

from __future__ import annotations

import torch
from torch import Tensor


def select_segments(scores: Tensor, allowed: Tensor, topk: int, neighbors: int, sink: bool = False) -> Tensor:
    """The best segments and their neighbours, ascending, -1 at the end.

    Hits are walked from the best down (of equal ones the oldest first), each followed by its neighbours from the
    nearest outwards: +1, -1, +2, ... Whatever is taken already or not allowed is replaced by the next segments around
    the hits, so there are always `min(topk * neighbors, allowed)`.

    Args:
        scores: `[..., segments]`.
        allowed: how many of the first segments may be taken, broadcasts with `[...]`.
        sink: the first segment is the first hit.

    Returns:
        Segments `[..., topk * neighbors]`.
    """
    segments = scores.shape[-1]
    allowed = allowed.to(scores.device).expand(scores.shape[:-1])
    if segments == 0:
        return torch.full((*scores.shape[:-1], topk * neighbors), -1, device=scores.device)
    hits = best(scores, allowed, topk, sink)
    chosen = hits if neighbors == 1 else widen(hits, allowed, neighbors, segments)
    chosen = torch.where(chosen < 0, segments, chosen).sort(-1).values
    return torch.where(chosen == segments, -1, chosen)


def best(scores: Tensor, allowed: Tensor, topk: int, sink: bool) -> Tensor:
    """The allowed segments with the highest scores, best first, -1 where there are no more, `[..., topk]`."""
    columns = torch.arange(scores.shape[-1], device=scores.device)
    left = scores.masked_fill(columns >= allowed[..., None], float("-inf"))
    if sink:
        left[..., 0] = torch.where(allowed > 0, float("inf"), float("-inf"))
    hits = []
    for rank in range(topk):
        hit = left.argmax(-1, keepdim=True)  # the first of equal ones
        hits.append(torch.where(rank < allowed[..., None], hit, -1))
        left.scatter_(-1, hit, float("-inf"))
    return torch.cat(hits, -1)


def widen(hits: Tensor, allowed: Tensor, neighbors: int, segments: int) -> Tensor:
    """Each hit's neighbours, and replacements for those that are taken or not allowed, `[..., topk * neighbors]`."""
    wanted = hits.shape[-1] * neighbors
    after = neighbors // 2
    before = neighbors - 1 - after
    near = [0]
    for distance in range(1, after + 1):
        near += [distance, -distance] if distance <= before else [distance]
    # A hit's surroundings grow by one segment a distance at least, so this many distances always suffice.
    further = [(after + distance, -before - distance) for distance in range(1, wanted + 1)]
    offsets = torch.tensor(near, device=hits.device)
    pairs = torch.tensor(further, device=hits.device)
    walked = torch.cat(
        [
            (hits[..., None] + offsets).flatten(-2),  # hit by hit
            (hits[..., None, :, None] + pairs[:, None]).flatten(-3),  # distance by distance, in each hit by hit
        ],
        -1,
    )
    is_hit = hits >= 0
    found = torch.cat(
        [
            is_hit[..., None].expand(*hits.shape, neighbors).flatten(-2),
            is_hit[..., None, :, None].expand(*hits.shape[:-1], wanted, hits.shape[-1], 2).flatten(-3),
        ],
        -1,
    )
    usable = found & (walked >= 0) & (walked < allowed[..., None])
    steps = torch.arange(walked.shape[-1], device=hits.device).expand_as(walked)
    never = walked.shape[-1]
    first = torch.full((*hits.shape[:-1], segments + 1), never, device=hits.device)
    first.scatter_reduce_(-1, torch.where(usable, walked, segments), torch.where(usable, steps, never), "amin")
    taken = min(wanted, segments)
    order, chosen = first[..., :segments].topk(taken, largest=False)
    chosen = torch.where(order < never, chosen, -1)
    missing = chosen.new_full((*chosen.shape[:-1], wanted - taken), -1)
    return torch.cat([chosen, missing], -1)
