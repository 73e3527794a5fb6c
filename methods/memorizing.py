"""Memorizing Transformer: attention to the nearest key/value pairs of the past (Wu et al. 2022, arXiv 2203.08913).

    R_t = the k pairs of earlier segments whose keys score highest with q_t, for each head           (section 3.1)
    M_t = softmax(s <q_t, k_i>) v_i over R_t,   keys and queries of length 1                         (section 3.2)
    V_t = g M_t + (1 - g) L_t,   g = sigmoid(b)                                                      (equation 1)

q, k, v are the layer's own, head by head; L is what self-attention gives that head; V goes through the layer's own W_o.
b and s are one number per head. No gradient reaches stored pairs. A token for which nothing is stored keeps L alone.

The paper leaves some choices open. Here q and k are taken before their rotary rotation (the paper's model has relative
biases, which memory attention does not use); s is learned and starts at sqrt(d_head), as in Henry et al. 2020 for keys
and queries of length 1; local attention stays the base's own; query heads that share a key head (GQA) each search its
keys for themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.adapters.registration import register
from cacheformers.modeling.attention import AttentionInputs
from cacheformers.modeling.composite import CompositeConfig, CompositeForCausalLM, CompositeModel
from cacheformers.modeling.memory import Reading, RingState, SegmentCall, token_numbers
from cacheformers.modeling.method import (
    STORE_DTYPES,
    LocalWindowOptions,
    LocalWindowSettings,
    MemoryMethod,
    PerHead,
    SearchSettings,
    Share,
    StoreOptions,
    check_at_least,
    check_choices,
    check_layers,
    setting,
    share_statistics,
)
from cacheformers.modeling.search import get_search
from cacheformers.modeling.search.store import Entries, Ring, vectors


@dataclass(repr=False)  # transformers prints a configuration
class MemorizingSettings(SearchSettings, LocalWindowSettings):
    """Fields of `MemorizingAdapterConfig` and `MemorizingConfig`. Layers count from 0."""

    cache_size: int = setting(
        8192, "Pairs of a key and a value that a document may keep; the oldest are dropped first.", free=True
    )
    topk: int = setting(64, "Pairs that each head of each token retrieves (k).", free=True)
    attention_layers: list[int] | None = setting(
        None, "Layers with a memory of their own. Default: one, three quarters up (the 9th of 12)."
    )
    gate_start: float = setting(
        0.0, "Initial bias of the gates: 0 mixes both attentions evenly, -4 starts near the base.", free=True
    )


@dataclass(kw_only=True)
class MemorizingOptions(StoreOptions, MemorizingSettings, LocalWindowOptions):
    """`MemorizingSettings` resolved against a base model; ValueError if an option does not fit it."""

    attention_layers: tuple[int, ...]  # type: ignore[assignment]  # resolved

    def __post_init__(self) -> None:
        layers = [default_layer(self.base.layers)] if self.attention_layers is None else self.attention_layers
        self.attention_layers = tuple(sorted(layers))
        check_layers(self.attention_layers, self.base)
        check_at_least(1, self, "cache_size", "topk")
        if self.topk > self.cache_size:
            raise ValueError(f"topk {self.topk} must not exceed cache_size {self.cache_size}.")
        if not math.isfinite(self.gate_start):
            raise ValueError(f"gate_start must be a finite number, got {self.gate_start}.")
        check_choices(self, cache_dtype=STORE_DTYPES)
        self.check_local_window()
        get_search(self.search)

    @property
    def width(self) -> int:
        """The size of the keys, and of the values, of one token."""
        return self.base.kv_heads * self.base.head_dim

    @property
    def entry_numbers(self) -> int:
        """The size of one token's entries in all layers that store."""
        return 2 * self.width * len(self.layers)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with a memory."""
        return self.attention_layers


def default_layer(layers: int) -> int:
    """Return the paper's layer, three quarters up (the 9th of 12), counted from 0."""
    return max(3 * layers // 4 - 1, 0)


class MemorizingParts(NamedTuple):
    """The trained parts of one layer: `gate` is b, `scale` is s, both `[heads]`."""

    gate: Share
    scale: PerHead


def make_parts(options: MemorizingOptions, *_: Any) -> dict[str, nn.Module]:
    """Make the parts of one layer."""
    heads = options.base.heads
    return {"gate": Share(heads, options.gate_start), "scale": PerHead(heads, options.base.head_dim**0.5)}


class MemorizingState(RingState):
    """A ring of pairs per layer, with all heads of a token side by side; see `MemoryMethod.new_state`.

    Attributes:
        last: the hits of the last forward by layer, all heads of a token side by side, `[rows, columns, heads * k]`.
    """

    retrieves = True

    def __init__(
        self,
        options: MemorizingOptions,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool,
        cache_size: int | None,
    ) -> None:
        size, width = options.cache_size if cache_size is None else cache_size, options.width
        super().__init__(
            {layer: options.new_ring(rows, size, devices[layer], dtype, width, width) for layer in options.layers}
        )
        self.last: dict[int, Tensor] = {}
        self.key_size = options.base.head_dim

    def end(self, reading: Reading) -> None:
        super().end(reading)
        self.last = {layer: side_by_side(hits) for layer, hits in reading.new["hits"].items()}

    def retrieved(self) -> dict[int, Tensor]:
        return {layer: token_numbers(self.rings[layer], hits) for layer, hits in self.last.items()}

    def keep(self, columns: Tensor) -> None:
        super().keep(columns)
        self.last = {}

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.last = {layer: hits[torch.tensor(rows, device=hits.device)] for layer, hits in self.last.items()}

    def join(self, others: Sequence[MemorizingState]) -> None:
        super().join(others)
        self.last = {}


def unit(states: Tensor) -> Tensor:
    """Scale vectors to length 1, so that keys of different ages and heads differ in direction alone."""
    return F.normalize(states, dim=-1)


def mix(options: MemorizingOptions, layer: int, parts: MemorizingParts, inputs: AttentionInputs) -> Tensor:
    """Mix self-attention with attention to the memory, head by head (equation 1), `[rows, time, heads, d_head]`."""
    reading: Reading = inputs.call.reading
    ring, hits = reading.stores[layer], reading.new["hits"]  # [rows, heads, time, k]
    queries = unit(inputs.plain_query)
    with torch.no_grad():
        reading.new["keys"][layer] = side_by_side(unit(inputs.plain_key)).to(ring.keys.dtype)
        reading.new["values"][layer] = side_by_side(inputs.new_value).to(ring.keys.dtype)
    if layer not in hits:  # activation checkpointing runs this twice, and searches once
        hits[layer] = search_heads(options, ring, queries, inputs.call)
    local = inputs.local
    remembered, anything = recall(options, ring, queries, hits[layer], parts.scale.weight)
    gate = torch.sigmoid(parts.gate.weight).to(local.dtype)[:, None] * anything[..., None].to(local.dtype)
    return local + gate * (remembered.to(local.dtype) - local)


def side_by_side(heads: Tensor) -> Tensor:
    """Turn `[rows, heads, time, d]` into `[rows, time, heads * d]`."""
    return heads.transpose(1, 2).flatten(2)


@torch.no_grad()
def search_heads(options: MemorizingOptions, ring: Ring, queries: Tensor, call: SegmentCall) -> Tensor:
    """Search the keys of each row and head (section 3.1).

    Returns:
        Hits `[rows, heads, time, k]`, counted from the oldest pair, -1 for none.
    """
    search, base = get_search(options.search), options.base
    rows, heads, time, size = queries.shape
    groups = heads // base.kv_heads
    hits = torch.full((rows, heads, time, options.topk), -1, dtype=torch.long, device=queries.device)
    for sharing in ring.sharing():
        entries = ring.entries(sharing[0])
        if entries.count == 0:
            continue
        chosen = torch.tensor(sharing, device=queries.device)
        for head in range(base.kv_heads):
            asking = slice(head * groups, (head + 1) * groups)
            asked = queries[chosen, asking]
            found = search(asked.reshape(-1, size), one_head(entries, head, size), options.topk, "dot")[1]
            hits[chosen, asking] = found.view(*asked.shape[:3], -1)
    return hits.masked_fill_(~call.real.to(hits.device)[:, None, :, None], -1)


def one_head(entries: Entries, head: int, size: int) -> Entries:
    """Take the keys of one head, with their own search index."""
    spans = tuple(span[:, head * size : (head + 1) * size] for span in entries.spans)
    return Entries(spans, entries.first, entries.index.setdefault(f"head {head}", {}))


def recall(
    options: MemorizingOptions, ring: Ring, queries: Tensor, hits: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend to retrieved pairs (section 3.2).

    Args:
        queries: of length 1, `[rows, heads, time, d_head]`.
        hits: `[rows, heads, time, k]`.
        scale: s, `[heads]`.

    Returns:
        M `[rows, time, heads, d_head]`, 0 where nothing was found; and where anything was, `[rows, time, heads]`.
    """
    base = options.base
    filled = hits >= 0
    slots = ring.slots(hits)
    head = torch.arange(base.heads, device=hits.device) // (base.heads // base.kv_heads)
    place = slots * base.kv_heads + head[:, None, None]  # of one head's vector in the store, [rows, heads, time, k]
    assert ring.values is not None
    keys, values = (vectors(store, base.head_dim)[place.to(store.device)] for store in (ring.keys, ring.values))
    scores = torch.einsum("bhtd,bhtkd->bhtk", queries, keys.to(queries.device, queries.dtype))
    scores = scores * scale.to(scores.dtype)[:, None, None]
    weights = torch.softmax(scores.masked_fill(~filled, torch.finfo(scores.dtype).min), -1) * filled
    found = torch.einsum("bhtk,bhtkd->bthd", weights, values.to(queries.device, queries.dtype))
    return found, filled.any(-1).transpose(1, 2)


def naive(
    options: MemorizingOptions, parts: MemorizingParts, queries: Tensor, keys: Tensor, values: Tensor, local: Tensor
) -> Tensor:
    """Specify the memory: one document, token by token, head by head.

    Args:
        queries: before their rotation, `[time, heads, d_head]`.
        keys, values: before their rotation, `[time, kv_heads, d_head]`.
        local: L, `[time, heads, d_head]`.

    Returns:
        V, `[time, heads, d_head]`. Stored pairs take no gradient.
    """
    base, length = options.base, options.segment_tokens
    keys, values = keys.detach(), values.detach()
    mixed = []
    for t in range(len(queries)):
        start = t // length * length  # of the open segment
        oldest = max(start - options.cache_size, 0)
        for head in range(base.heads):
            own = head // (base.heads // base.kv_heads)
            query = queries[t, head] / queries[t, head].norm()
            scores = [float((query @ (keys[i, own] / keys[i, own].norm())).detach()) for i in range(oldest, start)]
            found = sorted((-score, i) for i, score in enumerate(scores, oldest))
            chosen = [i for _, i in found[: options.topk]]
            if not chosen:
                mixed.append(local[t, head])
                continue
            near = keys[chosen, own] / keys[chosen, own].norm(dim=-1, keepdim=True)
            weights = torch.softmax(parts.scale.weight[head] * (near @ query), 0)
            gate = torch.sigmoid(parts.gate.weight[head])
            mixed.append(gate * (weights @ values[chosen, own]) + (1 - gate) * local[t, head])
    return torch.stack(mixed).view_as(local)


@dataclass
class MemorizingAdapterConfig(MemorizingSettings, MemoryAdapterConfig):
    """A Memorizing Transformer's memory beside LoRA (Wu et al. 2022, arXiv 2203.08913)."""


class MemorizingConfig(MemorizingSettings, CompositeConfig):
    """A base model with a Memorizing Transformer's memory in it (Wu et al. 2022, arXiv 2203.08913)."""

    model_type = "memorizing"


class MemorizingModel(CompositeModel):
    """A base model with a Memorizing Transformer's memory, without a head."""

    config_class = MemorizingConfig


class MemorizingForCausalLM(CompositeForCausalLM):
    """A base language model with a Memorizing Transformer's memory."""

    config_class = MemorizingConfig
    model_class = MemorizingModel


register(
    MemoryMethod(
        adapter_config=MemorizingAdapterConfig,
        causal_lm=MemorizingForCausalLM,
        options=MemorizingOptions,
        new_state=MemorizingState,
        parts=MemorizingParts,
        make_parts=make_parts,
        attend=mix,
        title="Memorizing Transformer",
        paper="[Wu et al. 2022](https://arxiv.org/abs/2203.08913)",
        citation="""@inproceedings{wu2022memorizing,
  title = {Memorizing Transformers},
  author = {Wu, Yuhuai and Rabe, Markus N. and Hutchins, DeLesley and Szegedy, Christian},
  booktitle = {ICLR},
  year = {2022}
}""",
        summary=(
            "Text is read in segments of {segment_tokens:,} tokens; of earlier text, each head keeps up to "
            "{cache_size:,} pairs of a key and a value, and attends to the {topk} nearest of each token (Memorizing "
            "Transformer, arXiv 2203.08913)."
        ),
        limits=(
            "Self-attention sees the open segment and what the local window keeps; the memory holds everything else.",
            "Text beyond the memory's capacity is forgotten.",
        ),
        choose_when="you want exact keys and values retrieved by each head, and can pay for their bytes",
        grows="a ring of at most `cache_size` pairs a layer",
        starts_as="the base model, until a segment is stored",
        stores="entries",
        retrieves="the {topk} nearest pairs for each head",
        rates={"gate": "gate"},
        statistics=lambda parts, memories: share_statistics(part.gate for part in parts),
        test_settings={"cache_size": 40, "topk": 4, "attention_layers": [1], "search": "exact"},
    )
)
