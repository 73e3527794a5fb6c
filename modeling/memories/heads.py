"""Grouped-query attention without repeated keys: query heads stand beside the kv head that they share."""

from __future__ import annotations

from torch import Tensor


def by_kv_head(queries: Tensor, kv_heads: int) -> Tensor:
    """Queries `[rows, heads, ..., tokens, d]` by kv head, `[rows, kv_heads, ..., group*tokens, d]`.

    The tokens of one query head stay together.
    """
    grouped = queries.unflatten(1, (kv_heads, -1)).movedim(2, -3)  # [rows, kv_heads, ..., group, tokens, d]
    return grouped.flatten(-3, -2)


def by_head(grouped: Tensor, tokens: int) -> Tensor:
    """The inverse of `by_kv_head`."""
    return grouped.unflatten(-2, (-1, tokens)).movedim(-3, 2).flatten(1, 2)
