"""The choice of the segments that CacheFormer's cache retrieves: the k best, their neighbors, and replacements."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cacheformers.methods.cacheformer.cacheformer import CacheFormerOptions
from cacheformers.modeling.memory import keep_columns


def select_segments(scores: Tensor, allowed: Tensor, topk: int, neighbors: int, sink: bool = False) -> Tensor:
    """Choose the best segments and their neighbors, ascending, -1 at the end.

    Hits are taken from the best down (the oldest first among equals), each followed by its neighbors from the nearest
    outwards: +1, -1, +2, ... Segments taken already or not allowed are replaced by the next ones around the hits, so
    there are always `min(topk * neighbors, allowed)`.

    Args:
        scores: `[..., segments]`.
        allowed: how many segments, from the first on, may be taken; broadcasts with `[...]`.
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
    """Return the allowed segments with the highest scores, best first, then -1, `[..., topk]`."""
    columns = torch.arange(scores.shape[-1], device=scores.device)
    left = scores.masked_fill(columns >= allowed[..., None], float("-inf"))
    if sink:
        left[..., 0] = torch.where(allowed > 0, float("inf"), float("-inf"))
    hits = []
    for rank in range(topk):
        hit = left.argmax(-1, keepdim=True)  # the first among equals
        hits.append(torch.where(rank < allowed[..., None], hit, -1))
        left.scatter_(-1, hit, float("-inf"))
    return torch.cat(hits, -1)


