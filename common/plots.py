"""Pictures (PNG): files, figures, heat maps and bars. Needs matplotlib, which is imported when something is drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colors, told apart with any kind of color blindness; markers and hatches say the same again. There
# are eight of one and seven of the others, so that no pair comes twice among 56 runs.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "--")
GRAY = "#555555"


def save_figures(figures: Mapping[Path, Callable[[], Figure]]) -> list[Path]:
    """Draw into files and return those; without matplotlib, say what is left out and how to get it."""
    for path, draw in figures.items():
        if importlib.util.find_spec("matplotlib") is None:
            print(f'{path.name} is left out, because it needs matplotlib: pip install "cacheformers[eval]"')
            return []
        path.parent.mkdir(parents=True, exist_ok=True)
        draw().savefig(path)
    return list(figures)


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
    look: dict[str, Any] = {"color": COLORS[number % 8], "hatch": HATCHES[number % 7], "edgecolor": "white"}
    axes.bar(np.arange(len(heights)) + beside(number, count, 0.8 - width), heights, width * 0.92, **look, **style)


def beside(number: int, count: int, width: float) -> float:
    """Return the place around 0 of the `number`-th of `count` things side by side, the outermost `width` apart."""
    return width * (number / (count - 1) - 0.5) if count > 1 else 0.0
