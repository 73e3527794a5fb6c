"""Retrieval heads: which passage a question asks for, by the base's own keys in the few heads that look for it.

    p_t(i) = softmax_i <q_t, k_i> / sqrt(d_head)     over all tokens i that were read, q and k before their rotation
    score(passage) = mean of p_t over the query's tokens t - mean of p_t over the tokens before the query,
                     summed over the passage's tokens i > 0, and averaged over the query heads that share the keys kept

Some heads of pretrained models look for what they need in the text (Wu et al. 2024, arXiv 2404.15574), and their
attention to a passage says whether it answers a question (Zhang et al. 2025, arXiv 2506.09944). What heads attend to
whatever is asked is taken off, as in Chen et al. 2024, arXiv 2410.02642, who ask "N/A" for that; here it is what the
words before the query, "Question:", attend to. The first token of a text takes what heads have no use for (an attention
sink), and belongs to no passage.

Self-attention sees its local window alone, so nothing that the model computes changes. The memory is for
`cacheformers.recall` and the prompts made with it: the passages that it finds are read again. It keeps d_head numbers a
token for each key-value head that is named.

Nothing is trained by default. With a `retrieval_weight` questions learn what to look for:

    q_t -> q_t + W x_t                              x the input of self-attention, W zero at first
    loss(t) = - mean of log p_t(passage)            over the passages that answer and the key-value heads of a layer

Keys stay as they are, so that W learns from questions alone, and no gradient goes through what was read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.adapters.registration import register
from cacheformers.modeling.attention import AttentionInputs, project
from cacheformers.modeling.composite import CompositeConfig, CompositeForCausalLM, CompositeModel
from cacheformers.modeling.memory import BaseShape, Gold, token_numbers
from cacheformers.modeling.method import (
    STORE_DTYPES,
    LocalWindowOptions,
    LocalWindowSettings,
    MemoryMethod,
    StoreOptions,
    StoreSettings,
    check_at_least,
    check_choices,
    check_layers,
    setting,
)
from cacheformers.modeling.search.store import Ring
from cacheformers.modeling.supervision import SupervisedReading, SupervisedState, passage_loss

TOGETHER = 4  # tokens whose scores of all entries are held at once


@dataclass(repr=False)  # transformers prints a configuration
class RetrievalHeadsSettings(StoreSettings, LocalWindowSettings):
    """Fields of `RetrievalHeadsAdapterConfig` and `RetrievalHeadsConfig`. Layers and heads count from 0."""

    heads: dict[int, list[int]] | None = setting(
        None,
        "Key-value heads whose keys are kept, by layer. `cacheformers heads` says which ones of a base find passages. "
        "Default: all of the layer three fifths up.",
    )
    cache_size: int = setting(1048576, "Tokens that a document may keep; the oldest are dropped first.", free=True)
    topk: int = setting(4, "Tokens that each query head of each token is said to retrieve.", free=True)
    retrieval_weight: float = setting(
        0.0,
        "Above 0 queries get a trained part, and this is the weight, in `memory.state.loss`, of a contrastive loss by "
        "which questions learn to find the passages that hold their answers, where training data say which.",
        free=True,
    )


@dataclass(kw_only=True)
class RetrievalHeadsOptions(StoreOptions, RetrievalHeadsSettings, LocalWindowOptions):
    """`RetrievalHeadsSettings` resolved against a base model; ValueError if an option does not fit it."""

    heads: tuple[tuple[int, tuple[int, ...]], ...]  # type: ignore[assignment]  # resolved

    def __post_init__(self) -> None:
        self.heads = chosen_heads(self.heads, self.base)
        check_at_least(1, self, "cache_size", "topk")
        check_at_least(0, self, "retrieval_weight")
        check_choices(self, cache_dtype=STORE_DTYPES)
        self.check_local_window()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose keys are kept."""
        return tuple(layer for layer, _ in self.heads)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that see the local window, and get LoRA by default: all of them."""
        return tuple(range(self.base.layers))

    @property
    def entry_numbers(self) -> int:
        """The size of one token's keys in all layers that store."""
        return self.base.head_dim * sum(len(heads) for _, heads in self.heads)

    @property
    def near_tokens(self) -> None:
        """None, because training reads no memory."""
        return None


