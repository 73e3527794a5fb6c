"""Which document each column of a batch belongs to, and where in it: rows of any length, padded, or packed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Columns(NamedTuple):
    """What a forward's columns hold.

    Attributes:
        positions: in the token's document, `[rows or 1, time]`.
        documents: number of the token's document in its row, -1 for padding, `[rows, time]` on the host; None where
            each row is a document. Used without a state.
        real: which columns are no padding, `[rows, time]` on the host; None for all. Used with a state.
    """

    positions: Tensor
    documents: Tensor | None = None
    real: Tensor | None = None


def documents_of(real: Tensor, position_ids: Tensor | None) -> Columns:
    """Find each token's document and its place in it.

    Args:
        real: which columns are no padding, `[rows, time]` on the host.
        position_ids: restart where another document begins, `[rows or 1, time]`; None: each row is a document.

    Raises:
        ValueError: padding inside a document; positions that do not count a document's tokens, or are too few.
    """
    time = real.shape[1]
    if position_ids is not None and position_ids.shape[-1] != time:
        raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}, but there are {time} tokens a row.")
    if position_ids is None and bool(real.all()):
        return Columns(torch.arange(time)[None])
    count = real.cumsum(1)
    begins = real & (count == 1)
    given = None if position_ids is None else position_ids.cpu().expand(len(real), -1)
    if given is not None:
        begins |= real & (given == 0)
    first = torch.where(begins, count, 0).cummax(1).values
    positions = (count - first).clamp(min=0)
    if given is not None and bool((real & (given != positions)).any()):
        raise ValueError(
            "position_ids must count each document's tokens from 0. Leave them out, unless documents are packed into a "
            "row."
        )
    after_padding = real[:, 1:] & ~real[:, :-1]
    if bool((after_padding & ~begins[:, 1:]).any()):
        raise ValueError("attention_mask has padding inside a document: pad on the left or on the right.")
    documents = torch.where(real, begins.cumsum(1) - 1, -1)
    alone = bool(real.all()) and bool((documents == 0).all())
    return Columns(positions, None if alone else documents)


def continued(real: Tensor, position_ids: Tensor | None, tokens_read: list[int]) -> Columns:
    """Places of tokens that follow what a cache has read, `tokens_read` in each row, whatever the padding.

    Raises:
        ValueError: a document begins anew.
    """
    positions = (torch.tensor(tokens_read)[:, None] + real.cumsum(1) - 1).clamp(min=0)
    if position_ids is not None and bool((real & (position_ids.cpu() == 0) & (positions > 0)).any()):
        raise ValueError(
            "position_ids restart, but with a cache every row goes on with its document: leave them out, and call "
            "cache.reset([row]) before a new document."
        )
    return Columns(positions, real=None if bool(real.all()) else real)
