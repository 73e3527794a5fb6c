"""Perplexities of held-out documents, their intervals, and tables of them.

Intervals are those of the percentile bootstrap at 95 %: documents are drawn with replacement, as many as there are, and
perplexity is exp(sum of nats / sum of tokens) of the drawn ones. The tokens of one document depend on each other, so
documents are drawn, not tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cacheformers.evaluation.held_out import HeldOut, Losses

Floats = NDArray[np.float64]
RESAMPLES = 10_000
LEVEL = 0.95


def perplexity_interval(nats: Floats, tokens: Floats) -> tuple[float, float] | None:
    """Return both ends of the perplexity's interval; None for a single document.

    Args:
        nats, tokens: of each document, `[documents]`; those without tokens do not count.
    """
    nats, tokens = nats[tokens > 0], tokens[tokens > 0]
    if len(nats) < 2:
        return None
    drawn = draws(len(nats), 0)
    return middle(np.exp(nats[drawn].sum(1) / tokens[drawn].sum(1)))


@lru_cache(maxsize=4)  # one set of documents is asked about many times
def draws(documents: int, seed: int) -> NDArray[np.int64]:
    """Draw the documents of each resample, `[RESAMPLES, documents]`."""
    return np.random.default_rng(seed).integers(documents, size=(RESAMPLES, documents))


def middle(values: Floats) -> tuple[float, float]:
    """Return the ends of the middle 95 % of values."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, (tail, 1 - tail))
    return float(low), float(high)


CLASSES = ("first occurrence", "repeated within the window", "repeated only beyond it")


def token_classes(ids: NDArray[np.int64], segment_tokens: int, window_tokens: int = 0) -> NDArray[np.int64]:
    """Return the class of each token from the second on, `[tokens - 1]`, as an index into `CLASSES`.

    Token i is predicted from token i - 1, where self-attention sees that token's segment up to it and the
    `window_tokens` tokens before the segment. The class says where i's id occurred last: never, there, or before it.
    """
    last = last_occurrences(ids)
    visible = (np.arange(1, len(ids)) - 1) // segment_tokens * segment_tokens - window_tokens
    return np.where(last < 0, 0, np.where(last >= visible, 1, 2))


