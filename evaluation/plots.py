"""Plots of runs and training losses (PNG). Without matplotlib only the plots are missing.

Documents differ more than runs do, so pictures of several runs have two panels: perplexities, and below them the
differences from one run in percent, with the intervals of the paired comparison.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheformers.common.plots import COLORS, GRAY, MARKERS, bars, beside, new_figure, save_figures
from cacheformers.evaluation.run import Measure, Run, compare, reference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def save_plots(folder: str | Path, runs: dict[str, Run], losses: Sequence[float] = ()) -> list[Path]:
    """Draw what there is to draw, and return the files.

    Args:
        folder: gets position.png, token_class.png, cache_size.png and training_loss.png.
        runs: over the same documents; may be empty.
        losses: of the training steps, in nats.
    """
    figures: dict[str, Callable[[], Figure]] = {}
    if runs:
        figures |= {"position": lambda: by_position(runs), "token_class": lambda: by_class(runs)}
    if sum(is_sized(run) for run in runs.values()) > 1:
        figures["cache_size"] = lambda: by_cache_size(runs)
    if len(losses):
        figures["training_loss"] = lambda: training_loss(losses)
    return save_figures({Path(folder) / f"{name}.png": draw for name, draw in figures.items()})


def by_position(runs: dict[str, Run]) -> Figure:
    """Draw perplexity by position in the document, one line for each run."""
    figure, panels = panels_for(runs, "Perplexity by position in the document")
    buckets = list(runs[reference(runs)].by_position.values())
    for number, (name, run) in enumerate(runs.items()):
        measures = list(run.by_position.values())
        places = np.arange(len(buckets)) + beside(number, len(runs), 0.4)
        style: dict[str, Any] = {"color": COLORS[number % 8], "marker": MARKERS[number % 7]}
        line = "--" if run.control else "-"
        panels[0].plot([measure.perplexity for measure in measures], linestyle=line, label=name, **style)
        for axes in panels[1:]:
            values, margins = differences(measures, buckets)
            axes.errorbar(places, values, margins, linestyle="", capsize=2, elinewidth=1, **style)
    ticks(panels[-1], runs[reference(runs)].by_position, "tokens of the document read before (tokens predicted)")
    figure.legend(loc="outside right center", frameon=False)
    return figure


def by_class(runs: dict[str, Run]) -> Figure:
    """Draw perplexity of new and of repeated tokens, one bar for each run in a group for each class."""
    from matplotlib.ticker import LogFormatter

    figure, panels = panels_for(runs, "Perplexity by the token's last occurrence")
    classes = list(runs[reference(runs)].by_class.values())
    style: dict[str, Any] = {"error_kw": {"elinewidth": 1, "capsize": 2, "ecolor": GRAY}}
    for number, (name, run) in enumerate(runs.items()):
        values, margins = perplexities(run.by_class.values())
        bars(panels[0], number, len(runs), values, yerr=margins, label=name, **style)
        for axes in panels[1:]:
            values, margins = differences(run.by_class.values(), classes)
            bars(axes, number, len(runs), values, yerr=margins, **style)
    panels[0].set(yscale="log", ylabel="perplexity per token\n(log scale)")
    panels[0].yaxis.set_major_formatter(LogFormatter())
    panels[0].yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2.5, 0.5)))
    ticks(panels[-1], runs[reference(runs)].by_class, "where the predicted token occurred before (tokens predicted)")
    figure.legend(loc="outside right center", frameon=False)
    return figure


def by_cache_size(runs: dict[str, Run]) -> Figure:
    """Draw perplexity by the number of entries as a line, and the other runs as points beside it."""
    sized = sorted((run for run in runs.values() if is_sized(run)), key=lambda run: run.cache_size or 0)
    others = {name: run for name, run in runs.items() if not is_sized(run)}
    names = [f"{run.cache_size:,}" if run.cache_size else "off" for run in sized]
    figure, panels = panels_for(runs, "Perplexity by cache size")
    chosen = runs[reference(runs)].total
    for start, shown, color, line in (
        (0, [run.total for run in sized], COLORS[0], "-"),
        (len(sized), [run.total for run in others.values()], GRAY, ""),
    ):
        places = np.arange(start, start + len(shown))
        style: dict[str, Any] = {"color": color, "marker": "o", "linestyle": line, "capsize": 3, "elinewidth": 1}
        panels[0].errorbar(places, *perplexities(shown), **style)
        values, margins = differences(shown, [chosen] * len(shown))
        panels[1].errorbar(places, values, margins, **style)
    labels = [*names, *(name.replace(" ", "\n") for name in others)]
    panels[-1].set_xticks(range(len(labels)), labels)
    panels[-1].set_xlabel("entries the memory may hold" + ("  (right of the line: other runs)" if others else ""))
    for axes in panels if others else []:
        axes.axvline(len(sized) - 0.5, color="#bbbbbb", linewidth=0.8)
    return figure


def training_loss(losses: Sequence[float]) -> Figure:
    """Draw the loss of each step and its running mean."""
    figure, (axes,) = new_figure("Training loss", ["loss (nats per token)"])
    steps, values = np.arange(1, len(losses) + 1), np.asarray(losses, float)
    window = min(max(len(values) // 50, 20), len(values))
    means = np.convolve(values, np.full(window, 1 / window), "valid")
    axes.plot(steps, values, color="#9ecae1", linewidth=0.8, marker="." if len(values) < 50 else "", label="each step")
    axes.plot(
        steps[window - 1 :], means, color=COLORS[0], linewidth=2, marker="o", markevery=[-1], label=f"mean of {window}"
    )
    axes.set_xlabel("optimizer step")
    axes.legend(loc="upper right", frameon=False)
    return figure


def is_sized(run: Run) -> bool:
    """Return whether a run belongs to the line over cache sizes."""
    return run.cache_size is not None and not run.control


def panels_for(runs: dict[str, Run], title: str) -> tuple[Figure, list[Axes]]:
    """Make a panel for perplexities, and with more than one run one for differences."""
    labels = ["perplexity per token"]
    if len(runs) > 1:
        labels.append(f"difference from\n{reference(runs)} (%)")
    figure, panels = new_figure(title, labels)
    for axes in panels[1:]:
        axes.axhline(0, color="black", linewidth=0.8)
    return figure, panels


def ticks(axes: Axes, parts: dict[str, Measure], label: str) -> None:
    """Name the parts of the tokens below the axis, each with how many tokens it has."""
    names = [f"{textwrap.fill(name, 16)}\n({measure.tokens:,})" for name, measure in parts.items()]
    axes.set_xticks(range(len(parts)), names)
    axes.set_xlabel(label)


def differences(measures: Iterable[Measure], others: Iterable[Measure]) -> tuple[Any, Any]:
    """Return by how many percent measures differ from others, `[measures]`, and how far the intervals reach."""
    found = [compare(measure, other) for measure, other in zip(measures, others, strict=True)]
    ratios = np.array([comparison.ratio for comparison in found])
    return 100 * (ratios - 1), 100 * reach(ratios, [comparison.interval for comparison in found])


def perplexities(measures: Iterable[Measure]) -> tuple[Any, Any]:
    """Return perplexities, `[measures]`, and how far the intervals reach."""
    shown = list(measures)
    values = np.array([measure.perplexity for measure in shown])
    return values, reach(values, [measure.interval for measure in shown])


def reach(values: Any, intervals: Sequence[tuple[float, float] | None]) -> Any:
    """Return how far intervals reach below and above values, `[2, values]`; 0 where there is none."""
    ends = [interval or (value, value) for value, interval in zip(values, intervals, strict=True)]
    low, high = np.array(ends).reshape(-1, 2).T
    return np.maximum([values - low, high - values], 0)
