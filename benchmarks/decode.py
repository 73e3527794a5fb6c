"""Time of a new token against what was read before, over the base's.

    python benchmarks/decode.py                     # SmolLM2-135M, a cache of 128K entries, 5 minutes on two CPU cores

Both models have the same 256 tokens of an open segment in their local cache; the memory's layers are the upper 8 of 30,
with one search. Steps of all take turns in one process. Beside the ratios: the bytes of entries a second that a step's
search reads if the search were all that the memory adds, and the bytes a second of a copy of as many.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import (
    RESULTS,
    about,
    draw_lines,
    interleaved,
    peak_extra,
    ratio,
    shown,
    write_json,
)
from models import base_model, full_memory, memory_model, shapes
from transformers import DynamicCache

OPEN = 256


@torch.no_grad()
def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--cache_size", type=int, default=131072)
    parser.add_argument("--read", type=int, nargs="+", default=[1024, 16384, 65536, 131072, 262144, 1048576])
    parser.add_argument("--steps", type=int, default=10, help="steps a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS / "costs", help="folder for decode.json, decode.png")
    options = parser.parse_args()

    shape, dtype = shapes()[options.shape], getattr(torch, options.dtype)
    plain, remembering = base_model(shape, dtype), memory_model(shape, dtype, lora=False, cache_size=options.cache_size)
    opening = torch.randint(0, shape.config.vocab_size, (1, OPEN))
    cache = DynamicCache(config=shape.config)
    runs = {"base": steps(plain, opening, cache, options.steps)}
    width = shape.config.hidden_size // 4
    for read in options.read:
        memory = full_memory(remembering, read)
        runs[f"{read:,}"] = steps(remembering, opening, memory, options.steps)
    extra = peak_extra(runs[f"{read:,}"])
    times = interleaved(runs, options.rounds)
    rows, step = [], {name: statistics.median(taken) / options.steps for name, taken in times.items()}
    for read in options.read:
        name, held = f"{read:,}", min(read, options.cache_size) * width * 4
        rows.append({"read": read, **ratio(times, name, "base"), "entry_bytes": held, "copy_rate": copy_rate(held)})
        rows[-1]["search_rate"] = held / max(step[name] - step["base"], 1e-9)
        rates = (rows[-1]["search_rate"] / 2**30, rows[-1]["copy_rate"] / 2**30)
        print(f"{name} tokens read: {1000 * step[name]:.1f} ms, {shown(rows[-1])} of the base's", end="; ")
        print("{:.1f} GiB/s of entries, {:.1f} in a copy".format(*rates))
    settings = {name: str(value) for name, value in vars(options).items()}
    result = {"about": about(), "settings": settings, "rows": rows, "extra_bytes": extra, "times": times}
    print(write_json(options.output, "decode", result))
    lines = {
        "with memory": [(read, 1000 * step[f"{read:,}"]) for read in options.read],
        "base": [(read, 1000 * step["base"]) for read in options.read],
    }
    title = f"A new token, {options.shape}, {options.cache_size:,} entries"
    draw_lines(options.output / "decode.png", title, "tokens read", "milliseconds", lines)


def steps(model: Any, opening: torch.Tensor, cache: Any, count: int) -> Callable[[], None]:
    """So many new tokens, one by one, after an opening that is read first."""
    model(input_ids=opening, past_key_values=cache)

    def run() -> None:
        for _ in range(count):
            model(input_ids=opening[:, :1], past_key_values=cache)

    return run


def copy_rate(size: int) -> float:
    """Bytes a second that a copy reads."""
    source = torch.randn(size // 4)
    target = torch.empty_like(source)
    times = interleaved({"copy": lambda: target.copy_(source)}, 5)["copy"]
    return size / statistics.median(times)


if __name__ == "__main__":
    main()
