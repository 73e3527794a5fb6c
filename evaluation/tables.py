"""Runs as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from cacheformers.evaluation.run import Measure, Run, compare, reference


def print_runs(runs: dict[str, Run], against: str | None = None) -> None:
    """Print what was measured: over all tokens, by position in the document, by kind of token.

    Args:
        against: the run that the others are divided by, then in every part too. Default: see `reference`, over all
            tokens only.
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
    print_parts("perplexity by tokens read before", {name: run.by_position for name, run in runs.items()})
    print_parts("perplexity by the token's last occurrence", {name: run.by_class for name, run in runs.items()})
    if against is not None:
        print_ratios(
            f"/ {against}, by tokens read before", {name: run.by_position for name, run in runs.items()}, against
        )
        print_ratios(f"/ {against}, by last occurrence", {name: run.by_class for name, run in runs.items()}, against)
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
    """A ratio and its interval; none where a longer window puts other tokens into a class."""
    if measure.tokens_by_document.tolist() != other.tokens_by_document.tolist():
        return "other tokens"
    found = compare(measure, other)
    return f"{found.ratio:.4f} ({between(found.interval, 4)})"


def between(interval: tuple[float, float] | None, digits: int) -> str:
    """An interval, or a dash for one document."""
    return "-" if interval is None else f"{interval[0]:.{digits}f} - {interval[1]:.{digits}f}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need, the first one flush left, the others flush right. Rows may end early."""
    full = [[*row, *[""] * (len(titles) - len(row))] for row in [titles, *rows]]
    columns = list(zip(*full, strict=True))
    widths = [max(map(len, column)) for column in columns]
    first = [cell.ljust(widths[0]) for cell in columns[0]]
    others = [[cell.rjust(width) for cell in column] for column, width in zip(columns[1:], widths[1:], strict=True)]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(first, *others, strict=True))
