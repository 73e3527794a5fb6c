"""Runs and training losses as pictures (PNG). Needs matplotlib; nothing else is lost without it.

Documents differ more than runs do, so pictures of several runs have two panels: perplexities, and below them the
differences from one run in percent, with the intervals of the paired comparison.
"""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheformers.evaluation.run import Measure, Run, compare, reference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colors, told apart with any kind of color blindness; markers and hatches say the same again. There
# are eight of one and seven of the others, so that no pair comes twice among 56 runs.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "--")
GREY = "#555555"


def save_figures(figures: Mapping[Path, Callable[[], Figure]]) -> list[Path]:
    """Draw into files and return those; without matplotlib, say what is left out and how to get it."""
    for path, draw in figures.items():
        if importlib.util.find_spec("matplotlib") is None:
            print(f'{path.name} is left out, because it needs matplotlib: pip install "cacheformers[eval]"')
            return []
        path.parent.mkdir(parents=True, exist_ok=True)
        draw().savefig(path)
    return list(figures)


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
        style: dict[str, Any] = {"color": COLOURS[number % 8], "marker": MARKERS[number % 7]}
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
    style: dict[str, Any] = {"error_kw": {"elinewidth": 1, "capsize": 2, "ecolor": GREY}}
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
        (0, [run.total for run in sized], COLOURS[0], "-"),
        (len(sized), [run.total for run in others.values()], GREY, ""),
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
        steps[window - 1 :], means, color=COLOURS[0], linewidth=2, marker="o", markevery=[-1], label=f"mean of {window}"
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


def new_figure(title: str, labels: Sequence[str], sharex: bool = True) -> tuple[Figure, list[Axes]]:
    """Make a figure with one panel for each label, without pyplot: no window and no global setting is touched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2 + 2.5 * len(labels)), dpi=150, layout="constrained")
    panels = list(figure.subplots(len(labels), sharex=sharex, squeeze=False)[:, 0])
    panels[0].set_title(title)
    for axes, label in zip(panels, labels, strict=True):
        axes.set_ylabel(label)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def heat_map(
    panels: Mapping[str, Any],
    axis_labels: tuple[str, str],
    color_label: str,
    size: tuple[float, float],
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    **style: Any,
) -> tuple[Figure, list[Axes]]:
    """Draw tables of numbers `[rows, columns]` as colors, up to four panels beside each other, with one color bar.

    Args:
        panels: by title.
        axis_labels: of columns and of rows.
        rows, columns: what the ticks say. Default: numbers.
        style: options of `imshow`.
    """
    from matplotlib.figure import Figure

    across = min(len(panels), 4)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    drawn = figure.subplots(-(-len(panels) // across), across, sharex=True, sharey=True, squeeze=False)
    for axes, (title, values) in zip(drawn.flat, panels.items(), strict=False):
        image = axes.imshow(values, **{"cmap": "cividis", "aspect": "auto", **style})
        axes.set_title(title, parse_math=False, fontsize=9)
        if columns is not None:
            axes.set_xticks(range(len(columns)), columns)
        if rows is not None:
            axes.set_yticks(range(len(rows)), rows, fontsize=8, parse_math=False)
    for axes in drawn.flat[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel(axis_labels[0], fontsize=9)
    figure.supylabel(axis_labels[1], fontsize=9)
    figure.colorbar(image, ax=drawn, label=color_label)
    return figure, list(drawn.flat[: len(panels)])


def bars(axes: Axes, number: int, count: int, heights: Any, **style: Any) -> None:
    """Draw the `number`-th of `count` bars that are beside each other in every group."""
    width = 0.8 / count
    look: dict[str, Any] = {"color": COLOURS[number % 8], "hatch": HATCHES[number % 7], "edgecolor": "white"}
    axes.bar(np.arange(len(heights)) + beside(number, count, 0.8 - width), heights, width * 0.92, **look, **style)


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


def beside(number: int, count: int, width: float) -> float:
    """Return the place around 0 of the `number`-th of `count` things side by side, the outermost `width` apart."""
    return width * (number / (count - 1) - 0.5) if count > 1 else 0.0
