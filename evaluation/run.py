"""`Run`: the losses of one way of reading held-out documents, and everything that is computed from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cacheformers.evaluation.bootstrap import Floats, perplexity_interval, ratio_interval
from cacheformers.evaluation.perplexity import HeldOut, Losses
from cacheformers.evaluation.tokens import CLASSES, bucket_name, position_edges, token_classes


@dataclass(frozen=True, eq=False)
class Measure:
    """The perplexity of some tokens of every document.

    Attributes:
        nats_by_document, tokens_by_document: sum of losses, and how many there are, `[documents]`.
    """

    nats_by_document: Floats
    tokens_by_document: Floats

    @property
    def nats(self) -> float:
        return float(self.nats_by_document.sum())

    @property
    def tokens(self) -> int:
        return int(self.tokens_by_document.sum())

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(self.nats / self.tokens)

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the perplexity; None for a single document."""
        return perplexity_interval(self.nats_by_document, self.tokens_by_document)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"tokens": self.tokens, "perplexity": self.perplexity, "interval": self.interval}


@dataclass(frozen=True)
class Comparison:
    """One perplexity over another, on the same tokens of the same documents, with its 95 % interval."""

    ratio: float
    interval: tuple[float, float] | None


def compare(measure: Measure, other: Measure) -> Comparison:
    """The perplexity of `measure` as a multiple of that of `other`, which is about the same tokens."""
    interval = ratio_interval(measure.nats_by_document, other.nats_by_document, measure.tokens_by_document)
    return Comparison(measure.perplexity / other.perplexity, interval)


@dataclass(frozen=True, eq=False)
class Run:
    """How well documents were predicted.

    Attributes:
        documents: what was read.
        losses: nats of each document's tokens from the second on, `[tokens - 1]` each, float32.
        segment_tokens, window_tokens: the configured local window, by which tokens are told apart (also where a control
            read with a longer one).
        cache_size: entries that the memory could hold; None where there was none.
        control: not a way to use the model, but something to compare with.
        note: what a reader of the numbers should know.
    """

    documents: Sequence[HeldOut]
    losses: Sequence[Losses]
    segment_tokens: int
    window_tokens: int = 0
    cache_size: int | None = None
    control: bool = False
    note: str = ""

    @cached_property
    def total(self) -> Measure:
        """All predicted tokens."""
        return self.measure([np.ones(len(losses), bool) for losses in self.losses])

    @property
    def perplexity(self) -> float:
        """Per token."""
        return self.total.perplexity

    @property
    def characters(self) -> int:
        """How many characters the predicted tokens stand for."""
        return sum(document.characters for document in self.documents)

    @property
    def bits_per_character(self) -> float:
        return self.total.nats / math.log(2) / self.characters

    @cached_property
    def by_position(self) -> dict[str, Measure]:
        """By how many tokens of the document were read before: the first segment, then buckets that double."""
        places = [np.arange(len(losses)) for losses in self.losses]
        edges = position_edges(max(map(len, places)), self.segment_tokens)
        return {
            bucket_name(start, end): self.measure([(start <= place) & (place < end) for place in places])
            for start, end in pairwise(edges)
        }

    @cached_property
    def by_class(self) -> dict[str, Measure]:
        """By where the predicted token occurred before (`CLASSES`); classes without a token are left out."""
        found = [
            token_classes(document.ids.numpy(), self.segment_tokens, self.window_tokens) for document in self.documents
        ]
        return {
            name: self.measure([classes == place for classes in found])
            for place, name in enumerate(CLASSES)
            if any((classes == place).any() for classes in found)
        }

    def measure(self, chosen: Sequence[NDArray[np.bool_]]) -> Measure:
        """The chosen tokens of each document, `[tokens - 1]` each."""
        picked = [losses[mask] for losses, mask in zip(self.losses, chosen, strict=True)]
        nats = [losses.sum(dtype=np.float64) for losses in picked]
        return Measure(np.array(nats), np.array([float(len(losses)) for losses in picked]))

    def as_dict(self, reference: Run) -> dict[str, Any]:
        """For JSON: every number, each part also as a multiple of that part of another run over the same documents."""

        def numbers(measure: Measure, other: Measure) -> dict[str, Any]:
            return {**measure.as_dict(), "compared": asdict(compare(measure, other))}

        def parts(own: dict[str, Measure], other: dict[str, Measure]) -> dict[str, Any]:
            return {name: numbers(measure, other[name]) for name, measure in own.items()}

        return {
            **numbers(self.total, reference.total),
            "nats": self.total.nats,
            "characters": self.characters,
            "bits_per_character": self.bits_per_character,
            "cache_size": self.cache_size,
            "control": self.control,
            "note": self.note,
            "by_position": parts(self.by_position, reference.by_position),
            "by_class": parts(self.by_class, reference.by_class),
            "documents": [
                {"name": document.name, "tokens": len(losses), "nats": float(nats)}
                for document, losses, nats in zip(self.documents, self.losses, self.total.nats_by_document, strict=True)
            ],
        }


def reference(runs: dict[str, Run]) -> str:
    """The run that the others are compared with: the last one that is not a control."""
    return [name for name, run in runs.items() if not run.control][-1]


def scores(runs: dict[str, Run]) -> dict[str, Any]:
    """All numbers of runs over the same documents, for JSON; `compared` is with the run that `reference` names."""
    chosen = reference(runs)
    return {name: {"compared_with": chosen, **run.as_dict(runs[chosen])} for name, run in runs.items()}
