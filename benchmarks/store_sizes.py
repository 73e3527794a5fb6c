"""What a search costs as a store grows: exact search, IVF, and IVF with PQ, over entries mapped from disk.

    cacheformers fetch
    OMP_NUM_THREADS=1 python benchmarks/store_sizes.py
    OMP_NUM_THREADS=1 python benchmarks/store_sizes.py --dtype int8 --sizes 10000000  # 3 GB; not run

Entries and queries are real as far as the book was read: an adapter reads its beginning, and asks with what comes next.
A larger store holds these entries, and copies of random ones with Gaussian noise, whose length is on average the mean
distance of a real entry from its nearest other. Seconds are the processor's: waiting for the disk and for other
processes is not in them. Results: store_sizes.json and .png.
"""

from __future__ import annotations

import math
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import Panel, draw_lines, interleaved, ratio, save, seconds_of, shown
from stores import book_parser, read_book

from cacheformers.modeling.search import Search, get_search
from cacheformers.modeling.search.faiss_search import load_faiss
from cacheformers.modeling.search.store import SCALE_BYTES, Entries, packed

INDEXES = ("IVF{lists},SQ8", "IVF{lists},PQ{parts}x4fs,Refine(SQ8)")
SINGLE = 16  # queries of a round that are asked one by one
BLOCK = 65536  # entries made at a time


@torch.no_grad()
def main() -> None:
    """Read, fill stores of all sizes, ask each, print, write, draw."""
    given = book_parser(__doc__, tokens=131072, asked=64)
    given.set_defaults(memory=Path("runs/store_sizes.memory"))
    given.add_argument("--sizes", type=int, nargs="+", default=[10**4, 10**5, 10**6], help="(default: %(default)s)")
    given.add_argument("--dtype", choices=["float32", "int8"], default="float32", help="(default: %(default)s)")
    options = given.parse_args()
    model, memory, ids = read_book(options)
    layer = next(iter(memory.state.rings))
    real = torch.cat(memory.state.rings[layer].entries(0).spans)
    model(ids, past_key_values=memory)
    queries = memory.state.tensors["queries"][layer][0].float()
    del model, memory
    rows = []
    for size in options.sizes:
        with tempfile.TemporaryDirectory(dir=options.memory.parent) as folder:
            entries = fill(real, size, getattr(torch, options.dtype), Path(folder) / "entries")
            rows += measure(entries, queries, options.topk, options.rounds, Path(folder) / "index")
        result = {"real entries": len(real), "width": real.shape[1], "rows": rows}
        path = save("store_sizes", options, result, indent=None)
        draw_lines(path, [[Panel("Time of a query", "entries", "seconds", lines(rows))]])


def fill(real: torch.Tensor, size: int, dtype: torch.dtype, path: Path) -> torch.Tensor:
    """Write a store `[size, width]` to disk, the newest real entries first, and return it mapped."""
    width = real.shape[1] + (SCALE_BYTES if dtype == torch.int8 else 0)
    stored = torch.from_file(str(path), shared=True, size=size * width, dtype=dtype).view(size, width)
    kept = real[-size:]
    some = real[:: max(len(real) // 1000, 1)]
    scores = get_search("exact")(some, Entries((real,)), 2, "l2")[0]
    noise = (some.square().sum(1) - scores[:, 1]).clamp(min=0).sqrt().mean() / math.sqrt(real.shape[1])
    random = torch.Generator().manual_seed(0)
    for start in range(0, size, BLOCK):
        chosen = torch.randint(len(real), (min(BLOCK, size - start),), generator=random)
        rows = real[chosen] + noise * torch.randn(len(chosen), real.shape[1], generator=random)
        rest = kept[start : start + BLOCK]
        rows[: len(rest)] = rest
        stored[start : start + len(rows)] = packed(rows) if dtype == torch.int8 else rows
    return stored


def measure(stored: torch.Tensor, queries: torch.Tensor, topk: int, rounds: int, path: Path) -> list[dict[str, Any]]:
    """Return a row for each search, asked queries one by one and all at once; `path` is where an index is weighed."""
    entries = Entries((stored,))
    lists = 2 ** math.ceil(math.log2(math.sqrt(len(stored))))
    parts = queries.shape[1] // 4
    exact = get_search("exact")
    truth = exact(queries, entries, topk, "l2")[1]
    searches: dict[str, Search] = {"exact": get_search("auto")}
    about: dict[str, dict[str, Any]] = {"exact": {"recall": 1.0, "bytes": stored.nbytes}}
    for pattern in INDEXES:
        name = pattern.format(lists=lists, parts=parts)
        searches[name] = search = get_search(f"faiss:{name}")
        build = seconds_of(partial(search, queries[:1], entries, topk, "l2"), clock=time.process_time)
        hits = search(queries, entries, topk, "l2")[1]
        found = (hits[:, :, None] == truth[:, None]).any(2).float().mean()
        load_faiss().write_index(entries.index[f"{name} l2"].faiss, str(path))
        about[name] = {"recall": round(float(found), 4), "bytes": path.stat().st_size, "build seconds": round(build, 1)}
    rows = []
    for asked, used in ((1, queries[:SINGLE]), (len(queries), queries)):
        runs = {name: partial(ask, search, used.split(asked), entries, topk) for name, search in searches.items()}
        times = interleaved(runs, rounds, clock=time.process_time)
        for name in searches:
            row = {"entries": len(stored), "search": name, "asked": asked, **about[name], **ratio(times, name, "exact")}
            row["seconds"] /= len(used)
            print(
                "{entries:,} {search}, {asked} asked: recall {recall}, {seconds:.6f} s,".format(**row),
                shown(row, 4),
                flush=True,
            )
            rows.append(row)
    return rows


def ask(search: Search, parts: tuple[torch.Tensor, ...], entries: Entries, topk: int) -> None:
    """Search with each part of the queries."""
    for part in parts:
        search(part, entries, topk, "l2")


def lines(rows: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return seconds of a query against entries, by search and number of queries."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        kind = "exact" if row["search"] == "exact" else "IVF and PQ" if "PQ" in row["search"] else "IVF"
        found.setdefault(f"{kind}, {row['asked']} asked", []).append((row["entries"], row["seconds"]))
    return found


if __name__ == "__main__":
    main()
