"""One table of methods: perplexity as their runs measured it, and what each holds and takes to read a book.

    python train_adapt.py recipes/methods/windowed.yaml    # LoRA alone; and neurocache.yaml and so on
    python benchmarks/methods.py runs/methods_{windowed,neurocache,infini_attention,gated_attention,cacheformer} \
        --text ../shared/data/books/test.jsonl.gz

Folders are outputs of `train_adapt.py` that read the same documents; the first is what the others are divided by.
All models read the text in turn, a segment each, so that what else the machine does hits all of them. Results:
methods.json, .md and .png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, about, held, write_json
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from cacheformers.evaluation.remembering import own_tokenizer
from cacheformers.evaluation.run import Run, compare
from cacheformers.evaluation.tables import between
from cacheformers.modeling.attach import new_memory
from cacheformers.training.sources import load_texts


@dataclass
class Method:
    """One run: its result, its model, and how it read the text.

    Attributes:
        seconds, state_bytes: of each segment, and what is held after it.
    """

    name: str
    result: dict[str, Any]
    runs: dict[str, Run]
    model: nn.Module
    seconds: list[float]
    state_bytes: list[int]

    @property
    def scores(self) -> tuple[Run | None, Run]:
        """Without its memory (None where it has none) and with it."""
        off = next((run for name, run in self.runs.items() if name in ("off", "cache off")), None)
        on = [run for name, run in self.runs.items() if name != "base" and not run.control]
        return off, on[-1]


def main() -> None:
    """Load, read, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="output folders of train_adapt.py")
    parser.add_argument("--text", required=True, help="a file of texts: the beginning of the first is read")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--segment_tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3, help="how often the text is read (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS / "methods", help="folder (default: %(default)s)")
    options = parser.parse_args()

    methods = [load(folder) for folder in options.runs]
    tokenizer = own_tokenizer(str(options.runs[0]))
    ids = tokenizer(load_texts([options.text])[0], return_tensors="pt").input_ids[:, : options.tokens]
    if ids.shape[1] < options.tokens:
        parser.error(f"The text has {ids.shape[1]:,} tokens: give a longer one, or fewer --tokens.")
    for number in range(options.rounds):
        read_together(methods, ids, options.segment_tokens)
        print(f"Round {number + 1} of {options.rounds}: {held('VmRSS') / 2**30:.1f} GiB in the process.")
    rows = [row(method, methods[0], options.tokens) for method in methods]
    settings = {name: str(value) for name, value in vars(options).items() if name != "output"}
    result = {"about": about(), "settings": settings, "rows": rows}
    print(write_json(options.output, "methods", result))
    table = markdown(result)
    (options.output / "methods.md").write_text(table, encoding="utf-8")
    print(table)
    draw(options.output / "methods.png", rows)


def load(folder: Path) -> Method:
    """A run's result and its model, in float32.

    Raises:
        OSError, ValueError: it has none, or was not evaluated.
    """
    result = json.loads((folder / "train_result.json").read_text(encoding="utf-8"))
    if not result["scores"]:
        raise ValueError(f"{folder} was not evaluated: resume it with --valid.")
    base = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(folder))
    runs = {name: Run.from_dict(numbers) for name, numbers in result["scores"].items()}
    return Method(folder.name.removeprefix("methods_"), result, runs, model.eval(), [], [])


@torch.no_grad()
def read_together(methods: list[Method], ids: Tensor, segment_tokens: int) -> None:
    """Every model reads the text from its beginning, a segment each in turn; times are added, bytes are the last's."""
    memories = [new_memory(method.model, 1) for method in methods]
    for method in methods:
        method.state_bytes = []
    for segment in ids.split(segment_tokens, 1):
        for method, memory in zip(methods, memories, strict=True):
            start = time.perf_counter()
            method.model(input_ids=segment, past_key_values=memory, logits_to_keep=1)
            method.seconds.append(time.perf_counter() - start)
            method.state_bytes.append(memory.nbytes)


