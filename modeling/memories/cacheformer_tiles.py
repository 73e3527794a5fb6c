"""CacheFormer's attention, tile by tile: a tile is some consecutive tokens that share a window and a block.

Every branch shows a token the first so many of its columns, so a mask is one number a token and branch. Scores exist for
one tile at a time, and are computed again for the gradient: nothing of size time x columns is ever held. The compressed
columns' scores serve both the attention and the choice of segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cacheformers.modeling.memories.cacheformer import CacheFormerOptions
from cacheformers.modeling.memories.cacheformer_selection import Chooser

TILE_TOKENS = 128


class Stores(NamedTuple):
    """What tokens attend to; a values entry is None where keys are values too.

    Attributes:
        keys, values: of tokens, from each row's first on, normed, `[rows, kv_heads, tokens, head_dim]`.
        long_keys, long_values, overlap_keys, overlap_values: of segments, `[rows, kv_heads, segments*r_s, head_dim]`;
            empty where no branch needs them.
    """

    keys: Tensor
    values: Tensor | None
    long_keys: Tensor
    long_values: Tensor | None
    overlap_keys: Tensor
    overlap_values: Tensor | None


class Columns(NamedTuple):
    """What a branch shows a tile.

    Attributes:
        keys, values: the names of the stores they are in.
        where: columns of the store: a slice that all share, or their numbers `[rows, kv_heads, columns]`, or those of
            each token `[rows, kv_heads, time, columns]`.
        limit: how many of the columns each token sees, `[rows or 1, time]`, on the host.
    """

    keys: str
    values: str
    where: slice | Tensor
    limit: Tensor

    @property
    def each_its_own(self) -> bool:
        """Whether every token has columns of its own."""
        return isinstance(self.where, Tensor) and self.where.dim() == 4

    def fetch(self, stores: Stores, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, kv_heads, (time,) columns, head_dim]`."""
        keys = take(getattr(stores, self.keys), self.where).to(dtype)
        values = getattr(stores, self.values)
        return keys, keys if values is None else take(values, self.where).to(dtype)

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Of queries `[rows, heads, time, head_dim]`, in the layout of `fold`."""
        return fold(queries, keys.shape[1], self.each_its_own) @ keys.transpose(-1, -2)

    def hide(self, scores: Tensor, value: float) -> None:
        """Overwrite the scores of columns that a token does not see."""
        full, most = int(self.limit.min()), scores.shape[-1]
        if full < most:
            hidden = (torch.arange(full, most) >= self.limit[..., None]).to(scores.device)
            by_head = unfold(scores, self.limit.shape[1], self.each_its_own)
            by_head[..., full:].masked_fill_(hidden[:, None, None], value)


def take(store: Tensor, where: slice | Tensor) -> Tensor:
    """Columns of a store `[rows, kv_heads, tokens, head_dim]`."""
    if isinstance(where, slice):
        return store[:, :, where]
    return store.flatten(0, 2).index_select(0, flat_places(store, where)).unflatten(0, where.shape)


def add(gradient: Tensor, where: slice | Tensor, added: Tensor) -> None:
    """The opposite of `take`: add to the columns of a contiguous gradient."""
    if isinstance(where, slice):
        gradient[:, :, where] += added
    else:
        index = flat_places(gradient, where)[:, None].expand(-1, added.shape[-1])
        gradient.view(-1, gradient.shape[-1]).scatter_add_(0, index, added.flatten(0, -2).to(gradient.dtype))


def flat_places(store: Tensor, where: Tensor) -> Tensor:
    """Where columns `[rows, kv_heads, ...]` of a store are when its first three dimensions are one."""
    rows, kv_heads, tokens = store.shape[:3]
    begins = torch.arange(0, rows * kv_heads * tokens, tokens, device=store.device)
    return (where.to(store.device) + begins.view(rows, kv_heads, *[1] * (where.dim() - 2))).flatten()


def fold(tensor: Tensor, kv_heads: int, each_its_own: bool) -> Tensor:
    """`[rows, heads, time, ...]` as what is multiplied with columns: `[rows, kv_heads, group*time or time, ...]`."""
    grouped = tensor.unflatten(1, (kv_heads, -1))
    if each_its_own:
        return grouped.transpose(2, 3)  # [rows, kv_heads, time, group, ...]
    return grouped.flatten(2, 3)


def unfold(tensor: Tensor, time: int, each_its_own: bool) -> Tensor:
    """The opposite, `[rows, kv_heads, group, time, ...]`."""
    return tensor.transpose(2, 3) if each_its_own else tensor.unflatten(2, (-1, time))


class Attended(NamedTuple):
    """What a branch by itself gives a tile.

    Attributes:
        read: `[rows, heads, time, head_dim]`; None where only the weights were asked for.
        total: logarithm of the sum of its columns' exponentials, `[rows, heads, time]`.
        weights: of columns, `[rows, kv_heads, group, time, columns]`, to be multiplied with `scale`
            `[rows, kv_heads, group, time]`.
    """

    read: Tensor | None
    total: Tensor
    weights: Tensor
    scale: Tensor


def attend(queries: Tensor, stores: Stores, columns: Columns, read: bool = True) -> Attended:
    """Softmax attention of a tile `[rows, heads, time, head_dim]` to the columns of one branch."""
    own, time = columns.each_its_own, queries.shape[2]
    keys, values = columns.fetch(stores, queries.dtype)
    weights = columns.scores(queries, keys)
    columns.hide(weights, float("-inf"))
    top = weights.amax(-1, keepdim=True).clamp_(min=torch.finfo(weights.dtype).min)  # finite where nothing is visible
    weights.sub_(top).exp_()
    sums = weights.sum(-1, keepdim=True)
    scale = torch.where(sums > 0, sums.reciprocal(), 0.0)
    total = unfold(top + sums.log(), time, own)[..., 0].flatten(1, 2)
    found = unfold((weights @ values) * scale, time, own).flatten(1, 2) if read else None
    return Attended(found, total, unfold(weights, time, own), unfold(scale, time, own)[..., 0])


@dataclass
class Run:
    """Attention of some tokens to stores.

    Attributes:
        starts: position of the first token in each row, or one number where all rows are alike.
        time: how many tokens.
        chooser: None without a cache.
        real: which tokens count for the choice of segments, `[rows, time]` on the host; None for all.
        lists: the segments that each tile retrieved, filled by `forward`.
    """

    options: CacheFormerOptions
    starts: tuple[int, ...]
    time: int
    chooser: Chooser | None = None
    real: Tensor | None = None
    lists: list[Tensor | None] = field(default_factory=list)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Begin and end of each tile: no row's tokens in it differ in window or block."""
        periods = {self.options.window_tokens}
        if self.options.cache and self.options.selection != "token":
            periods.add(self.options.block_rows)
        cuts = {self.time, *range(0, self.time, TILE_TOKENS)}
        for start in set(self.starts):
            for period in periods:
                cuts.update(range(-start % period, self.time, period))
        ordered = sorted(cuts)
        return iter(zip(ordered[:-1], ordered[1:], strict=True))

    def positions(self, begin: int, end: int) -> Tensor:
        """`[rows or 1, time]`, on the host."""
        return torch.tensor(self.starts)[:, None] + torch.arange(begin, end)

    def columns(self, positions: Tensor, lists: Tensor | None) -> dict[str, Columns]:
        """What each branch shows a tile; branches that show nothing are left out."""
        options = self.options
        begin, last = options.window_start(positions[:, :1]), positions[:, -1:]
        limit = positions - begin + 1
        where: slice | Tensor = slice(int(begin[0]), int(last[0]) + 1)
        if len(begin) > 1:
            window = (begin + torch.arange(int(limit.max()))).minimum(last)
            where = window[:, None].expand(-1, options.kv_heads, -1)
        shown = {"short": Columns("keys", "values", where, limit)}
        horizon, size = options.horizon(positions), options.pool_tokens
        complete = {"long": horizon // size, "overlap": (horizon + size // 2) // size}
        for name, on in (("long", options.long or options.cache), ("overlap", options.overlap)):
            if on:
                limit = complete[name] * options.pool_vectors
                shown[name] = Columns(f"{name}_keys", f"{name}_values", slice(0, int(limit.max())), limit)
        if lists is not None:
            filled = options.filled(positions)
            chosen = lists[..., : int(filled.max()), None].clamp(min=0) * size
            tokens = (chosen + torch.arange(size, device=lists.device)).flatten(-2)
            shown["cache"] = Columns("keys", "values", tokens, filled * size)
        return {name: columns for name, columns in shown.items() if int(columns.limit.max()) > 0}

    def shares(self, shown: dict[str, Columns], gates: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        """Each branch's part of the sum where a softmax does not decide it, and what was divided by.

        Args:
            gates: `[rows, heads, time, branches]`.

        Returns:
            Tensors that broadcast with `[rows, heads, time]`.
        """
        branches = self.options.branches
        there = {name: (shown[name].limit > 0)[:, None] for name in branches if name in shown}
        if gates is None:
            opened = {name: filled.double() for name, filled in there.items()}
        else:
            opened = {name: gates[..., branches.index(name)] * there[name].to(gates.device) for name in there}
        total = torch.stack([*opened.values()]).sum(0)
        return {name: gate / total for name, gate in opened.items()}, total

    @torch.no_grad()
    def forward(self, queries: Tensor, stores: Stores, gates: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            queries: `[rows, heads, time, head_dim]`, scaled.
            gates: `[rows, heads, time, branches]`.

        Returns:
            What heads read `[rows, heads, time, head_dim]`; and what makes their weights of scores, exp(score - shift),
            `[1 or branches, rows, heads, time]`.
        """
        branches, joint = self.options.branches, self.options.aggregation == "joint"
        dtype = torch.promote_types(queries.dtype, torch.float32)
        output = torch.zeros_like(queries)
        shifts = output.new_zeros(1 if joint else len(branches), *queries.shape[:3], dtype=dtype)
        if self.chooser is not None:
            self.chooser.grow(stores.long_keys.shape[2] // self.options.pool_vectors)
            if not self.options.causal:
                self.look_ahead(queries, stores)
        for begin, end in self.tiles():
            tile, positions = queries[:, :, begin:end].to(dtype), self.positions(begin, end)
            shown = self.columns(positions, None)
            long = attend(tile, stores, shown["long"], self.options.long) if "long" in shown else None
            if self.chooser is not None:
                lists = self.chooser(positions, long, None if self.real is None else self.real[:, begin:end])
                shown = self.columns(positions, lists)
                self.lists.append(lists)
            shown = {name: columns for name, columns in shown.items() if name in branches}
            done = {
                name: long if name == "long" and long else attend(tile, stores, columns)
                for name, columns in shown.items()
            }
            if joint:
                shift = torch.logsumexp(torch.stack([branch.total for branch in done.values()]), 0)
                shares = {name: (branch.total - shift).exp() for name, branch in done.items()}
                shifts[0, :, :, begin:end] = shift
            else:
                shares, _ = self.shares(shown, None if gates is None else gates[:, :, begin:end])
                for name, branch in done.items():
                    shares[name] = shares[name].to(branch.total)
                    shifts[branches.index(name), :, :, begin:end] = branch.total - shares[name].log()
            output[:, :, begin:end] = sum(shares[name][..., None] * branch.read for name, branch in done.items())
        return output, shifts

    def look_ahead(self, queries: Tensor, stores: Stores) -> None:
        """Tell the chooser what whole blocks think, their last tokens included (`paper_block`)."""
        assert self.chooser is not None
        for begin, end in self.tiles():
            positions = self.positions(begin, end)
            shown = self.columns(positions, None)
            if "long" in shown:
                tile = queries[:, :, begin:end].to(torch.promote_types(queries.dtype, torch.float32))
                self.chooser.foresee(positions, attend(tile, stores, shown["long"], False))

    @torch.no_grad()
    def backward(
        self, queries: Tensor, stores: Stores, gates: Tensor | None, output: Tensor, shifts: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
        """Gradients of queries, gates and stores, given those of the output; probabilities are computed again."""
        branches, joint = self.options.branches, self.options.aggregation == "joint"
        dtype = shifts.dtype
        to_queries = torch.zeros_like(queries, dtype=dtype)
        to_gates = None if gates is None else torch.zeros_like(gates)
        to_stores = {
            name: None if store is None else store.new_zeros(store.shape, dtype=dtype)
            for name, store in stores._asdict().items()
        }
        for number, (begin, end) in enumerate(self.tiles()):
            part = slice(begin, end)
            tile, upstream = queries[:, :, part].to(dtype), gradient[:, :, part].to(dtype)
            kept = (upstream * output[:, :, part].to(dtype)).sum(-1)  # [rows, heads, time]
            shown = self.columns(self.positions(begin, end), self.lists[number] if self.lists else None)
            shown = {name: columns for name, columns in shown.items() if name in branches}
            shares, divisor = self.shares(shown, None if gates is None else gates[:, :, part])
            for name, columns in shown.items():
                own, place = columns.each_its_own, branches.index(name)

                def by_column(tensor: Tensor, columns: Columns = columns) -> Tensor:
                    return fold(tensor, self.options.kv_heads, columns.each_its_own)

                keys, values = columns.fetch(stores, dtype)
                weights = columns.scores(tile, keys)
                weights.sub_(by_column(shifts[0 if joint else place, :, :, part])[..., None]).exp_()
                columns.hide(weights, 0.0)
                to_weights = by_column(upstream) @ values.transpose(-1, -2)
                to_values = weights.transpose(-1, -2) @ by_column(upstream)
                mean = kept
                if not joint:
                    share = shares[name].to(kept).clamp(min=torch.finfo(dtype).tiny)
                    mean = unfold((weights * to_weights).sum(-1), end - begin, own).flatten(1, 2) / share
                if to_gates is not None:
                    there = (columns.limit > 0)[:, None].to(kept.device)
                    to_gates[:, :, part, place] = (mean - kept) / divisor * there
                to_scores = weights.mul_(to_weights.sub_(by_column(mean)[..., None]))
                to_queries[:, :, part] += unfold(to_scores @ keys, end - begin, own).flatten(1, 2)
                to_keys = to_scores.transpose(-1, -2) @ by_column(tile)
                value_gradient = to_stores[columns.values]
                if value_gradient is None:
                    to_keys += to_values
                else:
                    add(value_gradient, columns.where, to_values)
                key_gradient = to_stores[columns.keys]
                assert key_gradient is not None
                add(key_gradient, columns.where, to_keys)
        cast = [
            None if grown is None or store is None else grown.to(store.dtype)
            for grown, store in zip(to_stores.values(), stores, strict=True)
        ]
        return to_queries.to(queries.dtype), to_gates, cast


class TiledAttention(torch.autograd.Function):
    """`Run` for autograd: keeps the inputs, the output and one number a token, and computes the rest again."""

    @staticmethod
    def forward(ctx: Any, run: Run, queries: Tensor, gates: Tensor | None, *stores: Tensor | None) -> Tensor:
        output, shifts = run.forward(queries, Stores(*stores), gates)  # type: ignore[arg-type]
        ctx.run = run
        ctx.save_for_backward(queries, gates, output, shifts, *stores)
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, gates, output, shifts, *stores = ctx.saved_tensors
        to_queries, to_gates, to_stores = ctx.run.backward(queries, Stores(*stores), gates, output, shifts, gradient)
        return None, to_queries, to_gates, *to_stores
