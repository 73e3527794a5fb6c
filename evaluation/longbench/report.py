"""Results as JSON, and side by side as a Markdown table in the papers' order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

from cacheformers.evaluation.longbench.scores import averages, bucket_average, common_tasks, paired_difference
from cacheformers.evaluation.longbench.tasks import BUCKETS, TASKS
from cacheformers.hub.card import cells
from cacheformers.training.environment import origin_lines

SCORERS = ("rouge", "jieba")


def make_result(
    name: str, settings: dict[str, Any], tasks: dict[str, Any], times: Sequence[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """Everything about one method's run, for JSON.

    Args:
        tasks: task -> what `task_scores` gave.
        times: what the records cost (`Predictions.times`).
        more: command, environment.
    """
    return {
        "name": name,
        **averages(tasks),
        "settings": settings,
        **more,
        "scored_with": {**{package: version(package) for package in SCORERS}, "code_similarity": "difflib"},
        "seconds_per_record": mean(line["seconds"] for line in times),
        "prompt_tokens_per_record": mean(line["prompt_tokens"] for line in times),
        "peak_bytes": max(line["peak_bytes"] for line in times),
        "records_cut_again": sum(line["cut_again_to"] is not None for line in times),
        "tasks": tasks,
    }


def load_result(path: str) -> dict[str, Any]:
    """A result.json, or that of a folder.

    Raises:
        OSError, ValueError: there is none, or it is another kind of file.
    """
    file = Path(path) / "result.json" if Path(path).is_dir() else Path(path)
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(result, dict) or not isinstance(result.get("tasks"), dict) or "average" not in result:
        raise ValueError(f"{file} is no result of eval_longbench.py.")
    return result


def joint_table(results: Sequence[dict[str, Any]]) -> str:
    """Scores by task in the papers' order, a column a result; below, each one's difference from the first.

    Raises:
        ValueError: the results have no task in common, or were run on different records.
    """
    names = common_tasks(results)
    titles = [result["name"] for result in results]
    lines = [cells("task", "records", *titles), cells("---", "---:", *["---:"] * len(titles))]
    shared = [{name: result["tasks"][name] for name in names} for result in results]
    means = [averages(tasks) for tasks in shared]
    for category, group in groupby(names, key=lambda name: TASKS[name].category):
        for name in group:
            count = len(shared[0][name]["records"])
            lines.append(cells(name, str(count), *(f"{tasks[name]['score']:.2f}" for tasks in shared)))
        lines.append(cells(f"*{category}*", "", *(f"*{each[category]:.2f}*" for each in means)))
    lines.append(cells("**average of tasks**", "", *(f"**{each['average']:.2f}**" for each in means)))
    for name in BUCKETS:
        means_of_tasks = (bucket_average(tasks, name) for tasks in shared)
        lines.append(cells(f"length {name}", "", *("-" if mean is None else f"{mean:.2f}" for mean in means_of_tasks)))
    lines.append(cells("seconds per record", "", *(f"{result['seconds_per_record']:.2f}" for result in results)))
    lines.append(cells("peak memory (GiB)", "", *(f"{result['peak_bytes'] / 2**30:.2f}" for result in results)))
    origins = origin_lines(results)
    return "\n".join([*lines, *(["", *origins] if origins else []), *differences(titles, shared)]) + "\n"


def differences(titles: Sequence[str], shared: Sequence[dict[str, Any]]) -> list[str]:
    """A second table that compares each result with the first one, by task and on average."""
    if len(shared) < 2:
        return []
    lines = ["", f"Difference from *{titles[0]}*, with 95 % intervals from resampled records:", ""]
    lines += [cells("task", *titles[1:]), cells("---", *["---:"] * (len(titles) - 1))]
    for name in shared[0]:
        lines.append(cells(name, *(difference({name: tasks[name]}, shared[0]) for tasks in shared[1:])))
    lines.append(cells("**average of tasks**", *(difference(tasks, shared[0]) for tasks in shared[1:])))
    return lines


def difference(tasks: dict[str, Any], others: dict[str, Any]) -> str:
    """Such as +1.20 (-0.31 to +2.75); without an interval for single records."""
    points, interval = paired_difference(tasks, others)
    return f"{points:+.2f}" + ("" if interval is None else f" ({interval[0]:+.2f} to {interval[1]:+.2f})")
