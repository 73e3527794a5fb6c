"""The result as JSON, as a table and as a heat map of depth by length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheformers.evaluation.passkey.prompts import Case
from cacheformers.evaluation.passkey.wordings import Wording
from cacheformers.evaluation.plots import can_draw, new_figure
from cacheformers.evaluation.tokens import short
from cacheformers.hub.card import cells
from cacheformers.training.environment import origin_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_result(
    cases: Sequence[Case],
    answers: Sequence[str],
    times: Sequence[dict[str, Any]],
    wording: Wording,
    **more: Any,
) -> dict[str, Any]:
    """Everything about a run, for JSON; `scores` is per cent by depth, then by length, None where there is no case.

    Args:
        times: what the cases cost (`Predictions.times`).
        more: name, settings, command, options, environment.
    """
    scores = {case.id: wording.score(answer, case.key) for case, answer in zip(cases, answers, strict=True)}
    cost = {line["_id"]: line for line in times}
    lengths, depths = sorted({case.length for case in cases}), sorted({case.depth for case in cases})
    return {
        **more,
        "score": percent(list(scores.values())),
        "lengths": lengths,
        "depths": depths,
        "scores": [
            [
                percent([scores[case.id] for case in cases if (case.depth, case.length) == (depth, length)])
                for length in lengths
            ]
            for depth in depths
        ],
        "seconds_per_case": [mean(cost[case.id]["seconds"] for case in cases if case.length == n) for n in lengths],
        "peak_bytes": [max(cost[case.id]["peak_bytes"] for case in cases if case.length == n) for n in lengths],
        "cases": [
            {
                "_id": case.id,
                "length": case.length,
                "depth": case.depth,
                "key": case.key,
                "answer": answer,
                "score": scores[case.id],
                "seconds": cost[case.id]["seconds"],
                "peak_bytes": cost[case.id]["peak_bytes"],
            }
            for case, answer in zip(cases, answers, strict=True)
        ],
    }


def percent(scores: Sequence[float]) -> float | None:
    return round(100 * mean(scores), 2) if scores else None


def table(result: dict[str, Any]) -> str:
    """Per cent of keys found, a row a depth, a column a length, as Markdown."""
    names = [short(length) for length in result["lengths"]]
    lines = [cells("depth", *names), cells("---:", *["---:"] * len(names))]
    for depth, row in zip(result["depths"], result["scores"], strict=True):
        lines.append(cells(f"{depth:g} %", *(shown(score) for score in row)))
    lines.append(cells("seconds a case", *(f"{seconds:.1f}" for seconds in result["seconds_per_case"])))
    lines.append(cells("peak memory (GiB)", *(f"{size / 2**30:.2f}" for size in result["peak_bytes"])))
    found = sum(case["score"] for case in result["cases"])
    total = f"{result['name']}: {found:.0f} of {len(result['cases'])} found"
    return "\n".join([*lines, "", total, *origin_lines([result])]) + "\n"


def shown(score: float | None) -> str:
    return "-" if score is None else f"{score:.0f}"


def save_heat_map(folder: Path, result: dict[str, Any]) -> None:
    """Draw heatmap.png; says how to install matplotlib where it is missing."""
    if not can_draw("The heat map"):
        return
    heat_map(result).savefig(folder / "heatmap.png")


def heat_map(result: dict[str, Any]) -> Figure:
    """Depth by length; numbers say the same as colours."""
    scores = np.array(result["scores"], dtype=float)
    figure, (axes,) = new_figure(f"{result['name']}: keys found (%)", ["depth (% of the text before the key)"])
    figure.set_size_inches(max(5, 0.8 * scores.shape[1] + 3), max(3, 0.45 * scores.shape[0] + 2))
    axes.grid(False)
    image = axes.imshow(scores, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    for (row, column), score in np.ndenumerate(scores):
        if not np.isnan(score):
            axes.text(column, row, f"{score:.0f}", ha="center", va="center", color="white" if score < 50 else "black")
    axes.set_xticks(range(scores.shape[1]), [short(length) for length in result["lengths"]])
    axes.set_yticks(range(scores.shape[0]), [f"{depth:g}" for depth in result["depths"]])
    axes.set_xlabel("tokens of the prompt")
    figure.colorbar(image, ax=axes)
    return figure
