"""Tokens a second of `read`: of a book, over the bare model on the same segments; of many documents, by batch size.

    cacheformers fetch
    python benchmarks/read_many.py book --tokens 32768                      # with a trained adapter
    python benchmarks/read_many.py book --methods memorizing infini_attention --tokens 8192     # with random adapters
    python benchmarks/read_many.py documents --batches 1 4 16
    cacheformers attach recipes/attach/retrieval_heads.yaml --dtype bfloat16 --output runs/heads
    python benchmarks/read_many.py layers --adapter runs/heads --dtype bfloat16

`book` reads a book segment by segment. The bare model's decoder (all layers, `use_cache=False`, no logits) and every
memory take turns after each segment, in one process, so that other load on the machine affects all alike. `documents`
reads pieces of books of different lengths; padding is the share of computed tokens that are none, here and if all were
padded to the longest. `layers` reads the beginning of a book as a whole, and segment by segment, for which all layers
must run, in turns, by the processor's time. Results: read_book_METHOD.json, by the first method, read_documents.json
and read_layers.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import interleaved, parser, ratio, save, seconds_of, shown
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import cacheformers
from cacheformers.modeling.architectures import find_decoder, unwrap
from cacheformers.modeling.method import METHODS, required_options

TRAINED = "trained"


@torch.no_grad()
def main() -> None:
    """Run one of the three."""
    given = parser(__doc__)
    given.add_argument("action", choices=("book", "documents", "layers"))
    given.add_argument("--base", default="data/smollm2-135m-instruct", help="(default: %(default)s)")
    given.add_argument("--adapter", default="model_cards/answers_questions", help="(default: %(default)s)")
    given.add_argument("--dtype", default="float32", help="(default: %(default)s)")
    given.add_argument("--books", type=Path, default=Path("../shared/data/books/valid.jsonl.gz"), help="JSON lines")
    given.add_argument("--methods", nargs="+", default=[TRAINED], help="default: the trained adapter")
    given.add_argument("--tokens", type=int, default=16384, help="of the book, or of all documents (%(default)s)")
    given.add_argument(
        "--segment", type=int, default=1024, help="tokens, of random adapters too (default: %(default)s)"
    )
    given.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], help="(default: %(default)s)")
    given.add_argument("--documents", type=int, default=16, help="(default: %(default)s)")
    given.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16], help="(default: %(default)s)")
    given.add_argument("--rounds", type=int, default=3, help="of reading all documents (default: %(default)s)")
    options = given.parse_args()
    {"book": book, "documents": documents, "layers": layers}[options.action](options)


def load_model(options: argparse.Namespace, name: str) -> Any:
    """Load the base, with a trained adapter or with a method whose other options are its defaults."""
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=getattr(torch, options.dtype))
    if name == TRAINED:
        return PeftModel.from_pretrained(base, options.adapter).eval()
    config = METHODS[name].adapter_config(task_type="CAUSAL_LM", target_modules=[], segment_tokens=options.segment)
    return get_peft_model(base, config).eval()


def book_ids(options: argparse.Namespace) -> torch.Tensor:
    """Return the first tokens of the longest of the first books, `[tokens]`."""
    with gzip.open(options.books, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(8), strict=False)]
    ids: torch.Tensor = AutoTokenizer.from_pretrained(options.base)(max(texts, key=len), return_tensors="pt").input_ids
    assert ids.shape[1] >= options.tokens, f"the book has {ids.shape[1]:,} tokens"
    return ids[0, : options.tokens]


def book(options: argparse.Namespace) -> None:
    """Let the bare model and every memory take turns, segment by segment."""
    ids, models = book_ids(options), {name: load_model(options, name) for name in options.methods}
    bare = AutoModelForCausalLM.from_pretrained(options.base, dtype=getattr(torch, options.dtype)).eval().model
    memories = {}
    for name, model in models.items():
        cacheformers.read(model, ids[:64], progress=False)  # warms up
        has_entries = bool(cacheformers.new_memory(model, 1).state.rings)
        memories[name] = cacheformers.new_memory(model, 1, options.tokens if has_entries else None)
    times: dict[str, list[float]] = {"bare": [], **{name: [] for name in models}}
    for segment in ids.split(options.segment):
        times["bare"].append(seconds_of(partial(bare, input_ids=segment[None], use_cache=False)))
        for name, model in models.items():
            reading = partial(cacheformers.read, model, segment, progress=False, memory=memories[name])
            times[name].append(seconds_of(reading))
    rows: dict[str, dict[str, float]] = {}
    for name, found in times.items():
        speed = {"tokens a second": len(ids) / sum(found), "as a whole": sum(times["bare"]) / sum(found)}
        rows[name] = {**ratio({"bare": times["bare"], "own": found}, "bare", "own"), **speed}
        print(
            f"{name}: {speed['tokens a second']:.0f} tokens/s, over bare {shown(rows[name])}, {speed['as a whole']:.2f}"
        )
    save(f"read_book_{options.methods[0]}", options, {"rows": rows, "seconds": times}, indent=None)


def documents(options: argparse.Namespace) -> None:
    """Read documents of different lengths, by batch size."""
    ids, model = book_ids(options), load_model(options, options.methods[0])
    weights = torch.rand(options.documents, generator=torch.Generator().manual_seed(0)).mul(3).exp()  # up to 20 times
    lengths = (weights / weights.sum() * options.tokens).long().tolist()
    texts = list(ids[: sum(lengths)].split(lengths))
    cacheformers.read(model, texts[0], progress=False)  # warms up
    times: dict[int, list[float]] = {size: [] for size in options.batches}
    rows: dict[int, dict[str, float]] = {}
    for _ in range(options.rounds):
        for size, seconds in times.items():
            start = time.perf_counter()
            computed = count_computed(model, partial(cacheformers.read, model, texts, progress=False, batch_size=size))
            seconds.append(time.perf_counter() - start)
            batches = [lengths[first : first + size] for first in range(0, len(lengths), size)]
            former = sum(max(batch) * len(batch) for batch in batches)
            rows[size] = {"padding": 1 - sum(lengths) / computed, "padding to the longest": 1 - sum(lengths) / former}
    for size, seconds in times.items():
        rows[size]["tokens a second"] = sum(lengths) / statistics.median(seconds)
        print(size, {name: round(value, 4) for name, value in rows[size].items()})
    save("read_documents", options, {"lengths": lengths, "rows": rows, "seconds": times}, indent=None)


def layers(options: argparse.Namespace) -> None:
    """Read texts of some lengths with and without the upper layers."""
    model, ids, rows = load_model(options, options.methods[0]), book_ids(options), {}

    def all_layers(text: torch.Tensor) -> None:
        memory = cacheformers.new_memory(model, 1)
        for segment in text.split(required_options(find_decoder(unwrap(model))).segment_tokens):
            cacheformers.read(model, segment, flush=False, progress=False, memory=memory)

    for length in options.lengths:
        text = ids[:length]
        runs: dict[str, Callable[[], Any]] = {
            "all": partial(all_layers, text),
            "own": partial(cacheformers.read, model, text, progress=False),
        }
        times = interleaved(runs, options.rounds, clock=time.process_time)
        rows[str(length)] = {**ratio(times, "all", "own"), "tokens a second": length / statistics.median(times["own"])}
        print(f"{length:,} tokens: all layers over {shown(rows[str(length)])}", flush=True)
    save("read_layers", options, {"rows": rows}, indent=None)


def count_computed(model: Any, run: Callable[[], object]) -> int:
    """Count the tokens that the lowest layer computes in a run."""
    counts: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        counts.append((args[0] if args else kwargs["hidden_states"]).shape[:2].numel())

    layers: Any = find_decoder(unwrap(model)).layers
    with layers[0].register_forward_pre_hook(count, with_kwargs=True):
        run()
    return sum(counts)


if __name__ == "__main__":
    main()
