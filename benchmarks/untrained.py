"""What an untrained base finds by retrieval: passkeys in a text, by what finds its segments and where they are read.

    cacheformers fetch
    python benchmarks/untrained.py --lengths 4096 8192 16384
    python benchmarks/untrained.py --filler ../shared/data/books/test.jsonl.gz

A text is read once, by its windows and the first segment (`reading_retrieves`); then every row asks in its own way.
Each case is saved as it is done, and a run that was stopped goes on from there. Results: untrained.json and .md.
"""

from __future__ import annotations

import argparse
import copy
import json
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
from cacheformers.evaluation.passkey.prompts import NEEDLES, REPEAT, Case, PromptMaker, load_filler, make_cases
from cacheformers.methods.cacheformer.representatives import represent
from cacheformers.methods.cacheformer.shelf import Shelf
from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap
from cacheformers.modeling.method import active_options
from cacheformers.modeling.rotary import rotation

Settings = dict[str, Any]
CACHE: Settings = {
    **{"long": False, "overlap": False, "window_tokens": 256, "pool_tokens": 32, "topk": 16, "sink": True},
    **{"select_rows": 8, "representatives": "mean"},
}
FOUR: Settings = {"representatives": "tokens", "pool_vectors": 4}
READING: Settings = {**CACHE, **FOUR, "packed": True, "reading_retrieves": False}
SINKS: Settings = {"local_window": "sliding", "segment_tokens": 128, "window_tokens": 892, "sink_tokens": 4}
ROWS: dict[str, Settings] = {  # at most 1,024 columns at a token, but for the first
    "window of 512 and the first segment": {**READING, "topk": 1},
    "mean, true distance": CACHE,
    "mean, at most 512 away": {**CACHE, "far_distance": 512},
    "mean, at most 64 away": {**CACHE, "far_distance": 64},
    "mean, packed": {**CACHE, "packed": True},
    "tokens, packed": {**CACHE, **FOUR, "packed": True},
    "bounds, packed": {**CACHE, "representatives": "bounds", "packed": True},
}


def main() -> None:
    """Ask for every key, and print the tables of all that was measured."""
    arguments = parser(__doc__, ".")
    arguments.add_argument("--base", default="data/smollm2-135m-instruct", help="(default: %(default)s)")
    arguments.add_argument("--lengths", type=int, nargs="+", default=[4096], help="tokens of a prompt")
    arguments.add_argument("--cases", type=int, default=10, help="passkeys of a length (default: %(default)s)")
    arguments.add_argument("--filler", default=REPEAT, help="around passkeys (default: %(default)s)")
    arguments.add_argument("--reader", default="retrieval", choices=("retrieval", "sinks", "full"), help="who is asked")
    options = arguments.parse_args()
    torch.set_grad_enabled(False)
    file = options.output / "untrained.json"
    found = json.loads(file.read_text())["found"] if file.exists() else {}
    tokenizer: Any = AutoTokenizer.from_pretrained(options.base)
    filler = load_filler(options.filler, "text", tokenizer, max(options.lengths))
    maker = PromptMaker(NEEDLES["passkey"], filler, tokenizer, 0)
    model: Any = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.bfloat16).eval()
    rows: dict[str, Settings | None] = {"full attention": None}
    if options.reader == "sinks":
        rows = {"sinks and window of 1,024": None}
        model = get_peft_model(
            model, cacheformers.WindowedAdapterConfig(task_type="CAUSAL_LM", target_modules=[], **SINKS)
        ).eval()
    if options.reader == "retrieval":
        rows = {**ROWS}
        model = get_peft_model(
            model, cacheformers.CacheFormerAdapterConfig(task_type="CAUSAL_LM", target_modules=[], **READING)
        ).eval()
    around = "grass" if options.filler == REPEAT else "book"
    reading = active_options(find_decoder(unwrap(model)))
    for case, memory in memories(model, maker, options, f"{around}, {next(iter(rows))}", found):
        for name, row in rows.items():
            twin = copied(memory) if row is None else asking_by(model, memory, row)
            known = {"row": name, "around": around, "length": case.length, "depth": case.depth}
            found[f"{around}, {name}, {case.id}"] = {**known, **ask(model, maker, case, twin)}
        if options.reader == "retrieval":
            use(model, reading)
        save("untrained", options, {"found": found})
    print("\n".join(page(list(found.values()))))


