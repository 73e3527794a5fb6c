"""What a memory that takes part in attention is given: queries, keys and values of a layer, head by head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from cacheformers.modeling.memory import SegmentCall


@dataclass
class AttentionInputs:
    """What self-attention of one layer computes from, and what it would return.

    Attributes:
        module: the attention module.
        query: rotated, `[rows, heads, time, d_head]`; some models have it scaled already (OPT).
        key, value: of the local window and the new tokens, rotated, `[rows, kv_heads, columns + time, d_head]`.
        call: the forward that this is a part of.
        compute: the former attention function over these tensors.
        scaling: of the scores of `query` and `key`.
        hidden: x, from which the module computes all of these, `[rows, time, h]`.
        rotation: cos and sin of the new tokens, None where there is none.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    call: SegmentCall
    compute: Callable[[], tuple[Tensor, Tensor | None]]
    scaling: float
    hidden: Tensor
    rotation: tuple[Tensor, Tensor] | None

    @cached_property
    def local(self) -> tuple[Tensor, Tensor | None]:
        """What self-attention returns without the memory, `[rows, time, heads, d_head]`, and its weights."""
        return self.compute()

    @cached_property
    def plain_query(self) -> Tensor:
        """Queries before rotation and scale, `[rows, heads, time, d_head]`, in float32 or better."""
        plain = self._unrotated(self.query)
        own: float = self.module.scaling  # type: ignore[assignment]  # OPT applies it to queries
        return plain if own == self.scaling else plain * (self.scaling / own)

    @cached_property
    def plain_key(self) -> Tensor:
        """Keys of the new tokens before their rotation, `[rows, kv_heads, time, d_head]`, in float32 or better."""
        return self._unrotated(self.new_key)

    @property
    def new_key(self) -> Tensor:
        """Rotated keys of the new tokens, `[rows, kv_heads, time, d_head]`."""
        return self.key[:, :, -self.query.shape[2] :]

    @property
    def new_value(self) -> Tensor:
        """Values of the new tokens, `[rows, kv_heads, time, d_head]`."""
        return self.value[:, :, -self.query.shape[2] :]

    def _unrotated(self, states: Tensor) -> Tensor:
        exact = states.to(torch.promote_types(states.dtype, torch.float32))
        return exact if self.rotation is None else unrotated(exact, *self.rotation)


def unrotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo a rotary embedding.

    Args:
        states: rotated, `[rows, heads, time, d_head]`; channels beyond the rotation's are left as they are.
        cos, sin: of the rotation, `[rows, time, rotated]`, with whatever factor the model scales them by.
    """
    cos, sin = cos[:, None].to(states.dtype), sin[:, None].to(states.dtype)
    turned, rest = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    back = (turned * cos - torch.cat([-second, first], -1) * sin) / (cos.square() + sin.square())
    return torch.cat([back, rest], -1)


def by_kv_head(queries: Tensor, kv_heads: int) -> Tensor:
    """Queries `[rows, heads, ..., tokens, d]` by kv head, `[rows, kv_heads, ..., group*tokens, d]`.

    The tokens of one query head stay together.
    """
    grouped = queries.unflatten(1, (kv_heads, -1)).movedim(2, -3)  # [rows, kv_heads, ..., group, tokens, d]
    return grouped.flatten(-3, -2)


def by_head(grouped: Tensor, tokens: int) -> Tensor:
    """The inverse of `by_kv_head`."""
    return grouped.unflatten(-2, (-1, tokens)).movedim(-3, 2).flatten(1, 2)
