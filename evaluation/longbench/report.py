"""Scores of LongBench as JSON, as a Markdown table in the papers' order, and as pictures (which need matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheformers.common.environment import origin_lines
from cacheformers.common.files import write_text
from cacheformers.common.plots import COLORS, MARKERS, bars, beside, new_figure, save_figures
from cacheformers.evaluation.longbench.gold import gold_summary
from cacheformers.evaluation.longbench.metrics import score
from cacheformers.evaluation.longbench.records import Record
from cacheformers.evaluation.longbench.tasks import BUCKETS, FORMS, TASKS, bucket
from cacheformers.evaluation.plots import reach
from cacheformers.evaluation.run import Floats, draws, middle
from cacheformers.hub.card import cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def task_scores(records: Sequence[Record], predictions: Sequence[str]) -> dict[str, Any]:
    """Score a task (0 to 100, rounded as in the official code), each bucket, and each record."""
    values = [
        score(record.form.name, prediction, record.answers, record.all_classes or ())
        for record, prediction in zip(records, predictions, strict=True)
    ]
    places = [bucket(record.length) for record in records]
    by_bucket = {
        name: [value for value, place in zip(values, places, strict=True) if place == name] for name in BUCKETS
    }
    return {
        "score": rounded(values),
        "template": records[0].form.name,
        "metric": records[0].form.metric,
        "buckets": {name: {"score": rounded(found), "records": len(found)} for name, found in by_bucket.items()},
        "records": [
            {"_id": record.id, "length": record.length, "score": value, "abstained": abstains(prediction)}
            for record, value, prediction in zip(records, values, predictions, strict=True)
        ],
    }


def abstains(prediction: str) -> bool:
    """Whether a prediction says that the text does not answer the question, in the word of the prompts of qasper."""
    return prediction.strip().lower().startswith("unanswerable")


def rounded(values: Sequence[float]) -> float | None:
    """Round a mean as the official code does; None for no values, where that gives NaN, which JSON does not have."""
    return round(100 * sum(values) / len(values), 2) if values else None


def category(name: str, numbers: dict[str, Any]) -> str:
    """Return the heading of a task in the papers' tables; a task of one's own has that of its template."""
    return FORMS[numbers.get("template", name)].category


def averages(tasks: dict[str, Any]) -> dict[str, float]:
    """Return the mean score of each category's tasks, and of all under `average`, from what `task_scores` returned."""
    found: dict[str, list[float]] = {}
    for name, numbers in tasks.items():
        found.setdefault(category(name, numbers), []).append(numbers["score"])
    means = {category: mean(scores) for category, scores in found.items()}
    return {**means, "average": mean(numbers["score"] for numbers in tasks.values())}


def bucket_average(tasks: dict[str, Any], name: str) -> float | None:
    """Return the mean score over the tasks that have records in a bucket; None if there are none."""
    found = [numbers["buckets"][name]["score"] for numbers in tasks.values() if numbers["buckets"][name]["records"]]
    return mean(found) if found else None


def mean_interval(values: Sequence[Floats]) -> tuple[float, float]:
    """Return the 95 % interval of the mean over tasks, from resampled records of each task that has some."""
    drawn = [each[draws(len(each), seed)].mean(1) for seed, each in enumerate(values) if len(each)]
    return middle(np.mean(drawn, axis=0))


def paired_difference(
    tasks: dict[str, Any], others: dict[str, Any], length: str | None = None
) -> tuple[float, tuple[float, float] | None]:
    """Return the difference of two means over tasks in points, and its 95 % interval.

    Args:
        tasks, others: task -> what `task_scores` returned, over the same records, which are resampled by task.
        length: the bucket whose records count, in the tasks that have any. Default: all.
    """
    every = [record_scores(own, length) - record_scores(others[name], length) for name, own in tasks.items()]
    differences = [each for each in every if len(each)]
    found = float(np.mean([each.mean() for each in differences]))
    return found, None if all(len(each) < 2 for each in differences) else mean_interval(differences)


def record_scores(numbers: dict[str, Any], name: str | None = None) -> Floats:
    """Return the score of each record, or of each in a bucket, 0 to 100, `[records]`."""
    rows = [each for each in numbers["records"] if name is None or bucket(each["length"]) == name]
    return np.array([100 * each["score"] for each in rows])


