"""The computation of the published Neurocache package, for its checkpoints (alisafaya/neurocache, commit 5253048).

It differs from the paper, and this file repeats that on purpose: each forward is a segment; the search takes one entry
per bucket; empty slots are zero states that compete in the softmax; the window is clipped and ignores the ring's seam;
the first tokens repeat their context; padding is stored; and, unless `compatibility="reference-fixed-heads"`, the head
and neighbor axes of keys and values are mixed up. It is neither causal across chunkings nor exact, so it is not for new
adapters.

Two things differ from the package. Its masks leave the states of padding undefined; here padding sees only itself, so
rows with padding retrieve something else from the next segment on. And its stores do not move with beams; here they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cacheformers.methods.neurocache.neurocache import NeurocacheParts
from cacheformers.methods.neurocache.options import NeurocacheOptions
from cacheformers.modeling.attention import project
from cacheformers.modeling.memory import MemoryState, SegmentCall

BUCKETS = 512
EMPTY_SCORE = -1e8


@dataclass
class ReferenceReading:
    """Data that one forward reads (`held`: keys, values and context) and leaves behind, by name and layer."""

    held: dict[str, dict[int, Tensor]]
    new: dict[str, dict[int, Tensor]] = field(default_factory=lambda: {"keys": {}, "values": {}})
    slots: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)
    encoder: NeurocacheParts = NeurocacheParts()


class ReferenceState(MemoryState):
    """Zero-initialized rings, written after every forward, and the last retrieved states of the running generation.

    Attributes:
        tensors: `keys` `[rows, m, d]` and `values` `[rows, m, h]` by storing layer, `context` `[rows, c-1, N, d]` by
            retrieval layer.
        frozen: forwards read but do not store (the package's `generation_mode`).
    """

    forward_is_segment = True

    def __init__(
        self,
        options: NeurocacheOptions,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool,
    ) -> None:
        super().__init__("keys", "values", "context")
        self.context_size, self.frozen = options.context_size, False
        self.written = torch.zeros(rows, dtype=torch.long)
        for storing in {storing for _, storing in options.retrieval_map}:
            kind, size = options.store_dtype(devices[storing], dtype), (rows, options.cache_size)
            keys = torch.zeros(*size, options.width, dtype=kind, device=devices[storing])
            self.tensors["keys"][storing] = keys
            if keep_values and options.compression_factor > 1:
                self.tensors["values"][storing] = keys.new_zeros(*size, options.base.hidden_size)

    def begin(self) -> ReferenceReading:
        return ReferenceReading({name: dict(held) for name, held in self.tensors.items()})

    def end(self, reading: ReferenceReading) -> None:
        if self.context_size > 1:
            self.tensors["context"] = {
                layer: states[:, -(self.context_size - 1) :].detach() for layer, states in reading.states.items()
            }
        if self.frozen:
            return
        for name, new in reading.new.items():
            stores = self.tensors[name]
            for layer, tensor in new.items():
                stores[layer] = stores[layer].clone()
                size = stores[layer].shape[1]
                last = tensor[:, -size:]
                skipped = tensor.shape[1] - last.shape[1]
                place = (self.written[:, None] + skipped + torch.arange(last.shape[1])) % size  # [rows, time]
                row = torch.arange(len(tensor))[:, None]
                stores[layer][row, place] = last.to(stores[layer])
        self.written += next(iter(reading.new["keys"].values())).shape[1]

    def kept(self, row: int, closed: int) -> int:
        written, size = int(self.written[row]), next(iter(self.tensors["keys"].values())).shape[1]
        return max(min(written, size) - (written - closed), 0)  # what is still visible has been written, too

    def keep(self, columns: Tensor) -> None:
        if columns.shape[1] == 0:
            self.tensors["context"] = {}

    def reset(self, rows: Sequence[int]) -> None:
        chosen = list(rows)
        self.written[chosen] = 0
        for stores in (self.tensors["keys"], self.tensors["values"]):
            for layer, held in stores.items():
                stores[layer] = held.index_fill(0, torch.tensor(chosen, dtype=torch.long, device=held.device), 0)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.written = self.written[list(rows)]

    def join(self, others: Sequence[ReferenceState]) -> None:
        super().join(others)
        self.written = torch.cat([state.written for state in (self, *others)])

    def clone(self) -> ReferenceState:
        twin = super().clone()
        twin.written = self.written.clone()
        return twin

    def state_dict(self) -> dict[str, Tensor]:
        return {"written": self.written, **super().state_dict()}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        super().load_state_dict(tensors)
        self.written = tensors["written"]

    def device(self, layer: int) -> torch.device:
        return next(iter(self.tensors["keys"].values())).device


def reference_branch(
    options: NeurocacheOptions, layer: int, parts: NeurocacheParts, hidden: Tensor, call: SegmentCall, training: bool
) -> Tensor | None:
    """Retrieve, then store, then attend, in this order; see `neurocache.branch`."""
    reading: ReferenceReading = call.reading
    if layer == options.first_layer:
        reading.encoder = parts
    retrieving = dict(options.retrieval_map)
    if layer in retrieving or layer in retrieving.values():
        with torch.no_grad():
            entries = reading.encoder.encode(hidden.detach())  # a factor of 1 gives back what it is given
        if layer in retrieving:
            reference_retrieve(options, layer, entries, hidden, reading, training)
        if layer in retrieving.values():
            reading.new["keys"][layer] = entries
            if layer in reading.held["values"]:
                reading.new["values"][layer] = hidden.detach()
    return reference_attend(options, layer, parts, hidden, call) if layer in options.attention_layers else None


def reference_retrieve(
    options: NeurocacheOptions, layer: int, queries: Tensor, hidden: Tensor, reading: ReferenceReading, training: bool
) -> None:
    """Search buckets, clip neighborhoods, and fetch states, as in the package's sections of these names."""
    storing = dict(options.retrieval_map)[layer]
    keys = reading.held["keys"][storing]
    if layer not in reading.slots:
        hits = bucket_search(queries.to(keys.dtype), keys, options.topk, options.similarity)
        half = options.neighborhood_size // 2
        offsets = torch.arange(-half + 1, half + 1) if half else torch.zeros(1, dtype=torch.long)
        wide = hits[..., None] + offsets.to(hits.device)
        reading.slots[layer] = wide.clamp(0, keys.shape[1] - 1).flatten(2)  # [rows, time, N]
    rows = torch.arange(len(keys), device=keys.device)[:, None, None]
    if training and options.compression_factor > 1:
        states = reading.encoder.encode(reading.held["values"][storing][rows, reading.slots[layer]].to(hidden.dtype))
    else:
        states = keys[rows, reading.slots[layer]]
    states = states.to(hidden.dtype)
    past = reading.held["context"].get(layer)
    if past is None:
        past = states[:, :1].expand(-1, options.context_size - 1, -1, -1)  # repeated, not truncated
    reading.states[layer] = torch.cat([past, states], 1)  # [rows, c-1+time, N, d]


def bucket_search(queries: Tensor, keys: Tensor, topk: int, similarity: str) -> Tensor:
    """Find the best entry in each of the k best buckets, slots `[rows, time, k]`; slot i is in bucket i mod 512.

    Args:
        queries: `[rows, time, d]`.
        keys: `[rows, m, d]`.
    """
    size = keys.shape[1]
    buckets = min(max(topk, BUCKETS), size)
    scores = queries @ keys.transpose(1, 2)  # [rows, time, m]
    if similarity == "l2":
        scores = 2 * scores - keys.square().sum(-1)[:, None]
    empty = keys.sum(-1) == 0  # also hits real entries: the package's rule
    penalty = float("-inf") if keys.dtype == torch.float16 else EMPTY_SCORE
    scores = scores + torch.where(empty, penalty, 0.0).to(scores.dtype)[:, None]
    best, row = scores.unflatten(-1, (size // buckets, buckets)).max(-2)  # [rows, time, buckets]
    slots = row * buckets + torch.arange(buckets, device=keys.device)
    if buckets == topk:
        return slots
    return slots.gather(-1, best.topk(topk, -1).indices)


def reference_attend(
    options: NeurocacheOptions, layer: int, parts: NeurocacheParts, hidden: Tensor, call: SegmentCall
) -> Tensor:
    """Attend to the states of the last c tokens, without a mask, `[rows, time, h]`."""
    assert parts.q is not None and parts.k is not None and parts.v is not None and parts.o is not None
    base, context = options.base, options.context_size
    rows, time, _ = hidden.shape
    states = call.reading.states[options.source(layer)].to(hidden.device)
    found = states.shape[2]

    def by_head(projected: Tensor) -> Tensor:
        """Split into `[rows, c-1+time, kv_heads, N, d_head]`, with or without the published mix-up of two axes."""
        if options.compatibility == "reference":
            return projected.view(rows, -1, base.kv_heads, found, base.head_dim)
        return projected.view(rows, -1, found, base.kv_heads, base.head_dim).transpose(2, 3)

    def with_context(tensor: Tensor) -> Tensor:
        """Gather windows of c tokens, `[rows, time, heads, c*N, d_head]`."""
        windows = [tensor[:, back : back + time] for back in range(context)]
        return torch.cat(windows, 3).repeat_interleave(base.heads // base.kv_heads, 2)

    queries = project(parts.q, hidden).view(rows, time, base.heads, 1, base.head_dim) * base.head_dim**-0.5
    keys = with_context(by_head(project(parts.k, states)))
    values = with_context(by_head(project(parts.v, states)))
    weights = torch.softmax(queries @ keys.transpose(-1, -2), -1)
    per_head = (weights @ values).squeeze(3)
    if parts.gate is not None:
        per_head = parts.gate(per_head)
    return project(parts.o, per_head.flatten(2))
