"""What CacheFormer's attention costs beside full causal attention: 12 heads of 64, window 128, one row, float32.

    python benchmarks/attention_cacheformer.py             # lengths to 64K
    python benchmarks/attention_cacheformer.py --quick     # to see that it works

Attention alone, of rotated queries and keys: norms, pooling and the choice of segments are in it, projections are not;
keys are values, but on a pretrained layer. Runs that are compared take turns in one process; a ratio is of two runs of
the same round. A decoding step is the mean of a window of steps, so that what happens once a window or block has its
share.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from cacheformers.benchmarks.measuring import (
    RESULTS,
    about,
    draw_lines,
    interleaved,
    peak_extra,
    ratio,
    shown,
    write_json,
)
from cacheformers.modeling.memories.cacheformer import CacheFormerOptions, CacheFormerParts, Projected, make_parts
from cacheformers.modeling.memories.cacheformer_attention import attend
from cacheformers.modeling.memories.cacheformer_state import CacheFormerState

HEADS, WIDTH, WINDOW = 12, 64, 128
NUMBER = 4  # bytes
PIECE = 4096  # tokens that a decoding state is filled with at a time
PAPER = CacheFormerOptions(HEADS, HEADS, WIDTH, WINDOW, overlap=False)  # s 16, r_s 4, k 7
OVERLAP = replace(PAPER, overlap=True)
CONSTANT = replace(PAPER, pool_tokens=WINDOW, pool_vectors=1, topk=2)
PRETRAINED = replace(PAPER, pretrained=True, tied=False, local_norm=False, global_norm=False)
SHAPES = {"s 128, r 1, k 2": CONSTANT, "s 16, r 4, k 7": PAPER, "s 16, r 4, k 7, overlap": OVERLAP}
BRANCHES = {
    "short": replace(PAPER, long=False, cache=False),
    "short, long (Transformer-LS)": replace(PAPER, cache=False),
    "short, long, overlap": replace(OVERLAP, cache=False),
    "short, long, cache": PAPER,
    "short, long, cache by prefix": replace(PAPER, selection="prefix"),
    "short, long, cache by token": replace(PAPER, selection="token"),
    "short, long, overlap, cache": OVERLAP,
}
Times = dict[str, list[float]]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--training_lengths", type=int, nargs="+", default=[4096, 16384], help="forward and backward")
    parser.add_argument("--decode", type=int, nargs="+", default=[4096, 16384, 65536], help="tokens read before a step")
    parser.add_argument("--at", type=int, default=16384, help="length of the branches' prices and of peak memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="short texts, a round")
    parser.add_argument("--output", type=Path, default=RESULTS / "costs", help="folder for attention_cacheformer.*")
    options = parser.parse_args()
    if options.quick:
        options.lengths, options.training_lengths, options.decode = [512, 1024, 2048], [1024], [512, 2048]
        options.at, options.rounds = 1024, 1
    torch.manual_seed(0)
    settings = {name: str(value) for name, value in vars(options).items()}
    result = {
        "about": about(),
        "options": settings,
        "threads": torch.get_num_threads(),
        "forward": [row for tokens in options.lengths for row in beside_sdpa(tokens, options.rounds)],
        "training": [row for n in options.training_lengths for row in beside_sdpa(n, options.rounds, training=True)],
        "growth": growth(options.at // 2, options.rounds),
        "memory": [row for training in (False, True) for row in memory(options.at, training)],
        "branches": branches(options.at, options.rounds),
        "decode": decode(options.decode, options.rounds),
    }
    report = markdown(result)
    print(report)
    path = write_json(options.output, "attention_cacheformer", result)
    path.with_suffix(".md").write_text(report, encoding="utf-8")
    draw(path.with_suffix(".png"), result)
    print(f"Written to {path.with_suffix('')}.json, .md and .png")


# What is measured


def columns(options: CacheFormerOptions, tokens: int) -> float:
    """How many columns a token sees on average in a text of so many; full attention has tokens / 2."""
    compressed = (options.long + options.overlap) * tokens * options.pool_vectors / (2 * options.pool_tokens)
    return 1.5 * options.window_tokens + compressed + options.cache * options.retrieved * options.pool_tokens


def attention(options: CacheFormerOptions | None, tokens: int, training: bool = False) -> Callable[[], None]:
    """A run of CacheFormer's attention, or of full causal attention, over a text; its gradients too in training."""
    q, k, v, gradient = (torch.randn(1, HEADS, tokens, WIDTH) for _ in range(4))
    leaves = [tensor.requires_grad_(training) for tensor in (q, k, v)]
    parts = CacheFormerParts() if options is None else make(options)

    def run() -> None:
        with torch.set_grad_enabled(training):
            if options is None:
                output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                output = attend(options, parts, Projected(q, k, None if options.tied else v))
        if training:
            output.backward(gradient)
            for leaf in leaves:
                leaf.grad = None

    return run