def chosen_heads(heads: Any, base: BaseShape) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Sort and check key-value heads by layer; None means all heads of the layer three fifths up."""
    if heads is None:
        return ((3 * base.layers // 5, tuple(range(base.kv_heads))),)
    if not isinstance(heads, Mapping | tuple):
        raise ValueError(f"heads must be a map from layers to key-value heads such as {{18: [2]}}, got {heads!r}.")
    named = dict(heads)
    found = {int(layer): tuple(sorted(own)) for layer, own in named.items()}  # JSON has text keys
    check_layers(found, base)
    for layer, own in found.items():
        if not own or len(set(own)) < len(own) or not set(own) <= set(range(base.kv_heads)):
            raise ValueError(
                f"heads of layer {layer}: name at least one of this base's key-value heads 0 to {base.kv_heads - 1}, "
                f"each once, got {list(own)}."
            )
    return tuple(sorted(found.items()))


class RetrievalHeadsParts(NamedTuple):
    """W, `[kept kv heads * group * d_head, h]`; None where nothing is trained."""

    query: nn.Linear | None = None


def make_parts(options: RetrievalHeadsOptions, layer: int, *_: Any) -> dict[str, nn.Module]:
    """Make the part of one layer, with which nothing changes at first."""
    if not options.retrieval_weight:
        return {}
    base, kept = options.base, len(dict(options.heads)[layer])
    query = nn.Linear(base.hidden_size, kept * (base.heads // base.kv_heads) * base.head_dim, bias=False)
    nn.init.zeros_(query.weight)
    return {"query": query}


class RetrievalHeadsState(SupervisedState):
    """A ring of keys per layer, with the heads of a token side by side; see `MemoryMethod.new_state`.

    Attributes:
        queries: of the last forward by layer, scaled, `[rows, columns, kept kv heads, group, d_head]`.
    """

    attends = False

    def __init__(
        self,
        options: RetrievalHeadsOptions,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool,
        cache_size: int | None,
    ) -> None:
        size, self.key_size = options.cache_size if cache_size is None else cache_size, options.base.head_dim
        super().__init__(
            {
                layer: options.new_ring(rows, size, devices[layer], dtype, len(heads) * self.key_size)
                for layer, heads in options.heads
            }
        )
        self.heads, self.topk, self.retrieval_weight = options.heads, options.topk, options.retrieval_weight
        self.queries: dict[int, Tensor] = {}

    def end(self, reading: SupervisedReading) -> None:
        super().end(reading)
        self.queries = dict(reading.new["queries"])

    def keep(self, columns: Tensor) -> None:
        super().keep(columns)
        self.queries = {}

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.queries = {
            layer: queries[torch.tensor(rows, device=queries.device)] for layer, queries in self.queries.items()
        }

    def join(self, others: Sequence[RetrievalHeadsState]) -> None:
        super().join(others)
        self.queries = {}

    def keys(self, layer: int, row: int) -> Tensor:
        """Return one row's keys, `[entries, kept kv heads, d_head]`."""
        assert self.key_size is not None
        return keys_of(self.rings[layer], row, self.key_size)

    def retrieved(self) -> dict[int, Tensor]:
        found = {}
        for layer, ring in self.rings.items():
            if layer not in self.queries:
                continue
            hits = [
                torch.cat([self.strongest(layer, row, query) for query in self.queries[layer][row].split(TOGETHER)])
                for row in range(ring.rows)
            ]
            found[layer] = token_numbers(ring, torch.stack(hits))
        return found

    def strongest(self, layer: int, row: int, queries: Tensor) -> Tensor:
        """Return the entries that tokens score highest, all but the first tokens', `[tokens, query heads * topk]`."""
        scores, first = scores_of(queries, self.keys(layer, row)), self.rings[layer].entries(row).first
        scores[..., [start - first for start in self.starts if 0 <= start - first < scores.shape[-1]]] = -torch.inf
        best = scores.topk(min(self.topk, scores.shape[-1]))
        chosen = torch.where(best.values > -torch.inf, best.indices, -1)
        return F.pad(chosen, (0, self.topk - chosen.shape[-1]), value=-1).transpose(0, 1).flatten(1)

    def shares(self, asked: int, read: int) -> dict[tuple[int, int], Tensor]:
        """Return p of the newest tokens of the first row, by layer and key-value head, `[asked, read]`, float32.

        It is the mean over the query heads that share the keys; 0 for texts' first tokens and for forgotten ones.
        """
        found: dict[tuple[int, int], Tensor] = {}
        for layer, heads in self.heads:
            first, keys = self.rings[layer].entries(0).first, self.keys(layer, 0)
            by_token = []
            for query in self.queries[layer][0, -asked:].split(TOGETHER):
                shares = scores_of(query, keys).float().softmax(-1).cpu()
                by_token.append(shares.unflatten(0, (len(heads), -1)).mean(1))
            shares = torch.cat(by_token, 1)
            shares = F.pad(shares, (first, read - first - shares.shape[-1]))
            shares[..., [start for start in self.starts if start < read]] = 0
            found |= {(layer, head): own for head, own in zip(heads, shares, strict=True)}
        return found

    def nearness(self, asked: int, read: int) -> Tensor:
        """Return p of the newest tokens, the mean over heads."""
        return torch.stack(list(self.shares(asked, read).values())).mean(0)

    def span_scores(self, asked: int, before: int, read: int, spans: Sequence[tuple[int, int]]) -> Tensor:
        """Score passages as the module's equation says; an empty or forgotten one has -1, the least."""
        first = max(ring.entries(0).first for ring in self.rings.values())
        kept = [(max(start, first), end) for start, end in spans]
        return passage_scores(self.nearness(before + asked, read), before, kept)


