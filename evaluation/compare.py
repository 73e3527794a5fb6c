"""Results of one kind side by side: scores of LongBench, or perplexities.

cacheformers compare runs/longbench/ONE runs/longbench/OTHER --output runs/compared
cacheformers compare runs/4K/ONE+runs/16K/ONE runs/4K/OTHER+runs/16K/OTHER
cacheformers compare runs/longbench/ONE runs/longbench/OTHER --tasks trec triviaqa
cacheformers compare runs/perplexity/ONE runs/perplexity/OTHER
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheformers.common.recipe import RecipeParser, option
from cacheformers.evaluation.longbench.report import joined, write_report
from cacheformers.evaluation.plots import save_plots
from cacheformers.evaluation.run import Run, print_runs
from cacheformers.evaluation.text_perplexity import as_run


@dataclass
class CompareOptions:
    """Results side by side."""

    compare: list[str] = option(
        help="Nothing is run: put these result.json files, or those of these folders, side by side, each compared with "
        "the first one. ONE+OTHER is a column of two results of LongBench, such as those of texts of two lengths."
    )
    tasks: list[str] | None = option(
        None,
        help="Scores: only these tasks; seconds, bytes and passages stay those of all records. Default: every task "
        "that all results have.",
    )
    output: str | None = option(None, help="Folder for tables and plots. Default: print the tables only.")


def main(arguments: list[str]) -> None:
    """Put results side by side."""
    parser = RecipeParser([CompareOptions], "Compare results of eval_longbench.py, or of cacheformers perplexity.")
    (options,) = parser.parse(arguments)
    folder = None if options.output is None else Path(options.output)
    try:
        columns = [[load_result(path) for path in parts(given)] for given in options.compare]
        kinds = {is_perplexity(result) for results in columns for result in results}
        if len(kinds) > 1:
            raise ValueError("Scores and perplexities cannot be compared with each other.")
        if kinds == {True}:
            if options.tasks:
                raise ValueError("Perplexities have no tasks.")
            compare_perplexities(dict(zip(options.compare, columns, strict=True)), folder)
        else:
            write_report(folder, [joined([of_tasks(each, options.tasks) for each in results]) for results in columns])
    except (OSError, ValueError) as error:
        parser.error(str(error))


def parts(given: str) -> list[str]:
    """Return the paths of a column: what '+' separates, unless there is a file or folder of that name."""
    return [given] if Path(given).exists() else given.split("+")


def load_result(path: str) -> dict[str, Any]:
    """Read a result.json, or that of a folder; raise OSError or ValueError if there is none."""
    file = Path(path) / "result.json" if Path(path).is_dir() else Path(path)
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(result, dict):
        raise ValueError(f"{file} is no result.")
    if is_perplexity(result):
        if "by_last_occurrence" not in result:
            raise ValueError(f"{file} is of an older version: measure again, or take its by_position from the file.")
        return result
    if not isinstance(result.get("tasks"), dict) or "average" not in result:
        raise ValueError(f"{file} is no result of eval_longbench.py or cacheformers perplexity.")
    for task, numbers in result["tasks"].items():
        whole = isinstance(numbers, dict) and {"score", "buckets", "records"} <= numbers.keys()
        if not whole or numbers["score"] is None:
            raise ValueError(f"{file} is damaged: {task} has no score, buckets and records.")
    return result


def of_tasks(result: dict[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Return a result with some of its tasks alone; raise ValueError for one that it does not have."""
    if names is None:
        return result
    for name in names:
        if name not in result["tasks"]:
            raise ValueError(f"{result['name']} has no task {name}, but: {', '.join(result['tasks'])}.")
    return {**result, "tasks": {name: result["tasks"][name] for name in names}}


def is_perplexity(result: dict[str, Any]) -> bool:
    """Return whether a result is of `cacheformers perplexity`."""
    return result.get("kind") == "perplexity"


def compare_perplexities(columns: dict[str, list[dict[str, Any]]], folder: Path | None) -> None:
    """Print perplexities and what each is of the first one, with intervals; in a folder, draw them.

    Raises:
        ValueError: they are of different texts or tokens.
    """
    runs: dict[str, Run] = {}
    for given, results in columns.items():
        if len(results) > 1:
            raise ValueError(f"{given}: a column of perplexities is one result.")
        runs[given] = as_run(results[0])
    first, *others = runs.items()
    for given, run in others:
        if run.documents != first[1].documents or tokens_of(run) != tokens_of(first[1]):
            raise ValueError(
                f"{first[0]} and {given} are of different texts, or of other tokens of them: windows of the mode "
                "'segment' leave out the first token of each."
            )
    print_runs(runs, against=first[0])
    if folder is not None:
        save_plots(folder, runs)
        print(f"\nPlots are in {folder}")


def tokens_of(run: Run) -> list[float]:
    """Return how many tokens of each document were predicted."""
    return run.total.tokens_by_document.tolist()
