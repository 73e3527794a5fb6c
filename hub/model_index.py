"""Results as the Hub's `model-index` has them, from the result files of this package."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from huggingface_hub import EvalResult

TASK = "text-generation"
UNITS = {
    "perplexity": "perplexity per token",
    "word_perplexity": "perplexity per word",
    "bits_per_character": "bits per character",
    "bits_per_byte": "bits per byte",
}


def eval_results(result: dict[str, Any]) -> list[EvalResult]:
    """What a result.json of LongBench, of the passkey task or of a perplexity says.

    Raises:
        ValueError: it is no such result.
    """
    if isinstance(result.get("tasks"), dict) and "average" in result:
        return longbench(result)
    if "cases" in result and "lengths" in result:
        return passkey(result)
    if result.get("kind") == "perplexity":
        return perplexity(result)
    raise ValueError("This is no result of eval_longbench.py, of the passkey task or of a perplexity.")


def longbench(result: dict[str, Any]) -> list[EvalResult]:
    """The score of each task, and their average, which says how many tasks it is over."""
    settings = result["settings"]
    name = "LongBench-E" if settings["longbench_e"] else "LongBench"
    found = [
        entry(
            name,
            "THUDM/LongBench",
            numbers["metric"],
            numbers["score"],
            f"{numbers['metric']} ({settings['method']})",
            config=f"{task}_e" if settings["longbench_e"] else task,
            split="test",
            arguments={"records": len(numbers["records"]), "max_length": settings["max_length"]},
        )
        for task, numbers in result["tasks"].items()
    ]
    title = f"average of {len(found)} tasks ({settings['method']})"
    return [*found, entry(name, "THUDM/LongBench", "average", round(result["average"], 2), title, split="test")]


def passkey(result: dict[str, Any]) -> list[EvalResult]:
    """Per cent of keys found, in all and by length."""
    found = [entry("Passkey retrieval", "passkey", "accuracy", result["score"], "keys found (%)")]
    for place, length in enumerate(result["lengths"]):
        scores = [row[place] for row in result["scores"] if row[place] is not None]
        title = f"keys found (%) in {length:,} tokens"
        found.append(
            entry("Passkey retrieval", "passkey", "accuracy", sum(scores) / len(scores), title, config=str(length))
        )
    return found


def perplexity(result: dict[str, Any]) -> list[EvalResult]:
    """Per token, per word, per character and per byte."""
    documents, windows = result["texts"]["documents"], result["windows"]
    name = ", ".join(dict.fromkeys(document.rpartition(", document ")[0] for document in documents))
    how = "with memory" if windows is None else f"windows of {windows['tokens']:,}, stride {windows['stride']:,}"
    arguments = {"documents": len(documents), "tokens": result["tokens"]}
    return [
        entry(name, name, metric, round(result[metric], 4), f"{title} ({how})", arguments=arguments)
        for metric, title in UNITS.items()
        if result[metric] is not None
    ]


def entry(
    dataset: str,
    dataset_type: str,
    metric: str,
    value: float,
    title: str,
    config: str | None = None,
    split: str | None = None,
    arguments: dict[str, Any] | None = None,
) -> EvalResult:
    return EvalResult(
        task_type=TASK,
        dataset_name=dataset,
        dataset_type=dataset_type,
        dataset_config=config,
        dataset_split=split,
        metric_type=metric,
        metric_value=value,
        metric_name=title,
        metric_args=arguments,
    )


def joined(old: Iterable[EvalResult], new: Sequence[EvalResult]) -> list[EvalResult]:
    """Old results and new ones; a new one takes the place of an old one of the same name on the same data."""
    replaced = {identity(each) for each in new}
    return [*(each for each in old if identity(each) not in replaced), *new]


def identity(result: EvalResult) -> tuple[Any, ...]:
    return (*result.unique_identifier, result.dataset_name, result.metric_type, result.metric_name)