def make(options: CacheFormerOptions) -> CacheFormerParts:
    """What a layer trains."""
    return CacheFormerParts(**make_parts(options))  # type: ignore[arg-type]


def beside_sdpa(tokens: int, rounds: int, training: bool = False) -> list[dict[str, Any]]:
    """Each shape's time over that of full attention, and what the columns that they see would say."""
    runs = {"sdpa": attention(None, tokens, training)}
    runs |= {name: attention(options, tokens, training) for name, options in SHAPES.items()}
    times = interleaved(runs, rounds)
    rows = []
    for name, options in SHAPES.items():
        model = columns(options, tokens) / (tokens / 2)
        found = ratio(times, name, "sdpa")
        rows.append({"shape": name, "tokens": tokens, "model": model, "of_model": found["ratio"] / model, **found})
        rows[-1]["sdpa_seconds"] = statistics.median(times["sdpa"])
        print(f"{tokens:,} tokens{', with gradients' if training else ''}, {name}: {shown(found)} of SDPA", flush=True)
    return rows


def growth(tokens: int, rounds: int) -> dict[str, Any]:
    """The time of twice the tokens over that of so many, where reads hardly grow."""
    runs = {"once": attention(CONSTANT, tokens), "twice": attention(CONSTANT, 2 * tokens)}
    return {"tokens": tokens, **ratio(interleaved(runs, rounds), "twice", "once")}


def memory(tokens: int, training: bool) -> list[dict[str, Any]]:
    """Bytes that a run takes at most, over those of full attention: beyond its inputs, and with them."""
    shapes = {**SHAPES, "the same on a pretrained layer": PRETRAINED}
    peaks, inputs = {}, {}
    for name, options in {"sdpa": None, **shapes}.items():
        run = attention(options, tokens, training)
        run()
        peaks[name] = max(peak_extra(run), 1)
        given = 2 if options is not None and options.tied else 3  # queries, keys, values; in training the gradient too
        inputs[name] = (given + training) * tokens * HEADS * WIDTH * NUMBER
    whole = {name: peaks[name] + inputs[name] for name in peaks}
    return [
        {"shape": name, "training": training, "bytes": peaks[name], "ratio": peaks[name] / peaks["sdpa"]}
        | {"bytes_with_inputs": whole[name], "ratio_with_inputs": whole[name] / whole["sdpa"]}
        for name in shapes
    ]


def branches(tokens: int, rounds: int) -> list[dict[str, Any]]:
    """What each branch adds, as a share of the window's own time, forward and with gradients."""
    found: dict[str, Times] = {}
    for kind in ("forward", "training"):
        runs = {name: attention(options, tokens, kind == "training") for name, options in BRANCHES.items()}
        found[kind] = interleaved(runs, rounds)
    return [
        {"branches": name, **{kind: ratio(times, name, "short") for kind, times in found.items()}} for name in BRANCHES
    ]


