"""Neurocache: k-nearest-neighbor retrieval of compressed past states (Safaya & Yuret 2024, arXiv 2407.02486).

    e_t    = LayerNorm(W_p x_t)                              compress; query and entry alike          (section 3.1)
    R_t    = the k entries of earlier segments nearest to e_t, each widened to w entries in time      (section 3.2)
    CA_t   = softmax(W_q x_t (W_k S_t)^T / sqrt(d_head)) W_v S_t,  S_t = R_{t-c+1} ... R_t            (section 3.3)

x is the input of a layer's self-attention; W_o CA is added to the output of self-attention.

Beyond the paper, `hit_scores` tells cache attention what the search knew, how near a hit was and a state's place beside
it, and lets a head attend to nothing (see `hit_scores.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cacheformers.methods.neurocache.hit_scores import Found, HitScores, newer_hits
from cacheformers.methods.neurocache.options import NeurocacheOptions
from cacheformers.modeling.attention import project
from cacheformers.modeling.memory import Gold, SegmentCall, keep_columns, token_numbers
from cacheformers.modeling.method import PerHead, gathered, normalize, tenths
from cacheformers.modeling.search import get_search
from cacheformers.modeling.search.store import Ring, unpacked, vectors
from cacheformers.modeling.supervision import SupervisedReading, SupervisedState

COMPRESSION_EPS = 1e-5

TEMPERATURE = 0.05  # of `retrieval_loss`; scores are between -2 and 0 for entries that the norm leaves as they are


class Gate(PerHead):
    """One learned number per query head, whose tanh scales the head's output. At zero the base model is unchanged."""

    def forward(self, per_head: Tensor) -> Tensor:
        return per_head * torch.tanh(self.weight).to(per_head.dtype)[:, None]


class NeurocacheParts(NamedTuple):
    """The trained parts of one layer; None where the layer needs none.

    Shapes: `down` `[d, h]`; `norm` LayerNorm(d); `q` `[heads*d_head, h]`; `k`, `v` `[kv_heads*d_head, d]`;
    `o` `[h, heads*d_head]`; `gate` `[heads]`; `scores` `[heads]`, `[heads, c, w]`, `[heads]`, `[heads]`.
    """

    down: nn.Linear | None = None
    norm: nn.LayerNorm | None = None
    q: nn.Linear | None = None
    k: nn.Linear | None = None
    v: nn.Linear | None = None
    o: nn.Linear | None = None
    gate: Gate | None = None
    scores: HitScores | None = None

    def encode(self, hidden: Tensor) -> Tensor:
        """Compress x `[..., h]` to entries `[..., d]`, in float32 or better (section 3.1)."""
        if self.down is None or self.norm is None:
            return hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        return normalize(self.norm, project(self.down, hidden))

    @property
    def fingerprint(self) -> tuple[float, ...]:
        """A few numbers of W_p and its norm, which differ between any two trained memories.

        Empty without W_p, or where it is sharded over processes (FSDP2), because gathering it needs all of them.
        """
        if self.down is None or self.norm is None or isinstance(self.down.weight, DTensor):
            return ()
        return (*self.down.weight.detach().flatten()[:8].tolist(), *self.norm.weight.detach()[:4].tolist())


def make_parts(options: NeurocacheOptions, layer: int, base_weights: tuple[Tensor, ...] | None) -> dict[str, nn.Module]:
    """Make the parts of one layer, initialized for adaptation (section 4.2).

    Args:
        base_weights: the layer's own W_q, W_k, W_v, W_o. W_q and W_o are copied, and the first d input columns of W_k
            and W_v; None leaves every projection random.
    """
    base, width = options.base, options.width
    parts: dict[str, nn.Module] = {}
    if layer == options.first_layer and options.compression_factor > 1:
        parts["down"] = nn.Linear(base.hidden_size, width, bias=False)
        nn.init.trunc_normal_(parts["down"].weight, std=base.hidden_size**-0.5)  # type: ignore[arg-type]  # a Linear
        parts["norm"] = nn.LayerNorm(width, eps=COMPRESSION_EPS)
    if layer in options.attention_layers:
        parts["q"] = nn.Linear(base.hidden_size, base.heads * base.head_dim, bias=False)
        parts["k"] = nn.Linear(width, base.kv_heads * base.head_dim, bias=False)
        parts["v"] = nn.Linear(width, base.kv_heads * base.head_dim, bias=False)
        parts["o"] = nn.Linear(base.heads * base.head_dim, base.hidden_size, bias=False)
        if base_weights is not None:
            for name, weight in zip("qkvo", base_weights, strict=True):
                linear = parts[name]
                assert isinstance(linear, nn.Linear)
                linear.weight = nn.Parameter(weight[:, : linear.in_features].clone())
        if options.gate == "zero":
            parts["gate"] = Gate(base.heads)
        if options.hit_scores:
            parts["scores"] = HitScores(base.heads, options.context_size, options.neighborhood_size, options.hit_order)
    return parts


