"""Accuracy by task and length: JSON, Markdown, and a heat map."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist, mean
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheformers.common.environment import origin_lines
from cacheformers.common.plots import heat_map
from cacheformers.evaluation.lengths.options import cell_name, label
from cacheformers.evaluation.longbench.gold import gold_summary
from cacheformers.evaluation.longbench.records import Record
from cacheformers.evaluation.longbench.report import mean_of
from cacheformers.evaluation.run import LEVEL
from cacheformers.hub.card import cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_result(
    name: str,
    tasks: Sequence[str],
    lengths: Sequence[int],
    records: Mapping[str, Sequence[Record]],
    predictions: Mapping[str, Sequence[str]],
    times: Sequence[dict[str, Any]],
    score: Callable[[Any, str], dict[str, float]],
    **more: Any,
) -> dict[str, Any]:
    """Collect everything about one method's run, for JSON.

    Args:
        records, predictions: by cell.
        times: the costs of the records (`Predictions.times`).
        score: see `Benchmark`.
        more: settings, command, options, environment.

    Returns:
        accuracy: per cent, with a 95 % interval each, by task, then by length; under 'all' over all tasks.
        gold_hits: by length, what was retrieved of the passages that answer (`gold_summary`).
    """
    scored: list[dict[str, Any]] = [
        {
            **{"_id": record.id, "cell": cell, "question": record.input, "answers": record.answers},
            **{"prediction": text, **score(record, text)},
        }
        for cell, own in records.items()
        for record, text in zip(own, predictions[cell], strict=True)
    ]
    rows = {task: [task] for task in tasks} | {"all": list(tasks)}
    wanted = {name: [{cell_name(task, tokens) for task in row} for tokens in lengths] for name, row in rows.items()}
    by_length = [[line for line in times if line["task"] in found] for found in wanted["all"]]
    return {
        "name": name,
        **more,
        "tasks": list(tasks),
        "lengths": list(lengths),
        "accuracy": {
            name: [accuracy([each["score"] for each in scored if each["cell"] in found]) for found in row]
            for name, row in wanted.items()
        },
        "seconds_per_record": [mean(line["seconds"] for line in own) for own in by_length],
        "prompt_tokens_per_record": [mean(line["prompt_tokens"] for line in own) for own in by_length],
        "peak_bytes": max(line["peak_bytes"] for line in times),
        "state_bytes_per_record": [mean_of(own, "state_bytes") for own in by_length],
        "gold_hits": [gold_summary(own) for own in by_length],
        "records": scored,
    }


def accuracy(scores: Sequence[float]) -> dict[str, Any]:
    """Return the percentage of right answers, and its interval by Wilson, which is honest about 0 and 100 %."""
    right, count = sum(scores), len(scores)
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    center = (right + z * z / 2) / (count + z * z)
    reach = z / (count + z * z) * math.sqrt(right * (count - right) / count + z * z / 4)
    percent = [round(100 * value, 2) for value in (right / count, max(0, center - reach), min(1, center + reach))]
    return {"accuracy": percent[0], "interval": percent[1:], "records": count}


def table(results: Sequence[dict[str, Any]]) -> str:
    """Format accuracies with their intervals as Markdown: by task and length, a table for each result."""
    lines = []
    for result in results:
        names = [label(tokens) for tokens in result["lengths"]]
        lines += [f"{result['name']}: right answers in per cent (95 % interval)", ""]
        lines += [cells("task", *names), cells("---", *["---:"] * len(names))]
        for name, row in result["accuracy"].items():
            shown = (f"{each['accuracy']:.0f} ({each['interval'][0]:.0f} to {each['interval'][1]:.0f})" for each in row)
            lines.append(cells(name, *shown))
        lines.append(cells("records", *(str(each["records"]) for each in result["accuracy"]["all"])))
        lines.append(cells("seconds a record", *(f"{seconds:.1f}" for seconds in result["seconds_per_record"])))
        held = result.get("state_bytes_per_record", [])
        if any(held):
            lines.append(cells("state (MiB)", *("-" if size is None else f"{size / 2**20:.2f}" for size in held)))
        found = [each.get("layers", {}).values() for each in result.get("gold_hits", [])]
        if any(found):
            hits = [[layer["passage"] for layer in own] for own in found]
            lines.append(cells("passages retrieved, by layer (%)", *(span(own) for own in hits)))
        lines += ["", f"Peak memory of the run: {result['peak_bytes'] / 2**30:.2f} GiB.", ""]
    return "\n".join([*lines, *origin_lines(results)]).rstrip() + "\n"


def span(shares: Sequence[float]) -> str:
    """Format the least and the most of shares as per cent; '-' for none."""
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f}" if shares else "-"


def draw(results: Sequence[dict[str, Any]]) -> Figure:
    """Draw a heat map, a panel for each result: tasks by lengths, from red to green; numbers say the same."""
    tasks, lengths = (results[0][name] for name in ("tasks", "lengths"))
    panels = {
        result["name"]: np.array([[each["accuracy"] for each in result["accuracy"][task]] for task in tasks])
        for result in results
    }
    across = min(len(results), 4)
    figure, drawn = heat_map(
        panels,
        ("tokens of the context", "task"),
        "right answers (%)",
        (across * max(3.5, 0.7 * len(lengths) + 1) + 1.5, -(-len(results) // across) * (0.45 * len(tasks) + 1) + 1),
        tasks,
        [label(tokens) for tokens in lengths],
        **{"cmap": "RdYlGn", "vmin": 0, "vmax": 100},
    )
    for axes, values in zip(drawn, panels.values(), strict=True):
        for (row, column), value in np.ndenumerate(values):
            axes.text(column, row, f"{value:.0f}", ha="center", va="center")
    return figure