def widen(hits: Tensor, allowed: Tensor, neighbors: int, segments: int) -> Tensor:
    """Add each hit's neighbors, and replacements for those taken or not allowed, `[..., topk * neighbors]`."""
    topk = hits.shape[-1]
    wanted, after = topk * neighbors, neighbors // 2
    before = neighbors - 1 - after
    offsets = [0]
    for distance in range(1, after + 1):
        offsets += [distance, -distance] if distance <= before else [distance]
    # Each further distance adds at least one segment around a hit, so this many distances always suffice.
    for distance in range(1, wanted + 1):
        offsets += [after + distance, -before - distance]
    place, rank = torch.arange(len(offsets), device=hits.device), torch.arange(topk, device=hits.device)[:, None]
    beyond = place - neighbors
    further = wanted + 2 * (beyond // 2 * topk + rank) + beyond % 2  # distance by distance, in each hit by hit
    steps = torch.where(place < neighbors, rank * neighbors + place, further)  # [topk, offsets]; neighbors hit by hit
    walked = hits[..., None] + torch.tensor(offsets, device=hits.device)
    usable = (hits[..., None] >= 0) & (walked >= 0) & (walked < allowed[..., None, None])
    never = steps.numel()
    first = torch.full((*hits.shape[:-1], segments + 1), never, device=hits.device)
    reached = torch.where(usable, walked, segments).flatten(-2)
    first.scatter_reduce_(-1, reached, torch.where(usable, steps, never).flatten(-2), "amin")
    taken = min(wanted, segments)
    order, chosen = first[..., :segments].topk(taken, largest=False)
    chosen = torch.where(order < never, chosen, -1)
    missing = chosen.new_full((*chosen.shape[:-1], wanted - taken), -1)
    return torch.cat([chosen, missing], -1)


class Chooser:
    """Chooses the segments that tokens retrieve, tile by tile, from the opinions of tokens.

    A token's opinion of a segment is the magnitude of its r_s probabilities among all compressed columns that the token
    sees, summed over the query heads that share keys.

    Attributes:
        lists: the current block's segments, `[rows, kv_heads, k*u]`, -1 for none.
        evidence: sum of the opinions of the current block's tokens so far, `[rows, kv_heads, segments]`; with
            magnitude="mean", of the probabilities, `[rows, heads, segments, r_s]`.
        foreseen: the same for whole blocks, by their numbers (`paper_block`).
    """

    def __init__(self, options: CacheFormerOptions, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        self.options = options
        self.lists = torch.full((rows, options.kv_heads, options.retrieved), -1, device=device)
        shape = (options.kv_heads, 0) if options.magnitude == "rows" else (options.heads, 0, options.pool_vectors)
        self.evidence = torch.zeros(rows, *shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
        self.foreseen: dict[int, Tensor] = {}

    def grow(self, segments: int) -> None:
        """Make room for evidence on `segments` segments."""
        missing = segments - self.evidence.shape[2]
        if missing > 0:
            blank = self.evidence.new_zeros(*self.evidence.shape[:2], missing, *self.evidence.shape[3:])
            self.evidence = torch.cat([self.evidence, blank], 2)

    def __call__(self, positions: Tensor, opinions: Tensor | None, real: Tensor | None) -> Tensor:
        """Return the segments that a tile retrieves, and take its opinions into account from now on.

        Args:
            positions: `[rows or 1, time]`, of a part of a block or of whole blocks.
            opinions: what `weigh` returned for the tile; None where it sees no compressed columns.
            real: which tokens count, `[rows, time]`; None for all.

        Returns:
            Segments, ascending, -1 at the end, for each block or each token: `[rows, kv_heads, parts, k*u]`.
        """
        options = self.options
        if not options.chooses:
            return self.first_segment(positions)
        if options.selection != "token":
            self.begin_block(positions[:, :1], None if real is None else real[:, :1])
        if opinions is None:
            return self.lists[:, :, None]
        if options.selection == "token":
            return self.select(opinions, positions, positions[:, :1])
        if options.selection == "prefix":
            opinions = opinions.unflatten(2, (self.blocks(positions.shape[1]), -1)).cumsum(3)
            opinions[:, :, 0] += self.evidence[:, :, None, : opinions.shape[4]]
            lists = self.select(opinions.flatten(2, 3), positions, positions[:, :1])
            self.evidence = torch.zeros_like(self.evidence)
            opinions = opinions[:, :, :, -1]
        else:
            lists = self.lists[:, :, None]
            if opinions.shape[2] > 1:
                lists = torch.cat([lists, self.next_blocks(positions, opinions[:, :, :-1])], 2)
                self.lists, self.evidence = lists[:, :, -1], torch.zeros_like(self.evidence)
            else:
                self.evidence = self.evidence.clone()
        self.evidence[:, :, : opinions.shape[3]] += opinions[:, :, -1]
        return lists

    def choose_oldest(self, read: Tensor, segments: int) -> None:
        """Choose for a block that goes on after a text, of which nobody has an opinion yet: the oldest segments.

        Args:
            read: how many tokens of each row were read, `[rows, 1]`.
            segments: how many can have opinions.
        """
        self.grow(segments)
        last = (read - 1).clamp(min=0)
        self.lists = self.select(self.evidence, last, last)

    def first_segment(self, positions: Tensor) -> Tensor:
        """Retrieve the first segment where it may be retrieved, by parts of a tile that are alike in that."""
        options, time = self.options, positions.shape[1]
        by_window = options.before_window and options.window_tokens % options.block_rows == 0
        part = options.window_tokens if by_window else options.block_rows
        there = options.admissible(options.block_start(positions[:, :: min(part, time)])) > 0
        lists = torch.where(there, 0, -1)[:, None, :, None].to(self.lists.device)
        return lists.expand(len(self.lists), options.kv_heads, -1, -1)

    def blocks(self, time: int) -> int:
        """Count the blocks of a tile of so many tokens."""
        return max(time // self.options.block_rows, 1)

    def next_blocks(self, positions: Tensor, opinions: Tensor) -> Tensor:
        """Choose for all blocks of a tile but the first, by the opinions of each one's previous block."""
        rows, size = len(opinions), self.options.block_rows
        firsts = positions[:, size::size].expand(rows, -1).reshape(-1, 1)  # blocks are rows, as each has its own
        chosen = self.select(opinions.transpose(1, 2).flatten(0, 1), firsts, firsts - size)
        return chosen.unflatten(0, (rows, -1)).transpose(1, 2)

    def begin_block(self, first: Tensor, real: Tensor | None) -> None:
        """Where a row's tile begins a block, choose for it, and forget the opinions of the previous block."""
        options = self.options
        begins = first % options.block_rows == 0  # [rows or 1, 1]
        if real is not None:
            begins = begins & real
        if not bool(begins.any()):
            return
        here = begins[..., None].to(self.lists.device)
        evidence, scored = self.evidence, (first - options.block_rows).clamp(min=0)
        if options.selection == "paper_block":
            evidence, scored = self.foreseen.get(int(first[0, 0]) // options.block_rows, evidence), first
        if options.selection != "prefix":
            self.lists = torch.where(here, self.select(evidence, first, scored), self.lists)
        self.evidence = self.evidence.masked_fill(here if evidence.dim() == 3 else here[..., None], 0.0)

    def foresee(self, positions: Tensor, opinions: Tensor) -> None:
        """Note a tile's opinions before the run."""
        block = int(positions[0, 0]) // self.options.block_rows
        thought = self.foreseen.setdefault(block, torch.zeros_like(self.evidence))
        thought[:, :, : opinions.shape[3]] += opinions[:, :, 0]

    def weigh(self, probabilities: Tensor, real: Tensor | None = None) -> Tensor:
        """Compute the opinions of a tile's tokens: of each token where they choose one by one, else each block's sum.

        Args:
            probabilities: among all compressed columns, `[rows, kv_heads, group, time, segments*r_s]`.
            real: which tokens count, `[rows, time]`; None for all.

        Returns:
            `[rows, kv_heads, time or blocks, segments]`; with magnitude="mean" `[rows, heads, time or blocks, segments,
            r_s]`.
        """
        opinions = probabilities.unflatten(-1, (-1, self.options.pool_vectors))
        if self.options.magnitude == "rows":
            first, *others = opinions.unbind(-1)
            opinions = first
            if others:
                opinions = first.square()
                for vector in others:  # faster than a reduction over a few vectors
                    opinions.addcmul_(vector, vector)
                opinions.sqrt_()
        if real is not None:
            opinions = opinions * real.to(opinions.device)[:, None, None, :, *[None] * (opinions.dim() - 4)]
        if self.options.selection not in ("token", "prefix"):
            opinions = opinions.unflatten(3, (self.blocks(opinions.shape[3]), -1)).sum(4)
        return opinions.sum(2) if self.options.magnitude == "rows" else opinions.flatten(1, 2)

    def select(self, evidence: Tensor, positions: Tensor, scored: Tensor) -> Tensor:
        """Choose segments for tokens that agree, or for each of them.

        Args:
            evidence: `[rows, kv_heads, (time,) segments]`, of the segments that could be scored at `scored`.
            positions: of the tokens, `[rows or 1, 1 or time]`.
            scored: position of a token whose opinion it is, `[rows or 1, 1]`.

        Returns:
            `[rows, kv_heads, (time,) k*u]`.
        """
        options = self.options
        if options.magnitude == "mean":
            evidence = torch.linalg.vector_norm(evidence, dim=-1).unflatten(1, (options.kv_heads, -1)).sum(2)
        gone = options.gone(positions[:, :1])
        allowed = options.admissible(options.block_start(positions)) - gone
        evidence = without(evidence, gone - options.unscored(scored), options.sinks, int(allowed.max()))
        if evidence.dim() == 4:
            allowed = allowed[:, None]
        places = select_segments(evidence, allowed, options.topk, options.neighbors, options.sink)
        gone = gone.to(places.device).view(-1, *[1] * (places.dim() - 1))
        return torch.where(places >= options.sinks, places + gone, places)


def without(evidence: Tensor, fewer: Tensor, sinks: int, count: int) -> Tensor:
    """Leave out the next `fewer` segments, `[rows or 1, 1]`, after the sinks; at least `count` are left if any is."""
    if not bool(fewer.any()):
        return evidence
    columns = torch.arange(count)
    places = torch.where(columns < sinks, columns, columns + fewer).expand(len(evidence), -1)
    missing = max(int(places.max()) + 1 - evidence.shape[-1], 0)  # segments that nobody could score
    return keep_columns(F.pad(evidence, (0, missing)), places, -1)
