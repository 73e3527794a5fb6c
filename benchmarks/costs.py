"""Measure what Neurocache adds to the forward of a segment, a training step and a new token.

    python benchmarks/costs.py forward                           # 10 minutes on two CPU cores
    python benchmarks/costs.py forward --shapes llama-12x768 --rounds 3
    python benchmarks/costs.py train --checkpointing             # 5 minutes
    python benchmarks/costs.py decode                            # 128K entries, 5 minutes

Weights are random, gates are open. Runs take turns in one process; a ratio is of two runs of the same round. Results:
NAME.json and NAME.png of forward, train or decode.

forward: a segment of 1,024 tokens with a full ring. The 12-layer Llama (float32, logits of all positions, no LoRA) is
compared with its base, the other models with LoRA alone.
train: forward and backward of such a segment over LoRA alone. The optimizer's time, the same for every byte trained, is
left out. Peak memory is measured in a process of its own for each.
decode: tokens one by one, after 256 tokens of an open segment and texts of several lengths in the memory, over the
base.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from measuring import Panel, draw_bars, draw_lines, interleaved, parser, peak_extra, ratio, save, shown
from models import base_model, full_memory, lora_model, memory_model, shapes
from transformers import DynamicCache

from cacheformers.common.base_model import checkpoint_activations
from cacheformers.common.loss import token_losses

TOKENS, OPEN = 1024, 256
DTYPES = ["float32", "bfloat16"]
# The most that the ratios should be.
ASKED = {"llama-12x768, float32": 1.15, "smollm2-135m, bfloat16": 1.25, "time": 1.4, "peak memory": 1.25}


def main() -> None:
    """Measure, print, write."""
    given = parser(__doc__)
    given.add_argument("task", choices=["forward", "train", "decode"])
    given.add_argument("--shapes", nargs="+", help="models (default: smollm2-135m, and for forward llama-12x768)")
    given.add_argument("--dtype", nargs="+", choices=DTYPES, help="of the weights (default: float32; train: bfloat16)")
    given.add_argument("--cache_size", type=int, help="entries (default: 16384; decode: 131072)")
    given.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given.add_argument("--rounds", type=int, default=7)
    given.add_argument("--compression_factor", type=int, default=4, help="train")
    given.add_argument("--hit_scores", action="store_true", help="train: with recipes/smollm2_books.yaml's additions")
    given.add_argument("--checkpointing", action="store_true", help="train: activation checkpointing")
    given.add_argument("--read", type=int, nargs="+", default=[2**10, 2**14, 2**16, 2**17, 2**18, 2**20], help="decode")
    given.add_argument("--steps", type=int, default=10, help="decode: steps in a round")
    given.add_argument("--peak", choices=["lora", "neurocache"], help=argparse.SUPPRESS)
    options = given.parse_args()
    options.shapes = options.shapes or [*["llama-12x768"] * (options.task == "forward"), "smollm2-135m"]
    options.dtype = options.dtype or ["bfloat16" if options.task == "train" else "float32"]
    options.cache_size = options.cache_size or (131072 if options.task == "decode" else 16384)
    if options.peak:
        print(peak_extra(training_step(options.peak, options), options.device))
    else:
        {"forward": forward, "train": train, "decode": decode}[options.task](options)


def forward(options: argparse.Namespace) -> None:
    """Measure a segment's forward with and without a memory, for each model and precision."""
    rows = []
    for name in options.shapes:
        for dtype in ["float32"] if name == "llama-12x768" else options.dtype:
            rows.append({"model": name, "dtype": dtype, **beside(name, dtype, options)})
            print(f"{name}, {dtype}: {shown(rows[-1])} of {rows[-1]['over']}, {rows[-1]['extra_mib']:.0f} MiB more")
    bars = {"{model}, {dtype}".format(**row): row for row in rows}
    draw_bars(save("forward", options, {"rows": rows}), {"a forward over the model's without memory": bars}, ASKED)


