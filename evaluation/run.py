"""`Run`: what was measured of one way of reading held-out documents; written as JSON, and read again."""

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
from cacheformers.evaluation.held_out import HeldOut, Losses
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
        return {
            "tokens": self.tokens,
            "perplexity": self.perplexity,
            "interval": self.interval,
            "nats_by_document": self.nats_by_document.tolist(),
            "tokens_by_document": self.tokens_by_document.tolist(),
        }

    @classmethod
    def from_dict(cls, numbers: dict[str, Any]) -> Measure:
        """What `as_dict` gave."""
        return cls(np.array(numbers["nats_by_document"]), np.array(numbers["tokens_by_document"]))


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
        documents: their names.
        characters: how many characters the predicted tokens stand for.
        total: all predicted tokens.
        by_position: by how many tokens of the document were read before: the first segment, then buckets that double.
        by_class: by where the predicted token occurred before (`CLASSES`); classes without a token are left out.
        cache_size: entries that the memory could hold; None where there was none.
        control: not a way to use the model, but something to compare with.
        note: what a reader of the numbers should know.
        losses: nats of each document's tokens from the second on, `[tokens - 1]` each, float32; not in the JSON.
    """

    documents: list[str]
    characters: int
    total: Measure
    by_position: dict[str, Measure]
    by_class: dict[str, Measure]
    cache_size: int | None = None
    control: bool = False
    note: str = ""
    losses: Sequence[Losses] = ()

    @property
    def perplexity(self) -> float:
        """Per token."""
        return self.total.perplexity

    @property
    def bits_per_character(self) -> float:
        return self.total.nats / math.log(2) / self.characters

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
            "documents": self.documents,
        }

    @classmethod
    def from_dict(cls, numbers: dict[str, Any]) -> Run:
        """What `as_dict` gave."""
        return cls(
            numbers["documents"],
            numbers["characters"],
            Measure.from_dict(numbers),
            {name: Measure.from_dict(part) for name, part in numbers["by_position"].items()},
            {name: Measure.from_dict(part) for name, part in numbers["by_class"].items()},
            numbers["cache_size"],
            numbers["control"],
            numbers["note"],
        )


def measure(
    documents: Sequence[HeldOut],
    losses: Sequence[Losses],
    segment_tokens: int,
    window_tokens: int = 0,
    cache_size: int | None = None,
    control: bool = False,
    note: str = "",
) -> Run:
    """What the losses of documents say.

    Args:
        losses: nats of each document's tokens from the second on, `[tokens - 1]` each.
        segment_tokens, window_tokens: the configured local window, by which tokens are told apart (also where a control
            read with a longer one).
    """

    def chosen(masks: Sequence[NDArray[np.bool_]]) -> Measure:
        picked = [each[mask] for each, mask in zip(losses, masks, strict=True)]
        nats = [each.sum(dtype=np.float64) for each in picked]
        return Measure(np.array(nats), np.array([float(len(each)) for each in picked]))

    places = [np.arange(len(each)) for each in losses]
    edges = position_edges(max(map(len, places)), segment_tokens)
    classes = [token_classes(document.ids.numpy(), segment_tokens, window_tokens) for document in documents]
    return Run(
        [document.name for document in documents],
        sum(document.characters for document in documents),
        chosen([np.ones(len(each), bool) for each in losses]),
        {
            bucket_name(start, end): chosen([(start <= place) & (place < end) for place in places])
            for start, end in pairwise(edges)
        },
        {
            name: chosen([found == number for found in classes])
            for number, name in enumerate(CLASSES)
            if any((found == number).any() for found in classes)
        },
        cache_size,
        control,
        note,
        losses,
    )


def reference(runs: dict[str, Run]) -> str:
    """The run that the others are compared with: the last one that is not a control."""
    return [name for name, run in runs.items() if not run.control][-1]


def scores(runs: dict[str, Run]) -> dict[str, Any]:
    """All numbers of runs over the same documents, for JSON; `compared` is with the run that `reference` names."""
    chosen = reference(runs)
    return {name: {"compared_with": chosen, **run.as_dict(runs[chosen])} for name, run in runs.items()}