class Retrieved(NamedTuple):
    """The states that tokens retrieved: N = k*w per token, hit by hit, each hit with its neighbors in time order.

    Attributes:
        states: `[..., N, d]`.
        filled: which of them exist, `[..., N]`.
        hits: what `hit_scores` is told about each hit; None without it.
    """

    states: Tensor
    filled: Tensor
    hits: Found | None

    def each(self, change: Callable[[Tensor], Tensor]) -> Retrieved:
        """Apply a function to every tensor."""
        hits = None if self.hits is None else Found(*map(change, self.hits))
        return Retrieved(change(self.states), change(self.filled), hits)


@dataclass
class NeurocacheReading(SupervisedReading):
    """Data that one forward reads and leaves behind: `keys` and `values` by storing layer, the rest by retrieval layer.

    Attributes:
        past: hits and queries of the open segments before this forward.
        retrieved: of this forward.
        encoder: the parts with W_p.
    """

    past: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    retrieved: dict[int, Retrieved] = field(default_factory=dict)
    encoder: NeurocacheParts = NeurocacheParts()


def training_statistics(parts: Sequence[NeurocacheParts], memories: Sequence[Any]) -> dict[str, Any]:
    """Summarize gates: mean, largest and histogram (counts of each tenth) of |tanh(gate)| of every head."""
    gates = [part.gate.weight for part in parts if part.gate is not None]
    if not gates:
        return {}
    sizes = torch.tanh(gathered(gates)).abs()
    return {"gate_mean": float(sizes.mean()), "gate_max": float(sizes.max()), "gate_histogram": tenths(sizes)}


class NeurocacheState(SupervisedState):
    """One ring per storing layer, and the hits and queries of the tokens of open segments."""

    def __init__(
        self,
        options: NeurocacheOptions,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool,
        cache_size: int | None = None,
    ) -> None:
        value_width = options.base.hidden_size if keep_values and options.compression_factor > 1 else None
        if value_width is not None and options.cache_dtype == "int8":
            raise ValueError(
                "A memory in int8 cannot be trained: W_p needs the states that entries were made of. Train with "
                "another cache_dtype and read with this one, in evaluation mode (model.eval())."
            )
        capacity = options.cache_size if cache_size is None else cache_size
        rings = {
            storing: options.new_ring(rows, capacity, devices[storing], dtype, options.width, value_width)
            for _, storing in options.retrieval_map
        }
        super().__init__(rings, ("hits", "queries"))
        self.stores, self.retrieval_weight = dict(options.retrieval_map), options.retrieval_weight

    @property
    def hits(self) -> dict[int, Tensor]:
        """Hits of the tokens of open segments by layer, `[rows, columns, k]`, counted from the oldest entry."""
        return self.tensors["hits"]

    def retrieved(self) -> dict[int, Tensor]:
        return {layer: token_numbers(self.rings[self.stores[layer]], hits) for layer, hits in self.hits.items()}

    def nearness(self, asked: int, read: int) -> Tensor:
        """Return cosines of queries and entries, the largest of all layers; without `hit_scores` no query is kept."""
        if not self.tensors["queries"]:
            return super().nearness(asked, read)
        near = torch.full((asked, read), -1.0)
        for layer, queries in self.tensors["queries"].items():
            entries = self.rings[self.stores[layer]].entries(0)
            keys = F.normalize(unpacked(torch.cat(entries.spans)).float(), dim=-1)
            here = near[:, entries.first : entries.first + len(keys)]
            found = F.normalize(queries[0, -asked:].float(), dim=-1) @ keys[: here.shape[1]].T
            here.copy_(torch.maximum(here, found.cpu()))
        return near

    def begin(self) -> NeurocacheReading:
        past = {name: dict(self.tensors[name]) for name in ("hits", "queries")}
        return NeurocacheReading(super().begin().stores, gold=self.gold, past=past)


