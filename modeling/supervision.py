"""A method's own loss, by which questions learn to retrieve the passages that answer them.

Training data may say where in a context an answer's passage is (`Gold`). A method that retrieves then adds a loss of
each layer to that of the language model: its state is `Supervised`, and its forwards leave losses behind in what they
read, a `Supervision`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cacheformers.modeling.memory import Gold, MemoryState, Reading, RingState


@dataclass(kw_only=True)
class Supervision:
    """What one forward is told of its questions, and the losses that it leaves behind.

    Attributes:
        gold: places of the answers to the questions of this forward; None if that is not known.
        losses: of this forward by layer, each a sum over tokens that ask, over the number of all that `gold` names.
    """

    gold: Gold | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class SupervisedReading(Supervision, Reading):
    """A `Supervision` of a forward that reads rings."""


class Supervised(MemoryState):
    """A state with a loss of what retrieves: `retrieval_weight` times the mean over layers.

    A state sets `retrieval_weight`, and its layers leave losses behind only where it is above 0.
    """

    retrieval_weight = 0.0
    losses: tuple[Tensor, ...] = ()  # of the pieces of the running forward

    def loss_targets(self, read: Sequence[int], new: Sequence[int]) -> int:
        """How many tokens of the next forward `loss` is a mean over: those that ask."""
        return int(self.gold.asking.sum()) if self.gold is not None and self.retrieval_weight else 0

    def take_losses(self, supervision: Supervision) -> None:
        """Take up the losses that a piece of a forward left behind."""
        if supervision.losses:
            self.losses = (*self.losses, torch.stack(list(supervision.losses.values())).mean())

    def detach(self) -> None:
        """Make `loss` that of the forward which ends here, of all its pieces."""
        super().detach()
        self.loss = self.retrieval_weight * torch.stack(self.losses).sum() if self.losses else None
        self.losses = ()


class SupervisedState(Supervised, RingState):
    """Rings, and a loss of what retrieves from them."""

    retrieves = True

    def begin(self) -> SupervisedReading:
        return SupervisedReading(super().begin().stores, gold=self.gold)

    def end(self, reading: SupervisedReading) -> None:
        self.take_losses(reading)
        super().end(reading)


def passage_loss(chances: Tensor, passages: Sequence[slice | list[int]]) -> Tensor:
    """How far tokens are from attending to passages: - mean of log p(passage) over passages and key-value heads.

    p is a mean over the query heads that share keys.

    Args:
        chances: log p of each entry, `[kv_heads, group, tokens, entries]`.
        passages: at least one, each the entries of a passage.

    Returns:
        The sum over tokens.
    """
    found = torch.stack([chances[..., passage].logsumexp(-1) for passage in passages])  # [passages, kv, group, tokens]
    by_head = found.logsumexp(2) - math.log(found.shape[2])
    return -by_head.mean((0, 1)).sum()
