"""Search, forward and decoding on a GPU, each beside what the hardware could do at best: under 10 minutes on one card.

    python benchmarks/gpu.py                                # then costs.py's training step of a 7B model
    python benchmarks/gpu.py --device cpu --quick           # the same code where there is no GPU, on toy sizes

First two rates are measured: of a large copy (bytes read and written) and of a large bfloat16 matrix product. A floor
is then the longer of the two times that a task's bytes and operations take at these rates. The CPU judges what the
search finds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from measuring import interleaved, parser, peak_extra, ratio, save, shown
from models import full_memory, memory_model, shapes

from cacheformers.modeling.search import get_search, recall
from cacheformers.modeling.search.store import Entries

QUERIES, TOPK, TOKENS = 2048, 16, 1024


@torch.no_grad()
def main() -> None:
    """Measure, print, write."""
    given = parser(__doc__)
    given.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given.add_argument("--quick", action="store_true", help="toy sizes, to see whether it runs")
    given.add_argument("--rounds", type=int, default=15)
    options = given.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here. --device cpu --quick runs the same code on toy sizes.")

    rates = measured_rates(options)
    print(f"copy {rates['copy'] / 1e12:.2f} TB/s, bfloat16 product {rates['product'] / 1e12:.0f} TFLOP/s")
    sizes = [(4096, 64)] if options.quick else [(131072, 256), (131072, 1024), (16384, 256)]
    found = [search(count, width, rates, options) for count, width in sizes]
    model, caches = ("smollm2-135m", [2048]) if options.quick else ("llama-2-7b", [16384, 131072])
    passes = [forward(model, cache, options) for cache in caches]
    save("gpu", options, {"rates": rates, "search": found, "forward": passes})
    if not options.quick:
        step = ["train", "--shapes", "llama-2-7b", "--device", options.device, "--output", str(options.output)]
        subprocess.run([sys.executable, str(Path(__file__).with_name("costs.py")), *step], check=True)


def measured_rates(options: argparse.Namespace) -> dict[str, float]:
    """Return the bytes per second of a copy, and the operations per second of a bfloat16 product."""
    size = 256 if options.quick else 8192
    a, b = (torch.randn(size, size, device=options.device).bfloat16() for _ in range(2))
    out, large = torch.empty_like(a), torch.empty(size, 8 * size, device=options.device)
    other = torch.empty_like(large)
    runs = {"copy": lambda: other.copy_(large), "product": lambda: torch.mm(a, b, out=out)}
    times = {name: statistics.median(taken) for name, taken in interleaved(runs, 9, options.device).items()}
    return {"copy": 2 * large.nbytes / times["copy"], "product": 2 * size**3 / times["product"]}


def search(count: int, width: int, rates: dict[str, float], options: argparse.Namespace) -> dict[str, Any]:
    """Measure exact search of a bfloat16 store beside the bare product (bfloat16 in and out) of the same size."""
    stored = torch.nn.functional.normalize(torch.randn(count, width, device=options.device), dim=1).bfloat16()
    queries = torch.nn.functional.normalize(torch.randn(QUERIES, width, device=options.device), dim=1)
    entries, exact, asked = Entries((stored,)), get_search("exact"), queries.bfloat16()
    out = torch.empty(QUERIES, count, dtype=torch.bfloat16, device=options.device)
    runs = {
        "search": lambda: exact(queries, entries, TOPK, "l2"),
        "product": lambda: torch.mm(asked, stored.T, out=out),
    }
    extra = peak_extra(runs["search"], options.device)
    times = interleaved(runs, options.rounds, options.device)
    least = max((stored.nbytes + queries.nbytes) / rates["copy"], 2 * QUERIES * count * width / rates["product"])
    _, hits = exact(queries[:64], entries, TOPK, "l2")
    found = recall(hits.cpu(), queries[:64].cpu(), Entries((stored.cpu(),)), TOPK, "l2")
    row: dict[str, Any] = {"entries": count, "width": width, **ratio(times, "search", "product"), "times": times}
    row |= {"over": "torch.mm, bfloat16 output", "floor_seconds": least, "extra_bytes": extra, "recall": found}
    print(
        f"search {QUERIES:,} x {count:,} x {width}: {shown(row)} of the product, {row['seconds'] / least:.1f} of the "
        f"floor, {extra / 2**20:.0f} MiB, recall {found:.4f}"
    )
    return row


def forward(name: str, cache_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a segment through a random base with a memory and with its adapter off; and a new token."""
    shape = shapes()[name]
    model: Any = memory_model(shape, torch.bfloat16, options.device, lora=False, cache_size=cache_size)
    memory = full_memory(model)
    ids = torch.randint(0, shape.config.vocab_size, (1, TOKENS), device=options.device)

    def base() -> None:
        with model.disable_adapter():
            model(input_ids=ids, use_cache=True)

    runs = {
        "memory": lambda: model(input_ids=ids, past_key_values=memory),
        "base": base,
        "token": lambda: model(input_ids=ids[:, :1], past_key_values=memory),
    }
    extra = peak_extra(runs["memory"], options.device)
    times = interleaved(runs, options.rounds, options.device)
    row: dict[str, Any] = {"model": name, "cache_size": cache_size, **ratio(times, "memory", "base")}
    row |= {"extra_bytes": extra, "token_seconds": statistics.median(times["token"]), "times": times}
    print(f"{name}, {cache_size:,} entries: {shown(row)} of the base, {1000 * row['token_seconds']:.1f} ms a token")
    return row


if __name__ == "__main__":
    main()