@torch.no_grad()
def beside(name: str, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return time and memory of one model's forward, with a memory over without."""
    shape, precision, device, with_lora = shapes()[name], getattr(torch, dtype), options.device, name != "llama-12x768"
    plain = (lora_model if with_lora else base_model)(shape, precision, device)
    remembering = memory_model(shape, precision, device, lora=with_lora, cache_size=options.cache_size)
    memory = full_memory(remembering)
    ids = torch.randint(0, shape.config.vocab_size, (1, TOKENS), device=device)
    runs = {
        "without": lambda: plain(input_ids=ids, use_cache=False),
        "with": lambda: remembering(input_ids=ids, past_key_values=memory),  # stores the segment before, too
    }
    extra = {kind: peak_extra(run, device) for kind, run in runs.items()}
    times = interleaved(runs, options.rounds, device)
    found = {"over": "LoRA alone" if with_lora else "the base", "layers": len(shape.layers), "times": times}
    return {**found, **ratio(times, "with", "without"), "extra_mib": (extra["with"] - extra["without"]) / 2**20}


def train(options: argparse.Namespace) -> None:
    """Measure a training step's time and peak memory over LoRA alone."""
    kinds = ("lora", "neurocache")
    times = interleaved({kind: training_step(kind, options) for kind in kinds}, options.rounds, options.device)
    row: dict[str, Any] = ratio(times, "neurocache", "lora")
    peaks = {}
    for kind in kinds:
        command = [sys.executable, __file__, *sys.argv[1:], "--peak", kind]
        peaks[kind] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])
    row |= {"peak_bytes": peaks, "peak_ratio": peaks["neurocache"] / peaks["lora"], "times": times}
    title = f"A training step, {options.shapes[0]}, {options.dtype[0]}, over LoRA alone"
    print(f"{title}: time {shown(row)}, peak memory {row['peak_ratio']:.2f}")
    bars = {"time": row, "peak memory": {"ratio": row["peak_ratio"]}}
    draw_bars(save("train", options, row), {title: bars}, ASKED)


def training_step(kind: str, options: argparse.Namespace) -> Callable[[], None]:
    """Return a run of one training step, of LoRA alone or of a memory with the same LoRA."""
    shape, dtype, device = shapes()[options.shapes[0]], getattr(torch, options.dtype[0]), options.device
    memory = None
    if kind == "lora":
        model = lora_model(shape, dtype, device)
    else:
        chosen = {name: getattr(options, name) for name in ("cache_size", "compression_factor", "hit_scores")}
        model = memory_model(shape, dtype, device, **chosen)
        memory = full_memory(model.train())
    model.train()
    if options.checkpointing:
        base: Any = model.base_model.model  # type: ignore[union-attr]  # PEFT types the tuner as a module
        checkpoint_activations(base)
        base.disable_input_require_grads()
    ids, targets = torch.randint(0, shape.config.vocab_size, (2, 1, TOKENS), device=device)

    def run() -> None:
        output = model(input_ids=ids, past_key_values=memory, use_cache=memory is not None)
        token_losses(output.logits, targets).mean().backward()
        model.zero_grad(set_to_none=True)

    return run


@torch.no_grad()
def decode(options: argparse.Namespace) -> None:
    """Measure the time of a new token by the number of tokens read before."""
    shape, dtype, device = shapes()[options.shapes[0]], getattr(torch, options.dtype[0]), options.device
    remembering = memory_model(shape, dtype, device, lora=False, cache_size=options.cache_size)
    opening = torch.randint(0, shape.config.vocab_size, (1, OPEN), device=device)
    runs = {"base": steps(base_model(shape, dtype, device), opening, DynamicCache(config=shape.config), options.steps)}
    for read in options.read:
        runs[str(read)] = steps(remembering, opening, full_memory(remembering, read), options.steps)
    extra = peak_extra(runs[str(options.read[-1])], device)
    times = interleaved(runs, options.rounds, device)
    rows, step = [], {name: statistics.median(taken) / options.steps for name, taken in times.items()}
    for read in options.read:
        size, own = min(read, options.cache_size) * (shape.config.hidden_size // 4) * dtype.itemsize, step[str(read)]
        rows.append({"read": read, **ratio(times, str(read), "base"), "entry_bytes": size})
        print(f"{read:,} tokens read: {1000 * own:.1f} ms, {shown(rows[-1])} of the base's")
    path = save("decode", options, {"rows": rows, "extra_bytes": extra, "times": times})
    lines = {
        "with memory": [(read, 1000 * step[str(read)]) for read in options.read],
        "base": [(read, 1000 * step["base"]) for read in options.read],
    }
    title = f"A new token, {options.shapes[0]}, {options.cache_size:,} entries"
    draw_lines(path, [[Panel(title, "tokens read", "milliseconds", lines)]])


def steps(model: Any, opening: torch.Tensor, cache: Any, count: int) -> Callable[[], None]:
    """Return a run of `count` new tokens, one by one, after an opening that is read now."""
    model(input_ids=opening, past_key_values=cache)

    def run() -> None:
        for _ in range(count):
            model(input_ids=opening[:, :1], past_key_values=cache)

    return run


if __name__ == "__main__":
    main()