def scores_of(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the scores of tokens `[tokens, kv heads, group, d]` with keys, `[kv heads * group, tokens, entries]`."""
    return torch.einsum("thgd,nhd->hgtn", queries, keys.to(queries.device, queries.dtype)).flatten(0, 1)


def passage_scores(shares: Tensor, before: int, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Score passages, the module's equation.

    Args:
        shares: p of the tokens before the query and of the query, `[tokens, read]`.
        before: tokens before the query.
        spans: first and last + 1 of each passage's tokens.

    Returns:
        `[spans]`, float32; -1, the least, for an empty passage.
    """
    more = shares[before:].mean(0, dtype=torch.float64)
    if before:
        more -= shares[:before].mean(0, dtype=torch.float64)
    until = F.pad(more.cumsum(0), (1, 0))
    starts, ends = (torch.tensor(side, dtype=torch.long) for side in zip(*spans, strict=True))
    scores = until[ends] - until[starts]
    return torch.where(ends > starts, scores, -1.0).float()


def keys_of(ring: Ring, row: int, size: int) -> Tensor:
    """Return one row's keys, `[entries, kept kv heads, d_head]`."""
    spans = ring.entries(row).spans
    return (spans[0] if len(spans) == 1 else torch.cat(spans)).unflatten(-1, (-1, size))


def keep_heads(
    options: RetrievalHeadsOptions, layer: int, parts: RetrievalHeadsParts, inputs: AttentionInputs
) -> Tensor:
    """Leave the queries and keys of a layer's retrieval heads behind, and return self-attention as it is."""
    reading, kept = inputs.call.reading, list(dict(options.heads)[layer])
    ring, scale = reading.stores[layer], inputs.module.scaling
    with torch.no_grad():
        keys = inputs.plain_key[:, kept].transpose(1, 2).flatten(2)
        reading.new["keys"][layer] = keys.to(ring.keys.dtype)
        queries = inputs.plain_query.unflatten(1, (options.base.kv_heads, -1))[:, kept].permute(0, 3, 1, 2, 4)
    if parts.query is not None:
        learned = project(parts.query, inputs.hidden.detach().to(queries.dtype))
        queries = queries + learned.unflatten(-1, queries.shape[2:])
    queries = queries * scale
    reading.new["queries"][layer] = queries.detach()
    if parts.query is not None and inputs.module.training and torch.is_grad_enabled():
        reading.losses[layer] = retrieval_loss(queries, ring, reading.gold, inputs.call.start)
    return inputs.local


def retrieval_loss(queries: Tensor, ring: Ring, gold: Gold | None, start: int = 0) -> Tensor:
    """How far the tokens that ask are from attending to the passages that answer; its gradient reaches W.

    Args:
        queries: scaled, `[rows, time, kept kv heads, group, d_head]`.
        ring: of the layer.
        gold: None for no question, and a loss of 0.
        start: columns of the forward before these.

    Returns:
        The sum of the module's loss(t) over these asking tokens, of rows that hold a passage, over the number of all
        that `gold` names.
    """
    loss = queries[:1, :1].sum() * 0  # every process has the same graph
    if gold is None:
        return loss
    for row in range(len(queries)):
        asking = gold.asking[row, start : start + queries.shape[1]].to(queries.device)
        first, keys = ring.entries(row).first, keys_of(ring, row, queries.shape[-1])
        # The first token belongs to no passage, and old ones may be forgotten.
        ends = [
            (max(own.start - first, int(first == 0)), min(own.stop - first, len(keys))) for own in gold.passages[row]
        ]
        passages = [slice(*end) for end in ends if end[0] < end[1]]
        if not asking.any() or not passages:
            continue
        logs = torch.log_softmax(scores_of(queries[row, asking], keys), -1).unflatten(0, (queries.shape[2], -1))
        loss = loss + passage_loss(logs, passages)
    return loss / gold.asking.sum().clamp(min=1).to(queries.device)


def naive(
    queries: Tensor, keys: Tensor, heads: Sequence[int], before: int, spans: Sequence[tuple[int, int]]
) -> list[float]:
    """Specify the scores of one layer's heads, token by token.

    Args:
        queries: of the tokens before the query and of the query, before their rotation, `[tokens, heads, d_head]`.
        keys: of what was read, before their rotation, `[read, kv_heads, d_head]`.
        heads: key-value heads.
        before: tokens before the query.
    """
    group = queries.shape[1] // keys.shape[1]
    scores = []
    for start, end in spans:
        shares = []  # of the span, by token
        for token in queries:
            own = []
            for head in heads:
                for query in token[head * group : (head + 1) * group]:
                    attention = torch.softmax(keys[:, head] @ query / queries.shape[2] ** 0.5, 0)
                    own.append(float(attention[max(start, 1) : end].sum()))
            shares.append(sum(own) / len(own))
        asked, other = shares[before:], shares[:before]
        usual = sum(other) / len(other) if other else 0.0
        scores.append(sum(asked) / len(asked) - usual if end > start else -1.0)
    return scores


@dataclass
class RetrievalHeadsAdapterConfig(RetrievalHeadsSettings, MemoryAdapterConfig):
    """A memory of the keys of retrieval heads beside LoRA (Zhang et al. 2025, arXiv 2506.09944)."""


class RetrievalHeadsConfig(RetrievalHeadsSettings, CompositeConfig):
    """A base model with a memory of the keys of its retrieval heads (Zhang et al. 2025, arXiv 2506.09944)."""

    model_type = "retrieval_heads"


class RetrievalHeadsModel(CompositeModel):
    """A base model with a memory of the keys of its retrieval heads, without a head of its own."""

    config_class = RetrievalHeadsConfig


class RetrievalHeadsForCausalLM(CompositeForCausalLM):
    """A base language model with a memory of the keys of its retrieval heads."""

    config_class = RetrievalHeadsConfig
    model_class = RetrievalHeadsModel


register(
    MemoryMethod(
        adapter_config=RetrievalHeadsAdapterConfig,
        causal_lm=RetrievalHeadsForCausalLM,
        options=RetrievalHeadsOptions,
        new_state=RetrievalHeadsState,
        parts=RetrievalHeadsParts,
        make_parts=make_parts,
        attend=keep_heads,
        title="Retrieval heads",
        paper="[Zhang et al. 2025](https://arxiv.org/abs/2506.09944)",
        citation="""@inproceedings{zhang2025qrhead,
  title = {Query-Focused Retrieval Heads Improve Long-Context Reasoning and Re-ranking},
  author = {Zhang, Wuwei and Yin, Fangcong and Yen, Howard and Chen, Danqi and Ye, Xi},
  booktitle = {EMNLP},
  year = {2025}
}""",
        summary=(
            "Text is read in segments of {segment_tokens:,} tokens; of up to {cache_size:,} tokens the keys of a few "
            "attention heads are kept, which say what passages a question asks for (arXiv 2506.09944)."
        ),
        limits=(
            "It changes nothing that the model computes: passages that it finds must be put before the question, from "
            "the text, which is kept beside it.",
            "Which heads find passages has to be found out for each base: `cacheformers heads`.",
        ),
        choose_when="nothing shall be trained, and the text may be kept beside the memory",
        grows="a ring of at most `cache_size` keys of the named heads",
        starts_as="the base model within its window",
        stores="entries",
        retrieves="{topk} tokens for each query head of the named ones",
        test_settings={"cache_size": 40, "heads": {1: [0]}},
    )
)
