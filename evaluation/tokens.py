"""Kinds of predicted tokens: where in the document they stand, and where their last earlier occurrence does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CLASSES = ("first occurrence", "repeated within the window", "repeated only beyond it")


def token_classes(ids: NDArray[np.int64], segment_tokens: int, window_tokens: int = 0) -> NDArray[np.int64]:
    """The class of each token from the second on, `[tokens - 1]`, as a place in `CLASSES`.

    Token i is predicted from token i - 1, where self-attention sees that token's segment up to it and the
    `window_tokens` tokens before the segment. The class says where i's id occurred last: never, there, or before it.

    Args:
        ids: a document, `[tokens]`.
    """
    order = np.argsort(ids, kind="stable")
    repeats = ids[order[1:]] == ids[order[:-1]]
    last = np.full(len(ids), -1)
    last[order[1:][repeats]] = order[:-1][repeats]
    visible = (np.arange(1, len(ids)) - 1) // segment_tokens * segment_tokens - window_tokens
    return np.where(last[1:] < 0, 0, np.where(last[1:] >= visible, 1, 2))


def position_edges(longest: int, segment_tokens: int) -> list[int]:
    """Where buckets of positions begin and end: 0, n, 2n, 4n, ... until all `longest` positions are in one."""
    edges = [0, segment_tokens]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    return edges


def bucket_name(start: int, end: int) -> str:
    """Such as 1K-2K (of 1,024 tokens), or 16-32."""
    return f"{short(start)}-{short(end)}"


def short(tokens: int) -> str:
    return f"{tokens // 1024:,}K" if tokens and tokens % 1024 == 0 else str(tokens)
