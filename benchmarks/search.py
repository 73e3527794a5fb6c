"""How fast nearest-neighbour search is: every back end against one matrix product of the same size.

    python benchmarks/search.py --headline --threads 2   # search and ring update, 2,048 queries, 16K and 128K entries
    python benchmarks/search.py                           # every size: hours
    python benchmarks/search.py --quick --out /tmp/search
    python benchmarks/search.py --ivf states.safetensors  # an index of a million entries against exact search

All calls of a row are timed in one process, in turn; a ratio is the median time of a search over the median time of
`torch.mm(queries, entries.T, out=scores)` in float32. With --headline each search is followed by writing as many new
entries as there are queries into the full ring, and both are in its time. The file of --ivf holds a tensor "entries"
`[N, width]`: its last segment is asked with, and the store is filled and moved on segment by segment; adding and
removing are in the index's time. Results: search.json and search.png (--headline: search_headline.json and .png; --ivf:
search_ivf.json) in the folder --out. Peak memory is what the process holds at most during a search, beyond what it held
before. Recall is by the rule of cacheformers.modeling.search.recall, against the stored entries; of a bfloat16 store
also against what it was made from.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from cacheformers.benchmarks.measuring import RESULTS, about, interleaved, peak_extra
from cacheformers.modeling.search import Search, get_search, recall
from cacheformers.modeling.search.base import between
from cacheformers.modeling.search.store import Entries, Ring

DTYPES = ("float32", "bfloat16")
# The product that everything is divided by is left out where its result would be larger.
MOST_SCORES = 1 << 29
RECALL_QUERIES = 128


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 64, 2048])
    parser.add_argument("--entries", type=int, nargs="+", default=[1 << 14, 1 << 16, 1 << 17, 1 << 20])
    parser.add_argument("--width", type=int, nargs="+", default=[144, 256, 1024])
    parser.add_argument("--topk", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument(
        "--back-ends", nargs="+", help="default: exact; faiss where it is installed"
    )
    parser.add_argument("--headline", action="store_true", help="only 2,048 queries, width 256, k 16, with ring update")
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--ivf", type=Path, metavar="STATES", help="entries to build an index of, safetensors")
    parser.add_argument("--factory", default="IVF4096,Flat", help="of the index, for --ivf")
    parser.add_argument("--capacity", type=int, default=1 << 20, help="entries that the ring holds, for --ivf")
    parser.add_argument("--segment", type=int, default=1024, help="for --ivf")
    parser.add_argument("--segments", type=int, default=20, help="how many are timed, for --ivf")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "costs")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
        if find_spec("faiss"):
            __import__("faiss").omp_set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)

    report: dict[str, Any] = {"about": about(options.device)}
    if options.ivf:
        report["ratio"] = "time of the index over time of exact search; adding, removing and asking included in both"
        report["result"] = approximate(options)
        print(json.dumps(report["result"], indent=1))
        (options.out / "search_ivf.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return
    if options.headline:
        options.queries, options.entries, options.width, options.topk = [2048], [1 << 14, 1 << 17], [256], [16]
    elif options.quick:
        options.queries, options.entries, options.width, options.topk = [1, 64], [2048], [64], [16]
    name = "search_headline" if options.headline else "search"
    report["ratio"] = "median time over that of one float32 torch.mm(queries, entries.T, out=scores)"
    report["ring_update"] = options.headline
    report["rows"] = []
    for sizes in itertools.product(options.dtype, options.width, options.entries, options.queries, options.topk):
        for row in measure(*sizes, options):
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
        (options.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot(report, options.out / f"{name}.png")


def back_ends(device: str) -> dict[str, Search]:
    """Every exact back end that runs here."""
    names = ["exact"]
    if find_spec("faiss") and (device == "cpu" or hasattr(__import__("faiss"), "knn_gpu")):
        names.append("faiss")
    return {name: get_search(name) for name in names}


def made(queries: int, entries: int, width: int, dtype: str, device: str) -> tuple[Tensor, Ring]:
    """Random queries `[queries, width]`, and a full ring whose seam lies in the middle."""
    generator = torch.Generator().manual_seed(0)
    ring = Ring(1, entries, width, dtype=getattr(torch, dtype), device=device)
    for count in (entries, entries // 2):
        ring.append(0, torch.randn(count, width, generator=generator))
    return torch.randn(queries, width, generator=generator).to(device), ring


def measure(
    dtype: str, width: int, entries: int, queries: int, topk: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row of results for each back end."""
    asked, ring = made(queries, entries, width, dtype, options.device)
    names = options.back_ends
    searches = {name: get_search(name) for name in names} if names else back_ends(options.device)
    if options.headline and not names:
        searches["auto"] = get_search("auto")
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
    product = statistics.median(times.pop("mm")) if "mm" in times else math.nan
    rows = []
    some, original = asked[:RECALL_QUERIES], made(queries, entries, width, "float32", options.device)[1]
    ring = made(queries, entries, width, dtype, options.device)[1]
    found = {name: search(some, ring.entries(0), topk, "l2")[1] for name, search in searches.items()}
    shares = {name: recall(hits, some, ring.entries(0), topk, "l2") for name, hits in found.items()}
    of_float32 = {name: recall(hits, some, original.entries(0), topk, "l2") for name, hits in found.items()}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        rows.append(
            {
                "back_end": name,
                "dtype": dtype,
                "width": width,
                "entries": entries,
                "queries": queries,
                "topk": topk,
                "milliseconds": round(1000 * median, 4),
                "fastest_slowest": [round(1000 * min(seconds), 4), round(1000 * max(seconds), 4)],
                "product_milliseconds": None if math.isnan(product) else round(1000 * product, 4),
                "ratio": None if math.isnan(product) else round(median / product, 3),
                "recall": shares[name],
                "recall_of_float32": of_float32[name],
                "extra_mib": round(peak_extra(partial(call, searches[name]), options.device) / 2**20, 1),
            }
        )
    return rows


