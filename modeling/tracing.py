"""Which tokens of a document are retrieved while a model generates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor

from cacheformers.modeling.cache import MemoryCache


@dataclass(frozen=True)
class Passage:
    """A stretch of a document: number of its first token, how often its tokens were retrieved, and its text."""

    first: int
    times: int
    text: str


class Trace(LogitsProcessor):
    """Give it to `generate(logits_processor=[trace])` together with a memory of one row; it changes nothing.

    Args:
        memory: the one that is given to `generate`.

    Attributes:
        asked: of each token of the question before its last, the numbers of the document's tokens that it retrieved.
        chosen: of each generated token, what was retrieved when it was chosen.

    Raises:
        ValueError: a memory of several rows, or of a method that does not retrieve.
    """

    def __init__(self, memory: MemoryCache) -> None:
        if memory.batch_size != 1 or not memory.state.retrieves:
            raise ValueError(
                "A trace needs a memory of one row, of a method that retrieves (Neurocache, Memorizing Transformer)."
            )
        self.memory = memory
        self.asked: list[Tensor] = []
        self.chosen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        retrieved = list(self.memory.state.retrieved().values())
        if not self.chosen:
            columns = min(self._columns(), retrieved[0].shape[1])
            self.asked = [numbers(retrieved, column) for column in range(-columns, -1)]
        self.chosen.append(numbers(retrieved, -1))
        return scores

    def _columns(self) -> int:
        """How many columns the open segment holds of the question (the rest of it was closed on the way)."""
        return min(int(self.memory.timeline.open.sum()), self.memory.visible)

    def passages(self, retrieved: list[Tensor], tokens: int, most: int) -> list[Passage]:
        """The stretches of `tokens` tokens that were retrieved most often, at most `most` of them."""
        votes = torch.bincount(torch.cat(retrieved) // tokens) if retrieved else torch.zeros(0, dtype=torch.long)
        best = votes.sort(descending=True, stable=True)
        source = self.memory.origin.sources[0]
        passages = []
        for times, place in list(zip(best.values.tolist(), best.indices.tolist(), strict=True))[:most]:
            first = place * tokens
            if source is None:
                text = "(its text was not saved)"
            elif first < len(source.offsets):
                text = source.passage(first, first + tokens - 1)
            else:
                text = "(question and answer)"
            if times:
                passages.append(Passage(first, times, text))
        return passages


def numbers(retrieved: list[Tensor], column: int) -> Tensor:
    """Numbers of the document's tokens that one column's token retrieved, in all layers."""
    here = torch.cat([layer[0, column].cpu() for layer in retrieved])
    return here[here >= 0]
