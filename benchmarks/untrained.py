"""What an untrained base reads by retrieval: passkeys and the perplexity of books, against a window of as many columns.

    cacheformers fetch
    python benchmarks/untrained.py passkeys --lengths 4096 8192 16384
    python benchmarks/untrained.py books --texts ../shared/data/books/test.jsonl.gz

Every row sees at most 1,024 columns at a token. Each case and each book is saved as it is done, and a run that was
stopped goes on from there. Results: untrained.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from measuring import parser, save, table
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import cacheformers
from cacheformers.evaluation.held_out import token_nats
from cacheformers.evaluation.passkey.prompts import NEEDLES, REPEAT, Case, PromptMaker, load_filler, make_cases
from cacheformers.evaluation.readers import Remembering
from cacheformers.evaluation.text_perplexity import read_texts

Settings = dict[str, Any]
SINKS = {"local_window": "sliding", "segment_tokens": 128, "window_tokens": 892, "sink_tokens": 4}
RETRIEVAL = {
    **{"long": False, "overlap": False, "window_tokens": 256, "pool_tokens": 32, "topk": 16, "sink": True},
    **{"selection": "previous_block", "select_rows": 8, "far_distance": 512, "segment_tokens": 2048},
}
ROWS: dict[str, Settings | None] = {
    "base, full attention": None,
    "sinks and window": SINKS,
    "mean": {**RETRIEVAL, "representatives": "mean"},
    "tokens": {**RETRIEVAL, "representatives": "tokens", "pool_vectors": 4},
    "bounds": {**RETRIEVAL, "representatives": "bounds"},
}


def main() -> None:
    """Measure one part, and print the tables of all that was measured."""
    arguments = parser(__doc__, ".")
    arguments.add_argument("part", choices=("passkeys", "books"))
    arguments.add_argument("--base", default="data/smollm2-135m-instruct", help="(default: %(default)s)")
    arguments.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, help="(default: all)")
    arguments.add_argument("--lengths", type=int, nargs="+", default=[4096], help="tokens of a prompt, or of a book")
    arguments.add_argument("--cases", type=int, default=10, help="passkeys of a length (default: %(default)s)")
    arguments.add_argument("--filler", default=REPEAT, help="around passkeys (default: %(default)s)")
    arguments.add_argument("--texts", help="books")
    arguments.add_argument("--documents", type=int, default=2, help="books read (default: %(default)s)")
    options = arguments.parse_args()
    torch.set_grad_enabled(False)
    file = options.output / "untrained.json"
    found = json.loads(file.read_text())["found"] if file.exists() else {"passkeys": {}, "books": {}}
    tokenizer: Any = AutoTokenizer.from_pretrained(options.base)
    for name in options.rows:
        model = load(options.base, ROWS[name])
        for key, result in {"passkeys": passkeys, "books": books}[options.part](model, tokenizer, options, name, found):
            found[options.part][key] = result
            save("untrained", options, {"found": found})
    print("\n".join(page(found)))


def load(base: str, settings: Settings | None) -> Any:
    """Load the base in bfloat16, with an adapter that is not trained if there are settings of one."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    if settings is None:
        return model.eval()
    kind = cacheformers.WindowedAdapterConfig if settings is SINKS else cacheformers.CacheFormerAdapterConfig
    return get_peft_model(model, kind(task_type="CAUSAL_LM", target_modules=[], **settings)).eval()


