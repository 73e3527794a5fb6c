"""Measure which exact back end is fastest on this machine, and write the table that `search="auto"` reads.

    python benchmarks/calibrate.py                                # minutes; into the cache folder, used from then on
    python benchmarks/calibrate.py --device cuda
    python benchmarks/calibrate.py --out modeling/search/fastest.json   # the table that is shipped

A table holds one device's rows; those of other devices in the same file are kept. The package's own search is taken
unless another needs at most nine tenths of its time: no search changes, and with it its rounding, for nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measuring import about, interleaved
from search import DTYPES, back_ends, made

from cacheformers.modeling.search.choice import OWN_TABLE, table

WORTHWHILE = 0.9


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 8, 64, 512, 2048])
    parser.add_argument("--entries", type=int, nargs="+", default=[1024, 16384, 131072])
    parser.add_argument("--width", type=int, nargs="+", default=[144, 256, 1024])
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OWN_TABLE)
    options = parser.parse_args()

    rows = []
    device = torch.device(options.device).type
    for dtype, width, entries, queries in itertools.product(
        options.dtype, options.width, options.entries, options.queries
    ):
        asked, store = made(queries, entries, width, dtype, options.device)
        calls: dict[str, Callable[[], object]] = {
            name: partial(search, asked, store.entries(0), 16, "l2")
            for name, search in back_ends(options.device).items()
        }
        times = interleaved(calls, options.repeats, options.device)
        medians = {name: sorted(seconds)[len(seconds) // 2] for name, seconds in times.items()}
        rows.append(
            {
                "device": device,
                "dtype": dtype,
                "width": width,
                "entries": entries,
                "queries": queries,
                "fastest": fastest(medians),
                "milliseconds": {name: round(1000 * seconds, 4) for name, seconds in medians.items()},
            }
        )
        print(json.dumps(rows[-1]))
    kept = []
    if options.out.is_file():
        kept = [row for row in json.loads(options.out.read_text(encoding="utf-8"))["rows"] if row["device"] != device]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in kept + rows)
    header = json.dumps(about(options.device))
    options.out.write_text(f'{{"about": {header},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")
    table.cache_clear()
    print(options.out)


def fastest(medians: dict[str, float]) -> str:
    """Which back end a row names, given the seconds of each."""
    name = min(medians, key=lambda name: medians[name])
    return name if medians[name] <= WORTHWHILE * medians["exact"] else "exact"


if __name__ == "__main__":
    main()