def approximate(options: argparse.Namespace) -> dict[str, Any]:
    """An index that follows the ring, against exact search of the same ring."""
    with safe_open(options.ivf, "pt") as file:
        states = file.get_tensor("entries").float()
    searches = {"exact": get_search("exact"), "index": get_search(f"faiss:{options.factory}")}
    # The last segment asks; those before it are written while the clock runs.
    timed = options.segments * options.segment
    asked, states = states[-options.segment :], states[: -options.segment]
    filled = len(states) - timed
    if filled < options.segment:
        raise SystemExit(f"{options.ivf} has too few entries for {options.segments} segments of {options.segment}")
    ring = Ring(1, options.capacity, states.shape[1])
    ring.append(0, states[:filled])
    start = time.perf_counter()
    searches["index"](asked[:1], ring.entries(0), 16, "l2")
    built = time.perf_counter() - start
    times: dict[str, list[float]] = {name: [] for name in searches}
    shares = []
    for segment in states[filled:].split(options.segment):
        start = time.perf_counter()
        ring.append(0, segment)
        writing = time.perf_counter() - start
        for name, search in searches.items():
            start = time.perf_counter()
            hits = search(asked, ring.entries(0), 16, "l2")[1]
            times[name].append(writing + time.perf_counter() - start)
        shares.append(recall(hits[:RECALL_QUERIES], asked[:RECALL_QUERIES], ring.entries(0), 16, "l2"))
    mean = {name: statistics.mean(seconds) for name, seconds in times.items()}
    # Entries that have left are skipped until they are as many as the living, then removed: here half of all at once.
    entries, half = ring.entries(0), ring.count(0) // 2
    newest = Entries((between(entries, half, entries.count),), entries.first + half, entries.index)
    start = time.perf_counter()
    searches["index"](asked[:1], newest, 16, "l2")
    removing = time.perf_counter() - start
    mean["index"] += removing * options.segment / half
    return {
        "factory": options.factory,
        "entries": ring.count(0),
        "width": states.shape[1],
        "segment": options.segment,
        "segments": len(shares),
        "build_seconds": round(built, 2),
        "seconds_to_remove_half": round(removing, 2),
        "milliseconds_a_segment": {name: round(1000 * seconds, 2) for name, seconds in mean.items()},
        "slowest_milliseconds": {name: round(1000 * max(seconds), 2) for name, seconds in times.items()},
        "ratio": round(mean["index"] / mean["exact"], 4),
        "recall": statistics.mean(shares),
    }


def plot(report: dict[str, Any], path: Path) -> None:
    """Ratios over the number of entries: a column for each number of queries, a row for each store and k."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: no plot.")
        return
    rows = [row for row in report["rows"] if row["ratio"] is not None]
    down = sorted({(row["dtype"], row["topk"]) for row in rows}, reverse=True)
    across = sorted({row["queries"] for row in rows})
    names = sorted({row["back_end"] for row in rows})
    if not rows:
        return
    figure = Figure(figsize=(4 * len(across) + 2, 3 * len(down)), layout="constrained")
    panels = figure.subplots(len(down), len(across), squeeze=False, sharex=True, sharey=True)
    for (dtype, topk), line in zip(down, panels, strict=True):
        for queries, axes in zip(across, line, strict=True):
            chosen = [row for row in rows if (row["dtype"], row["topk"], row["queries"]) == (dtype, topk, queries)]
            for color, width in enumerate(sorted({row["width"] for row in rows})):
                for name, style in zip(names, ("-", "--", ":", "-."), strict=False):
                    found = [row for row in chosen if (row["width"], row["back_end"]) == (width, name)]
                    points = sorted((row["entries"], row["ratio"]) for row in found)
                    if points:
                        label = f"{name}, width {width:,}"
                        axes.plot(*zip(*points, strict=True), style, marker="o", color=f"C{color}", label=label)
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set(xscale="log", yscale="log", title=f"{queries:,} queries, {dtype}, k {topk}")
            axes.grid(alpha=0.3)
    figure.supxlabel("entries")
    figure.supylabel("time over that of one matrix product")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
