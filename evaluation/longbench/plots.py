"""LongBench results as pictures (PNG). Needs matplotlib; nothing else is lost without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheformers.evaluation.longbench.scores import bucket_average, bucket_interval, common_tasks
from cacheformers.evaluation.longbench.tasks import BUCKETS
from cacheformers.evaluation.plots import COLOURS, HATCHES, MARKERS, beside, can_draw, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_plots(folder: Path, results: Sequence[dict[str, Any]]) -> list[Path]:
    """Draw tasks.png and length.png, and return the files; says how to install matplotlib where it is missing."""
    if not can_draw("Every plot"):
        return []
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, figure in (("tasks", by_task(results)), ("length", by_length(results))):
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1])
    return files


def by_task(results: Sequence[dict[str, Any]]) -> Figure:
    """Score by task: bars, a group a task."""
    names = common_tasks(results)
    figure, (axes,) = new_figure("LongBench by task", ["score"])
    figure.set_size_inches(max(8, 0.6 * len(names) + 3), 5)
    width = 0.8 / len(results)
    for number, result in enumerate(results):
        places = np.arange(len(names)) + beside(number, len(results), 0.8 - width)
        axes.bar(
            places,
            [result["tasks"][name]["score"] for name in names],
            width * 0.92,
            color=COLOURS[number % 8],
            hatch=HATCHES[number % 7],
            edgecolor="white",
            label=result["name"],
        )
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    figure.legend(loc="outside upper center", frameon=False, ncols=3)
    return figure


def by_length(results: Sequence[dict[str, Any]]) -> Figure:
    """Draw the means of the table's buckets of length: a line a result, with 95 % intervals from resampled records."""
    names = common_tasks(results)
    figure, (axes,) = new_figure("LongBench by length of the context", ["mean score of the tasks"])
    shared = [{name: result["tasks"][name] for name in names} for result in results]
    counts = {name: sum(task["buckets"][name]["records"] for task in shared[0].values()) for name in BUCKETS}
    shown = [name for name in BUCKETS if counts[name]]
    for number, (result, tasks) in enumerate(zip(results, shared, strict=True)):
        means = np.array([bucket_average(tasks, name) for name in shown])
        ends = np.array([bucket_interval(tasks, name) for name in shown]).T
        axes.errorbar(
            np.arange(len(shown)) + beside(number, len(results), 0.2),
            means,
            np.maximum([means - ends[0], ends[1] - means], 0),
            color=COLOURS[number % 8],
            marker=MARKERS[number % 7],
            capsize=2,
            elinewidth=1,
            label=result["name"],
        )
    axes.set_xticks(range(len(shown)), [f"{name}\n({counts[name]})" for name in shown])
    axes.set_xlabel("length in words, Chinese in characters (records); tasks differ between lengths")
    figure.legend(loc="outside upper center", frameon=False, ncols=2)
    return figure