def common_tasks(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the tasks of all results, in the papers' order; raise ValueError for none, or if their records differ."""
    every = {name: category(name, numbers) for name, numbers in results[0]["tasks"].items()}
    shared = [name for name in every if all(name in result["tasks"] for result in results)]
    places, categories = list(TASKS), list(dict.fromkeys(task.category for task in TASKS.values()))
    names = sorted(
        shared, key=lambda name: (categories.index(every[name]), places.index(name) if name in TASKS else len(TASKS))
    )
    if not names:
        raise ValueError("The results have no task in common.")
    for name in names:
        own = [[record["_id"] for record in result["tasks"][name]["records"]] for result in results]
        for result, ids in zip(results, own, strict=True):
            if ids != own[0]:
                raise ValueError(
                    f"{results[0]['name']} and {result['name']} were run on different records of {name}: they cannot "
                    "be compared."
                )
    return names


SCORERS = ("rouge", "jieba")


def make_result(
    name: str, settings: dict[str, Any], tasks: dict[str, Any], times: Sequence[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """Collect everything about one method's run, for JSON.

    Args:
        tasks: task -> what `task_scores` returned.
        times: the costs of the records (`Predictions.times`).
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
        "state_bytes_per_record": mean_of(times, "state_bytes"),
        "gold_hits": gold_summary(times),
        "gold_in_sight": mean_of(times, "gold_in_sight"),
        "abstained": mean(record["abstained"] for numbers in tasks.values() for record in numbers["records"]),
        "records_cut_again": sum(line["cut_again_to"] is not None for line in times),
        "tasks": tasks,
    }


def mean_of(times: Sequence[dict[str, Any]], name: str) -> float | None:
    """Return the mean of a cost over the records that have it; None if none has."""
    values = [line[name] for line in times if name in line]
    return mean(values) if values else None


def joined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return several results, such as those of texts of several lengths, as one whose tasks are numbered by result."""
    if len(results) == 1:
        return results[0]
    tasks = {
        f"{name} ({number})": {"template": name, **numbers}
        for number, result in enumerate(results, 1)
        for name, numbers in result["tasks"].items()
    }
    counts = [sum(len(numbers["records"]) for numbers in result["tasks"].values()) for result in results]

    def overall(name: str) -> float | None:
        values = [result.get(name) for result in results]
        return None if None in values else float(np.average(np.array(values, float), weights=counts))

    return {
        **results[0],
        **averages(tasks),
        "name": "+".join(dict.fromkeys(result["name"] for result in results)),
        **{name: overall(name) for name in ("seconds_per_record", "state_bytes_per_record", "gold_in_sight")},
        "peak_bytes": max(result["peak_bytes"] for result in results),
        "gold_hits": {},
        "tasks": tasks,
    }


def joint_table(results: Sequence[dict[str, Any]]) -> str:
    """Format scores by task in the papers' order, one column for each result, and the differences from the first.

    Raises:
        ValueError: the results have no task in common, or were run on different records.
    """
    names = common_tasks(results)
    titles = [result["name"] for result in results]
    lines = [cells("task", "records", *titles), cells("---", "---:", *["---:"] * len(titles))]
    shared = [{name: result["tasks"][name] for name in names} for result in results]
    means = [averages(tasks) for tasks in shared]
    for heading, group in groupby(names, key=lambda name: category(name, shared[0][name])):
        for name in group:
            count = len(shared[0][name]["records"])
            lines.append(cells(name, str(count), *(f"{tasks[name]['score']:.2f}" for tasks in shared)))
        lines.append(cells(f"*{heading}*", "", *(f"*{each[heading]:.2f}*" for each in means)))
    lines.append(cells("**average of tasks**", "", *(f"**{each['average']:.2f}**" for each in means)))
    for name in BUCKETS:
        means_of_tasks = (bucket_average(tasks, name) for tasks in shared)
        lines.append(cells(f"length {name}", "", *("-" if mean is None else f"{mean:.2f}" for mean in means_of_tasks)))
    lines.append(cells("seconds per record", "", *(f"{result['seconds_per_record']:.2f}" for result in results)))
    if any(result.get("gold_hits") for result in results):
        layers = [result.get("gold_hits", {}).get("layers", {}).values() for result in results]
        hits = [[layer["records"] for layer in own] for own in layers]
        lines.append(cells("answer's passage retrieved", "", *(f"{max(own):.0%}" if own else "-" for own in hits)))
    seen = [result.get("gold_in_sight") for result in results]
    if any(share is not None for share in seen):
        lines.append(
            cells("answer's passage in sight", "", *("-" if share is None else f"{share:.0%}" for share in seen))
        )
    held = [result.get("state_bytes_per_record") for result in results]
    if any(held):
        lines.append(cells("state (MiB)", "", *("-" if not size else f"{size / 2**20:.2f}" for size in held)))
    lines.append(cells("peak memory (GiB)", "", *(f"{result['peak_bytes'] / 2**30:.2f}" for result in results)))
    origins = origin_lines(results)
    return "\n".join([*lines, *(["", *origins] if origins else []), *differences(titles, shared)]) + "\n"


def differences(titles: Sequence[str], shared: Sequence[dict[str, Any]]) -> list[str]:
    """Format a second table that compares each result with the first, by task, category and length, and in all."""
    if len(shared) < 2:
        return []
    lines = ["", f"Difference from *{titles[0]}*, with 95 % intervals from resampled records:", ""]
    lines += [cells("task", *titles[1:]), cells("---", *["---:"] * (len(titles) - 1))]
    first = shared[0]
    for heading, group in groupby(first, key=lambda name: category(name, first[name])):
        names = list(group)
        for name in names:
            lines.append(cells(name, *(difference({name: tasks[name]}, first) for tasks in shared[1:])))
        own = ({name: tasks[name] for name in names} for tasks in shared[1:])
        lines.append(cells(f"*{heading}*", *(difference(tasks, first) for tasks in own)))
    lines.append(cells("**average of tasks**", *(difference(tasks, first) for tasks in shared[1:])))
    for length in BUCKETS:
        if bucket_average(first, length) is not None:
            lines.append(cells(f"length {length}", *(difference(tasks, first, length) for tasks in shared[1:])))
    return lines


def difference(tasks: dict[str, Any], others: dict[str, Any], length: str | None = None) -> str:
    """Format a difference, such as +1.20 (-0.31 to +2.75); without an interval for single records."""
    points, interval = paired_difference(tasks, others, length)
    return f"{points:+.2f}" + ("" if interval is None else f" ({interval[0]:+.2f} to {interval[1]:+.2f})")


def write_report(folder: Path | None, results: Sequence[dict[str, Any]], plots: bool = True) -> None:
    """Print the table; in a folder, write it and the plots.

    Raises:
        ValueError: see `joint_table`.
    """
    table = joint_table(results)
    print(f"\n{table}")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "table.md", table)
        if plots:
            figures = {"tasks.png": lambda: by_task(results), "length.png": lambda: by_length(results)}
            if all(result.get("state_bytes_per_record") for result in results):  # older results do not have it
                figures["bytes.png"] = lambda: by_bytes(results)
            save_figures({folder / name: draw for name, draw in figures.items()})
        print(f"The table and plots are in {folder}")


def by_task(results: Sequence[dict[str, Any]]) -> Figure:
    """Draw the score by task, one bar for each result."""
    names = common_tasks(results)
    figure, (axes,) = new_figure("LongBench by task", ["score"])
    figure.set_size_inches(max(8, 0.6 * len(names) + 3), 5)
    for number, result in enumerate(results):
        bars(axes, number, len(results), [result["tasks"][name]["score"] for name in names], label=result["name"])
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    figure.legend(loc="outside upper center", frameon=False, ncols=3)
    return figure


def by_length(results: Sequence[dict[str, Any]]) -> Figure:
    """Draw the means of the table's buckets of length, one line for each result, with 95 % intervals."""
    names = common_tasks(results)
    figure, (axes,) = new_figure("LongBench by length of the context", ["mean score of the tasks"])
    shared = [{name: result["tasks"][name] for name in names} for result in results]
    counts = {name: sum(task["buckets"][name]["records"] for task in shared[0].values()) for name in BUCKETS}
    shown = [name for name in BUCKETS if counts[name]]
    for number, (result, tasks) in enumerate(zip(results, shared, strict=True)):
        means = np.array([bucket_average(tasks, name) for name in shown])
        ends = [mean_interval([record_scores(task, name) for task in tasks.values()]) for name in shown]
        places = np.arange(len(shown)) + beside(number, len(results), 0.2)
        style: dict[str, Any] = {"color": COLORS[number % 8], "marker": MARKERS[number % 7], "label": result["name"]}
        axes.errorbar(places, means, reach(means, ends), capsize=2, elinewidth=1, **style)
    axes.set_xticks(range(len(shown)), [f"{name}\n({counts[name]})" for name in shown])
    axes.set_xlabel("length in words, Chinese in characters (records); tasks differ between lengths")
    figure.legend(loc="outside upper center", frameon=False, ncols=2)
    return figure


def by_bytes(results: Sequence[dict[str, Any]]) -> Figure:
    """Draw the average score against the bytes that attention held, one point for each result, with 95 % intervals."""
    names = common_tasks(results)
    figure, (axes,) = new_figure("LongBench by bytes of state", ["mean score of the tasks"])
    for number, result in enumerate(results):
        own = [result["tasks"][name] for name in names]
        value = np.array([mean(task["score"] for task in own)])
        ends = reach(value, [mean_interval([record_scores(task) for task in own])])
        style: dict[str, Any] = {"color": COLORS[number % 8], "marker": MARKERS[number % 7], "label": result["name"]}
        axes.errorbar([result["state_bytes_per_record"] / 2**20], value, ends, capsize=2, elinewidth=1, **style)
    axes.set_xscale("log")
    axes.set_xlabel("keys, values and memory held for a record in the end (MiB)")
    figure.legend(loc="outside upper center", frameon=False, ncols=2)
    return figure
