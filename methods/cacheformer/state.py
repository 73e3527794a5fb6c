"""CacheFormer while it decodes: the state of one layer, and how it reads the next tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cacheformers.methods.cacheformer.cacheformer import (
    CacheFormerOptions,
    CacheFormerParts,
    Projected,
    Rotate,
    normed,
    pool,
)
from cacheformers.methods.cacheformer.representatives import width
from cacheformers.methods.cacheformer.selection import Chooser
from cacheformers.methods.cacheformer.shelf import Shelf
from cacheformers.methods.cacheformer.tiles import Run, Stores, TiledAttention
from cacheformers.modeling.inputs import refuse_looking_ahead
from cacheformers.modeling.memory import joined, keep_columns, part
from cacheformers.modeling.search.store import SCALE_BYTES, packed, stacked

SIDES = ("keys", "values", "queries")  # of the last tokens, from which segments are compressed
SEGMENTS = {"long_keys", "long_values", "overlap_keys", "overlap_values"}  # the stores whose vectors are of segments


class CacheFormerState:
    """Keys, values and choices of one layer, for rows that may have read different numbers of tokens.

    A step reads a window, compressed vectors and retrieved segments; all other tokens are only kept, up to the budget
    of `cache_tokens`, and those before the window not at all without a cache. Windows, segments and blocks count from
    each row's first real token. With gradients on, the state carries the graph of what was read,
    until `detach`.

    Attributes:
        tokens_read: by each row.
        shelves: by the names of `Stores`, without values where keys are also values.
        tail: the last s tokens of each row, from which segments are compressed: keys, values, and `strengths`,
            `[rows, kv_heads, s, head_dim]` each.
        chooser: None without a cache.
        expected_tokens: how many a row is going to have read, so that shelves get room for them at once; 0 if unknown.
        taken: segments that the last tokens retrieved, `[rows, time, kv_heads * k*u]`, -1 for none; None if unknown.

    Raises:
        ValueError: with `paper_block`, which chooses with tokens that do not exist yet.
    """

    def __init__(
        self, options: CacheFormerOptions, rows: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        refuse_looking_ahead(options)
        self.options = options
        self.tokens_read = [0] * rows
        self.expected_tokens = 0
        blank = torch.zeros(rows, options.kv_heads, 0, options.head_dim, dtype=dtype, device=device)
        names = [name for name in Stores._fields if not (options.tied and name.endswith("values"))]
        names = [name for name in names if options.rounds or not name.startswith("cache")]
        self.shelves = dict.fromkeys(names, Shelf(blank))
        for name in names:
            if name.startswith("cache"):
                shape = (rows, options.kv_heads, 0, options.head_dim + SCALE_BYTES)
                self.shelves[name] = Shelf(blank.new_zeros(shape, dtype=torch.int8))
        found_by = width(options.representatives, options.head_dim)
        self.shelves["long_keys"] = Shelf(blank.new_zeros(rows, options.kv_heads, 0, found_by))
        shape = (rows, options.kv_heads, options.pool_tokens, options.head_dim)
        sides = 1 if options.tied else 3 if options.representatives == "tokens" else 2
        self.tail = [blank.new_zeros(shape) for _ in range(sides)]
        self.chooser = self.new_chooser(options, blank)
        self.taken: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.tokens_read)

    def attend(
        self,
        parts: CacheFormerParts,
        projected: Projected,
        rotate: Rotate | None = None,
        real: Tensor | None = None,
        by_windows: bool = False,
    ) -> Tensor:
        """Read any number of new tokens, and return what heads read, `[rows, heads, time, head_dim]`.

        Args:
            rotate: turns unrotated keys to positions; only used with `pretrained`.
            real: which tokens are not padding, `[rows, time]`; None for all.
            by_windows: they see windows, and the first segment with `sink`; what follows makes a new choice.
        """
        if real is None or bool(real.all()):
            return self.advance(parts, projected, rotate, [projected.q.shape[2]] * self.rows, by_windows)
        real = real.cpu()
        counts = real.sum(1)
        order = torch.argsort(~real, dim=1, stable=True)[:, : int(counts.max())]  # real tokens first
        packed = projected.each(lambda tensor: keep_columns(tensor, order, 2))
        read = self.advance(parts, packed, rotate, counts.tolist(), by_windows)
        output = torch.zeros_like(projected.q)
        row, column = (torch.arange(order.shape[1]) < counts[:, None]).nonzero(as_tuple=True)
        place = order[row, column]
        output[row, :, place] = read[row, :, column]
        if self.taken is not None:
            taken = self.taken.new_full((*real.shape, self.taken.shape[2]), -1)
            taken[row, place] = self.taken[row, column]
            self.taken = taken
        return output

    def advance(
        self,
        parts: CacheFormerParts,
        projected: Projected,
        rotate: Rotate | None,
        counts: list[int],
        by_windows: bool = False,
    ) -> Tensor:
        """Read tokens of which each row's first `counts` are real; the others are overwritten later."""
        options, time = self.options, projected.q.shape[2]
        alike = len(set(self.tokens_read)) == 1
        starts = tuple(self.tokens_read[:1] if alike else self.tokens_read)
        first = torch.tensor(starts)
        new = {"keys": projected.k} if projected.v is None else {"keys": projected.k, "values": projected.v}
        for name, tokens in new.items():
            tokens = normed(parts.local_norm, tokens)
            self.write(name, first, tokens)
            if options.rounds:
                self.write(f"cache_{name}", first, packed(tokens.detach()))
        strengths = projected.strengths(options)
        sides = {**new, "keys": projected.pooled_keys(options)}
        if strengths is not None:
            sides["queries"] = strengths.to(sides["keys"].dtype)
        self.compress(parts, sides, rotate, starts, counts)

        # Raw tokens are taken one by one; of segments, a row's last one would show nothing before the next token.
        shelves = dict(self.shelves)
        for name in SEGMENTS & shelves.keys():
            complete = self.held(name, first + time - 1, self.missing(name, first))
            shelves[name] = shelves[name].cut(int(complete.max()))
        ragged = len(set(counts)) > 1
        real = torch.arange(time) < torch.tensor(counts)[:, None] if ragged else None
        asking = projected.asking(options)
        dropped, window_dropped = (tuple(of(first).tolist()) for of in (options.left, options.window_left))
        chooser = self.chooser
        if by_windows:
            self.chooser, options = self.new_chooser(options, projected.q), options.by_windows()
            chooser = self.new_chooser(options, projected.q)
        run = Run(options, starts, time, projected.scale, chooser, real, asking, rotate, dropped, window_dropped)
        gates = projected.gates(parts)
        if torch.is_grad_enabled():
            stores = Stores(**{name: shelf.whole for name, shelf in shelves.items()})
            read: Tensor = TiledAttention.apply(run, projected.q, gates, *stores)  # type: ignore[no-untyped-call]  # torch's
        else:
            read, _ = run.forward(projected.q, Stores(**shelves), gates)
        if run.lists:  # none without a cache or without tokens
            self.taken = run.chosen().transpose(1, 2).flatten(2)
        earlier = self.tokens_read
        self.tokens_read = [before + count for before, count in zip(self.tokens_read, counts, strict=True)]
        if by_windows and self.chooser is not None:
            segments = shelves["long_keys"].shape[2] // options.pool_vectors
            self.chooser.choose_oldest(torch.tensor(self.tokens_read)[:, None], segments)
        self.forget(earlier)
        return read

    def new_chooser(self, options: CacheFormerOptions, like: Tensor) -> Chooser | None:
        """Return a chooser without any opinion, for vectors `[rows, ...]` of this kind."""
        return Chooser(options, len(like), like.device, like.dtype) if options.cache else None

    def missing(self, name: str, tokens: Tensor) -> Tensor:
        """Count the segments after the sinks that a shelf does not hold any more, where rows have read so much."""
        options = self.options
        if name in ("keys", "values"):
            return options.window_left(tokens)
        if name.startswith("cache") or (name.startswith("long") and not options.long):
            return options.left(tokens)
        return torch.zeros_like(tokens)

    def held(self, name: str, tokens: Tensor, missing: Tensor) -> Tensor:
        """Count the vectors on a shelf, where rows have read so much and these segments are missing, all `[rows]`."""
        size, vectors = self.options.pool_tokens, self.options.pool_vectors
        if name.startswith("long"):
            return (tokens // size - missing) * vectors
        return (tokens + size // 2) // size * vectors if name.startswith("overlap") else tokens - missing * size

    def write(self, name: str, starts: Tensor, new: Tensor) -> None:
        """Put new vectors of rows that have read `starts` tokens on a shelf."""
        options = self.options
        most = options.most_window_tokens if name in ("keys", "values") else options.most_tokens
        if name in SEGMENTS:
            most = None if options.long or name.startswith("overlap") else options.most_vectors
        begin = self.held(name, starts, self.missing(name, starts))
        expected = torch.tensor([self.expected_tokens])
        expected = self.held(name, expected, self.missing(name, expected))
        self.shelves[name] = self.shelves[name].written(begin.tolist(), new, most, int(expected))

    def forget(self, earlier: Sequence[int]) -> None:
        """Forget segments that no later token reads, after rows had read `earlier` tokens."""
        options, tokens = self.options, torch.tensor(self.tokens_read)
        for name, shelf in self.shelves.items():
            missing = self.missing(name, tokens)
            fewer = (missing - self.missing(name, torch.tensor(earlier)))[:, None]
            if bool(fewer.any()) and shelf.shape[2]:  # some kinds of representatives have no values
                unit = options.pool_vectors if name in SEGMENTS else options.pool_tokens
                sinks = 0 if options.rounds and name in ("keys", "values") else options.sinks
                left = self.held(name, tokens, missing)[:, None]
                self.shelves[name] = shelf.forgotten(sinks * unit, fewer * unit, left)

    def compress(
        self,
        parts: CacheFormerParts,
        new: dict[str, Tensor],
        rotate: Rotate | None,
        starts: tuple[int, ...],
        counts: list[int],
    ) -> None:
        """Compress the segments that the new tokens complete, and keep the last s tokens.

        With gradients on, the parts are in the graph even if no segment is complete.
        """
        options, size = self.options, self.options.pool_tokens
        tokens = [torch.cat([old, fresh], 2) for old, fresh in zip(self.tail, new.values(), strict=True)]
        time = tokens[0].shape[2] - size
        begins = torch.tensor(starts)[:, None]
        for name, on, shift in (("long", options.long or options.cache, 0), ("overlap", options.overlap, size // 2)):
            first = (begins + shift) // size
            complete = int(((begins + time + shift) // size - first).max())
            if not on or (complete == 0 and not torch.is_grad_enabled()):
                continue
            numbers = first + torch.arange(complete)  # [rows or 1, segments]
            places = numbers[..., None] * size - shift + torch.arange(size) - begins[..., None] + size
            places = places.clamp(max=time + size - 1).flatten(1).expand(self.rows, -1)
            cut = [keep_columns(side, places, 2).unflatten(2, (complete, size)) for side in tokens]
            cut_values = None if options.tied else cut[1]
            queries = cut[2] if len(cut) > 2 else None
            pooled = pool(options, parts, cut[0], cut_values, numbers.to(cut[0].device), shift > 0, rotate, queries)
            for side, vectors in zip(("keys", "values"), pooled, strict=True):
                if vectors is not None:
                    self.write(f"{name}_{side}", begins[:, 0], vectors)
        last = torch.tensor(counts)[:, None] + torch.arange(size)
        self.tail = [keep_columns(side, last, 2) for side in tokens]

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name; of shelves whole ones, which may be copies."""
        return {**joined(shelves={name: shelf.whole for name, shelf in self.shelves.items()}), **self.beside()}

    def beside(self) -> dict[str, Tensor]:
        """Return the tensors that are on no shelf."""
        tail = dict(zip(SIDES, self.tail, strict=False))
        choices = {} if self.chooser is None else {"lists": self.chooser.lists, "evidence": self.chooser.evidence}
        return joined(tail=tail, chooser=choices)

    def replace(self, tensors: dict[str, Tensor], private: bool = False) -> None:
        """Replace the tensors of `tensors()`; `private` ones are not used elsewhere."""
        self.shelves = {name: Shelf(vectors, private) for name, vectors in part(tensors, "shelves").items()}
        self.replace_beside(tensors)

    def replace_beside(self, tensors: dict[str, Tensor]) -> None:
        """Replace the tensors of `beside()`."""
        tail = part(tensors, "tail")
        self.tail = [tail[name] for name in SIDES if name in tail]  # files sort their tensors by name
        if self.chooser is not None:
            self.chooser.lists, self.chooser.evidence = tensors["chooser.lists"], tensors["chooser.evidence"]

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to every tensor."""
        self.shelves = {name: shelf.change(function) for name, shelf in self.shelves.items()}
        self.replace_beside({name: function(tensor) for name, tensor in self.beside().items()})

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was; a row may be taken several times, and then its vectors are shared."""
        if list(rows) == list(range(self.rows)):
            return
        held = {name: self.columns(name).tolist() for name in self.shelves}
        self.shelves = {name: shelf.select(rows, held[name]) for name, shelf in self.shelves.items()}
        index = torch.tensor(rows, dtype=torch.long)
        self.replace_beside({name: tensor[index.to(tensor.device)] for name, tensor in self.beside().items()})
        self.taken = None if self.taken is None else self.taken[index.to(self.taken.device)]
        self.tokens_read = [self.tokens_read[row] for row in rows]

    def columns(self, name: str) -> Tensor:
        """Count the vectors of every row on a shelf, `[rows]`."""
        tokens = torch.tensor(self.tokens_read)
        return self.held(name, tokens, self.missing(name, tokens))

    def join(self, others: Sequence[CacheFormerState]) -> None:
        """Append the rows of other states with the same options."""
        theirs = [other.tensors() for other in others]
        self.replace(
            {name: stacked([tensor, *(held[name] for held in theirs)]) for name, tensor in self.tensors().items()},
            private=True,
        )
        self.taken = None
        self.tokens_read = [tokens for state in (self, *others) for tokens in state.tokens_read]

    def reset(self, rows: Sequence[int]) -> None:
        """Forget what the given rows have read."""
        index = torch.tensor(rows, dtype=torch.long)
        self.shelves = {name: Shelf(shelf.whole, shelf.private) for name, shelf in self.shelves.items()}
        self.tail = [side.index_fill(0, index.to(side.device), 0.0) for side in self.tail]
        if self.chooser is not None:
            index = index.to(self.chooser.lists.device)
            self.chooser.lists = self.chooser.lists.index_fill(0, index, -1)
            self.chooser.evidence = self.chooser.evidence.index_fill(0, index, 0.0)
        self.taken = None
        self.tokens_read = [0 if row in rows else tokens for row, tokens in enumerate(self.tokens_read)]

    def successor(self) -> CacheFormerState:
        """Return a state that can go on from here while this one is read. Only one successor may go on."""
        twin = copy.copy(self)
        twin.shelves, twin.tail, twin.chooser = dict(self.shelves), list(self.tail), copy.copy(self.chooser)
        return twin

    def clone(self) -> CacheFormerState:
        """Return an independent copy. What both have read stays shared when they go on."""
        self.shelves = {name: replace(shelf, private=False) for name, shelf in self.shelves.items()}
        return self.successor()

    def detach(self) -> None:
        """Cut the autograd graph."""
        shelves, beside = self.shelves.values(), self.beside().values()
        if any(shelf.requires_grad for shelf in shelves) or any(tensor.requires_grad for tensor in beside):
            self.change(Tensor.detach)

    def to(self, device: torch.device | str) -> None:
        """Move every tensor."""
        self.change(lambda tensor: tensor.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor."""
        on_shelves = sum(shelf.nbytes for shelf in self.shelves.values())
        return on_shelves + sum(tensor.nbytes for tensor in self.beside().values())

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything held, by name, without unused room."""
        shelves = {name: shelf.cut(int(self.columns(name).max())).whole for name, shelf in self.shelves.items()}
        held = {**joined(shelves=shelves), **self.beside()}
        return {
            **{name: tensor.clone() for name, tensor in held.items()},
            "tokens_read": torch.tensor(self.tokens_read),
        }

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Load the `state_dict` of a state with the same options and number of rows."""
        device = self.tail[0].device
        self.replace({name: tensor.to(device) for name, tensor in tensors.items() if name != "tokens_read"})
        self.tokens_read = tensors["tokens_read"].tolist()
        # Earlier releases kept all keys without a cache, too.
        if self.shelves["keys"].shape[2] > int(self.columns("keys").max()):
            self.forget([0] * self.rows)