def row(method: Method, first: Method, tokens: int) -> dict[str, Any]:
    """What the table says of a method."""
    (off, on), half = method.scores, len(method.state_bytes) // 2
    of_first = compare(on.total, first.scores[1].total) if method is not first else None
    of_off = compare(on.total, off.total) if off is not None else None
    rounds = len(method.seconds) // len(method.state_bytes)
    return {
        "method": method.name,
        "trained_parameters": method.result["trained_parameters"],
        "off": None if off is None else off.perplexity,
        "perplexity": on.perplexity,
        "over_first": None if of_first is None else asdict(of_first),
        "over_off": None if of_off is None else asdict(of_off),
        "state_bytes": method.state_bytes[-1],
        "state_bytes_per_token": method.state_bytes[-1] / tokens,
        "bytes_a_further_token": (method.state_bytes[-1] - method.state_bytes[half - 1])
        / (tokens * (1 - half / len(method.state_bytes))),
        "seconds_per_token": sum(method.seconds) / rounds / tokens,
        "time_over_first": statistics.median(
            own / other for own, other in zip(method.seconds, first.seconds, strict=True)
        ),
        "by_position": {name: measure.perplexity for name, measure in on.by_position.items()},
        "seconds": method.seconds,
        "bytes": method.state_bytes,
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    facts, settings, rows = result["about"], result["settings"], result["rows"]
    lines = [
        "# Methods side by side",
        "",
        f"`{facts['command']}`",
        "",
        f"Commit {facts['commit']}, {facts['date']}; {facts['processor']}, {facts['machine']}; torch {facts['torch']}. "
        f"Bytes and times: {settings['tokens']} tokens in segments of {settings['segment_tokens']}, "
        f"{settings['rounds']} rounds, float32; time is the median over all segments.",
        "",
        f"| | trained parameters | perplexity, memory off | on | / {rows[0]['method']} (95 %) | on / off (95 %) "
        f"| bytes held per token read | bytes for one more | ms a token | / {rows[0]['method']} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for found in rows:
        cells = [
            found["method"],
            f"{found['trained_parameters']:,}",
            "-" if found["off"] is None else f"{found['off']:.3f}",
            f"{found['perplexity']:.3f}",
            ratio_cell(found["over_first"]),
            ratio_cell(found["over_off"]),
            f"{found['state_bytes_per_token']:,.0f}",
            f"{found['bytes_a_further_token']:,.0f}",
            f"{1000 * found['seconds_per_token']:.2f}",
            f"{found['time_over_first']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    positions = list(rows[0]["by_position"])
    lines += ["", f"| perplexity by tokens read before | {' | '.join(positions)} |", "|---|" + "---:|" * len(positions)]
    for found in rows:
        lines.append(f"| {found['method']} | {' | '.join(f'{value:.3f}' for value in found['by_position'].values())} |")
    return "\n".join([*lines, "", "![Perplexity, bytes held and time](methods.png)", ""])


def ratio_cell(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['ratio']:.4f} ({between(found['interval'], 4)})"


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Perplexity, bytes held and time of every method as bars into a PNG."""
    from matplotlib.figure import Figure

    panels = {
        "perplexity": [found["perplexity"] for found in rows],
        "KiB held per token read": [found["state_bytes_per_token"] / 2**10 for found in rows],
        "ms a token": [1000 * found["seconds_per_token"] for found in rows],
    }
    names = [found["method"] for found in rows]
    figure = Figure(figsize=(11, 1.2 + 0.4 * len(rows)), layout="constrained")
    for axes, (title, values) in zip(figure.subplots(1, 3, sharey=True), panels.items(), strict=True):
        bars = axes.barh(names, values, color="tab:blue")
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.set_title(title)
        axes.margins(x=0.18)
    figure.axes[0].invert_yaxis()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