def branch(
    options: NeurocacheOptions, layer: int, parts: NeurocacheParts, hidden: Tensor, call: SegmentCall, training: bool
) -> Tensor | None:
    """Compute what Neurocache adds to a layer's self-attention, or None in a layer that only retrieves or stores.

    Args:
        hidden: x, `[rows, time, h]`.
        training: re-encode retrieved entries from their stored x, with gradients to W_p.
    """
    if hidden.dtype == torch.float32 and torch.is_autocast_enabled(hidden.device.type):
        # Once here, instead of in every product with retrieved states.
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    reading: NeurocacheReading = call.reading
    if layer == options.first_layer:
        reading.encoder = parts
    retrieving, storing = dict(options.retrieval_map), {storing for _, storing in options.retrieval_map}
    if layer in retrieving or layer in storing:
        with torch.no_grad():
            entries = reading.encoder.encode(hidden.detach())  # with a compression_factor of 1 the input itself
        if layer in retrieving:
            retrieve(options, layer, entries, hidden, call, training)
            if training and options.retrieval_weight and reading.gold is not None and torch.is_grad_enabled():
                ring = reading.stores[retrieving[layer]]
                reading.losses[layer] = retrieval_loss(options, ring, reading.encoder, hidden, reading.gold, call.start)
        if layer in storing:
            ring = reading.stores[layer]
            reading.new["keys"][layer] = entries.to(ring.column_dtype)
            if ring.values is not None:
                reading.new["values"][layer] = hidden.detach().to(ring.keys.dtype)
    if layer in options.attention_layers:
        return attend(options, layer, parts, hidden, call)
    return None


def retrieve(
    options: NeurocacheOptions, layer: int, queries: Tensor, hidden: Tensor, call: SegmentCall, training: bool
) -> None:
    """Find each token's k nearest entries, widen them in time, and fetch the states (section 3.2)."""
    reading: NeurocacheReading = call.reading
    ring = reading.stores[dict(options.retrieval_map)[layer]]
    new_hits = reading.new["hits"]
    if layer not in new_hits:  # activation checkpointing runs this twice, with the same hits
        new_hits[layer] = search_rows(options, ring, queries, call)
    sources = context_sources(options.context_size, call, hidden.device)
    before = earlier(reading.past["hits"].get(layer), sources, new_hits[layer], -1)
    hits = torch.cat([before, new_hits[layer]], 1)

    half = options.neighborhood_size // 2
    offsets = torch.arange(-half + 1, half + 1) if half else torch.zeros(1, dtype=torch.long)
    counts = torch.tensor([searchable(options, ring, row, call) for row in range(ring.rows)]).view(-1, 1, 1, 1)
    counts = counts.to(hits.device)
    wide = hits[..., None] + offsets.to(hits.device)  # [rows, c-1+time, k, w]
    filled = (hits[..., None] >= 0) & (wide >= 0) & (wide < counts)
    wide, filled = wide.flatten(2), filled.flatten(2)  # [rows, c-1+time, N]
    slots = ring.slots(wide.masked_fill(~filled, 0))
    states = fetch(options, ring, slots, reading.encoder, hidden.dtype, training)
    found = None
    if options.hit_scores:
        reading.new["queries"][layer] = queries.clone()  # files cannot hold one tensor as queries and entries
        before = earlier(reading.past["queries"].get(layer), sources, queries, 0)
        alone = states.unflatten(2, (options.topk, -1))[..., max(half - 1, 0), :]  # hits without neighbors
        found = Found(cosines(torch.cat([before, queries], 1), alone), newer_hits(hits))
    reading.retrieved[layer] = Retrieved(states, filled, found)


def searchable(options: NeurocacheOptions, ring: Ring, row: int, call: SegmentCall) -> int:
    """Count a row's entries, from the oldest on, that may be retrieved."""
    return max(ring.count(row) - (call.window_tokens[row] if options.exclude_window else 0), 0)


def search_rows(options: NeurocacheOptions, ring: Ring, queries: Tensor, call: SegmentCall) -> Tensor:
    """Search each row's entries: hits `[rows, time, k]`, counted from the oldest entry, -1 for none."""
    search = get_search(options.search)
    rows, time, width = queries.shape
    hits = torch.full((rows, time, options.topk), -1, dtype=torch.long, device=queries.device)
    real = call.real.to(queries.device)
    for sharing in ring.sharing():
        groups = [[row] for row in sharing] if options.exclude_window else [sharing]
        for group in groups:
            entries = ring.entries(group[0]).oldest(searchable(options, ring, group[0], call))
            if entries.count == 0:
                continue
            chosen = torch.tensor(group, device=queries.device)
            if call.padded:
                asked = real[chosen]
                found = hits[chosen]
                found[asked] = search(queries[chosen][asked], entries, options.topk, options.similarity)[1]
            else:
                flat = queries[chosen].reshape(-1, width)
                found = search(flat, entries, options.topk, options.similarity)[1].view(len(group), time, -1)
            hits[chosen] = found
    return hits


