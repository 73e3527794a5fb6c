"""What a segment is found by, where nothing is trained: a few vectors made of its keys before their rotation.

    mean    the mean of its keys, <q, mean k>
    tokens  the keys that its own queries ask for most, <q, k_i>, as in InfLLM (Xiao et al. 2024, arXiv 2402.04617)
    bounds  the largest and smallest number of each channel, sum_c max(q_c top_c, q_c bottom_c): no key of the segment
            can score higher (Quest, Tang et al. 2024, arXiv 2406.10774)

InfLLM takes the keys that the next thousands of tokens ask for most; here it is the segment's own mean query that
says which keys are strong, so that a segment is complete when its last token is.
"""

from __future__ import annotations

import torch
from torch import Tensor

REPRESENTATIVES = ("mean", "tokens", "bounds")
ONE_VECTOR = ("mean", "bounds")


def represent(kind: str, vectors: int, keys: Tensor, queries: Tensor | None) -> Tensor:
    """Return what segments are scored by.

    Args:
        vectors: representatives of a segment, for "tokens".
        keys: before rotation, `[rows, kv_heads, segments, s, head_dim]`.
        queries: summed over the heads that share keys, likewise; None where they are not needed.

    Returns:
        `[rows, kv_heads, segments*vectors, head_dim]`; with "bounds" `[rows, kv_heads, segments, 2*head_dim]`.
    """
    if kind == "mean":
        return keys.mean(3)
    if kind == "bounds":
        return torch.cat([keys.amax(3), keys.amin(3)], -1)
    assert queries is not None
    strength = (keys * queries.mean(3, keepdim=True)).sum(-1)
    strongest = strength.sort(dim=-1, descending=True, stable=True).indices[..., :vectors, None]
    return keys.gather(3, strongest.expand(*strongest.shape[:-1], keys.shape[-1])).flatten(2, 3)


def asking(kind: str, queries: Tensor) -> Tensor:
    """Return queries as their product with representatives is a score."""
    if kind == "bounds":
        return torch.cat([queries.clamp(min=0), queries.clamp(max=0)], -1)
    return queries


def width(kind: str, head_dim: int) -> int:
    """Return the size of a representative."""
    return 2 * head_dim if kind == "bounds" else head_dim
