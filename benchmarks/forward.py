"""What a memory adds to the forward of a segment: time over the same model without one, and peak memory.

    python benchmarks/forward.py                    # both tables of part C, 10 minutes on two CPU cores
    python benchmarks/forward.py --rounds 3 --shapes llama-12x768

The ring is full and gates are open. The 12-layer Llama (float32, logits of all positions, no LoRA) is compared with its
base; SmolLM2-135M with the LoRA-only model. Runs take turns in one process; a ratio is of two runs of the same round.
"""

from __future__ import annotations

import argparse
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
from models import Shape, base_model, full_memory, lora_model, memory_model, shapes

TOKENS = 1024
# The most that the ratios should be (the bfloat16 one where a processor has such products).
ASKED = {"llama-12x768, float32": 1.15, "smollm2-135m, bfloat16": 1.25}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["llama-12x768", "smollm2-135m"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of SmolLM2; default: both")
    parser.add_argument("--cache_size", type=int, default=16384)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS / "costs", help="folder for forward.json, forward.png")
    options = parser.parse_args()

    rows = []
    for name in options.shapes:
        dtypes = (
            ["float32"] if name == "llama-12x768" else [options.dtype] if options.dtype else ["float32", "bfloat16"]
        )
        for dtype in dtypes:
            rows.append({"model": name, "dtype": dtype, **measure(shapes()[name], dtype, options)})
            print(f"{name}, {dtype}: {shown(rows[-1])} of {rows[-1]['over']}, {rows[-1]['extra_mib']:.0f} MiB more")
    result = {
        "about": about(options.device),
        "tokens": TOKENS,
        "cache_size": options.cache_size,
        "rounds": options.rounds,
        "rows": rows,
    }
    print(write_json(options.output, "forward", result))
    title = f"A segment of {TOKENS:,} tokens, {options.cache_size:,} entries"
    bars = {"{model}, {dtype}".format(**row): row for row in rows}
    draw_bars(options.output / "forward.png", title, "time over the model's without memory", bars, ASKED)


def measure(shape: Shape, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time and memory of one model with and without a memory."""
    precision, device, plain_lora = getattr(torch, dtype), options.device, shape.first == 22
    plain = lora_model(shape, precision, device) if plain_lora else base_model(shape, precision, device)
    remembering = memory_model(shape, precision, device, lora=plain_lora, cache_size=options.cache_size)
    full = full_memory(remembering)
    ids = torch.randint(0, shape.config.vocab_size, (1, TOKENS), device=device)

    @torch.no_grad()
    def without() -> None:
        plain(input_ids=ids, use_cache=False)

    @torch.no_grad()
    def with_memory() -> None:
        remembering(input_ids=ids, past_key_values=full)  # each call stores the segment before: retrieval and update

    extra = {"without": peak_extra(without, device), "with": peak_extra(with_memory, device)}
    times = interleaved({"without": without, "with": with_memory}, options.rounds, device)
    return {
        "over": "LoRA alone" if plain_lora else "the base",
        "layers": len(shape.layers),
        **ratio(times, "with", "without"),
        "extra_mib": (extra["with"] - extra["without"]) / 2**20,
        "times": times,
    }


if __name__ == "__main__":
    main()
