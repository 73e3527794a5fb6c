"""Slopes by which query heads prefer newer retrieved segments: ALiBi's (arXiv 2108.12409), but learned.

    score(t, s) = q_t . k_s / sqrt(d_head) - slope n

n counts the segments that token t retrieves after that of s, so the latest of several facts can be told from the earlier
ones in a text of any length. Slopes are zero at first, and may become negative. Scores of the other branches, and the
choice of segments, stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

STEP = 4.0  # of slopes, so that a usual learning rate moves them in hundreds of steps


class SegmentSlopes(nn.Module):
    """The slope of each query head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))

    def forward(self) -> Tensor:
        """Return slopes `[heads]`, in float32 or better."""
        return STEP * self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))


@dataclass(frozen=True)
class Slopes:
    """Lowers scores in the layout of columns, `[rows, kv_heads, parts, group*tokens, columns]`.

    Attributes:
        values: slopes of some query heads, by key-value head, `[kv_heads, group]`.
        newer: how many segments each token retrieves after that of a column, `[rows, parts, tokens, columns]`.
    """

    values: Tensor
    newer: Tensor

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Return what is added to scores."""
        return -(self.values[:, None, :, None, None] * self.newer[:, None, :, None]).flatten(3, 4).to(dtype)

    def gradient(self, to_scores: Tensor) -> Tensor:
        """Return the gradient of `values` from that of scores."""
        by_head = to_scores.unflatten(3, (self.values.shape[1], -1))
        return -(by_head * self.newer[:, None, :, None]).sum((0, 2, 4, 5))


def count_newer(limit: Tensor, columns: int, pool_tokens: int) -> Tensor:
    """Count the retrieved segments after that of each column, `[rows, parts, tokens, columns]`; 0 for hidden columns.

    Args:
        limit: how many of the columns each token sees, `[rows, parts, tokens]`.
    """
    return (limit[..., None] // pool_tokens - 1 - torch.arange(columns) // pool_tokens).clamp(min=0)
