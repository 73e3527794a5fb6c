"""What gated attention holds: the keys and values of every layer, and what gates did in the forward that goes on."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cacheformers.methods.gated_attention.columns import Columns
from cacheformers.methods.gated_attention.near_far import Reads, one_pass, two_passes
from cacheformers.methods.gated_attention.options import GatedAttentionOptions
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.memory import MemoryState, SegmentCall, joined, part


class GateLosses(NamedTuple):
    """Terms over layers and tokens: mean g(1 - g) with its sign, mean g, and their weighted sum."""

    sparsity: Tensor
    mean: Tensor
    total: Tensor


def gate_losses(options: GatedAttentionOptions, gates: Iterable[Tensor], counted: Tensor) -> GateLosses:
    """What is added to the loss.

    Args:
        gates: sigmoid of the logits in every layer, `[rows, channels, time]` (whatever the choice in the forward).
        counted: tokens that have something far (see `GatedReading`), `[rows, time]`.
    """
    chosen = torch.stack([layer.transpose(1, 2)[counted.to(layer.device)].to(counted.device) for layer in gates])
    sign = -1 if options.sparsity_sign == "paper" else 1
    number = max(chosen.numel(), 1)
    sparsity, mean = sign * (chosen * (1 - chosen)).sum() / number, chosen.sum() / number
    return GateLosses(sparsity, mean, options.sparsity_weight * sparsity + options.mean_weight * mean)


@dataclass
class GatedReading:
    """What one forward reads and leaves behind.

    Attributes:
        held: columns of each layer before this forward, under "far" (everything is kept) and "near".
        new: the same with this forward's.
        gates: sigmoid of each layer's logits, `[rows, channels, time]`.
        counted: which new columns are tokens with something far from them, `[rows, time]`; losses and statistics are
            about those.
        visible: which columns, old and new, hold a token, `[rows, columns + time]`.
        reads: what each layer read.
        closed: all gates are 0, whatever the tokens.
    """

    held: dict[tuple[str, int], Columns]
    new: dict[tuple[str, int], Columns] = field(default_factory=dict)
    gates: dict[int, Tensor] = field(default_factory=dict)
    counted: Tensor | None = None
    visible: Tensor | None = None
    reads: dict[int, Reads] = field(default_factory=dict)
    closed: bool = False

    def append(self, name: str, layer: int, keys: Tensor, values: Tensor) -> Columns:
        """Old and new columns of a layer."""
        old = self.held.get((name, layer))
        held = Columns.of(keys, values) if old is None else old.appended(keys, values)
        self.new[name, layer] = held
        return held

    def attention(
        self, layer: int, queries: Tensor, held: Columns, gates: Tensor, window: int, scaling: float, call: SegmentCall
    ) -> Tensor:
        """Mixed attention, row by row where rows hold different tokens, `[rows, heads, time, d]`."""
        reads = self.reads.setdefault(layer, Reads())

        def mixed(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                return two_passes(q, k, v, g, window, scaling)
            output, read = one_pass(q, k, v, g, window, scaling)
            reads.add(read)
            return output

        if not call.padded:
            return mixed(queries, held.keys, held.values, gates)
        rows = []
        for row in range(len(queries)):
            new = call.real[row].nonzero()[:, 0].to(queries.device)
            output = torch.zeros_like(queries[row : row + 1])
            if len(new):
                seen = span(call.visible[row, held.dropped :].nonzero()[:, 0].to(queries.device))
                mine = slice(row, row + 1)
                found = mixed(
                    queries[mine, :, new], held.keys[mine, :, seen], held.values[mine, :, seen], gates[mine, :, new]
                )
                output = output.index_copy(2, new, found)
            rows.append(output)
        return torch.cat(rows)


def span(columns: Tensor) -> slice | Tensor:
    """Columns as a slice where they are without gaps, so that taking them copies nothing."""
    first, last = int(columns[0]), int(columns[-1])
    return slice(first, last + 1) if last - first + 1 == len(columns) else columns


class TokenGates(NamedTuple):
    """The gates of one forward: of each layer, `[rows, channels, time]`; and which tokens have something far,
    `[rows, time]`."""

    gates: dict[int, Tensor]
    counted: Tensor


class GatedState(MemoryState):
    """Keys and values of every augmented layer, in the columns of the local cache; and what gates did.

    Args:
        closed: all gates are 0, whatever the tokens.

    Attributes:
        reads: what each layer read, without gradients.
        last: gates of the last forward that is complete, without gradients; None before it.
    """

    def __init__(self, options: GatedAttentionOptions, devices: dict[int, torch.device], closed: bool = False) -> None:
        self.options, self.window_tokens, self.devices, self.closed = options, options.window_tokens, devices, closed
        self.own_layers = frozenset(options.layers)
        self.pieces: list[TokenGates] = []  # of the forward that goes on
        self.last: TokenGates | None = None
        self.held: dict[tuple[str, int], Columns] = {}
        self.reads: dict[int, Reads] = {layer: Reads() for layer in options.layers}
        self.gate_sums: dict[int, Tensor] = {}  # layer -> [channels]
        self.tokens_counted = 0

    def begin(self) -> GatedReading:
        return GatedReading(dict(self.held), closed=self.closed)

    def end(self, reading: GatedReading) -> None:
        self.held = {**self.held, **reading.new}
        assert reading.visible is not None and reading.counted is not None
        near = {key: columns for key, columns in self.held.items() if key[0] == "near"}
        needed = first_needed(reading.visible, self.window_tokens) if near else 0
        for key, columns in near.items():
            if needed - columns.dropped > self.window_tokens:
                self.held[key] = columns.without_first(needed)
        self.pieces.append(TokenGates(dict(reading.gates), reading.counted))
        for layer, read in reading.reads.items():
            self.reads[layer].add(read)
        self.tokens_counted += int(reading.counted.sum())
        for layer, gates in reading.gates.items():
            counted = gates.detach().transpose(1, 2)[reading.counted.to(gates.device)].double().sum(0)
            self.gate_sums[layer] = self.gate_sums[layer] + counted if layer in self.gate_sums else counted

    @property
    def gate_means(self) -> dict[int, Tensor]:
        """Mean gate of each layer, `[channels]`, over tokens that have something far from them."""
        return {layer: total / max(self.tokens_counted, 1) for layer, total in self.gate_sums.items()}

    def loss_targets(self, read: Sequence[int], new: Sequence[int]) -> int:
        """How many tokens of the next forward `loss` is a mean over: those with something far.

        Args:
            read, new: tokens of each row, read before and in that forward.
        """
        return sum(max(old + more - max(self.window_tokens, old), 0) for old, more in zip(read, new, strict=True))

    def check(self, row: int, columns: Tensor) -> None:
        """Nothing is stored that is not visible already."""

    def commit(self, row: int, columns: Tensor) -> None:
        """Closed segments stay where they are."""

    def detach(self) -> None:
        """Cut the autograd graph: the next step's gradient does not reach keys and values of this one.

        What gates add to the loss of the forward that ends here is `loss` then, with its graph.
        """
        if any(held.keys.requires_grad or held.values.requires_grad for held in self.held.values()):
            self._change(Tensor.detach)
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
        """A row that begins again does not see its columns any more."""

    def select(self, rows: Sequence[int]) -> None:
        self._change(lambda tensor: tensor[torch.tensor(rows, dtype=torch.long, device=tensor.device)])

    def clone(self) -> GatedState:
        twin = copy.copy(self)
        twin.held, twin.gate_sums, twin.pieces = dict(self.held), dict(self.gate_sums), []
        twin.reads = {layer: replace(reads) for layer, reads in self.reads.items()}
        return twin

    def to(self, device: torch.device | str) -> None:
        self._change(lambda tensor: tensor.to(device))
        self.devices = dict.fromkeys(self.devices, torch.device(device))
        self.gate_sums = {layer: total.to(device) for layer, total in self.gate_sums.items()}

    def _change(self, change: Any) -> None:
        self.held = {key: held.each(change) for key, held in self.held.items()}

    def state_dict(self) -> dict[str, Tensor]:
        parts: dict[str, dict[str, Tensor]] = {"far": {}, "near": {}}
        for (name, layer), held in self.held.items():
            parts[name][f"{layer}.keys"], parts[name][f"{layer}.values"] = held.keys.clone(), held.values.clone()
            parts[name][f"{layer}.dropped"] = torch.tensor(held.dropped)
        return joined(**parts)

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        self.held = {}
        for name in ("far", "near"):
            saved = part(tensors, name)
            for layer in sorted({int(key.partition(".")[0]) for key in saved}):
                keys, values = (saved[f"{layer}.{side}"].to(self.devices[layer]) for side in ("keys", "values"))
                self.held[name, layer] = Columns.of(keys, values, int(saved[f"{layer}.dropped"]))

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.held.values())


def first_needed(visible: Tensor, window: int) -> int:
    """The first column that the next token's window may reach in some row."""
    after = visible.flip(1).cumsum(1).flip(1)  # tokens from each column to the end
    reached = visible & (after < window)
    columns = reached.any(0).nonzero()[:, 0]
    return int(columns[0]) if len(columns) else visible.shape[1]


def new_state(
    options: GatedAttentionOptions,
    rows: int,
    devices: dict[int, torch.device],
    dtype: torch.dtype,
    keep_values: bool = False,
    cache_size: int | None = None,
) -> GatedState:
    """An empty memory.

    Args:
        devices: of each augmented layer.
        dtype: of the model's activations.
        keep_values: nothing is encoded anew in training, so this changes nothing.
        cache_size: 0 for one in which all gates are closed: tokens see their window.

    Raises:
        ValueError: another cache_size was asked for.
    """
    if cache_size:
        raise ValueError("Gated attention keeps every key and value: leave cache_size out, or 0 for closed gates.")
    return GatedState(options, devices, closed=cache_size == 0)


def token_gate_statistics(parts: Sequence[Any], memories: Sequence[MemoryCache]) -> dict[str, Any]:
    """Summarize the gates of the last step, over tokens that have something far, in the lanes of this process.

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