def retrieval_loss(
    options: NeurocacheOptions, ring: Ring, encoder: NeurocacheParts, hidden: Tensor, gold: Gold, start: int = 0
) -> Tensor:
    """How far the tokens that ask are from retrieving the passages that answer; its gradient reaches W_p and its norm.

        loss(t) = - log( sum_{i in gold} exp s(t, i) / sum_i exp s(t, i) ),  i over all entries of the row
        s(t, i) = - |e_t - e_i|^2 / (2 d TEMPERATURE)   (similarity "dot": e_t . e_i / (d TEMPERATURE))

    Args:
        hidden: x of the retrieval layer, `[rows, time, h]`.
        start: columns of the forward before these.

    Returns:
        The sum over these asking tokens, of rows that hold their passage, over the number of all that `gold` names.
    """
    losses = [encoder.encode(hidden[:1, :1].detach()).sum() * 0]  # every process has the same graph
    for sharing in ring.sharing():
        count, first = ring.count(sharing[0]), ring.entries(sharing[0]).first
        known = {
            row: places[(places >= 0) & (places < count)] for row in sharing if len(places := gold.numbers(row) - first)
        }
        if ring.values is None or not any(len(places) for places in known.values()):
            continue
        slots = ring.slots(torch.arange(count).expand(ring.rows, 1, -1))[sharing[0], 0].to(ring.values.device)
        entries = encoder.encode(ring.values.flatten(0, 1)[slots].to(hidden.device, hidden.dtype))  # [m, d]
        for row, places in known.items():
            asking = gold.asking[row, start : start + hidden.shape[1]].to(hidden.device)
            if not asking.any() or not len(places):
                continue
            queries = encoder.encode(hidden[row, asking].detach())  # [asking, d]
            scores = queries @ entries.T
            if options.similarity == "l2":  # |e_t|^2 is the same for all entries
                scores = scores - entries.square().sum(-1) / 2
            chances = torch.log_softmax(scores / (options.width * TEMPERATURE), -1)
            losses.append(-torch.logsumexp(chances[:, places.to(chances.device)], -1))
    return torch.stack([loss.sum() for loss in losses]).sum() / gold.asking.sum().clamp(min=1).to(hidden.device)


class ContextSources(NamedTuple):
    """The places of the last c tokens of each token's segment, in c-1 earlier columns and the new columns."""

    columns: Tensor  # the last c-1 columns of open segments before the new ones, [rows, c-1]
    present: Tensor  # whether that column exists, [rows, c-1]
    place: Tensor  # [rows, time, c], newest first
    valid: Tensor  # [rows, time, c]
    shifted: bool  # place is the new column's own minus 0 ... c-1


def context_sources(context: int, call: SegmentCall, device: torch.device) -> ContextSources:
    """Find whose retrieved states each new token attends to: its own and those of the c-1 tokens before it."""
    key = f"context {context} {device}"
    if key not in call.scratch:
        time = call.real.shape[1]
        old = call.open.shape[1] - time
        opened = call.open[:, :old].sum(1, keepdim=True)  # [rows, 1]
        by_rank = torch.argsort((~call.open).long(), dim=1, stable=True)  # open columns first, in order
        rank = opened + call.real.cumsum(1) - 1  # [rows, time]
        wanted = rank[..., None] - torch.arange(context)  # [rows, time, c]
        valid = (wanted >= 0) & call.real[..., None]
        column = by_rank.gather(1, wanted.clamp(min=0).flatten(1)).view_as(wanted)
        place = torch.where(column >= old, context - 1 + column - old, wanted - opened[..., None] + context - 1)
        tail = opened - torch.arange(context - 1, 0, -1)  # ranks of the last c-1 old tokens, [rows, c-1]
        columns = by_rank.gather(1, tail.clamp(min=0)).masked_fill(tail < 0, 0)
        place = place.masked_fill(~valid, 0)
        present = tail >= 0
        call.scratch[key] = ContextSources(
            columns.to(device), present.to(device), place.to(device), valid.to(device), bool(call.real.all())
        )
    found: ContextSources = call.scratch[key]
    return found


