"""Put methods into one table: the perplexity of their runs, and the bytes and time with which each reads a book.

    python train_adapt.py recipes/methods/windowed.yaml    # LoRA alone; and neurocache.yaml and so on
    python benchmarks/methods.py runs/methods_{windowed,neurocache,infini_attention,gated_attention,cacheformer} \
        --text ../shared/data/books/test.jsonl.gz

Folders are outputs of `train_adapt.py` that read the same documents; the first is what the others are divided by.
All models read the text in turn, a segment each, so that other load on the machine affects all alike. Results:
methods.json, .md and .png.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from measuring import draw_bars, held, opening, parser, save, table
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from cacheformers.adapters.folders import own_tokenizer
from cacheformers.common.sources import load_texts
from cacheformers.evaluation.run import Run, between, compare
from cacheformers.modeling.segments import new_memory


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
        """Return its scores without its memory (None where it has none) and with it."""
        off = next((run for name, run in self.runs.items() if name in ("off", "cache off")), None)
        on = [run for name, run in self.runs.items() if name != "base" and not run.control]
        return off, on[-1]


def main() -> None:
    """Load, read, write."""
    given = parser(__doc__, "methods")
    given.add_argument("runs", nargs="+", type=Path, help="output folders of train_adapt.py")
    given.add_argument("--text", required=True, help="a file of texts: the beginning of the first is read")
    given.add_argument("--tokens", type=int, default=8192)
    given.add_argument("--segment_tokens", type=int, default=512)
    given.add_argument("--rounds", type=int, default=3, help="how often the text is read (default: %(default)s)")
    options = given.parse_args()

    methods = [load(folder) for folder in options.runs]
    tokenizer = own_tokenizer(str(options.runs[0]))
    ids = tokenizer(load_texts([options.text])[0], return_tensors="pt").input_ids[:, : options.tokens]
    if ids.shape[1] < options.tokens:
        given.error(f"The text has {ids.shape[1]:,} tokens: give a longer one, or fewer --tokens.")
    for number in range(options.rounds):
        read_together(methods, ids, options.segment_tokens)
        print(f"Round {number + 1} of {options.rounds}: {held('VmRSS') / 2**30:.1f} GiB in the process.")
    rows = [row(method, methods[0], options.tokens) for method in methods]
    draw(save("methods", options, {"rows": rows}, page), rows)


def load(folder: Path) -> Method:
    """Load a run's result and its model, in float32; raise OSError or ValueError if it was not evaluated."""
    result = json.loads((folder / "train_result.json").read_text(encoding="utf-8"))
    if not result["scores"]:
        raise ValueError(f"{folder} was not evaluated: resume it with --valid.")
    base = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(folder))
    runs = {name: Run.from_dict(numbers) for name, numbers in result["scores"].items()}
    return Method(folder.name.removeprefix("methods_"), result, runs, model.eval(), [], [])


@torch.no_grad()
def read_together(methods: list[Method], ids: Tensor, segment_tokens: int) -> None:
    """Read the text with every model, a segment each in turn; times are added, bytes are the last round's."""
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
    """Return what the table says of a method."""
    (off, on), half = method.scores, len(method.state_bytes) // 2
    of_first = asdict(compare(on.total, first.scores[1].total)) if method is not first else None
    of_off = asdict(compare(on.total, off.total)) if off is not None else None
    growth, rest = method.state_bytes[-1] - method.state_bytes[half - 1], 1 - half / len(method.state_bytes)
    rounds = len(method.seconds) // len(method.state_bytes)
    return {
        "method": method.name,
        "trained_parameters": method.result["trained_parameters"],
        "off": None if off is None else off.perplexity,
        "perplexity": on.perplexity,
        "over_first": of_first,
        "over_off": of_off,
        "state_bytes": method.state_bytes[-1],
        "state_bytes_per_token": method.state_bytes[-1] / tokens,
        "bytes_a_further_token": growth / (tokens * rest),
        "seconds_per_token": sum(method.seconds) / rounds / tokens,
        "time_over_first": statistics.median(map(truediv, method.seconds, first.seconds)),
        "by_position": {name: measure.perplexity for name, measure in on.by_position.items()},
        "seconds": method.seconds,
        "bytes": method.state_bytes,
    }


def page(result: dict[str, Any]) -> str:
    """Format the result as a page."""
    chosen, rows = result["settings"], result["rows"]
    text = (
        f"Bytes and times: {chosen['tokens']} tokens in segments of {chosen['segment_tokens']}, {chosen['rounds']} "
        "rounds, float32; time is the median over all segments."
    )
    first = f"/ {rows[0]['method']}"
    titles = ["", "trained parameters", "perplexity, memory off", "on", f"{first} (95 %)", "on / off (95 %)"]
    titles += ["bytes held per token read", "bytes for one more", "ms a token", first]
    cells = [
        [
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
        for found in rows
    ]
    lines = opening("Methods side by side", result, text) + table(titles, cells)
    cells = [[found["method"], *(f"{value:.3f}" for value in found["by_position"].values())] for found in rows]
    lines += table(["perplexity by tokens read before", *rows[0]["by_position"]], cells)
    return "\n".join([*lines, "![Perplexity, bytes held and time](methods.png)", ""])


def ratio_cell(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['ratio']:.4f} ({between(found['interval'], 4)})"


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw perplexity, bytes held and time of every method as bars."""
    parts = {"perplexity": ("perplexity", 1), "KiB held per token read": ("state_bytes_per_token", 2**-10)}
    parts["ms a token"] = ("seconds_per_token", 1000)
    panels = {name: {row["method"]: {"ratio": unit * row[key]} for row in rows} for name, (key, unit) in parts.items()}
    draw_bars(path, panels, {})


if __name__ == "__main__":
    main()
