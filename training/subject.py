"""What a run trains, as far as a recipe must know: an adapter on a pretrained base, or a whole model from scratch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from accelerate import Accelerator
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cacheformers.common.documents import DocumentRow
from cacheformers.training.optim import Rates

Trained = PeftModel | PreTrainedModel


class Subject(ABC):
    """What a run trains. Everything about it that can be wrong is found when it is made, before weights are.

    Attributes:
        title: what the first line of the output calls it.
        memory: options of the memory; where none is trained, at least its `window` and `segment_tokens`.
        remembers: a memory is trained.
        rates: learning rates.
        base: the pretrained model that it cannot do without, as it was named; None for a whole model.
    """

    title: str
    memory: Any
    remembers: bool
    rates: Rates
    base: str | None

    @abstractmethod
    def tokenizer(self, accelerator: Accelerator) -> PreTrainedTokenizerBase:
        """The tokenizer that belongs to it. Every process must call this."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What a run that goes on from another one's checkpoints must share of it, as JSON holds it."""

    @abstractmethod
    def make(self, accelerator: Accelerator, documents: DocumentRow, resumed: bool) -> Trained:
        """The model as it starts, the same in every process; every process must call this.

        Args:
            resumed: a checkpoint will replace what is trained.
        """