def earlier(past: Tensor | None, sources: ContextSources, new: Tensor, blank: int) -> Tensor:
    """Return columns `[rows, c-1, ...]` of the c-1 tokens before the new ones, `blank` where no token was."""
    if past is None or past.shape[1] == 0:
        return new.new_full((*sources.columns.shape, new.shape[2]), blank)
    if past.shape[2] != new.shape[2]:
        raise ValueError(
            f"The open segment was read with topk={past.shape[2]}, not {new.shape[2]}: close it with read() first."
        )
    return keep_columns(past, sources.columns, 1).masked_fill(~sources.present[..., None], blank)


def cosines(queries: Tensor, entries: Tensor) -> Tensor:
    """Compute cosines `[..., k]` of queries `[..., d]` and entries `[..., k, d]`, in float32 or better.

    Products use the entries' dtype, so that training keeps no wider copy of them.
    """
    products = torch.matmul(entries, queries.to(entries.dtype)[..., None])[..., 0]
    norms = torch.linalg.vector_norm(entries, dim=-1, dtype=queries.dtype)
    norms = norms * torch.linalg.vector_norm(queries, dim=-1, keepdim=True)
    return products.to(queries.dtype) / norms.clamp(min=torch.finfo(queries.dtype).tiny)


def fetch(
    options: NeurocacheOptions,
    ring: Ring,
    slots: Tensor,
    encoder: NeurocacheParts,
    dtype: torch.dtype,
    training: bool,
) -> Tensor:
    """Fetch entries at `slots` `[rows, time, N]`, `[rows, time, N, d]`; in training, encode them again from their x."""
    slots = slots.to(ring.keys.device)
    if not (training and options.compression_factor > 1):
        return unpacked(vectors(ring.keys, ring.keys.shape[-1])[slots]).to(dtype)
    if ring.values is None:
        raise ValueError(
            "This memory was begun in evaluation mode and keeps no values, so W_p would get no gradient. Begin it with "
            "the model in training mode (model.train())."
        )
    unique, place = torch.unique(slots, return_inverse=True)
    stored = vectors(ring.values, options.base.hidden_size)[in_few_lengths(unique)]
    return encoder.encode(stored.to(dtype)).to(dtype)[place]


def in_few_lengths(numbers: Tensor) -> Tensor:
    """Repeat the last number until the length, by less than an eighth longer, is one of 8 in each doubling.

    Each segment needs another length, and bfloat16 products on CPUs (oneDNN) keep compiled code for each one they met.
    """
    step = 2 ** max(len(numbers).bit_length() - 4, 0)
    return F.pad(numbers[None], (0, -len(numbers) % step), mode="replicate")[0]


def attend(options: NeurocacheOptions, layer: int, parts: NeurocacheParts, hidden: Tensor, call: SegmentCall) -> Tensor:
    """Compute cache attention of one layer (section 3.3), `[rows, time, h]`.

    W_k and W_v are absorbed: queries are mapped into the space of entries, and one weighted sum of entries per head is
    mapped back, so retrieved states are never projected.
    """
    assert parts.q is not None and parts.k is not None and parts.v is not None and parts.o is not None
    base, width = options.base, options.width
    rows, time, size = hidden.shape
    groups, context = base.heads // base.kv_heads, options.context_size
    retrieved: Retrieved = call.reading.retrieved[options.source(layer)]  # [rows, c-1+time, ...]
    sources = context_sources(context, call, hidden.device)
    alone = time == 1 and sources.shifted and not torch.is_grad_enabled()
    before = context - 1 if sources.shifted and not alone else 0
    # From here on rows share one axis of tokens. Without padding each row begins with c-1 zeros, so that what was
    # retrieved `back` tokens ago is found `back` places earlier, without a copy.
    queries = project(parts.q, hidden)
    if before:
        queries = F.pad(queries, (0, 0, before, 0))
    queries = queries.flatten(0, 1)[before:].view(-1, base.kv_heads, groups, base.head_dim)
    keys_weight = (parts.k.weight.to(hidden.dtype) * base.head_dim**-0.5).view(base.kv_heads, base.head_dim, width)
    absorbed = torch.einsum("tkgh,khd->tkgd", queries, keys_weight).flatten(1, 2)
    if alone:
        mixed = attend_alone(absorbed, options.source(layer), parts.scores, call)
    else:
        here = retrieved.each(lambda tensor: tensor.to(hidden.device))
        mixed = attend_together(
            absorbed, [taken(here, sources, back, context) for back in range(context)], parts.scores
        )
    mixed = mixed.view(-1, base.kv_heads, groups, width)
    values_weight = parts.v.weight.to(hidden.dtype).view(base.kv_heads, base.head_dim, width)
    per_head = torch.einsum("tkgd,khd->tkgh", mixed, values_weight).flatten(1, 2)  # [tokens, heads, d_head]
    if parts.gate is not None:
        per_head = parts.gate(per_head)
    added = project(parts.o, per_head.flatten(1))
    return (F.pad(added, (0, 0, before, 0)) if before else added).view(rows, before + time, size)[:, before:]


