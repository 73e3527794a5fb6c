"""What a finished run writes: train_result.json, the model card, plots; and pushing them to the Hub."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

from huggingface_hub import ModelCard
from torch import Tensor

from cacheformers.common.environment import environment, origin_lines
from cacheformers.common.files import write_text
from cacheformers.evaluation.plots import save_plots
from cacheformers.evaluation.run import Run, between, print_runs, scores
from cacheformers.hub.card import Card, cells, renewed, saved_card
from cacheformers.hub.push import HubError, push_to_hub
from cacheformers.modeling.method import method_named
from cacheformers.training.optim import parameter_groups
from cacheformers.training.plan import Plan
from cacheformers.training.run import TrainingRun
from cacheformers.training.scratch import OF_ADAPTERS
from cacheformers.training.settings import HubOptions

ELSEWHERE = ("output", "method")  # the card names the method elsewhere, and needs no folder
WITHOUT_MEMORY = ("r", "lora_alpha", "segment_tokens")
# What the optimizer's groups hold (training/optim.py).
TRAINED = {"memory": "memory", "gate": "gates", "beta": "the memory's shares"}


def write_results(
    plan: Plan,
    run: TrainingRun,
    weights: dict[str, Tensor],
    runs: dict[str, Run],
    earlier: ModelCard | None,
    arguments: list[str],
) -> None:
    """Write train_result.json, model card and plots, print the main numbers, and push the folder if that is wanted.

    Args:
        weights: what was trained, by name.
        runs: of the evaluation; empty without held-out documents.
        earlier: the model card that the output folder had; what people wrote into it is kept.
        arguments: of the command line.
    """
    options, accelerator, history = plan.options, run.accelerator, run.history
    output, subject = Path(options.train.output), plan.subject
    result = {
        "command": ["train_adapt.py", *arguments],
        "options": asdict(options),
        "environment": environment(accelerator.device, accelerator.num_processes, subject.base),
        "trained_parameters": sum(tensor.numel() for tensor in weights.values()),
        "rates": {group["name"]: group["lr"] for group in parameter_groups(run.trained, subject.rates)},
        **asdict(history),
        "scores": scores(runs) if runs else {},
    }
    write_text(output / "train_result.json", json.dumps(result, indent=1) + "\n")
    card = adapter_card(result) if subject.base else scratch_card(result, output)
    write_text(output / "README.md", renewed(card, earlier))
    print(
        f"\n{history.steps} steps, {history.seconds / history.steps:.2f} s a step; mean loss of the last 20: "
        f"{mean(history.losses[-20:]):.4f}"
    )
    if runs:
        print_runs(runs)
    if options.evaluation.plots:
        save_plots(output, runs, history.losses)
    print(f"\nWeights, model card (README.md), train_result.json and plots are in {output}")
    if options.hub.push_to_hub is not None:
        print(f"Pushed: {publish(output, options.hub)}")


def publish(folder: Path, options: HubOptions) -> str:
    """Push a finished run to the Hub and return the commit's address.

    Raises:
        HubError: it was not pushed; the message says how to push the folder later.
    """
    assert options.push_to_hub is not None
    named = {"base_model": options.hub_base_model, "allow_mixed": options.hub_allow_mixed or None}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    try:
        return push_to_hub(folder, options.push_to_hub, private=options.hub_private, **given)
    except HubError as error:
        written = "".join(f", {name}={value!r}" for name, value in given.items())
        raise HubError(
            f"{error}\nThe result is finished and lies in {folder}. To push it from Python: "
            f"cacheformers.push_to_hub({str(folder)!r}, {options.push_to_hub!r}{written})"
        ) from error


def adapter_card(result: dict[str, Any]) -> str:
    """Return an adapter's card, Markdown with the Hub's metadata, from what stands in train_result.json."""
    options, remembers = result["options"], result["options"]["train"]["method"] != "lora"
    memory = {name: value for name, value in options["memory"].items() if remembers or name in WITHOUT_MEMORY}
    train = {name: value for name, value in options["train"].items() if name not in ELSEWHERE}
    purpose = "" if remembers else "It was trained to compare a memory with. "
    card = Card(
        kind="adapter",
        method=method_named(options["train"]["method"]) if remembers else None,
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
    """Return the model card of a model that was trained from scratch and saved in `folder`."""
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


def measured(result: dict[str, Any]) -> str:
    """Return the table of perplexities, or a sentence that says that there is none."""
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
        ratio = ("", "") if name == reference else (f"{compared['ratio']:.4f}", between(compared["interval"], 4))
        overall = f"{run['perplexity']:.3f}", between(run["interval"], 3), f"{run['bits_per_character']:.4f}"
        lines.append(cells(name, *overall, *ratio))
    classes = list(first["by_class"])
    lines += ["", cells("perplexity where the token occurred last", *classes), cells(*["---"] * (len(classes) + 1))]
    for name, run in scores.items():
        lines.append(cells(name, *(f"{run['by_class'][kind]['perplexity']:.3f}" for kind in classes)))
    return "\n".join(lines)


def trained(result: dict[str, Any]) -> str:
    """Describe data, settings, command and environment."""
    options, environment, found = result["options"], result["environment"], result["rates"]
    train = options["train"]
    names = (Path(source).name if Path(source).exists() else source for source in options["data"]["train"])
    sources = ", ".join(f"`{name}`" for name in names)
    titles = {"weights": "LoRA" if options["model"]["init"] == "pretrained" else "weights", **TRAINED}
    rates = ", ".join(f"{found[kind]:g} ({title})" for kind, title in titles.items() if kind in found)
    origin = "".join(f"\n\n{line}" for line in origin_lines([result]))
    versions = ", ".join(f"{name} {environment[name]}" for name in ("cacheformers", "torch", "transformers", "peft"))
    return "\n".join(
        [
            f"{len(result['losses']):,} steps over {result['tokens']:,} tokens of {sources}, "
            f"{train['lanes']} lane(s), {train['optimizer']}, rates {rates}. Every option and every loss is in "
            "`train_result.json`.\n",
            "```bash",
            f"python {' '.join(result['command'])}",
            "```\n",
            f"{environment['date']}, commit {environment['commit']}, {environment['device']}, "
            f"{environment['processes']} process(es), {result['seconds']:,.0f} s; {versions}.{origin}",
        ]
    )


def limits(result: dict[str, Any], has_entries: bool) -> list[str]:
    """List what a user of this run's result should know."""
    unchecked = (
        "Whether the memory carries what a document says, or merely helps in general, was not checked (`--controls "
        "other_document`)."
    )
    found = [unchecked] if has_entries and "other document" not in result["scores"] else []
    if len(next(iter(result["scores"].values()))["documents"] if result["scores"] else []) < 10:
        found.append("With so few held-out documents the intervals are too narrow.")
    return found
