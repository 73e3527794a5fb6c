"""The specification of Neurocache's attention: one document, token by token, in the plainest way."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cacheformers.methods.neurocache.hit_scores import NEARNESS, NOTHING, NOTHING_STEP
from cacheformers.methods.neurocache.neurocache import NeurocacheParts
from cacheformers.methods.neurocache.options import NeurocacheOptions


def naive(
    options: NeurocacheOptions, encoder: NeurocacheParts, parts: NeurocacheParts, searched: Tensor, hidden: Tensor
) -> Tensor:
    """Specify cache attention: one document, token by token, in the plainest way.

    Args:
        encoder: parts with W_p and its norm.
        parts: parts of the attention layer.
        searched: x of the retrieval layer, which also stores, `[time, h]`.
        hidden: x of the attention layer, `[time, h]`.

    Returns:
        What the branch adds, `[time, h]`. As in training, gradients reach W_p only through retrieved entries.
    """
    assert parts.q is not None and parts.k is not None and parts.v is not None and parts.o is not None
    base, length = options.base, options.segment_tokens
    entries = encoder.encode(searched.detach())
    retrieved: list[list[tuple[int, int, int]]] = []  # of each token: entry, its hit, place beside the hit
    outputs = []
    for t in range(len(hidden)):
        start = t // length * length  # of the open segment
        oldest = max(start - options.cache_size, 0)
        found: list[tuple[float, int]] = []
        for i in range(oldest, start):
            if options.similarity == "l2":
                score = -float(((entries[t] - entries[i]) ** 2).sum())
            else:
                score = float(entries[t] @ entries[i])
            found.append((-score, i))
        half = options.neighborhood_size // 2
        offsets = list(range(-half + 1, half + 1)) if half else [0]
        hits = [i for _, i in sorted(found)[: options.topk]]
        retrieved.append(
            [(i + o, i, place) for i in hits for place, o in enumerate(offsets) if oldest <= i + o < start]
        )
        seen = [
            (back, *entry) for back in range(min(options.context_size, t - start + 1)) for entry in retrieved[t - back]
        ]
        chosen = [i for _, i, _, _ in seen]
        query = parts.q(hidden[t]).view(base.heads, base.head_dim)
        keys = parts.k(entries[chosen]).view(len(chosen), base.kv_heads, base.head_dim)
        values = parts.v(entries[chosen]).view(len(chosen), base.kv_heads, base.head_dim)
        heads = []
        for head in range(base.heads):
            kv_head = head // (base.heads // base.kv_heads)
            scores = keys[:, kv_head] @ query[head] / base.head_dim**0.5
            if parts.scores is None:
                weights = torch.softmax(scores, 0)
            else:
                nothing = NOTHING + NOTHING_STEP * parts.scores.nothing[head]
                added = []
                for back, _, hit, place in seen:
                    near = torch.cosine_similarity(entries[t - back].detach(), entries[hit], 0)
                    added.append(
                        NEARNESS * torch.exp(parts.scores.nearness[head]) * near
                        + parts.scores.beside[head, back, place]
                    )
                    if parts.scores.order is not None:
                        newer = len({other for _, other, _ in retrieved[t - back] if other > hit})
                        added[-1] = added[-1] - parts.scores.order[head] * math.log2(1 + newer)
                weights = torch.softmax(torch.stack([*(scores[i] + new for i, new in enumerate(added)), nothing]), 0)[
                    :-1
                ]
            heads.append(weights @ values[:, kv_head])
        per_head = torch.stack(heads)
        if parts.gate is not None:
            per_head = parts.gate(per_head)
        outputs.append(parts.o(per_head.flatten()))
    return torch.stack(outputs)
