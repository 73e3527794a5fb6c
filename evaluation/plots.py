"""Runs and training losses as pictures (PNG). Needs matplotlib; nothing else is lost without it.

Documents differ more than runs do, so pictures of several runs have two panels: perplexities, and below them the
differences from one run in percent, with the intervals of the paired comparison.
"""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
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


def can_draw(what: str) -> bool:
    """Whether matplotlib is there; says what is left out without it, and how to get it."""
    found = importlib.util.find_spec("matplotlib") is not None
    if not found:
        print(f'{what} is left out, because it needs matplotlib: pip install "cacheformers[eval]"')
    return found


def save_plots(folder: str | Path, runs: dict[str, Run], losses: Sequence[float] = ()) -> list[Path]:
    """Draw what there is to draw, and return the files; says how to install matplotlib where it is missing.

    Args:
        folder: gets position.png, token_class.png, cache_size.png and training_loss.png.
        runs: over the same documents; may be empty.
        losses: of the training steps, in nats.
    """
    if not can_draw("Every plot"):
        return []
    figures: dict[str, Figure] = {}
    if runs:
        figures |= {"position": by_position(runs), "token_class": by_class(runs)}
    if sum(is_sized(run) for run in runs.values()) > 1:
        figures["cache_size"] = by_cache_size(runs)
    if len(losses):
        figures["training_loss"] = training_loss(losses)
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = []
    for name, figure in figures.items():
        files.append(Path(folder) / f"{name}.png")
        figure.savefig(files[-1])
    return files


def by_position(runs: dict[str, Run]) -> Figure:
    """Perplexity by position in the document: a line a run."""
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
    """Perplexity of new and of repeated tokens: bars, a group a class."""
    from matplotlib.ticker import LogFormatter

    figure, panels = panels_for(runs, "Perplexity by the token's last occurrence")
    classes = list(runs[reference(runs)].by_class.values())
    width = 0.8 / len(runs)
    for number, (name, run) in enumerate(runs.items()):
        measures = list(run.by_class.values())
        places = np.arange(len(classes)) + beside(number, len(runs), 0.8 - width)
        style: dict[str, Any] = {
            "width": width * 0.92,
            "color": COLOURS[number % 8],
            "edgecolor": "white",
            "hatch": HATCHES[number % 7],
            "error_kw": {"elinewidth": 1, "capsize": 2, "ecolor": GREY},
        }
        panels[0].bar(places, [measure.perplexity for measure in measures], yerr=reach(measures), label=name, **style)
        for axes in panels[1:]:
            values, margins = differences(measures, classes)
            axes.bar(places, values, yerr=margins, **style)
    panels[0].set(yscale="log", ylabel="perplexity per token\n(log scale)")
    panels[0].yaxis.set_major_formatter(LogFormatter())
    panels[0].yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2.5, 0.5)))
    ticks(panels[-1], runs[reference(runs)].by_class, "where the predicted token occurred before (tokens predicted)")
    figure.legend(loc="outside right center", frameon=False)
    return figure


def by_cache_size(runs: dict[str, Run]) -> Figure:
    """Perplexity by the number of entries: a line; the other runs are points beside it."""
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
        panels[0].errorbar(places, [measure.perplexity for measure in shown], reach(shown), **style)
        values, margins = differences(shown, [chosen] * len(shown))
        panels[1].errorbar(places, values, margins, **style)
    labels = [*names, *(name.replace(" ", "\n") for name in others)]
    panels[-1].set_xticks(range(len(labels)), labels)
    panels[-1].set_xlabel("entries the memory may hold" + ("  (right of the line: other runs)" if others else ""))
    for axes in panels if others else []:
        axes.axvline(len(sized) - 0.5, color="#bbbbbb", linewidth=0.8)
    return figure


def training_loss(losses: Sequence[float]) -> Figure:
    """The loss of each step, and its running mean."""
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
    """Whether it belongs to the line over cache sizes."""
    return run.cache_size is not None and not run.control


def panels_for(runs: dict[str, Run], title: str) -> tuple[Figure, list[Axes]]:
    """A panel for perplexities, and one for differences where there is more than one run."""
    labels = ["perplexity per token"]
    if len(runs) > 1:
        labels.append(f"difference from\n{reference(runs)} (%)")
    figure, panels = new_figure(title, labels)
    for axes in panels[1:]:
        axes.axhline(0, color="black", linewidth=0.8)
    return figure, panels


def new_figure(title: str, labels: Sequence[str], sharex: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure with a panel a label, without pyplot: no window and no global setting is touched."""
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


def ticks(axes: Axes, parts: dict[str, Measure], label: str) -> None:
    """Name the parts of the tokens below the axis, each with how many tokens it has."""
    names = [f"{textwrap.fill(name, 16)}\n({measure.tokens:,})" for name, measure in parts.items()]
    axes.set_xticks(range(len(parts)), names)
    axes.set_xlabel(label)


def differences(measures: Sequence[Measure], others: Sequence[Measure]) -> tuple[Any, Any]:
    """By how many percent measures differ from others, `[measures]`, and how far the intervals reach."""
    found = [compare(measure, other) for measure, other in zip(measures, others, strict=True)]
    ends = [comparison.interval or (comparison.ratio, comparison.ratio) for comparison in found]
    ratios = np.array([comparison.ratio for comparison in found])
    return 100 * (ratios - 1), 100 * between(ratios, ends)


def reach(measures: Sequence[Measure]) -> Any:
    """How far intervals reach below and above, `[2, measures]`; 0 where there is none."""
    values = np.array([measure.perplexity for measure in measures])
    return between(values, [measure.interval or (measure.perplexity, measure.perplexity) for measure in measures])


def between(values: Any, ends: Sequence[tuple[float, float]]) -> Any:
    low, high = np.array(ends).T if len(ends) else (values, values)
    return np.maximum([values - low, high - values], 0)


def beside(number: int, count: int, width: float) -> float:
    """Where the `number`-th of `count` things beside each other stands around 0, the outermost `width` apart."""
    return width * (number / (count - 1) - 0.5) if count > 1 else 0.0
