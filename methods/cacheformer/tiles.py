"""CacheFormer's attention, tile by tile: a tile is a part of a window and of a block, or whole ones of them.

A branch shows all tokens of a tile the same columns, or each of its equal parts (windows, blocks, tokens) its own. A
token sees a prefix of them, so a mask is one number per token and branch. Scores exist for one tile and a few heads at
a time, and are computed again for the gradient, so no tensor of time x columns is ever held. The probabilities of the
compressed columns serve both attention and the choice of segments.

Shapes: queries and outputs `[rows, heads, time, head_dim]`, gates `[rows, heads, time, branches]`, one number per head
and token `[rows, heads, time]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cacheformers.methods.cacheformer.cacheformer import CacheFormerOptions, Rotate
from cacheformers.methods.cacheformer.selection import Chooser
from cacheformers.methods.cacheformer.shelf import Shelf, add, after_sinks, take
from cacheformers.modeling.attention import fused_on_cpu
from cacheformers.modeling.search.store import unpacked

FUSED_ON = ("cpu",)  # devices whose fused attention gives the log-sum-exp of scores
TILE_TOKENS = {"cpu": 128, "cuda": 1024}  # at most
# Scores held at once, unless one key-value head has more: they fit a processor's cache, or keep a GPU busy.
SCORES_AT_ONCE = {"cpu": 2**19, "cuda": 2**26}
# Scores of one key-value head, in all rows, to compressed columns: a tile that had more has fewer tokens (after 200,000
# tokens and more).
MOST_SCORES = {"cpu": 2**25, "cuda": 2**28}
# Where each token has its own list: up to this many times a list's columns, multiplying all columns and hiding most of
# them is faster than gathering a list for each token.
ALL_AT_ONCE = 32


class Stores(NamedTuple):
    """The vectors that tokens attend to: tensors, or shelves where no gradients are wanted.

    Values are None where keys are values, too.

    Attributes:
        keys, values: of a row's tokens, normed, `[rows, kv_heads, tokens, head_dim]`.
        long_keys, overlap_keys, long_values, overlap_values: of segments, `[rows, kv_heads, segments*r_s, head_dim]`;
            empty where no branch needs them.
        cache_keys, cache_values: what the cache retrieves instead of keys and values, with `cache_int8` (`packed`).
    """

    keys: Tensor | Shelf
    long_keys: Tensor | Shelf
    overlap_keys: Tensor | Shelf
    values: Tensor | Shelf | None = None
    long_values: Tensor | Shelf | None = None
    overlap_values: Tensor | Shelf | None = None
    cache_keys: Tensor | Shelf | None = None
    cache_values: Tensor | Shelf | None = None


@dataclass(frozen=True)
class Move:
    """Turns the keys of segments forward.

    Attributes:
        shifts: positions, by segment: `[rows, 1 or kv_heads, parts, segments]`.
    """

    rotate: Rotate
    shifts: Tensor

    def __call__(self, keys: Tensor, heads: slice, back: bool = False) -> Tensor:
        """Turn keys of some kv heads, `[rows, kv_heads, parts, segments * s, head_dim]`, or their gradients back."""
        shifts = self.shifts if self.shifts.shape[1] == 1 else self.shifts[:, heads]
        shifts = shifts.expand(*keys.shape[:-2], shifts.shape[-1]).reshape(-1, 1)
        columns = keys.reshape(len(shifts), -1, 1, keys.shape[-1])  # a segment's tokens turn alike, as heads do
        return self.rotate(columns, -shifts if back else shifts).reshape(keys.shape)


class View(NamedTuple):
    """The columns that a branch shows a tile.

    Attributes:
        keys, values: names of the stores.
        where: columns of the stores: (start, end), the same for all; or their numbers, for each of the equal parts of a
            tile, `[rows or 1, kv_heads, parts, columns]`.
        limit: how many of the columns each token sees, `[rows or 1, time]`, on the host.
        seen: which segments of the columns a token sees, `[rows, kv_heads, time, segments]`; None for all.
        move: turns the keys of the columns to where they are read; None where they stay.
    """

    keys: str
    values: str
    where: tuple[int, int] | Tensor
    limit: Tensor
    seen: Tensor | None = None
    move: Move | None = None

    @property
    def parts(self) -> int:
        """The number of parts of the tile that have their own columns."""
        return self.where.shape[2] if isinstance(self.where, Tensor) else 1

    @property
    def columns(self) -> int:
        """The number of columns of a part."""
        return self.where.shape[-1] if isinstance(self.where, Tensor) else self.where[1] - self.where[0]

    def pieces(self, queries: Tensor, kv_heads: int) -> Iterator[tuple[slice, slice]]:
        """Yield key-value heads whose scores, and columns, are held at once, and their query heads."""
        rows, heads, time, width = queries.shape
        budget = SCORES_AT_ONCE.get(queries.device.type, SCORES_AT_ONCE["cpu"])
        held = rows * self.columns * max(heads * time // kv_heads, width * (self.parts if self.parts > 1 else 0))
        step, group = max(budget // held, 1), heads // kv_heads
        for begin in range(0, kv_heads, step):
            end = min(begin + step, kv_heads)
            yield slice(begin, end), slice(begin * group, end * group)

    def of(self, heads: slice) -> tuple[int, int] | Tensor:
        """Return the columns of some key-value heads."""
        return self.where[:, heads] if isinstance(self.where, Tensor) else self.where

    def fetch(self, stores: Stores, heads: slice, dtype: torch.dtype, read: bool = True) -> tuple[Tensor, Tensor]:
        """Take keys and values of some key-value heads, `[rows, kv_heads, parts, columns, head_dim]`.

        Where values are not wanted, or keys are values, keys are returned twice.
        """
        keys = unpacked(take(getattr(stores, self.keys), heads, self.of(heads)))
        if self.move is not None:
            keys = self.move(keys.to(torch.promote_types(dtype, torch.float32)), heads)
        keys = keys.to(dtype)
        values = getattr(stores, self.values)
        if values is None or not read:
            return keys, keys
        return keys, unpacked(take(values, heads, self.of(heads))).to(dtype)

    def hide(self, scores: Tensor, heads: slice, value: float) -> None:
        """Overwrite some heads' scores of columns that a token does not see."""
        full, most = int(self.limit.min()), scores.shape[-1]
        by_token = scores.unflatten(3, (-1, self.limit.shape[1] // self.parts))  # [..., parts, group, tokens, columns]
        if self.seen is not None:
            by_segment = by_token.unflatten(-1, (self.seen.shape[-1], -1))
            by_segment.masked_fill_(~self.seen[:, heads, None, None, ..., None], value)
        elif full < most:
            hidden = torch.arange(full, most) >= self.limit.unflatten(1, (self.parts, -1))[..., None]
            by_token[..., full:].masked_fill_(hidden.to(scores.device)[:, None, :, None], value)


def fold(tensor: Tensor, kv_heads: int, parts: int) -> Tensor:
    """Bring `[rows, heads, time, ...]` to the layout of columns: `[rows, kv_heads, parts, group*time/parts, ...]`."""
    return tensor.unflatten(1, (kv_heads, -1)).unflatten(3, (parts, -1)).transpose(2, 3).flatten(3, 4)


def unfold(tensor: Tensor, time: int) -> Tensor:
    """Undo `fold`, up to `[rows, kv_heads, group, time, ...]`."""
    return tensor.unflatten(3, (-1, time // tensor.shape[2])).transpose(2, 3).flatten(3, 4)


class Attended(NamedTuple):
    """The result of one branch for a tile: its output (empty where not wanted), log-sum-exp of scores, and opinions."""

    read: Tensor
    total: Tensor
    opinions: Tensor | None


def attend(
    queries: Tensor,
    scale: float,
    stores: Stores,
    view: View,
    read: bool = True,
    weigh: Callable[[Tensor], Tensor] | None = None,
) -> Attended:
    """Attend from a tile with the softmax of one branch.

    Args:
        read: whether values are wanted.
        weigh: turns probabilities `[rows, kv_heads, group, time, columns]` into opinions `[rows, kv_heads or heads,
            ...]`.
    """
    if weigh is None and view.seen is None and queries.device.type in FUSED_ON:
        return attend_fused(queries, scale, stores, view)
    time, kv_heads = queries.shape[2], stores.keys.shape[1]
    queries = queries.to(torch.promote_types(queries.dtype, torch.float32)) * scale
    lowest, none_visible = torch.finfo(queries.dtype).min, int(view.limit.min()) == 0
    reads, totals, opinions = [], [], []
    for heads, here in view.pieces(queries, kv_heads):
        keys, values = view.fetch(stores, heads, queries.dtype, read)
        scores = fold(queries[:, here], keys.shape[1], view.parts) @ keys.transpose(-1, -2)
        view.hide(scores, heads, lowest)
        top = scores.amax(-1)
        probabilities = torch.softmax(scores, -1)
        totals.append(unfold(top - probabilities.amax(-1).log(), time).flatten(1, 2))
        if none_visible:
            view.hide(probabilities, heads, 0.0)
        if read:
            reads.append(unfold(probabilities @ values, time).flatten(1, 2))
        if weigh is not None:
            opinions.append(weigh(unfold(probabilities, time)))
    return Attended(
        torch.cat(reads, 1) if read else queries[..., :0],
        torch.cat(totals, 1),
        None if weigh is None else torch.cat(opinions, 1),
    )


def attend_fused(queries: Tensor, scale: float, stores: Stores, view: View) -> Attended:
    """Compute `attend` by PyTorch's fused attention for CPUs.

    A token that sees nothing gets the lowest total, so its share of this branch is 0.
    """
    time, kv_heads = queries.shape[2], stores.keys.shape[1]
    full, most, bias = int(view.limit.min()), view.columns, None
    if full < most:
        hidden = torch.arange(most) >= view.limit.unflatten(1, (view.parts, -1))[..., None]  # [rows, parts, time, most]
        bias = queries.new_zeros(hidden.shape).masked_fill_(hidden, torch.finfo(queries.dtype).min)
        bias = bias.repeat(1, 1, queries.shape[1] // kv_heads, 1)[:, None]
    reads, totals = [], []
    for heads, here in view.pieces(queries, kv_heads):
        keys, values = view.fetch(stores, heads, queries.dtype)
        tile = fold(queries[:, here], keys.shape[1], view.parts)
        seen = None if bias is None else bias.expand(-1, keys.shape[1], -1, -1, -1).flatten(1, 2)
        read, total = fused_on_cpu(tile.flatten(1, 2), keys.flatten(1, 2), values.flatten(1, 2), scale, seen)
        reads.append(unfold(read.view(tile.shape), time).flatten(1, 2))
        totals.append(unfold(total.view(tile.shape[:-1]), time).flatten(1, 2))
    read = torch.cat(reads, 1).to(torch.promote_types(queries.dtype, torch.float32))
    return Attended(read, torch.cat(totals, 1), None)


@dataclass
class Run:
    """Attention of consecutive tokens to stores.

    Attributes:
        starts: position of the first token of each row, or one number where all rows are alike.
        time: the number of tokens.
        scale: the factor of queries.
        chooser: None without a cache.
        real: which tokens count for the choice of segments, `[rows, time]` on the host; None for all.
        asking: queries that score segments, where they are not those that attend.
        rotate: turns keys, for `far_distance` and `packed`.
        dropped: how many segments after the sinks the stores do not hold any more, like `starts`; of compressed ones
            only without `long`.
        window_dropped: the same for `Stores.keys` and `Stores.values`.
        tiles, lists: (begin, end) of each tile, and the segments that it retrieved, `[rows, kv_heads, parts, k*u]`, -1
            for none; `forward` fills them.
    """

    options: CacheFormerOptions
    starts: tuple[int, ...]
    time: int
    scale: float
    chooser: Chooser | None = None
    real: Tensor | None = None
    asking: Tensor | None = None
    rotate: Rotate | None = None
    dropped: tuple[int, ...] = (0,)
    window_dropped: tuple[int, ...] = (0,)
    tiles: list[tuple[int, int]] = field(default_factory=list)
    lists: list[Tensor] = field(default_factory=list)

    def cut(self, most: int) -> list[tuple[int, int]]:
        """Return (begin, end) of each tile, of at most so many tokens."""
        tiles, begin = [], 0
        while begin < self.time:
            left = min(most, self.time - begin)
            end = begin + min(self.tile(start + begin, left) for start in self.starts)
            tiles.append((begin, end))
            begin = end
        return tiles

    def tile_tokens(self, queries: Tensor, stores: Stores) -> int:
        """Return how many tokens a tile may have."""
        (rows, heads), device, options = queries.shape[:2], queries.device.type, self.options
        most = TILE_TOKENS.get(device, TILE_TOKENS["cpu"])
        columns = stores.long_keys.shape[2] if options.long or options.chooses else 0
        scores = rows * heads // options.kv_heads * columns
        return min(most, max(MOST_SCORES.get(device, MOST_SCORES["cpu"]) // scores, 1)) if scores else most

    def tile(self, position: int, most: int) -> int:
        """Return how many tokens the tile at a position may have: whole windows, whole blocks, or part of a block."""
        options = self.options
        window, block = options.window_tokens, 1
        if options.cache and options.selection != "token":
            block = options.block_rows
        in_window = min(window - position % window, most)
        if len(self.starts) == 1 and self.real is None and position % block == 0 and options.causal:
            whole = most // window * window
            if whole and position % window == 0 and window % block == 0 and options.joins_windows:
                return whole
            whole = in_window // block * block
            if whole and options.joins_blocks:
                return whole
        return min(in_window, block - position % block)

    def positions(self, begin: int, end: int) -> Tensor:
        """Return positions `[rows or 1, time]`, on the host."""
        return torch.tensor(self.starts)[:, None] + torch.arange(begin, end)

    def views(self, positions: Tensor, lists: Tensor | None) -> dict[str, View]:
        """Return what each branch shows a tile, without branches that show nothing."""
        options, size = self.options, self.options.pool_tokens
        dropped = torch.tensor(self.dropped)[:, None]
        limit = positions - options.window_start(positions) + 1
        shown = {"short": View("keys", "values", self.window(positions), limit)}
        horizon, vectors = options.horizon(positions), options.pool_vectors
        if options.long or options.chooses:
            unscored = options.unscored(positions[:, :1])
            limit = (horizon // size - unscored) * vectors
            hidden = (unscored - (0 if options.long else dropped)) * vectors
            where: tuple[int, int] | Tensor = (0, int(limit.max()))
            if bool(hidden.any()):
                where = after_sinks(limit[:, -1:], hidden, options.sinks * vectors, options.kv_heads)
            shown["long"] = View("long_keys", "long_values", where, limit)
        if options.overlap:
            limit = (horizon + size // 2) // size * vectors
            shown["overlap"] = View("overlap_keys", "overlap_values", (0, int(limit.max())), limit)
        if lists is not None:
            shown["cache"] = self.retrieved(positions, lists)
        return {name: view for name, view in shown.items() if int(view.limit.max()) > 0}

    def window(self, positions: Tensor) -> tuple[int, int] | Tensor:
        """Return where the windows of a tile are, by the rows or by the windows of a tile of several."""
        options = self.options
        missing = torch.tensor(self.window_dropped)[:, None] * options.pool_tokens
        begins = options.window_start(positions[:, :: options.window_tokens]) - missing  # a tile of more has whole ones
        last = positions[:, -1:] - missing
        if begins.numel() == 1:
            return int(begins), int(last) + 1
        most = min(int((last - begins).max()) + 1, 2 * options.window_tokens)
        columns = (begins[..., None] + torch.arange(most)).minimum(last[..., None])
        return columns[:, None].expand(-1, options.kv_heads, -1, -1)

    def retrieved(self, positions: Tensor, lists: Tensor) -> View:
        """Return a view of the tokens of the listed segments."""
        options, size = self.options, self.options.pool_tokens
        keys, values = ("cache_keys", "cache_values") if options.rounds else ("keys", "values")
        filled, dropped = options.filled(positions), torch.tensor(self.dropped, device=lists.device)
        places = torch.where(lists < options.sinks, lists, lists - dropped[:, None, None, None])
        segments = int((options.admissible(options.block_start(positions)) - dropped.cpu()[:, None]).max())
        by_token = lists.shape[2] == positions.shape[1]
        alike = by_token and not options.packed  # a segment is read at one place by all tokens of a tile
        if alike and segments <= min(lists.shape[2], ALL_AT_ONCE) * options.retrieved:
            nowhere = torch.where(places < 0, segments, places)
            seen = lists.new_zeros(*lists.shape[:3], segments + 1, dtype=torch.bool).scatter_(-1, nowhere, True)
            numbers = torch.arange(segments, device=lists.device)
            numbers = torch.where(numbers < options.sinks, numbers, numbers + dropped[:, None])
            move = self.move(positions[:, :1], numbers[:, None, None] * size)
            return View(keys, values, (0, segments * size), filled * size, seen[..., :segments], move)
        most = int(filled.max())
        tokens = places[..., :most, None].clamp(min=0) * size + torch.arange(size, device=lists.device)
        firsts = positions[:, :: positions.shape[1] // lists.shape[2]]
        move = self.move(firsts, lists[..., :most].clamp(min=0) * size)
        return View(keys, values, tokens.flatten(-2), filled * size, move=move)

    def move(self, firsts: Tensor, begins: Tensor) -> Move | None:
        """Return how keys of segments are moved.

        Args:
            firsts: positions of the first tokens of parts, `[rows or 1, parts]`.
            begins: positions of the segments, `[rows or 1, 1 or kv_heads, parts, segments]`.
        """
        options, rotate = self.options, self.rotate
        if rotate is None or not (options.far_distance or options.packed):
            return None
        before = torch.tensor(options.far_distance, device=begins.device)
        start = options.window_start(firsts).to(begins.device)[:, None, :, None]
        if options.packed:
            place = torch.arange(begins.shape[-1], device=begins.device)
            filled = options.filled(firsts).to(begins.device)[:, None, :, None]
            before = (filled - place) * options.pool_tokens
        shifts = (start - before - begins).clamp(min=0)
        return Move(rotate, shifts) if bool(shifts.any()) else None

    def shares(self, shown: dict[str, View], gates: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        """Return each branch's share of a "separate" or "gated" mean, and the divisor; both broadcast over heads."""
        branches = self.options.branches
        opened = {name: (shown[name].limit > 0)[:, None].double() for name in branches if name in shown}
        if gates is not None:
            opened = {name: gates[..., branches.index(name)] * there.to(gates) for name, there in opened.items()}
        total = torch.stack([*opened.values()]).sum(0)
        return {name: gate / total for name, gate in opened.items()}, total

    def chosen(self) -> Tensor:
        """Return the segments that each token retrieved in `forward`, `[rows, kv_heads, time, k*u]`, -1 for none."""
        each = [
            lists.repeat_interleave((end - begin) // lists.shape[2], 2)
            for lists, (begin, end) in zip(self.lists, self.tiles, strict=True)
        ]
        return torch.cat(each, 2)

    @torch.no_grad()
    def forward(self, queries: Tensor, stores: Stores, gates: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attend.

        Returns:
            The output, and shifts `[1 or branches, rows, heads, time]`: the weight of a column is exp(score - shift).
        """
        options, branches = self.options, self.options.branches
        dtype = torch.promote_types(queries.dtype, torch.float32)
        output = torch.zeros_like(queries)
        kinds = 1 if options.aggregation == "joint" else len(branches)
        shifts = output.new_zeros(kinds, *queries.shape[:3], dtype=dtype)
        self.tiles = self.cut(self.tile_tokens(queries, stores))
        with torch.autocast(queries.device.type, enabled=False):
            if self.chooser is not None:
                self.chooser.grow(stores.long_keys.shape[2] // options.pool_vectors)
                if not options.causal:
                    self.look_ahead(queries, stores)
            for begin, end in self.tiles:
                part = slice(begin, end)
                shown, done = self.attend_branches(queries[:, :, part], stores, begin, end)
                if options.aggregation == "joint":
                    shift = torch.logsumexp(torch.stack([branch.total for branch in done.values()]), 0)
                    shares = {name: (branch.total - shift).exp() for name, branch in done.items()}
                    shifts[0, :, :, part] = shift
                else:
                    given, _ = self.shares(shown, None if gates is None else gates[:, :, part])
                    shares = {name: share.to(shifts) for name, share in given.items()}
                    for name, share in shares.items():
                        shifts[branches.index(name), :, :, part] = done[name].total - share.log()
                read = [share[..., None] * done[name].read for name, share in shares.items()]
                output[:, :, part] = torch.stack(read).sum(0)
        return output, shifts

    def attend_branches(
        self, tile: Tensor, stores: Stores, begin: int, end: int
    ) -> tuple[dict[str, View], dict[str, Attended]]:
        """Choose the segments of a tile, and attend to each branch separately."""
        positions = self.positions(begin, end)
        shown, done = self.views(positions, None), {}
        real = None if self.real is None else self.real[:, begin:end]
        weigh = partial(self.chooser.weigh, real=real) if self.chooser is not None and self.options.chooses else None
        if "long" in shown:
            asking = tile
            if self.asking is not None:
                asking = self.asking[:, :, begin:end]
            done["long"] = attend(asking, self.scale, stores, shown["long"], self.options.long, weigh)
        if self.chooser is not None:
            lists = self.chooser(positions, done["long"].opinions if "long" in done else None, real)
            self.lists.append(lists)
            shown = self.views(positions, lists)
        shown = {name: view for name, view in shown.items() if name in self.options.branches}
        return shown, {name: done.get(name) or attend(tile, self.scale, stores, view) for name, view in shown.items()}

    def look_ahead(self, queries: Tensor, stores: Stores) -> None:
        """Tell the chooser the opinions of whole blocks, including their last tokens (`paper_block`)."""
        assert self.chooser is not None
        for begin, end in self.tiles:
            positions = self.positions(begin, end)
            shown = self.views(positions, None)
            if "long" in shown:
                tile = queries[:, :, begin:end]
                opinions = attend(tile, self.scale, stores, shown["long"], False, self.chooser.weigh).opinions
                assert opinions is not None
                self.chooser.foresee(positions, opinions)

    @torch.no_grad()
    def backward(
        self, queries: Tensor, stores: Stores, gates: Tensor | None, output: Tensor, shifts: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
        """Return gradients of queries, gates and stores; probabilities are computed again."""
        branches, joint = self.options.branches, self.options.aggregation == "joint"
        dtype = shifts.dtype
        to_queries = torch.zeros_like(queries, dtype=dtype)
        to_gates = None if gates is None else torch.zeros_like(gates)
        to_stores = {
            name: None if store is None or store.dtype == torch.int8 else output.new_zeros(store.shape, dtype=dtype)
            for name, store in stores._asdict().items()
        }
        for number, (begin, end) in enumerate(self.tiles):
            part = slice(begin, end)
            tile, upstream = queries[:, :, part].to(dtype) * self.scale, gradient[:, :, part].to(dtype)
            kept = (upstream * output[:, :, part].to(dtype)).sum(-1)  # [rows, heads, time]
            shown = self.views(self.positions(begin, end), self.lists[number] if self.lists else None)
            shown = {name: view for name, view in shown.items() if name in branches}
            shares, divisor = self.shares(shown, None if gates is None else gates[:, :, part])
            for name, view in shown.items():
                place = branches.index(name)
                shift = shifts[0 if joint else place, :, :, part]
                share = None if joint else shares[name].to(kept).expand_as(kept)
                slope = to_queries[:, :, part]
                means = self.differentiate(tile, upstream, kept, shift, share, view, stores, slope, to_stores)
                if to_gates is not None:
                    there = (view.limit > 0)[:, None].to(kept.device)
                    to_gates[:, :, part, place] = (means - kept) / divisor * there
        cast = [None if grown is None else grown.to(stores.keys.dtype) for grown in to_stores.values()]
        return to_queries.mul_(self.scale).to(queries.dtype), to_gates, cast

    def differentiate(
        self,
        queries: Tensor,
        upstream: Tensor,
        kept: Tensor,
        shift: Tensor,
        share: Tensor | None,
        view: View,
        stores: Stores,
        to_queries: Tensor,
        to_stores: dict[str, Tensor | None],
    ) -> Tensor:
        """Add one branch's gradients of a tile to `to_queries` and `to_stores`.

        Args:
            upstream: gradient of the tile's output.
            kept: product of the output and its gradient, summed over head_dim.
            share: of the branch; None with a joint softmax.

        Returns:
            Product of the branch's own output and the gradient, summed over head_dim; `kept` with a joint softmax.
        """
        time, means = queries.shape[2], []
        for heads, here in view.pieces(queries, self.options.kv_heads):

            def by_column(tensor: Tensor, here: slice = here, count: int = heads.stop - heads.start) -> Tensor:
                return fold(tensor[:, here], count, view.parts)

            keys, values = view.fetch(stores, heads, queries.dtype)
            tile, incoming = by_column(queries), by_column(upstream)
            weights = tile @ keys.transpose(-1, -2)
            weights.sub_(by_column(shift)[..., None]).exp_()
            view.hide(weights, heads, 0.0)
            to_weights = incoming @ values.transpose(-1, -2)
            to_values = weights.transpose(-1, -2) @ incoming
            mean = by_column(kept)
            if share is not None:
                given = by_column(share).clamp(min=torch.finfo(share.dtype).tiny)
                mean = (weights * to_weights).sum(-1) / given
            means.append(unfold(mean, time).flatten(1, 2))
            to_scores = weights.mul_(to_weights.sub_(mean[..., None]))
            to_queries[:, here] += unfold(to_scores @ keys, time).flatten(1, 2)
            key_gradient, value_gradient = to_stores[view.keys], to_stores[view.values]
            if key_gradient is None:  # rounded
                continue
            to_keys = to_scores.transpose(-1, -2) @ tile
            if view.move is not None:
                to_keys = view.move(to_keys, heads, back=True)
            if value_gradient is None:
                to_keys += to_values
            else:
                add(value_gradient, heads, view.of(heads), to_values)
            add(key_gradient, heads, view.of(heads), to_keys)
        return torch.cat(means, 1)


class TiledAttention(torch.autograd.Function):
    """`Run` for autograd: saves inputs, output and shifts, and computes the rest again."""

    @staticmethod
    def forward(ctx: Any, run: Run, queries: Tensor, gates: Tensor | None, *stores: Tensor | None) -> Tensor:
        output, shifts = run.forward(queries, Stores(*stores), gates)  # type: ignore[arg-type]  # None only where unread
        ctx.run = run
        ctx.save_for_backward(queries, gates, output, shifts, *stores)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, gates, output, shifts, *stores = ctx.saved_tensors
        with torch.autocast(queries.device.type, enabled=False):  # a loop may call backward inside its autocast
            grown = ctx.run.backward(queries, Stores(*stores), gates, output, shifts, gradient)
        to_queries, to_gates, to_stores = grown
        return None, to_queries, to_gates, *to_stores
