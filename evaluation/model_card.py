"""The model card of an adapter or a model from scratch, from what its run wrote down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from cacheformers.evaluation.tables import between
from cacheformers.hub.card import Card, cells, method_of, saved_card
from cacheformers.training.environment import origin_lines
from cacheformers.training.scratch import OF_ADAPTERS

ELSEWHERE = ("output", "method")  # the card tells the method in other places; a folder's name tells nobody anything
WITHOUT_MEMORY = ("r", "lora_alpha", "segment_tokens")
# What the optimizer's groups hold (training/optim.py).
TRAINED = {"memory": "memory", "gate": "gates", "beta": "the memory's shares"}


def adapter_card(result: dict[str, Any]) -> str:
    """Markdown with the Hub's metadata: what was trained, how, what was measured, how to use it, what to beware of.

    Args:
        result: what train_adapt.py writes to train_result.json.
    """
    options, remembers = result["options"], result["options"]["train"]["method"] != "lora"
    memory = {name: value for name, value in options["memory"].items() if remembers or name in WITHOUT_MEMORY}
    train = {name: value for name, value in options["train"].items() if name not in ELSEWHERE}
    purpose = "" if remembers else "It was trained to compare a memory with. "
    card = Card(
        kind="adapter",
        method=method_of(options["train"]["method"].upper()) if remembers else None,
        base=options["hub"]["hub_base_model"] or options["model"]["base"],
        settings={**memory, **train},
        has_tokenizer=True,
        trained=trained(result),
        measured=measured(result),
        summary=f"{purpose}{result['trained_parameters']:,} trained parameters.",
        limits=tuple(limits(result, remembers and "cache_size" in memory)),
    )
    return card.text()


def scratch_card(result: dict[str, Any], folder: Path) -> str:
    """The same for a model that was trained from scratch.

    Args:
        folder: where it was saved, with its configuration.
    """
    card, train, scratch = saved_card(folder), result["options"]["train"], result["options"]["scratch"]
    used = [name for name in train if name not in (*ELSEWHERE, *OF_ADAPTERS)]
    return replace(
        card,
        settings={**card.settings, **{name: train[name] for name in used}, "precision": scratch["precision"]},
        has_tokenizer=True,
        trained=trained(result),
        measured=measured(result),
        summary=f"Trained from scratch: {result['trained_parameters']:,} parameters. {card.summary}",
        limits=tuple(limits(result, "cache_size" in card.settings)),
    ).text()


def rates(result: dict[str, Any]) -> str:
    """List the learning rates of what was trained."""
    titles = {"weights": "LoRA" if result["options"]["model"]["init"] == "pretrained" else "weights", **TRAINED}
    found = result["rates"]
    return ", ".join(f"{found[kind]:g} ({title})" for kind, title in titles.items() if kind in found)


def measured(result: dict[str, Any]) -> str:
    """The table of perplexities, or that there is none."""
    scores = result["scores"]
    if not scores:
        return "Nothing: the run had no held-out documents."
    first = next(iter(scores.values()))
    reference = first["compared_with"]
    lines = [
        f"{len(first['documents'])} held-out documents, {first['tokens']:,} predicted tokens. Intervals (95 %) are "
        f"from resampled documents; `multiple` is the perplexity over that of *{reference}*.\n",
        "| | perplexity | 95 % | bits per character | multiple | 95 % |",
        "|---|---:|---|---:|---:|---|",
    ]
    for name, run in scores.items():
        compared = run["compared"]
        ratio = "" if name == reference else f"{compared['ratio']:.4f}"
        sure = "" if name == reference else between(compared["interval"], 4)
        overall = f"{run['perplexity']:.3f}", between(run["interval"], 3), f"{run['bits_per_character']:.4f}"
        lines.append(cells(name, *overall, ratio, sure))
    classes = list(first["by_class"])
    lines += ["", cells("perplexity where the token occurred last", *classes), cells(*["---"] * (len(classes) + 1))]
    for name, run in scores.items():
        lines.append(cells(name, *(f"{run['by_class'][kind]['perplexity']:.3f}" for kind in classes)))
    return "\n".join(lines)


def trained(result: dict[str, Any]) -> str:
    """Data, settings and the command."""
    options, environment = result["options"], result["environment"]
    train = options["train"]
    sources = ", ".join(
        f"`{Path(source).name if Path(source).exists() else source}`" for source in options["data"]["train"]
    )
    origin = "".join(f"\n\n{line}" for line in origin_lines([result]))
    versions = ", ".join(f"{name} {environment[name]}" for name in ("cacheformers", "torch", "transformers", "peft"))
    return "\n".join(
        [
            f"{len(result['losses']):,} steps over {result['tokens']:,} tokens of {sources}, "
            f"{train['lanes']} lane(s), {train['optimizer']}, rates {rates(result)}. Every option and every loss is in "
            "`train_result.json`.\n",
            "```bash",
            f"python {' '.join(result['command'])}",
            "```\n",
            f"{environment['date']}, commit {environment['commit']}, {environment['device']}, "
            f"{environment['processes']} process(es), {result['seconds']:,.0f} s; {versions}.{origin}",
        ]
    )


def limits(result: dict[str, Any], has_entries: bool) -> list[str]:
    """What a user must know of this run."""
    found = []
    if has_entries and "other document" not in result["scores"]:
        found.append(
            "Whether the memory carries what a document says, or merely helps in general, was not checked "
            "(`--controls other_document`)."
        )
    if len(next(iter(result["scores"].values()))["documents"] if result["scores"] else []) < 10:
        found.append("With so few held-out documents the intervals are too narrow.")
    return found
