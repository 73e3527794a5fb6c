"""What exact search costs by the number of queries: over one matrix product of the same size, and a single query over
stores of all precisions.

    OMP_NUM_THREADS=1 python benchmarks/few_queries.py

Entries and queries are random, in a ring whose seam is in its middle; 16 entries are found for each query. A round's
product is `torch.mm(queries, entries.T, out=scores)`, for a single query of the second table
`torch.mv(entries, query, out=scores)`, of the float32 entries. Seconds are the processor's: waiting for other processes
is not in them. Results: few_queries.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import interleaved, parser, ratio, save, shown, table
from torch import Tensor

from cacheformers.modeling.search import get_search, recall
from cacheformers.modeling.search.store import Ring

TOPK = 16
DTYPES = [torch.float32, torch.bfloat16, torch.int8]


@torch.no_grad()
def main() -> None:
    """Measure, print, write."""
    given = parser(__doc__)
    given.add_argument("--queries", type=int, nargs="+", default=[1, 8, 16, 64, 128, 256, 512, 2048])
    given.add_argument("--entries", type=int, nargs="+", default=[1 << 14, 1 << 16, 1 << 17])
    given.add_argument("--width", type=int, nargs="+", default=[144, 256, 1024])
    given.add_argument("--rounds", type=int, default=5)
    options = given.parse_args()
    rows: list[dict[str, Any]] = []
    for width in options.width:
        for count in options.entries:
            stored = torch.randn(count, width)
            rows += [by_queries(stored, asked, options.rounds) for asked in options.queries]
            rows += by_precision(stored, options.rounds)
            save("few_queries", options, {"rows": rows}, indent=None)
    print("\n".join(shown_rows(rows, "search") + shown_rows(rows, "single")))


def ring(stored: Tensor, dtype: torch.dtype) -> Ring:
    """Return a full ring of the entries, the oldest of which is in the middle."""
    made, half = Ring(1, len(stored), stored.shape[1], dtype=dtype), len(stored) // 2
    for part in (stored[-half:], stored):
        made.append(0, part)
    return made


def by_queries(stored: Tensor, asked: int, rounds: int) -> dict[str, Any]:
    """Return the time of a search over that of a product."""
    queries, scores, search = torch.randn(asked, stored.shape[1]), torch.empty(asked, len(stored)), get_search("exact")
    entries = ring(stored, torch.float32).entries(0)
    runs: dict[str, Callable[[], Any]] = {
        "product": partial(torch.mm, queries, stored.T, out=scores),
        "exact": partial(search, queries, entries, TOPK, "l2"),
    }
    found = ratio(interleaved(runs, rounds, clock=time.process_time), "exact", "product")
    some = queries[:16]
    row = {"kind": "search", "width": stored.shape[1], "entries": len(stored), "name": f"{asked:,}", **found}
    row["recall"] = recall(search(some, entries, TOPK, "l2")[1], some, entries, TOPK, "l2")
    print(row, flush=True)
    return row


def by_precision(stored: Tensor, rounds: int) -> list[dict[str, Any]]:
    """Return the time of a single query, over stores of each precision, over that of a product with one vector."""
    query, scores = torch.randn(1, stored.shape[1]), torch.empty(len(stored))
    runs: dict[str, Callable[[], Any]] = {"product": partial(torch.mv, stored, query[0], out=scores)}
    for dtype in DTYPES:
        entries = ring(stored, dtype).entries(0)
        runs[str(dtype).removeprefix("torch.")] = partial(get_search("exact"), query, entries, TOPK, "l2")
    runs["float32, auto"] = partial(get_search("auto"), query, ring(stored, torch.float32).entries(0), TOPK, "l2")
    times = interleaved(runs, 2 * rounds, clock=time.process_time)
    rows = []
    for name in list(runs)[1:]:
        row = {"kind": "single", "width": stored.shape[1], "entries": len(stored), "name": name}
        rows.append(row | ratio(times, name, "product"))
        print(rows[-1], flush=True)
    return rows


def shown_rows(rows: list[dict[str, Any]], kind: str) -> list[str]:
    """Return a Markdown table of ratios: a line for each width and number of entries, a column for each name."""
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["kind"] == kind:
            lines.setdefault(f"d {row['width']:,}, {row['entries']:,} entries", {})[row["name"]] = shown(row)
    names = list(next(iter(lines.values())))
    return table(["", *names], [[line, *(found[name] for name in names)] for line, found in lines.items()])


if __name__ == "__main__":
    main()
