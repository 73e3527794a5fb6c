"""A method's own loss, by which questions learn to retrieve the passages that answer them.

Training data may say where in a context an answer's passage is (`Gold`). A method that retrieves then adds a loss of
each layer to that of the language model: its state is a `SupervisedState`, and its forwards leave losses behind in a
`SupervisedReading`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cacheformers.modeling.memory import Gold, Reading, RingState


@dataclass
class SupervisedReading(Reading):
    """Data that one forward reads and leaves behind.

    Attributes:
        gold: places of the answers to the questions of this forward; None if that is not known.
        losses: of this forward by layer, each a sum over tokens that ask, over the number of all that `gold` names.
    """

    gold: Gold | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)


class SupervisedState(RingState):
    """Rings, and a loss of what retrieves from them: `retrieval_weight` times the mean over layers.

    A state sets `retrieval_weight`, and its layers leave losses behind only where it is above 0.
    """

    retrieves = True
    retrieval_weight = 0.0
    losses: tuple[Tensor, ...] = ()  # of the pieces of the running forward

    def begin(self) -> SupervisedReading:
        return SupervisedReading(super().begin().stores, gold=self.gold)

    def loss_targets(self, read: Sequence[int], new: Sequence[int]) -> int:
        """How many tokens of the next forward `loss` is a mean over: those that ask."""
        return int(self.gold.asking.sum()) if self.gold is not None and self.retrieval_weight else 0

    def end(self, reading: SupervisedReading) -> None:
        if reading.losses:
            self.losses = (*self.losses, torch.stack(list(reading.losses.values())).mean())
        super().end(reading)

    def detach(self) -> None:
        """Make `loss` that of the forward which ends here, of all its pieces."""
        super().detach()
        self.loss = self.retrieval_weight * torch.stack(self.losses).sum() if self.losses else None
        self.losses = ()