def last_occurrences(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where the id of each token from the second on occurred last before it, `[tokens - 1]`; -1 for nowhere."""
    order = np.argsort(ids, kind="stable")
    repeats = ids[order[1:]] == ids[order[:-1]]
    last = np.full(len(ids), -1)
    last[order[1:][repeats]] = order[:-1][repeats]
    return last[1:]


def by_last_occurrence(losses: Sequence[Losses], ids: Sequence[NDArray[np.int64]], first: int) -> dict[str, Measure]:
    """Measure by how many tokens before each its id occurred last: never, or in buckets as `by_place` makes them."""
    last = [last_occurrences(each) for each in ids]
    new = Measure.of(losses, [np.isfinite(each) & (own < 0) for each, own in zip(losses, last, strict=True)])
    back = [np.where(own < 0, -1, np.arange(1, len(own) + 1) - own) for own in last]
    return {**({CLASSES[0]: new} if new.tokens else {}), **by_place(losses, back, first)}


def short(tokens: int) -> str:
    """Format a number of tokens, such as 2K for 2,048 and 1M for 1,048,576."""
    for unit, size in (("M", 1024**2), ("K", 1024)):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


@dataclass(frozen=True, eq=False)
class Measure:
    """The perplexity of some tokens of every document.

    Attributes:
        nats_by_document, tokens_by_document: sum of the losses and number of tokens, `[documents]`.
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
        """Return it per token."""
        return math.exp(self.nats / self.tokens)

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the perplexity; None for a single document."""
        return perplexity_interval(self.nats_by_document, self.tokens_by_document)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "tokens": self.tokens,
            "perplexity": self.perplexity,
            "interval": self.interval,
            "nats_by_document": self.nats_by_document.tolist(),
            "tokens_by_document": self.tokens_by_document.tolist(),
        }

    @classmethod
    def of(cls, losses: Sequence[Losses], masks: Sequence[NDArray[np.bool_]]) -> Measure:
        """Measure the tokens of each document that are in its mask."""
        picked = [each[mask] for each, mask in zip(losses, masks, strict=True)]
        nats, tokens = [each.sum(dtype=np.float64) for each in picked], [float(len(each)) for each in picked]
        return cls(np.array(nats), np.array(tokens))

    @classmethod
    def from_dict(cls, numbers: dict[str, Any]) -> Measure:
        """Make it from what `as_dict` returned."""
        return cls(np.array(numbers["nats_by_document"]), np.array(numbers["tokens_by_document"]))


def by_place(losses: Sequence[Losses], places: Sequence[NDArray[np.int64]], first: int) -> dict[str, Measure]:
    """Measure by the place of each loss, in buckets that double from `first` on; NaN and empty ones are left out."""
    scored = [np.where(np.isfinite(each), place, -1) for each, place in zip(losses, places, strict=True)]
    longest, start, end, found = max(int(place.max()) for place in places), 0, first, {}
    while start <= longest:
        measure = Measure.of(losses, [(start <= place) & (place < end) for place in scored])
        if measure.tokens:
            found[f"{short(start)}-{short(end)}"] = measure
        start, end = end, 2 * end
    return found


@dataclass(frozen=True)
class Comparison:
    """One perplexity over another, on the same tokens of the same documents, with its 95 % interval."""

    ratio: float
    interval: tuple[float, float] | None


def compare(measure: Measure, other: Measure) -> Comparison:
    """Return the ratio of two perplexities over the same tokens; resamples draw the same documents for both."""
    nats = measure.nats_by_document - other.nats_by_document
    return Comparison(measure.perplexity / other.perplexity, perplexity_interval(nats, measure.tokens_by_document))


@dataclass(frozen=True, eq=False)
class Run:
    """How well documents were predicted.

    Attributes:
        documents: their names.
        characters: length of the text of the predicted tokens.
        total: all predicted tokens.
        by_position: by the number of tokens read before: the first segment, then buckets that double.
        by_class: by where the predicted token occurred before (`CLASSES`); empty classes are left out.
        cache_size: entries that the memory could hold; None without a memory.
        control: it is a comparison, not a way to use the model.
        note: a caveat for readers of the numbers.
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
        """Return it per token."""
        return self.total.perplexity

    @property
    def bits_per_character(self) -> float:
        return self.total.nats / math.log(2) / self.characters

    def as_dict(self, reference: Run) -> dict[str, Any]:
        """Return every number, each also as a multiple of that of another run over the same documents, for JSON."""

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
        """Make it from what `as_dict` returned."""
        kept: dict[str, Any] = {
            name: numbers[name] for name in ("documents", "characters", "cache_size", "control", "note")
        }
        for by in ("by_position", "by_class"):
            kept[by] = {name: Measure.from_dict(part) for name, part in numbers[by].items()}
        return cls(total=Measure.from_dict(numbers), **kept)


def measure(
    documents: Sequence[HeldOut],
    losses: Sequence[Losses],
    segment_tokens: int,
    window_tokens: int = 0,
    cache_size: int | None = None,
    control: bool = False,
    note: str = "",
) -> Run:
    """Make a run from the losses of documents, `[tokens - 1]` each.

    Args:
        segment_tokens, window_tokens: the configured local window, which divides tokens into classes (also where a
            control read with a longer one).
    """
    classes = [token_classes(document.ids.numpy(), segment_tokens, window_tokens) for document in documents]
    return Run(
        [document.name for document in documents],
        sum(document.characters for document in documents),
        Measure.of(losses, [np.ones(len(each), bool) for each in losses]),
        by_place(losses, [np.arange(len(each)) for each in losses], segment_tokens),
        {
            name: Measure.of(losses, [found == number for found in classes])
            for number, name in enumerate(CLASSES)
            if any((found == number).any() for found in classes)
        },
        cache_size,
        control,
        note,
        losses,
    )


def reference(runs: dict[str, Run]) -> str:
    """Return the run that the others are compared with: the last one that is not a control."""
    return [name for name, run in runs.items() if not run.control][-1]


def scores(runs: dict[str, Run]) -> dict[str, Any]:
    """Return all numbers of runs over the same documents, for JSON, compared with the run that `reference` names."""
    chosen = reference(runs)
    return {name: {"compared_with": chosen, **run.as_dict(runs[chosen])} for name, run in runs.items()}


def print_runs(runs: dict[str, Run], against: str | None = None) -> None:
    """Print perplexities over all tokens, by position in the document and by class of token.

    Args:
        against: the run that the others are divided by, also in every part. Default: see `reference`, over all tokens
            only.
    """
    first, chosen = next(iter(runs.values())), against or reference(runs)
    print(f"\n{len(first.documents):,} held-out documents, {first.total.tokens:,} tokens predicted\n")
    titles = ["", "perplexity", "95 %", "bits/character", f"/ {chosen}", "95 %"]
    overview = []
    for name, run in runs.items():
        row = [name, f"{run.perplexity:.3f}", between(run.total.interval, 3), f"{run.bits_per_character:.4f}"]
        if name != chosen:
            ratio = compare(run.total, runs[chosen].total)
            row += [f"{ratio.ratio:.4f}", between(ratio.interval, 4)]
        overview.append(row)
    print(table(titles, overview))
    positions = {name: run.by_position for name, run in runs.items()}
    classes = {name: run.by_class for name, run in runs.items()}
    print_parts("perplexity by tokens read before", positions)
    print_parts("perplexity by the token's last occurrence", classes)
    if against is not None:
        print_ratios(f"/ {against}, by tokens read before", positions, against)
        print_ratios(f"/ {against}, by last occurrence", classes, against)
    for name, run in runs.items():
        if run.note:
            print(f"\n{name}: {run.note}.")


def print_parts(title: str, parts: dict[str, dict[str, Measure]]) -> None:
    """Print the perplexity of each run on each part of the tokens."""
    first = next(iter(parts.values()))
    rows = [[run, *(f"{measure.perplexity:.3f}" for measure in measures.values())] for run, measures in parts.items()]
    rows.append(["(tokens)", *(f"{measure.tokens:,}" for measure in first.values())])
    print(f"\n{table([title, *first], rows)}")


def print_ratios(title: str, parts: dict[str, dict[str, Measure]], against: str) -> None:
    """Print the perplexity of each run on each part as a multiple of another run's, with 95 % intervals."""
    rows = []
    for run, measures in parts.items():
        if run != against:
            rows.append([run, *(multiple(measure, parts[against][name]) for name, measure in measures.items())])
    print(f"\n{table([title, *parts[against]], rows)}")


def multiple(measure: Measure, other: Measure) -> str:
    """Format a ratio and its interval, unless a longer window puts other tokens into the class."""
    if measure.tokens_by_document.tolist() != other.tokens_by_document.tolist():
        return "other tokens"
    found = compare(measure, other)
    return f"{found.ratio:.4f} ({between(found.interval, 4)})"


def between(interval: tuple[float, float] | None, digits: int) -> str:
    """Format an interval; a dash for one document."""
    return "-" if interval is None else f"{interval[0]:.{digits}f} - {interval[1]:.{digits}f}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns, the first one left and the others right. Rows may end early."""
    full = [[*row, *[""] * (len(titles) - len(row))] for row in [titles, *rows]]
    columns = list(zip(*full, strict=True))
    widths = [max(map(len, column)) for column in columns]
    first = [cell.ljust(widths[0]) for cell in columns[0]]
    others = [[cell.rjust(width) for cell in column] for column, width in zip(columns[1:], widths[1:], strict=True)]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(first, *others, strict=True))
