"""Measure nearest-neighbor search: every back end against one matrix product of the same size.

    python benchmarks/search.py --headline --threads 2   # search and ring update, 2,048 queries, 16K and 128K entries
    python benchmarks/search.py                           # every size: hours
    python benchmarks/search.py --quick --output /tmp/search

All calls of a row are timed in one process, in turn; a ratio is the median time of a search over the median time of
`torch.mm(queries, entries.T, out=scores)` in float32. With --headline each search is followed by writing as many new
entries as there are queries into the full ring, and both are in its time. Results: search.json and search.png
(--headline: search_headline). Peak memory is what the process holds at most during a search, beyond what it held
before. Recall is by the rule of cacheformers.modeling.search.recall, against the stored entries; of a bfloat16 store
also against the float32 entries.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measuring import Panel, draw_lines, interleaved, parser, peak_extra, save
from torch import Tensor

from cacheformers.modeling.search import Search, get_search, recall
from cacheformers.modeling.search.store import Ring

DTYPES = ["float32", "bfloat16"]
# The product that everything is divided by is left out where its result would be larger.
MOST_SCORES = 1 << 29
RECALL_QUERIES = 128


def main() -> None:
    """Measure, print, write."""
    given = parser(__doc__)
    given.add_argument("--queries", type=int, nargs="+", default=[1, 64, 2048])
    given.add_argument("--entries", type=int, nargs="+", default=[1 << 14, 1 << 16, 1 << 17, 1 << 20])
    given.add_argument("--width", type=int, nargs="+", default=[144, 256, 1024])
    given.add_argument("--topk", type=int, nargs="+", default=[16, 64])
    given.add_argument("--dtype", nargs="+", default=DTYPES, choices=DTYPES)
    given.add_argument("--back_ends", nargs="+", help="default: exact, faiss where it is installed, headline: auto")
    given.add_argument("--headline", action="store_true", help="only 2,048 queries, width 256, k 16, with ring update")
    given.add_argument("--quick", action="store_true", help="small sizes only")
    given.add_argument("--device", default="cpu")
    given.add_argument("--threads", type=int)
    given.add_argument("--repeats", type=int, default=7)
    options = given.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
        if find_spec("faiss"):
            __import__("faiss").omp_set_num_threads(options.threads)

    if options.headline:
        options.queries, options.entries, options.width, options.topk = [2048], [1 << 14, 1 << 17], [256], [16]
    elif options.quick:
        options.queries, options.entries, options.width, options.topk = [1, 64], [2048], [64], [16]
    about = "median time over that of one float32 torch.mm(queries, entries.T, out=scores)"
    rows: list[dict[str, Any]] = []
    for sizes in itertools.product(options.dtype, options.width, options.entries, options.queries, options.topk):
        rows += measure(*sizes, options)
        found = {"ratio": about, "ring_update": options.headline, "rows": rows}
        path = save("search_headline" if options.headline else "search", options, found)
    draw(path, rows)


def back_ends(options: argparse.Namespace) -> dict[str, Search]:
    """Return the back ends to measure, by default every exact one that runs here."""
    names = ["exact"]
    if find_spec("faiss") and (options.device == "cpu" or hasattr(__import__("faiss"), "knn_gpu")):
        names.append("faiss")
    return {name: get_search(name) for name in options.back_ends or [*names, *["auto"] * options.headline]}


def made(queries: int, entries: int, width: int, dtype: str, device: str) -> tuple[Tensor, Ring]:
    """Make random queries `[queries, width]`, and a full ring whose seam is in the middle."""
    generator = torch.Generator().manual_seed(0)
    ring = Ring(1, entries, width, dtype=getattr(torch, dtype), device=device)
    for count in (entries, entries // 2):
        ring.append(0, torch.randn(count, width, generator=generator))
    return torch.randn(queries, width, generator=generator).to(device), ring


def measure(
    dtype: str, width: int, entries: int, queries: int, topk: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return one row of results for each back end."""
    asked, ring = made(queries, entries, width, dtype, options.device)
    searches = back_ends(options)
    new = torch.randn(queries, width, device=options.device)

    def call(search: Search) -> None:
        search(asked, ring.entries(0), topk, "l2")
        if options.headline:
            ring.append(0, new)

    calls: dict[str, Callable[[], object]] = {name: partial(call, one) for name, one in searches.items()}
    if queries * entries <= MOST_SCORES:
        stored, scores = ring.keys[0].float(), asked.new_empty(queries, entries)
        calls = {"mm": lambda: torch.mm(asked, stored.T, out=scores), **calls}
    times = interleaved(calls, options.repeats, options.device)
    product = statistics.median(times.pop("mm")) if "mm" in times else None
    some, original = asked[:RECALL_QUERIES], made(queries, entries, width, "float32", options.device)[1].entries(0)
    unmoved = made(queries, entries, width, dtype, options.device)[1].entries(0)
    rows = []
    for name, seconds in times.items():
        median, hits = statistics.median(seconds), searches[name](some, unmoved, topk, "l2")[1]
        row = {"back_end": name, "dtype": dtype, "width": width, "entries": entries, "queries": queries, "topk": topk}
        row |= {
            "milliseconds": round(1000 * median, 4),
            "fastest_slowest": [round(1000 * min(seconds), 4), round(1000 * max(seconds), 4)],
            "product_milliseconds": product and round(1000 * product, 4),
            "ratio": product and round(median / product, 3),
            "recall": recall(hits, some, unmoved, topk, "l2"),
            "recall_of_float32": recall(hits, some, original, topk, "l2"),
            "extra_mib": round(peak_extra(calls[name], options.device) / 2**20, 1),
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw ratios over the number of entries: a column for each number of queries, a row for each store and k."""
    panels: dict[tuple[Any, ...], dict[int, Panel]] = {}
    for row in rows:
        across = panels.setdefault((row["dtype"], row["topk"]), {})
        title = "{queries:,} queries, {dtype}, k {topk}".format(**row)
        panel = across.setdefault(row["queries"], Panel(title, "entries", "time over one product's", {}))
        if row["ratio"] is not None:
            points = panel.lines.setdefault("{back_end}, width {width:,}".format(**row), [])
            points.append((row["entries"], row["ratio"]))
    draw_lines(path, [list(across.values()) for across in panels.values()])


if __name__ == "__main__":
    main()
