"""The state of gated attention: keys and values of every layer, and what the gates of the running forward did."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cacheformers.methods.gated_attention.near_far import Operands, one_pass, tile_by_tile, two_passes
from cacheformers.methods.gated_attention.options import GatedAttentionOptions
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.memory import MemoryState, SegmentCall, joined, keep_columns, part
from cacheformers.modeling.search.store import stacked

LEAST_ROOM = 64  # columns
# Kinds of keys and values. "far": of everything, with `far_distance` before rotation. Of windows alone: "near" of heads
# that see no more, "window" of the others with `far_distance`.
KINDS = ("far", "near", "window")
CLAIMING = Lock()  # copies of one memory may go on in several threads


@dataclass
class Storage:
    """Room for keys and values `[rows, kv_heads, capacity, d]`, of which the first `claimed` columns are taken."""

    keys: Tensor
    values: Tensor
    claimed: int


@dataclass(frozen=True)
class KeyValues:
    """The keys and values of one layer: the first `length` columns of a storage. Appending returns another object.

    The first one to append goes on in the same storage; an older copy that appends later moves to a new storage. So
    copies cost nothing, and a decoding step does not touch earlier columns.

    Attributes:
        dropped: columns before these that have been forgotten.
    """

    storage: Storage
    length: int
    dropped: int = 0

    @property
    def keys(self) -> Tensor:
        """`[rows, kv_heads, length, d]`"""
        return self.storage.keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """`[rows, kv_heads, length, d]`"""
        return self.storage.values[:, :, : self.length]

    @property
    def nbytes(self) -> int:
        return self.storage.keys.nbytes + self.storage.values.nbytes

    @staticmethod
    def of(keys: Tensor, values: Tensor, dropped: int = 0) -> KeyValues:
        """Wrap tensors."""
        return KeyValues(Storage(keys, values, keys.shape[2]), keys.shape[2], dropped)

    def appended(self, keys: Tensor, values: Tensor) -> KeyValues:
        """Append columns `[rows, kv_heads, time, d]`; into new tensors where a graph may read the old ones."""
        if torch.is_grad_enabled():
            return KeyValues.of(torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2), self.dropped)
        end = self.length + keys.shape[2]
        storage = self.storage
        own = storage.keys.shape[2] >= end and not storage.keys.requires_grad
        own = own and storage.keys.is_inference() == torch.is_inference_mode_enabled()
        with CLAIMING:
            own = own and storage.claimed == self.length
            if own:
                storage.claimed = end
        if not own:
            room = end + max(end // 4, LEAST_ROOM)
            storage = Storage(grown(self.keys, room), grown(self.values, room), end)
        storage.keys[:, :, self.length : end] = keys
        storage.values[:, :, self.length : end] = values
        return KeyValues(storage, end, self.dropped)

    def kept(self, columns: Tensor) -> KeyValues:
        """Keep only the columns `[rows, kept]`, each row its own. Forgotten columns come back with any content.

        Raises:
            ValueError: the last columns are to be removed, and earlier ones have been forgotten.
        """
        count = columns.shape[1]
        if count and bool((columns == torch.arange(count, device=columns.device)).all()):
            if self.dropped and count < self.dropped + self.length:
                raise ValueError("Tokens cannot be removed where heads with a window have forgotten what was before.")
            return KeyValues(self.storage, count - self.dropped, self.dropped)
        if not self.length:  # all have been forgotten
            return self.each(lambda tensor: tensor.new_zeros(*tensor.shape[:2], count, tensor.shape[3]), dropped=0)
        chosen = (columns - self.dropped).clamp(min=0)
        return self.each(lambda tensor: keep_columns(tensor, chosen, 2), dropped=0)

    def without_first(self, columns: int) -> KeyValues:
        """Copy without the columns before number `columns`."""
        start = columns - self.dropped
        if torch.is_grad_enabled():
            return self.each(lambda tensor: tensor[:, :, start:], columns)
        return self.each(lambda tensor: tensor[:, :, start:].clone(), columns)

    def with_dropped(self) -> KeyValues:
        """Put zeros in the place of what has been forgotten."""
        return self.each(lambda tensor: F.pad(tensor, (0, 0, self.dropped, 0)), dropped=0) if self.dropped else self

    def each(self, change: Callable[[Tensor], Tensor], dropped: int | None = None) -> KeyValues:
        """Apply a function to keys and values."""
        return KeyValues.of(change(self.keys), change(self.values), self.dropped if dropped is None else dropped)


def grown(tensor: Tensor, room: int) -> Tensor:
    """Copy a tensor, with room for `room` columns."""
    rows, heads, length, width = tensor.shape
    new = tensor.new_empty(rows, heads, room, width)
    new[:, :, :length] = tensor
    return new


class GateLosses(NamedTuple):
    """Terms over layers and tokens: mean g(1 - g) with its sign, mean g, and their weighted sum."""

    sparsity: Tensor
    mean: Tensor
    total: Tensor


def gate_losses(options: GatedAttentionOptions, gates: Iterable[Tensor], counted: Tensor) -> GateLosses:
    """Compute what gates add to the loss.

    Args:
        gates: sigmoid of the logits of every layer, `[rows, channels, time]`, whatever `gate_choice` is.
        counted: tokens with something beyond their window, `[rows, time]`.
    """
    chosen = torch.stack([layer.transpose(1, 2)[counted.to(layer.device)].to(counted.device) for layer in gates])
    sign = -1 if options.sparsity_sign == "paper" else 1
    number = max(chosen.numel(), 1)
    sparsity, mean = sign * (chosen * (1 - chosen)).sum() / number, chosen.sum() / number
    return GateLosses(sparsity, mean, options.sparsity_weight * sparsity + options.mean_weight * mean)


@dataclass
class GatedReading:
    """Data that one forward reads and leaves behind.

    Attributes:
        held: keys and values before this forward by kind (`KINDS`) and layer.
        new: the same after this forward.
        gates: sigmoid of each layer's logits, `[rows, channels, time]`.
        counted: which new columns are tokens with something beyond their window, `[rows, time]`. Losses and statistics
            count only those.
        visible: which columns, old and new, hold a token, `[rows, columns + time]`.
        closed: all gates are 0, whatever the tokens.
    """

    held: dict[tuple[str, int], KeyValues]
    new: dict[tuple[str, int], KeyValues] = field(default_factory=dict)
    gates: dict[int, Tensor] = field(default_factory=dict)
    counted: Tensor | None = None
    visible: Tensor | None = None
    closed: bool = False

    def append(self, name: str, layer: int, keys: Tensor, values: Tensor) -> KeyValues:
        """Append new columns of a layer, and return all of its columns."""
        old = self.held.get((name, layer))
        if old is not None and old.keys.dtype != keys.dtype:  # read in another precision, and loaded
            old = old.each(lambda tensor: tensor.to(keys.dtype))
        held = KeyValues.of(keys, values) if old is None else old.appended(keys, values)
        self.new[name, layer] = held
        return held

    def attention(
        self,
        queries: Tensor,
        held: KeyValues,
        gates: Tensor,
        window: int,
        scaling: float,
        call: SegmentCall,
        far: tuple[Tensor, KeyValues] | None = None,
    ) -> Tensor:
        """Compute P V, row by row where rows hold different tokens, `[rows, heads, time, d]`.

        Args:
            held: of everything; of the window alone where there is nothing far, or `far` is given.
            far: queries, and keys and values of everything, by which tokens see what is far.
        """

        def mixed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, f: Operands | None) -> Tensor:
            if not torch.is_grad_enabled():
                return one_pass(q, k, v, g, window, scaling, f)
            return (
                two_passes(q, k, v, g, window, scaling) if f is None else tile_by_tile(q, k, v, g, window, scaling, f)
            )

        if not call.padded:
            beyond = None if far is None else Operands(far[0], far[1].keys, far[1].values)
            return mixed(queries, held.keys, held.values, gates, beyond)
        rows = []
        for row in range(len(queries)):
            new = call.real[row].nonzero()[:, 0].to(queries.device)
            output = torch.zeros_like(queries[row : row + 1])
            if len(new):
                mine, beyond = slice(row, row + 1), None
                seen = span(call.visible[row, held.dropped :].nonzero()[:, 0].to(queries.device))
                if far is not None:
                    everything = span(call.visible[row].nonzero()[:, 0].to(queries.device))
                    keys, values = far[1].keys[mine, :, everything], far[1].values[mine, :, everything]
                    beyond = Operands(far[0][mine, :, new], keys, values)
                keys, values = held.keys[mine, :, seen], held.values[mine, :, seen]
                found = mixed(queries[mine, :, new], keys, values, gates[mine, :, new], beyond)
                output = output.index_copy(2, new, found)
            rows.append(output)
        return torch.cat(rows)


def span(columns: Tensor) -> slice | Tensor:
    """Turn columns without gaps into a slice, so that taking them copies nothing."""
    first, last = int(columns[0]), int(columns[-1])
    return slice(first, last + 1) if last - first + 1 == len(columns) else columns


class TokenGates(NamedTuple):
    """The gates of one forward by layer, `[rows, channels, time]`, and `GatedReading.counted`, `[rows, time]`."""

    gates: dict[int, Tensor]
    counted: Tensor


class GatedState(MemoryState):
    """Keys and values of every augmented layer, in the columns of the local cache, and what gates did.

    `MemoryMethod.new_state` has the arguments. With cache_size 0 all gates are closed.

    Attributes:
        last: gates of the last complete forward, without gradients; None before it.
    """

    def __init__(
        self,
        options: GatedAttentionOptions,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool,
        cache_size: int | None,
    ) -> None:
        self.options, self.devices = options, devices
        self.own_layers = frozenset(options.layers)
        self.pieces: list[TokenGates] = []  # of the running forward
        self.last: TokenGates | None = None
        self.held: dict[tuple[str, int], KeyValues] = {}

    def begin(self) -> GatedReading:
        return GatedReading(dict(self.held), closed=self.off)

    def end(self, reading: GatedReading) -> None:
        self.held = {**self.held, **reading.new}
        assert reading.visible is not None and reading.counted is not None
        near = {key: held for key, held in self.held.items() if key[0] != "far"}
        needed = first_needed(reading.visible, self.options.window_tokens) if near else 0
        for key, held in near.items():
            if needed - held.dropped > self.options.window_tokens:
                self.held[key] = held.without_first(needed)
        self.pieces.append(TokenGates(dict(reading.gates), reading.counted))

    def loss_targets(self, read: Sequence[int], new: Sequence[int]) -> int:
        """Count the tokens over which `loss` of the next forward is a mean.

        Args:
            read, new: tokens that each row has read before, and reads in that forward.
        """
        return sum(
            max(old + more - max(self.options.window_tokens, old), 0) for old, more in zip(read, new, strict=True)
        )

    def detach(self) -> None:
        """Cut the autograd graph, so that no gradient of the next step reaches these keys and values.

        `loss` becomes what gates add to the loss of the forward that ends here, with its graph.
        """
        if any(held.keys.requires_grad or held.values.requires_grad for held in self.held.values()):
            self.change(Tensor.detach)
        self.loss = None
        if not self.pieces:
            return
        gates = {layer: torch.cat([piece.gates[layer] for piece in self.pieces], 2) for layer in self.pieces[0].gates}
        counted = torch.cat([piece.counted for piece in self.pieces], 1)
        self.pieces = []
        if gates and torch.is_grad_enabled() and (self.options.sparsity_weight or self.options.mean_weight):
            self.loss = gate_losses(self.options, gates.values(), counted).total
        self.last = TokenGates({layer: tensor.detach() for layer, tensor in gates.items()}, counted)

    def keep(self, columns: Tensor) -> None:
        self.held = {key: held.kept(columns.to(held.keys.device)) for key, held in self.held.items()}

    def reset(self, rows: Sequence[int]) -> None:
        """Do nothing: a row that begins again no longer sees its columns."""

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        self.held = {key: held.each(function) for key, held in self.held.items()}

    def join(self, others: Sequence[GatedState]) -> None:
        for key in self.held:
            rows = [state.held[key].with_dropped() for state in (self, *others)]
            self.held[key] = KeyValues.of(stacked([row.keys for row in rows]), stacked([row.values for row in rows]))
        self.last = None

    def clone(self) -> GatedState:
        twin = copy.copy(self)
        twin.held, twin.pieces = dict(self.held), []
        return twin

    def to(self, device: torch.device | str) -> None:
        super().to(device)
        self.devices = dict.fromkeys(self.devices, torch.device(device))

    def state_dict(self) -> dict[str, Tensor]:
        parts: dict[str, dict[str, Tensor]] = {name: {} for name in KINDS}
        for (name, layer), held in self.held.items():
            parts[name][f"{layer}.keys"], parts[name][f"{layer}.values"] = held.keys.clone(), held.values.clone()
            parts[name][f"{layer}.dropped"] = torch.tensor(held.dropped)
        return joined(**parts)

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        self.held = {}
        for name in KINDS:
            saved = part(tensors, name)
            for layer in sorted({int(key.partition(".")[0]) for key in saved}):
                keys, values = (saved[f"{layer}.{side}"].to(self.devices[layer]) for side in ("keys", "values"))
                self.held[name, layer] = KeyValues.of(keys, values, int(saved[f"{layer}.dropped"]))

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.held.values())


def first_needed(visible: Tensor, window: int) -> int:
    """Return the first column that the next token's window may reach in some row."""
    after = visible.flip(1).cumsum(1).flip(1)  # tokens from each column to the end
    columns = (visible & (after < window)).any(0).nonzero()[:, 0]
    return int(columns[0]) if len(columns) else visible.shape[1]


def token_gate_statistics(parts: Sequence[Any], memories: Sequence[MemoryCache]) -> dict[str, Any]:
    """Summarize the gates of the last step over counted tokens, in the lanes of this process.

    Returns:
        `token_gate_mean`; `token_gate_layers`, the mean of each layer with gates; `token_gate_closed`, the share below
        the threshold, or below 0.5 without one. Empty without such tokens.
    """
    found: dict[int, list[Tensor]] = {}
    threshold = 0.0
    for memory in memories:
        state = memory.state
        if not isinstance(state, GatedState) or state.last is None:
            continue
        threshold = state.options.threshold
        for layer, gates in state.last.gates.items():
            counted = state.last.counted.to(gates.device)
            found.setdefault(layer, []).append(gates.transpose(1, 2)[counted].float().flatten().cpu())
    layers = [torch.cat(gates) for _, gates in sorted(found.items())]
    if not layers or not len(layers[0]):
        return {}
    joint = torch.cat(layers)
    return {
        "token_gate_mean": float(joint.mean()),
        "token_gate_layers": [float(layer.mean()) for layer in layers],
        "token_gate_closed": float((joint < (threshold or 0.5)).float().mean()),
    }
