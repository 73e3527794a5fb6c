"""What fewer bits of an entry cost: bytes, recall, time of a search and the loss of the next tokens, by precision.

    cacheformers fetch
    python benchmarks/stores.py             # reads 32,768 tokens of a book once, and keeps that memory

Entries and queries are real: an adapter reads the beginning of a book, and asks with what comes next. The memory is
read in float32, and its entries are rounded, so that all precisions hold the same states. Results: stores.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import torch
from measuring import interleaved, parser, ratio, save, shown
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import cacheformers
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.search import get_search, recall
from cacheformers.modeling.search.store import Ring

DTYPES = (torch.float32, torch.bfloat16, torch.int8)


@torch.no_grad()
def main() -> None:
    """Read, ask in each precision, print, write."""
    options = book_parser(__doc__, tokens=32768, asked=256).parse_args()
    model, memory, asked = read_book(options)
    rows = measure(model, memory, asked, options)
    for row in rows:
        print("{dtype}: {bytes:,} bytes, recall {recall:.4f}, loss {loss:.4f}, time ".format(**row) + shown(row))
    nothing = float(model(asked, labels=asked, past_key_values=cacheformers.new_memory(model, 1)).loss)
    print(f"loss without a memory {nothing:.4f}")
    save("stores", options, {"rows": rows, "loss without a memory": nothing}, indent=None)


def book_parser(doc: str | None, tokens: int, asked: int) -> argparse.ArgumentParser:
    """Return a parser of what `read_book` needs, and of the options that searches share."""
    given = parser(doc)
    given.add_argument("--base", default="data/smollm2-135m-instruct", help="(default: %(default)s)")
    given.add_argument("--adapter", default="model_cards/answers_questions", help="(default: %(default)s)")
    given.add_argument("--book", type=Path, default=Path("../shared/data/books/valid.jsonl.gz"), help="its first row")
    given.add_argument("--memory", type=Path, default=Path("runs/stores.memory"), help="(default: %(default)s)")
    given.add_argument("--tokens", type=int, default=tokens, help="of the memory (default: %(default)s)")
    given.add_argument("--asked", type=int, default=asked, help="tokens that come next (default: %(default)s)")
    given.add_argument("--topk", type=int, default=16, help="(default: %(default)s)")
    given.add_argument("--rounds", type=int, default=3, help="of timing (default: %(default)s)")
    return given


def read_book(options: argparse.Namespace) -> tuple[Any, MemoryCache, torch.Tensor]:
    """Return the model, its memory of the book, which is read once, and the ids `[1, asked]` that come next."""
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, options.adapter).eval()
    with gzip.open(options.book, "rt", encoding="utf-8") as file:
        text = json.loads(file.readline())["text"]
    ids = AutoTokenizer.from_pretrained(options.base)(text, return_tensors="pt").input_ids
    if not options.memory.exists():
        cacheformers.read(model, ids[:, : options.tokens], cache_size=options.tokens).save(options.memory)
    memory = cacheformers.load_memory(options.memory, model)
    return model, memory, ids[:, options.tokens : options.tokens + options.asked]


def measure(model: Any, memory: MemoryCache, ids: torch.Tensor, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row of each precision."""
    layer = next(iter(memory.state.rings))
    exact = memory.state.rings[layer].entries(0)
    search = get_search("exact")
    rings: dict[str, Ring] = {}
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        rounded = memory.clone()
        rings[str(dtype)] = ring = in_dtype(memory.state.rings[layer], dtype)
        rounded.state.rings[layer] = ring
        loss = float(model(ids, labels=ids, past_key_values=rounded).loss)
        queries = rounded.state.tensors["queries"][layer][0]
        hits = search(queries, ring.entries(0), options.topk, "l2")[1]
        found = recall(hits, queries, exact, options.topk, "l2")
        rows.append({"dtype": str(dtype), "bytes": ring.nbytes, "recall": found, "loss": loss})
    times = interleaved(
        {
            name: lambda ring=ring: search(queries, ring.entries(0), options.topk, "l2")  # type: ignore[misc]  # a default binds it
            for name, ring in rings.items()
        },
        options.rounds,
    )
    return [{**row, **ratio(times, row["dtype"], str(torch.float32))} for row in rows]


def in_dtype(ring: Ring, dtype: torch.dtype) -> Ring:
    """Round the entries of a ring."""
    rounded = Ring(1, ring.capacity, ring.width, dtype=dtype)
    rounded.append(0, torch.cat(ring.entries(0).spans))
    return rounded


if __name__ == "__main__":
    main()