def attend_together(absorbed: Tensor, window: list[Retrieved], added: HitScores | None) -> Tensor:
    """Mix retrieved states by the shares that queries `[tokens, heads, d]` give them, `[tokens, heads, d]`.

    Args:
        window: what was retrieved 0 ... c-1 tokens before each token.
    """
    scores = torch.cat([torch.matmul(absorbed, near.states.transpose(-1, -2)) for near in window], -1)
    seen = torch.cat([near.filled for near in window], -1)[:, None]  # [tokens, 1, N*c]
    if added is not None:
        scores = scores + added([near.hits for near in window if near.hits is not None])
        nothing = added.score_of_nothing()[:, None].expand(*scores.shape[:2], 1).to(scores.dtype)
        scores, seen = torch.cat([scores, nothing], -1), F.pad(seen, (0, 1), value=True)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    # Scores are in the graph even where none is seen.
    shares = torch.softmax(scores.masked_fill(~seen, torch.finfo(scores.dtype).min), -1).to(absorbed.dtype)
    mixed = absorbed.new_zeros(absorbed.shape)
    for share, near in zip(shares.split(window[0].filled.shape[1], dim=-1), window, strict=False):  # not of nothing
        mixed = torch.baddbmm(mixed, share, near.states)
    return mixed if added is not None else mixed * seen.any(-1, keepdim=True)


def attend_alone(absorbed: Tensor, source: int, added: HitScores | None, call: SegmentCall) -> Tensor:
    """Do as `attend_together` for one new token of each row, with fewer operations, some of them once for all layers.

    Nothing is a last state of zeros. Without `added` its score is so low that it has a share only where no other is
    seen.
    """
    queries = absorbed.to(torch.promote_types(absorbed.dtype, torch.float32))
    key = f"alone {source} {queries.device}"
    if key not in call.scratch:
        here = call.reading.retrieved[source].each(lambda tensor: tensor.to(queries.device).flip(1))  # newest first
        states = F.pad(here.states.to(queries.dtype).flatten(1, 2), (0, 0, 0, 1))[:, None]  # [rows, 1, c*N + 1, d]
        unseen = F.pad(~here.filled.flatten(1, 2), (0, 1))[:, None]
        scores = F.pad(queries.new_zeros(unseen.shape)[..., 1:], (0, 1), value=torch.finfo(queries.dtype).min)
        hits = [] if here.hits is None else list(map(Found, here.hits.cosines.unbind(1), here.hits.newer.unbind(1)))
        call.scratch[key] = states, unseen, hits, scores.masked_fill(unseen, -torch.inf)
    states, unseen, hits, scores = call.scratch[key]
    if added is not None:
        nothing = added.score_of_nothing()[:, None].expand(len(queries), -1, 1)
        scores = torch.cat([added(hits), nothing], -1).masked_fill(unseen, -torch.inf)  # [rows, heads, c*N + 1]
    every = states.expand(-1, queries.shape[1], -1, -1)
    mixed = F.scaled_dot_product_attention(queries[:, :, None], every, every, scores[:, :, None].to(queries), scale=1.0)
    return mixed[:, :, 0].to(absorbed.dtype)


def taken(retrieved: Retrieved, sources: ContextSources, back: int, context: int) -> Retrieved:
    """Return what was retrieved `back` tokens before each token, `[tokens, ...]`."""
    if sources.shifted:
        start, end = context - 1 - back, retrieved.filled.shape[:2].numel() - back
        return retrieved.each(lambda tensor: tensor.flatten(0, 1)[start:end])
    place = sources.place[..., back]
    near = retrieved.each(lambda tensor: keep_columns(tensor, place, 1).flatten(0, 1))
    return near._replace(filled=near.filled & sources.valid[..., back].flatten()[:, None])
