"""The model card of an adapter, from what its run wrote down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from cacheformers.evaluation.tables import between

USE = """```python
import cacheformers  # makes the adapter's type known
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER_OR_HUB_ID").eval()
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER_OR_HUB_ID")
{reading}
```"""
READING = """memory = cacheformers.read(model, tokenizer(open("book.txt").read(), return_tensors="pt").input_ids)
question = tokenizer("Who tells this story?", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(question, past_key_values=memory.clone(), max_new_tokens=40)[0]))"""
PLAIN = """question = tokenizer("Who tells this story?", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(question, max_new_tokens=40)[0]))"""


def model_card(result: dict[str, Any]) -> str:
    """Markdown with the Hub's metadata: what was trained, how, what was measured, how to use it, what to beware of.

    Args:
        result: what train_adapt.py writes to train_result.json.
    """
    options, remembers = result["options"], result["options"]["train"]["method"] != "lora"
    base = options["model"]["base"]
    local = Path(base).exists()
    data = ModelCardData(
        library_name="peft",
        pipeline_tag="text-generation",
        base_model=None if local else base,
        tags=["cacheformers", "lora", *(["neurocache", "long-context"] if remembers else [])],
    )
    title = "Neurocache and LoRA" if remembers else "LoRA"
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {title} on {Path(base).name if local else base}\n",
        "An adapter of the package cacheformers. " + what(result, remembers) + "\n",
        "## Use\n",
        USE.format(reading=READING if remembers else PLAIN) + "\n",
        "## Measured\n",
        measured(result) + "\n",
        "## Trained\n",
        trained(result) + "\n",
        "## Beware\n",
        beware(result, remembers, local) + "\n",
    ]
    return "\n".join(parts)


def what(result: dict[str, Any], remembers: bool) -> str:
    count = f"{result['trained_parameters']:,} trained parameters."
    if not remembers:
        return f"LoRA alone, trained to compare a memory with; {count}"
    memory = result["options"]["memory"]
    return (
        f"Text is read in segments of {memory['segment_tokens']:,} tokens; of what was read before, up to "
        f"{memory['cache_size']:,} compressed states are kept, and every token retrieves the {memory['topk']} nearest "
        f"(Neurocache, arXiv 2407.02486); {count}"
    )


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


def cells(*texts: str) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(texts)} |"


def trained(result: dict[str, Any]) -> str:
    """Data, settings and the command."""
    options, environment = result["options"], result["environment"]
    train = options["train"]
    sources = ", ".join(
        f"`{Path(source).name if Path(source).exists() else source}`" for source in options["data"]["train"]
    )
    versions = ", ".join(f"{name} {environment[name]}" for name in ("cacheformers", "torch", "transformers", "peft"))
    return "\n".join(
        [
            f"{len(result['losses']):,} steps over {result['tokens']:,} tokens of {', '.join(sources)}, "
            f"{train['lanes']} lane(s), {train['optimizer']}, rates {train['lora_rate']:g} (LoRA), "
            f"{train['memory_rate']:g} (memory), "
            f"{train['memory_rate'] * train['gate_factor']:g} (gates). Every option and every loss is in "
            "`train_result.json`.\n",
            "```bash",
            f"python {' '.join(result['command'])}",
            "```\n",
            f"{environment['date']}, commit {environment['commit']}, {environment['device']}, "
            f"{environment['processes']} process(es), {result['seconds']:,.0f} s; {versions}.",
        ]
    )


def beware(result: dict[str, Any], remembers: bool, local: bool) -> str:
    """What a user must know."""
    lines = ["- The base model's licence and limits hold for the adapter too."]
    if local:
        lines.append(
            "- The base was a local folder: before you push this adapter, name the base's Hub id in "
            "`adapter_config.json` (`base_model_name_or_path`) and here (`base_model`)."
        )
    if remembers and "other document" not in result["scores"]:
        lines.append(
            "- Whether the memory carries what a document says, or merely helps in general, was not checked "
            "(`--controls other_document`)."
        )
    if len(next(iter(result["scores"].values()))["documents"] if result["scores"] else []) < 10:
        lines.append("- With so few held-out documents the intervals are too narrow.")
    return "\n".join(lines)
