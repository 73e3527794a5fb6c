"""What a memory adds to a training step: time and peak memory over LoRA alone.

    python benchmarks/train.py                      # SmolLM2-135M, 5 minutes on two CPU cores
    python benchmarks/train.py --checkpointing --rounds 3

A step is the forward and backward of one segment of 1,024 tokens (the optimiser's own time is the same for every byte
trained, and left out). The memory's layers are the upper 8 of 30, its ring is full, gates are open. Steps take turns in
one process; peak memory is measured in a process of its own for each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import (
    RESULTS,
    about,
    draw_bars,
    interleaved,
    peak_extra,
    ratio,
    shown,
    write_json,
)
from models import full_memory, lora_model, memory_model, shapes

from cacheformers.training.loss import token_losses

TOKENS = 1024
ASKED = {"time": 1.4, "peak memory": 1.25}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--cache_size", type=int, default=16384)
    parser.add_argument("--compression_factor", type=int, default=4)
    parser.add_argument("--hit_scores", action="store_true", help="with the additions of recipes/smollm2_books.yaml")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS / "costs", help="folder for train.json, train.png")
    parser.add_argument("--peak", choices=["lora", "neurocache"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(json.dumps(peak_extra(step(options.peak, options))))
        return
    times = interleaved({kind: step(kind, options) for kind in ("lora", "neurocache")}, options.rounds)
    row: dict[str, Any] = ratio(times, "neurocache", "lora")
    peaks = {kind: measured_alone(kind) for kind in ("lora", "neurocache")}
    row |= {"peak_bytes": peaks, "peak_ratio": peaks["neurocache"] / peaks["lora"], "times": times}
    print(f"{options.shape}, {options.dtype}: time {shown(row)} of LoRA alone, peak memory {row['peak_ratio']:.2f}")
    settings = {name: str(value) for name, value in vars(options).items()}
    print(write_json(options.output, "train", {"about": about(), "settings": settings, **row}))
    held = dict.fromkeys(("ratio", "low", "high"), row["peak_ratio"])
    title = f"A training step of {TOKENS:,} tokens, {options.shape}, {options.dtype}"
    draw_bars(options.output / "train.png", title, "over LoRA alone", {"time": row, "peak memory": held}, ASKED)


def step(kind: str, options: argparse.Namespace) -> Callable[[], None]:
    """A training step of LoRA alone or of a memory with the same LoRA."""
    shape, dtype = shapes()[options.shape], getattr(torch, options.dtype)
    if kind == "lora":
        model, memory = lora_model(shape, dtype), None
    else:
        model = memory_model(
            shape,
            dtype,
            cache_size=options.cache_size,
            compression_factor=options.compression_factor,
            hit_scores=options.hit_scores,
        )
        memory = full_memory(model.train())
    model.train()
    if options.checkpointing:
        model.base_model.model.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator, union-attr]
        model.base_model.model.disable_input_require_grads()  # type: ignore[operator, union-attr]
    ids = torch.randint(0, shape.config.vocab_size, (1, TOKENS))
    targets = torch.randint(0, shape.config.vocab_size, (1, TOKENS))

    def run() -> None:
        output = model(input_ids=ids, past_key_values=memory, use_cache=memory is not None)
        token_losses(output.logits, targets).mean().backward()
        model.zero_grad(set_to_none=True)

    return run


def measured_alone(kind: str) -> int:
    """Peak memory of a step in a process of its own, beside weights and ring."""
    command = [sys.executable, __file__, *sys.argv[1:], "--peak", kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
