"""The result as JSON, as a table and as a heat map of depth by length."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheformers.common.environment import origin_lines
from cacheformers.common.plots import heat_map
from cacheformers.evaluation.passkey.prompts import Case, Wording
from cacheformers.evaluation.run import short
from cacheformers.hub.card import cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_result(
    cases: Sequence[Case], answers: Sequence[str], times: Sequence[dict[str, Any]], wording: Wording, **more: Any
) -> dict[str, Any]:
    """Collect everything about a run, for JSON; `scores` is in percent by depth, then by length, None without a case.

    Args:
        times: the costs of the cases (`Predictions.times`).
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
                **{"_id": case.id, "length": case.length, "depth": case.depth, "key": case.key, "answer": answer},
                "score": scores[case.id],
                **{name: cost[case.id][name] for name in ("seconds", "peak_bytes")},
            }
            for case, answer in zip(cases, answers, strict=True)
        ],
    }


def percent(scores: Sequence[float]) -> float | None:
    return round(100 * mean(scores), 2) if scores else None


def table(result: dict[str, Any]) -> str:
    """Format the percentage of keys found, a row for each depth, a column for each length, as Markdown."""
    names = [short(length) for length in result["lengths"]]
    lines = [cells("depth", *names), cells("---:", *["---:"] * len(names))]
    for depth, row in zip(result["depths"], result["scores"], strict=True):
        lines.append(cells(f"{depth:g} %", *("-" if score is None else f"{score:.0f}" for score in row)))
    lines.append(cells("seconds a case", *(f"{seconds:.1f}" for seconds in result["seconds_per_case"])))
    lines.append(cells("peak memory (GiB)", *(f"{size / 2**30:.2f}" for size in result["peak_bytes"])))
    found = sum(case["score"] for case in result["cases"])
    total = f"{result['name']}: {found:.0f} of {len(result['cases'])} found"
    return "\n".join([*lines, "", total, *origin_lines([result])]) + "\n"


def draw(result: dict[str, Any]) -> Figure:
    """Draw a heat map of depth by length; numbers say the same as colors."""
    scores = np.array(result["scores"], dtype=float)
    figure, (axes,) = heat_map(
        {f"{result['name']}: keys found (%)": scores},
        ("tokens of the prompt", "depth (% of the text before the key)"),
        "",
        (max(5, 0.8 * scores.shape[1] + 3), max(3, 0.45 * scores.shape[0] + 2)),
        [f"{depth:g}" for depth in result["depths"]],
        [short(length) for length in result["lengths"]],
        vmin=0,
        vmax=100,
    )
    for (row, column), score in np.ndenumerate(scores):
        if not np.isnan(score):
            axes.text(column, row, f"{score:.0f}", ha="center", va="center", color="white" if score < 50 else "black")
    return figure