@torch.no_grad()
def decode(lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    """The time of a new token by what was read before, and the bytes of keys that it reads."""
    runs = {f"{name}|{read}": steps(options, read) for name, options in SHAPES.items() for read in lengths}
    runs |= {f"sdpa|{read}": full_step(read) for read in lengths}
    times = interleaved(runs, rounds)
    rows = []
    for name in (*SHAPES, "sdpa"):
        for read in lengths:
            found = ratio(times, f"{name}|{read}", f"{name}|{lengths[0]}")
            found["seconds"] /= WINDOW
            rows.append({"shape": name, "read": read, "bytes": bytes_read(SHAPES.get(name), read), **found})
    return rows


def bytes_read(options: CacheFormerOptions | None, read: int) -> float:
    """Keys (and values, where they are others) that a step looks at after so many tokens."""
    if options is None:
        return 2.0 * read * HEADS * WIDTH * NUMBER
    return (2 * columns(options, read) - columns(options, 0)) * HEADS * WIDTH * NUMBER  # compressed: all, not half


def steps(options: CacheFormerOptions, read: int) -> Callable[[], None]:
    """A window of new tokens, one by one, after a text of so many."""
    state, parts = CacheFormerState(options, 1, torch.float32), make(options)
    for start in range(0, read, PIECE):
        state.attend(parts, Projected(*torch.randn(2, 1, HEADS, min(PIECE, read - start), WIDTH)))
    new = Projected(*torch.randn(2, 1, HEADS, 1, WIDTH))

    @torch.no_grad()
    def run() -> None:
        for _ in range(WINDOW):
            state.attend(parts, new)

    return run


def full_step(read: int) -> Callable[[], None]:
    """The same with full attention."""
    q, k, v = torch.randn(1, HEADS, 1, WIDTH), *torch.randn(2, 1, HEADS, read, WIDTH)

    def run() -> None:
        for _ in range(WINDOW):
            F.scaled_dot_product_attention(q, k, v)

    return run


# What is shown


def markdown(result: dict[str, Any]) -> str:
    """Every number as tables."""
    facts, at = result["about"], int(result["options"]["at"])
    parts = [
        "# CacheFormer's attention beside full attention\n",
        f"12 heads x 64, window 128, one row, float32, {result['threads']} thread(s); medians of "
        f"{result['options']['rounds']} rounds, the middle half in brackets. SDPA is torch's causal attention.\n",
        f"```\n{facts['command']}\n```\n",
        f"{facts['date']}, commit {facts['commit']}, {facts['processor']}, torch {facts['torch']}.\n",
    ]
    for kind, title in (("forward", "Forward"), ("training", "Forward and backward")):
        titles = ["shape", "tokens", "of SDPA", "columns / (n/2)", "measured / columns", "seconds", "SDPA's"]
        rows = [
            [row["shape"], f"{row['tokens']:,}", shown(row), f"{row['model']:.3f}", f"{row['of_model']:.2f}"]
            + [f"{row['seconds']:.3f}", f"{row['sdpa_seconds']:.3f}"]
            for row in result[kind]
        ]
        parts.append(section(title, titles, rows))
    grown = result["growth"]
    twice = f"{grown['tokens']:,} to {2 * grown['tokens']:,} tokens, s 128, r 1, k 2: {shown(grown)} times the time.\n"
    parts.append(f"## Twice the text\n\n{twice}")
    rows = [
        [row["shape"], "forward and backward" if row["training"] else "forward", f"{row['bytes'] / 2**20:.0f}"]
        + [f"{row['ratio']:.2f}", f"{row['ratio_with_inputs']:.2f}"]
        for row in result["memory"]
    ]
    titles = ["shape", "", "MiB beyond the inputs", "of SDPA's", "with the inputs"]
    parts.append(section(f"Peak memory, {at:,} tokens", titles, rows))
    rows = [[row["branches"], shown(row["forward"]), shown(row["training"])] for row in result["branches"]]
    titles = ["branches (s 16, r 4, k 7)", "forward, of the window alone", "and backward"]
    parts.append(section(f"The price of each branch, {at:,} tokens", titles, rows))
    rows = [
        [row["shape"], f"{row['read']:,}", f"{1000 * row['seconds']:.3f}", f"{row['bytes'] / 2**20:.2f}", shown(row)]
        for row in result["decode"]
    ]
    titles = ["shape", "tokens read", "ms a token", "MiB read", "of the first length"]
    return "\n".join([*parts, section("Decoding", titles, rows)])


def section(title: str, titles: list[str], rows: list[list[str]]) -> str:
    """A heading and a table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join([f"## {title}\n", *(f"| {' | '.join(line)} |" for line in lines), ""])


def draw(path: Path, result: dict[str, Any]) -> None:
    """Time of a forward by length, each shape and full attention."""
    lines = {name: [(r["tokens"], r["seconds"]) for r in result["forward"] if r["shape"] == name] for name in SHAPES}
    first = next(iter(SHAPES))
    lines["full attention (SDPA)"] = [
        (row["tokens"], row["sdpa_seconds"]) for row in result["forward"] if row["shape"] == first
    ]
    draw_lines(path, "CacheFormer's attention, 12 heads x 64", "tokens", "seconds, forward", lines)


if __name__ == "__main__":
    main()