def passkeys(
    model: Any, tokenizer: Any, options: argparse.Namespace, name: str, found: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the result of each case that was not asked before, from the beginning of the text to its end."""
    wording = NEEDLES["passkey"]
    filler = load_filler(options.filler, "text", tokenizer, max(options.lengths))
    maker = PromptMaker(wording, filler, tokenizer, 0)
    around = "grass" if options.filler == REPEAT else "book"
    depths = [100 * (place + 0.5) / options.cases for place in range(options.cases)]
    for length in options.lengths:
        cases = make_cases(wording, [length], depths, 1, 0)
        left = [case for case in cases if f"{name}, {around}, {case.id}" not in found["passkeys"]]
        stem, read = None, 0  # a memory of the tokens that the next prompts have in common
        for case, following in zip(left, [*left[1:], None], strict=True):
            start, prompt = time.perf_counter(), maker(case)
            common = 0 if following is None else shared(prompt.read, maker(following).read)
            if common > read:
                stem, read = go_on(model, prompt.read[read:common], stem), common
            if common < read:
                stem, read = None, 0
            memory = go_on(model, prompt.read[read:], copy.deepcopy(stem))
            result = ask(model, maker, case, memory)
            known = {"row": name, "around": around, "length": case.length, "depth": case.depth}
            yield f"{name}, {around}, {case.id}", {**known, **result, "seconds": time.perf_counter() - start}


def shared(left: list[int], right: list[int]) -> int:
    """Return how many tokens at the beginning are the same."""
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def go_on(model: Any, ids: list[int], memory: Any) -> Any:
    """Read more of a text."""
    return model(torch.tensor([ids]), past_key_values=memory, use_cache=True, logits_to_keep=1).past_key_values


def ask(model: Any, maker: PromptMaker, case: Case, memory: Any) -> dict[str, Any]:
    """Ask for the key: whether every digit is the likeliest, its loss, and in which heads it was retrieved."""
    prompt, key = maker(case), maker.encode(f" {case.key}")
    asked = torch.tensor([prompt.asked + key])
    logits = model(asked, past_key_values=memory, use_cache=True).logits[0, -len(key) - 1 : -1].float()
    answer = torch.tensor(key)
    result: dict[str, Any] = {
        "found": bool((logits.argmax(-1) == answer).all()),
        "loss": float(F.cross_entropy(logits, answer)),
    }
    if hasattr(model, "peft_config") and memory.state.retrieves:
        needle = maker.parts(case)[1]
        first = next(place for place in range(len(prompt.read)) if prompt.read[place : place + len(needle)] == needle)
        result["hits"] = hits(memory.state, len(key) + 1, first, first + len(needle))
    return result


def hits(state: Any, back: int, first: int, end: int) -> list[float]:
    """Return, by layer, the share of kv heads that retrieved tokens from `first` to `end`.

    Args:
        back: which token retrieved them, counted from the last one of the last piece that was read, or its first one.
    """
    shares = []
    for layer in state.retrieved().values():
        begins: Tensor = layer[0, -min(back, layer.shape[1])].unflatten(0, (state.layers[0].options.kv_heads, -1))
        inside = (begins >= 0) & (begins + state.retrieved_tokens > first) & (begins < end)
        shares.append(round(float(inside.any(-1).float().mean()), 3))
    return shares


def books(
    model: Any, tokenizer: Any, options: argparse.Namespace, name: str, found: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the mean losses of the books that were not read before, in their first 8K tokens and after them."""
    tokens = max(options.lengths)
    for text in read_texts([options.texts], tokenizer, documents=options.documents, tokens=tokens):
        key = f"{name}, {text.name}, {tokens}"
        if key not in found["books"] and ROWS[name] is not None:
            start = time.perf_counter()
            losses = token_nats(model, [text], Remembering(), 2048, title=name)[0]
            parts = {"to_8k": losses[:8192], "beyond": losses[8192:]}
            nats = {part: float(own.mean()) if len(own) else None for part, own in parts.items()}
            seconds = time.perf_counter() - start
            yield key, {"row": name, "text": text.name, "tokens": tokens, **nats, "seconds": seconds}


def page(found: dict[str, Any]) -> list[str]:
    """Return the lines of the tables of all that was measured."""
    cases, read = (list(found[part].values()) for part in ("passkeys", "books"))
    lines = []
    for around in dict.fromkeys(case["around"] for case in cases):
        shown = []
        for row in ROWS:
            for length in sorted({case["length"] for case in cases}):
                own = [c for c in cases if (c["row"], c["around"], c["length"]) == (row, around, length)]
                if own:
                    shown.append([row, f"{length:,}", *passkey_cells(own)])
        titles = [f"passkeys, {around}", "tokens", "found", "loss", "hit rate", "hit rate, upper half", "seconds"]
        lines += table(titles, shown)
    return lines + (table(["", "book", "to 8K", "8K and on", "seconds"], map(book_cells, read)) if read else [])


def passkey_cells(own: list[dict[str, Any]]) -> list[str]:
    """Return the cells of one row and length."""
    rates = [case["hits"] for case in own if "hits" in case]
    upper = [mean(rate[len(rate) // 2 :]) for rate in rates]
    return [
        f"{sum(case['found'] for case in own)} of {len(own)}",
        f"{mean(case['loss'] for case in own):.2f}",
        f"{mean(map(mean, rates)):.2f}" if rates else "-",
        f"{mean(upper):.2f}" if rates else "-",
        f"{mean(case['seconds'] for case in own):.0f}",
    ]


def book_cells(book: dict[str, Any]) -> list[str]:
    """Return the cells of one row and book."""
    parts = ["-" if book[part] is None else f"{math.exp(book[part]):.2f}" for part in ("to_8k", "beyond")]
    return [book["row"], book["text"].rpartition(" ")[2], *parts, f"{book['seconds']:.0f}"]


if __name__ == "__main__":
    main()
