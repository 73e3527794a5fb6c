"""Write results into a model card's metadata, where the Hub shows them (`model-index`).

    cacheformers results runs/longbench/NAME/result.json runs/perplexity/result.json --card ADAPTER

Earlier results in the card stay, unless they are measured again. The card's text does not change.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from cacheformers.evaluation.longbench.tasks import TASKS
from cacheformers.hub.card import CARD, joined, refresh_card

UNITS = {
    "perplexity": "perplexity per token",
    "word_perplexity": "perplexity per word",
    "bits_per_character": "bits per character",
    "bits_per_byte": "bits per byte",
}


def write_results(results: Sequence[str | Path], folder: str | Path) -> list[EvalResult]:
    """Write result files into the card of a folder, which gets one if it has none, and return what was written.

    Args:
        results: result.json files, or their folders.
        folder: of an adapter or a model.

    Raises:
        OSError, ValueError: a file is missing or not a result, the folder holds no model, or its card is damaged.
            Nothing is written then.
    """
    new: list[EvalResult] = []
    for given in map(Path, results):
        file = given / "result.json" if given.is_dir() else given
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            new = joined(new, eval_results(result if isinstance(result, dict) else {}))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from error
    path = Path(folder) / CARD
    if not path.exists():
        refresh_card(Path(folder))
    try:
        card = ModelCard.load(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    data: Any = card.data
    data.model_name = data.model_name or Path(folder).resolve().name
    data.eval_results = joined(data.eval_results or [], new)
    card.save(path)
    return new


def eval_results(result: dict[str, Any]) -> list[EvalResult]:
    """Turn a result.json of LongBench, of the passkey task or of a perplexity into entries, or raise ValueError."""
    if isinstance(result.get("tasks"), dict) and "average" in result:
        return longbench(result)
    if "cases" in result and "lengths" in result:
        return passkey(result)
    if result.get("kind") == "perplexity":
        return perplexity(result)
    raise ValueError("This is not a result of eval_longbench.py, of the passkey task or of a perplexity.")


def longbench(result: dict[str, Any]) -> list[EvalResult]:
    """Return the score of each task of LongBench, and their average, which says over how many tasks it is.

    Raises:
        ValueError: all tasks are sets of one's own, which are no dataset of the Hub; or a control.
    """
    settings = result["settings"]
    if "memory_content" in settings:
        raise ValueError(
            f"a control (memory_content {settings['memory_content']!r}), whose scores are not the model's."
        )
    shown = settings.get("memory_prompt")
    method = settings["method"] if shown is None else f"{settings['method']}, {shown['method']} prompt"
    tasks = {task: numbers for task, numbers in result["tasks"].items() if task in TASKS}
    if not tasks:
        raise ValueError(f"{', '.join(result['tasks'])}: a card takes LongBench's own tasks, not sets of one's own.")
    name = "LongBench-E" if settings["longbench_e"] else "LongBench"
    found = [
        entry(
            (name, "THUDM/LongBench"),
            (numbers["metric"], numbers["score"], f"{numbers['metric']} ({method})"),
            dataset_config=f"{task}_e" if settings["longbench_e"] else task,
            dataset_split="test",
            metric_args={"records": len(numbers["records"]), "max_length": settings["max_length"]},
        )
        for task, numbers in tasks.items()
    ]
    title = f"average of {len(found)} tasks ({method})"
    average = ("average", round(mean(numbers["score"] for numbers in tasks.values()), 2), title)
    return [*found, entry((name, "THUDM/LongBench"), average, dataset_split="test")]


def passkey(result: dict[str, Any]) -> list[EvalResult]:
    """Return the percentage of keys found, in all and by length."""
    data = ("Passkey retrieval", "passkey")
    found = [entry(data, ("accuracy", result["score"], "keys found (%)"))]
    for place, length in enumerate(result["lengths"]):
        scores = [row[place] for row in result["scores"] if row[place] is not None]
        metric = ("accuracy", sum(scores) / len(scores), f"keys found (%) in {length:,} tokens")
        found.append(entry(data, metric, dataset_config=str(length)))
    return found


def perplexity(result: dict[str, Any]) -> list[EvalResult]:
    """Return it per token, word, character and byte."""
    documents, windows = result["texts"]["documents"], result["windows"]
    name = ", ".join(dict.fromkeys(document.rpartition(", document ")[0] for document in documents))
    how = "with memory" if windows is None else f"windows of {windows['tokens']:,}, stride {windows['stride']:,}"
    arguments = {"documents": len(documents), "tokens": result["tokens"]}
    return [
        entry((name, name), (metric, round(result[metric], 4), f"{title} ({how})"), metric_args=arguments)
        for metric, title in UNITS.items()
        if result[metric] is not None
    ]


def entry(dataset: tuple[str, str], metric: tuple[str, float, str], **more: Any) -> EvalResult:
    """Make an entry from a dataset's name and type, and a metric's type, value and name."""
    more |= {"dataset_name": dataset[0], "dataset_type": dataset[1], "metric_name": metric[2]}
    return EvalResult("text-generation", metric_type=metric[0], metric_value=metric[1], **more)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write results as the arguments say."""
    parser = argparse.ArgumentParser(
        prog="cacheformers results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", metavar="RESULT", help="result.json, or the folder that holds it")
    parser.add_argument("--card", required=True, metavar="FOLDER", help="of the adapter or the model")
    options = parser.parse_args(arguments)
    try:
        written = write_results(options.results, options.card)
    except (OSError, ValueError) as error:
        sys.exit(f"cacheformers results: {error}")
    print(f"{len(written)} results are in {Path(options.card) / CARD}.")