def memories(
    model: Any, maker: PromptMaker, options: argparse.Namespace, name: str, found: dict[str, Any]
) -> Iterator[tuple[Case, Any]]:
    """Yield each case that was not asked before, and a memory of its text; what texts have in common is read once."""
    depths = [100 * (place + 0.5) / options.cases for place in range(options.cases)]
    for length in options.lengths:
        left = [c for c in make_cases(maker.wording, [length], depths, 1, 0) if f"{name}, {c.id}" not in found]
        stem, read = None, 0
        for case, following in zip(left, [*left[1:], None], strict=True):
            ids = maker(case).read
            common = 0 if following is None else shared(ids, maker(following).read)
            if common > read:
                stem, read = go_on(model, ids[read:common], stem), common
            if common < read:
                stem, read = None, 0
            yield case, go_on(model, ids[read:], copied(stem))


def copied(memory: Any) -> Any:
    """Copy a memory or a cache of transformers."""
    return memory.clone() if isinstance(memory, cacheformers.MemoryCache) else copy.deepcopy(memory)


def use(model: Any, options: Any) -> None:
    """Make the layers of a model attend by other options."""
    attentions: Any = attention_modules(find_decoder(unwrap(model)))
    for layer in options.layers:
        attentions[layer].memory.adapter_options["default"] = options


def asking_by(model: Any, memory: Any, settings: Settings) -> Any:
    """Return a copy of a memory whose segments are found and placed by other settings, as the model then does."""
    decoder, twin = find_decoder(unwrap(model)), memory.clone()
    options: Any = cacheformers.CacheFormerAdapterConfig(**settings).resolve(active_options(decoder).base)
    twin.signature, rotate = options.signature, rotation(decoder)
    assert rotate is not None
    use(model, options)
    for layer in options.layers:
        state, size, keys = twin.state.layers[layer], options.pool_tokens, memory.state.layers[layer].shelves["keys"]
        state.options, state.chooser = options, state.new_chooser(options, keys.whole)
        state.chooser.choose_oldest(torch.tensor([state.tokens_read]), state.tokens_read[0] // size)
        if options.representatives != "tokens":
            segments = state.tokens_read[0] // size
            plain = rotate(keys.whole[:, :, : segments * size], -torch.arange(segments * size)[None], layer)
            parts = represent(options.representatives, 1, plain.unflatten(2, (segments, size)), None)
            state.shelves["long_keys"], state.tail = Shelf(parts), state.tail[:2]
    return twin


def shared(left: list[int], right: list[int]) -> int:
    """Return how many tokens at the beginning are the same."""
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def go_on(model: Any, ids: list[int], memory: Any) -> Any:
    """Read more of a text."""
    if active_options(find_decoder(unwrap(model))) is not None:
        return cacheformers.read(model, [ids], progress=False, memory=memory)
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
    state: Any = getattr(memory, "state", None)
    if getattr(state, "layers", None) and state.layers[0].chooser is not None:
        needle = maker.parts(case)[1]
        first = next(place for place in range(len(prompt.read)) if prompt.read[place : place + len(needle)] == needle)
        rates = hits(state, len(key) + 1, first, first + len(needle))
        upper = rates[len(rates) // 2 :]
        result |= {"hit_rate": round(mean(rates), 3), "upper_hit_rate": round(mean(upper), 3)}
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


def page(cases: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the tables of all that was measured."""
    lines = []
    for around in dict.fromkeys(case["around"] for case in cases):
        shown = []
        for length in sorted({case["length"] for case in cases if case["around"] == around}):
            for row in dict.fromkeys(case["row"] for case in cases):
                own = [c for c in cases if (c["row"], c["around"], c["length"]) == (row, around, length)]
                if own:
                    shown.append([row, f"{length:,}", *passkey_cells(own)])
        titles = [f"passkeys, {around}", "tokens", "found", "loss", "hit rate", "hit rate, upper half"]
        lines += table(titles, shown)
    return lines


def passkey_cells(own: list[dict[str, Any]]) -> list[str]:
    """Return the cells of one row and length."""
    rates = [
        f"{mean(case[rate] for case in own):.2f}" if rate in own[0] else "-" for rate in ("hit_rate", "upper_hit_rate")
    ]
    return [
        f"{sum(case['found'] for case in own)} of {len(own)}",
        f"{mean(case['loss'] for case in own):.2f}",
        *rates,
    ]


if __name__ == "__main__":
    main()
