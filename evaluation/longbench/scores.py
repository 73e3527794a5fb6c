"""Scores of tasks, of LongBench-E's buckets and of everything; and how sure a difference between two results is."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

import numpy as np

from cacheformers.evaluation.bootstrap import Floats, draws, middle
from cacheformers.evaluation.longbench.metrics import score
from cacheformers.evaluation.longbench.records import Record
from cacheformers.evaluation.longbench.tasks import BUCKETS, TASKS, bucket


def task_scores(records: Sequence[Record], predictions: Sequence[str]) -> dict[str, Any]:
    """The score of a task (0 to 100, rounded as in the official code), of each bucket, and of each record."""
    values = [
        score(record.task, prediction, record.answers, record.all_classes or ())
        for record, prediction in zip(records, predictions, strict=True)
    ]
    places = [bucket(record.length) for record in records]
    by_bucket = {
        name: [value for value, place in zip(values, places, strict=True) if place == name] for name in BUCKETS
    }
    return {
        "score": rounded(values),
        "metric": TASKS[records[0].task].metric,
        "buckets": {name: {"score": rounded(found), "records": len(found)} for name, found in by_bucket.items()},
        "records": [
            {"_id": record.id, "length": record.length, "score": value}
            for record, value in zip(records, values, strict=True)
        ],
    }


def rounded(values: Sequence[float]) -> float | None:
    """A mean as the official code gives it; None of nothing, where that gives NaN, which JSON does not have."""
    return round(100 * sum(values) / len(values), 2) if values else None


def averages(tasks: dict[str, Any]) -> dict[str, float]:
    """The mean score of each category's tasks, and of all tasks under `average`.

    Args:
        tasks: task -> what `task_scores` gave.
    """
    found: dict[str, list[float]] = {}
    for name, numbers in tasks.items():
        found.setdefault(TASKS[name].category, []).append(numbers["score"])
    means = {category: mean(scores) for category, scores in found.items()}
    return {**means, "average": mean(numbers["score"] for numbers in tasks.values())}


def bucket_average(tasks: dict[str, Any], name: str) -> float | None:
    """Return the mean score over the tasks that have records in a bucket; None if there is none.

    Args:
        tasks: task -> what `task_scores` gave.
    """
    found = [numbers["buckets"][name]["score"] for numbers in tasks.values() if numbers["buckets"][name]["records"]]
    return mean(found) if found else None


def bucket_interval(tasks: dict[str, Any], name: str) -> tuple[float, float]:
    """Return the 95 % interval of `bucket_average`, from resampled records of each task that has some."""
    scores = [
        np.array([100 * record["score"] for record in numbers["records"] if bucket(record["length"]) == name])
        for numbers in tasks.values()
    ]
    drawn = [each[draws(len(each), seed)].mean(1) for seed, each in enumerate(scores) if len(each)]
    return middle(np.mean(drawn, axis=0))


def paired_difference(tasks: dict[str, Any], others: dict[str, Any]) -> tuple[float, tuple[float, float] | None]:
    """By how many points the mean over tasks differs, and its 95 % interval from resampled records of each task.

    Args:
        tasks, others: task -> what `task_scores` gave, over the same records.
    """
    differences = [record_scores(numbers) - record_scores(others[name]) for name, numbers in tasks.items()]
    found = float(np.mean([each.mean() for each in differences]))
    if all(len(each) < 2 for each in differences):
        return found, None
    drawn = [each[draws(len(each), seed)].mean(1) for seed, each in enumerate(differences)]
    return found, middle(np.mean(drawn, axis=0))


def record_scores(numbers: dict[str, Any]) -> Floats:
    """0 to 100, `[records]`."""
    return np.array([100 * record["score"] for record in numbers["records"]])


def common_tasks(results: Sequence[dict[str, Any]]) -> list[str]:
    """Tasks that all results have, in the papers' order.

    Raises:
        ValueError: there is none, or their records differ.
    """
    names = [name for name in TASKS if all(name in result["tasks"] for result in results)]
    if not names:
        raise ValueError("The results have no task in common.")
    for name in names:
        for result in results[1:]:
            first, other = (
                [record["_id"] for record in each["tasks"][name]["records"]] for each in (results[0], result)
            )
            if first != other:
                raise ValueError(
                    f"{results[0]['name']} and {result['name']} were run on different records of {name}: they cannot "
                    "be compared."
                )
    return names
