"""What a search costs as a store grows: exact search, IVF, and IVF with PQ, over entries mapped from disk.

    cacheformers fetch
    OMP_NUM_THREADS=1 python benchmarks/store_sizes.py --sizes 10000 100000
    OMP_NUM_THREADS=1 python benchmarks/store_sizes.py --sizes 1000000 10000000 --add  # 12 GB on disk

Entries are real as far as books were read: what an adapter stores of them, segment by segment and book after book. The
segment that comes next asks. A larger store holds these entries, and copies of random ones with Gaussian noise, whose
length is on average the mean distance of a real entry from its nearest other. Seconds are the processor's: waiting for
the disk and for other processes is not in them. Results: store_sizes.json and .png.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import Panel, draw_lines, interleaved, parser, ratio, save, seconds_of, shown
from peft import PeftModel
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from cacheformers.modeling.architectures import find_decoder, unwrap
from cacheformers.modeling.method import active_memories, required_options
from cacheformers.modeling.search import Search, get_search
from cacheformers.modeling.search.faiss_search import POINTS_PER_CENTROID, load_faiss
from cacheformers.modeling.search.store import SCALE_BYTES, Entries, packed

INDEXES = ("IVF{lists},SQ8", "IVF{lists},PQ{parts}x4fs")
MOST_LISTS = 4096  # more take hours to train and to fill on one core
SQ8_ENTRIES = 2_000_000  # larger stores are indexed with PQ only
SEGMENT = 1024
SINGLE = 16  # queries of a round that are asked one by one
TOGETHER = 64
BLOCK = 65536  # entries made at a time


@torch.no_grad()
def main() -> None:
    """Read, fill stores of all sizes, ask each, print, write, draw."""
    given = parser(__doc__)
    given.add_argument("--base", default="data/smollm2-135m-instruct", help="(default: %(default)s)")
    given.add_argument("--adapter", default="model_cards/answers_questions", help="(default: %(default)s)")
    given.add_argument("--books", type=Path, default=Path("../shared/data/books/train.jsonl.gz"), help="JSON lines")
    given.add_argument("--entries", type=Path, default=Path("runs/store_sizes.f32"), help="of the books, read once")
    given.add_argument("--real", type=int, default=2**19, help="entries read from the books (default: %(default)s)")
    given.add_argument("--sizes", type=int, nargs="+", default=[10**4, 10**5, 10**6], help="(default: %(default)s)")
    given.add_argument("--add", action="store_true", help="keep the sizes measured before")
    given.add_argument("--dtype", choices=["float32", "int8"], default="float32", help="(default: %(default)s)")
    given.add_argument("--topk", type=int, default=16, help="(default: %(default)s)")
    given.add_argument("--rounds", type=int, default=3, help="of timing (default: %(default)s)")
    options = given.parse_args()
    everything = read_books(options)
    real, queries = everything[: options.real], everything[options.real :: 4]
    earlier = options.output / "store_sizes.json"
    rows = json.loads(earlier.read_text(encoding="utf-8"))["rows"] if options.add else []
    for size in options.sizes:
        with tempfile.TemporaryDirectory(dir=options.entries.parent) as folder:
            entries = fill(real, size, getattr(torch, options.dtype), Path(folder) / "entries")
            rows += measure(entries, queries, options.topk, options.rounds, Path(folder) / "index")
        result = {"real entries": len(real), "width": real.shape[1], "rows": rows}
        path = save("store_sizes", options, result, indent=None)
        draw_lines(path, [panels(rows)])


def read_books(options: argparse.Namespace) -> torch.Tensor:
    """Return entries `[real + SEGMENT, width]` of the books, in their order; read what the file does not hold yet.

    An entry is made of its layer's input. No layer before it has a memory, so these layers of the base are enough.
    """
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    decoder = find_decoder(unwrap(PeftModel.from_pretrained(base, options.adapter).eval()))
    settings = required_options(decoder)
    layer = settings.first_layer
    encoder = next(memory for memory in active_memories(decoder) if memory.layer == layer).active_parts
    first = AutoModel.from_pretrained(options.base, dtype=torch.float32, num_hidden_layers=layer + 1).eval()
    inputs = []
    first.layers[layer].input_layernorm.register_forward_hook(lambda _, __, output: inputs.append(output))
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    options.entries.parent.mkdir(parents=True, exist_ok=True)
    wanted, seen = options.real + SEGMENT, 0
    with gzip.open(options.books, "rt", encoding="utf-8") as books, options.entries.open("ab") as file:
        written = file.tell() // (4 * settings.width)
        for book in books:
            if written >= wanted:
                break
            ids = tokenizer(json.loads(book)["text"], return_tensors="pt").input_ids[0]
            for segment in ids.split(SEGMENT)[: len(ids) // SEGMENT]:  # whole ones
                if seen >= written and written < wanted:
                    first(segment[None], use_cache=False)
                    file.write(encoder.encode(inputs.pop())[0].numpy().tobytes())
                    written += SEGMENT
                seen += SEGMENT
    return torch.from_file(str(options.entries), size=wanted * settings.width).view(wanted, settings.width)


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
    """Return a row for each search, asked queries one by one and many at once; `path` is where an index is weighed."""
    entries = Entries((stored,))
    count = len(stored)
    lists = 2 ** min(round(math.log2(4 * math.sqrt(count))), int(math.log2(count / POINTS_PER_CENTROID)))
    truth = get_search("exact")(queries, entries, topk, "l2")[1]
    searches: dict[str, Search] = {"exact": get_search("auto")}
    about: dict[str, dict[str, Any]] = {"exact": {"recall": 1.0, "bytes": stored.nbytes}}
    for pattern in INDEXES[count > SQ8_ENTRIES :]:
        name = pattern.format(lists=min(lists, MOST_LISTS), parts=queries.shape[1] // 4)
        searches[name] = search = get_search(f"faiss:{name}")
        build = seconds_of(partial(search, queries[:1], entries, topk, "l2"), clock=time.process_time)
        hits = search(queries, entries, topk, "l2")[1]
        found = (hits[:, :, None] == truth[:, None]).any(2).float().mean()
        load_faiss().write_index(entries.index[f"{name} l2"].faiss, str(path))
        about[name] = {"recall": round(float(found), 4), "bytes": path.stat().st_size, "build seconds": round(build, 1)}
        print(f"{count:,} {name}: {about[name]}", flush=True)
    rows = []
    together = queries[:TOGETHER]
    for asked, used in ((1, queries[:SINGLE]), (len(together), together)):
        runs = {name: partial(ask, search, used.split(asked), entries, topk) for name, search in searches.items()}
        times = interleaved(runs, rounds, clock=time.process_time)
        for name in searches:
            row = {"entries": count, "search": name, "asked": asked, **about[name], **ratio(times, name, "exact")}
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


def panels(rows: list[dict[str, Any]]) -> list[Panel]:
    """Return the panels of the plot: seconds, and time over exact search, by search and number of queries."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {"seconds": {}, "ratio": {}}
    for row in rows:
        kind = "exact" if row["search"] == "exact" else "IVF and PQ" if "PQ" in row["search"] else "IVF"
        for name, lines in found.items():
            lines.setdefault(f"{kind}, {row['asked']} asked", []).append((row["entries"], row[name]))
    return [
        Panel("Time of a query", "entries", "seconds", found["seconds"]),
        Panel("Over exact search", "entries", "time over exact search", found["ratio"]),
    ]


if __name__ == "__main__":
    main()
