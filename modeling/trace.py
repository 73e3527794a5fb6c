"""Which tokens of a document are retrieved while a model answers, and the passages that they are in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor

from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.memory import all_numbers
from cacheformers.modeling.method import retrieving_methods
from cacheformers.modeling.origin import Source

NOT_SAVED = "(its text was not saved)"


@dataclass(frozen=True)
class Passage:
    """A passage that was retrieved.

    Attributes:
        first, last: numbers of its first and last token, counted from the first token that the memory has read.
        times: how often its tokens were retrieved.
        text: on one line.
        document: name of its text; empty if unknown.
        characters: start and end in that text; None if the text was not saved.
    """

    first: int
    last: int
    times: int
    text: str
    document: str = ""
    characters: tuple[int, int] | None = None


class Trace(LogitsProcessor):
    """Records which tokens are retrieved in `generate(logits_processor=[trace])`, without changing any score.

    Args:
        memory: the memory that is passed to `generate`.
        asking: how many of the prompt's last tokens are the question; None for all.

    Attributes:
        asked: for each new token of the question except the last, the numbers of the tokens that it retrieved.
        chosen: for each generated token, the numbers of the tokens that were retrieved when it was chosen.

    Raises:
        ValueError: the memory has several rows, or its method does not retrieve.
    """

    def __init__(self, memory: MemoryCache, asking: int | None = None) -> None:
        if memory.batch_size != 1 or not memory.state.retrieves:
            raise ValueError(f"A trace needs a memory of one row, of a method that retrieves: {retrieving_methods()}.")
        self.memory, self.before, self.asking = memory, memory.visible, asking
        self.asked: list[Tensor] = []
        self.chosen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        state = self.memory.state
        retrieved, together = list(state.retrieved().values()), state.retrieved_tokens
        if not self.chosen:
            # The rest of the prompt is in closed segments.
            new = self.memory.visible - self.before
            held = int(self.memory.timeline.open.sum()) if self.memory.columns else new
            columns = min(held, new, retrieved[0].shape[1], self.asking or new)
            self.asked = [numbers(retrieved, column, together) for column in range(-columns, -1)]
        self.chosen.append(numbers(retrieved, -1, together))
        return scores


def numbers(retrieved: list[Tensor], column: int, together: int) -> Tensor:
    """Return the numbers of the document's tokens that one column's token retrieved, in all layers.

    Args:
        together: tokens that were retrieved from each number on.
    """
    here = all_numbers(torch.cat([layer[0, column].cpu() for layer in retrieved]), together)
    return here[here >= 0]


def passages(retrieved: list[Tensor], texts: list[tuple[int, Source | None]], tokens: int, most: int) -> list[Passage]:
    """Return the passages of `tokens` tokens that were retrieved most often, at most `most` of them.

    Args:
        retrieved: numbers of tokens.
        texts: the number of the first token of every text, and the text; None where it was not saved.
    """
    found: list[Passage] = []
    for (start, source), end in zip(texts, [*(start for start, _ in texts[1:]), None], strict=True):
        here = torch.cat(retrieved) if retrieved else torch.zeros(0, dtype=torch.long)
        here = here[here >= start] - start
        here = here if end is None else here[here < end - start]
        votes = torch.bincount(here // tokens)
        for place in votes.nonzero()[:, 0].tolist():
            last = (place + 1) * tokens - 1
            last = last if end is None else min(last, end - start - 1)
            found.append(passage(source, start, place * tokens, last, int(votes[place])))
    return sorted(found, key=lambda passage: (-passage.times, passage.first))[:most]


def passage(source: Source | None, start: int, first: int, last: int, times: int) -> Passage:
    """Return the passage of the tokens `first` to `last` of a text whose first token has the number `start`."""
    if source is None:
        return Passage(start + first, start + last, times, NOT_SAVED)
    source = source.covering(first + 1)  # what was generated has no text
    last = min(last, len(source.offsets) - 1)
    characters = int(source.offsets[first, 0]), int(source.offsets[last, 1])
    return Passage(start + first, start + last, times, source.passage(first, last), source.name, characters)
