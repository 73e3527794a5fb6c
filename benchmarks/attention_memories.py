"""Infini-attention and gated attention beside full causal attention: time, peak memory, pairs of query and key read.

    python benchmarks/attention_memories.py
    python benchmarks/attention_memories.py --quick    # short texts and windows, to see that it runs

12 heads of 64, one row, float32, no gradients; full attention is torch's own fused one, and Infini-attention reads four
segments at a time. Runs of one length take turns in one process; a ratio is of two runs of the same round. Peak memory
is what a run holds at most beyond its inputs, its output included. Pairs are counted by the attention itself. Results:
attention_memories.json, .md and .png.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import (
    RESULTS,
    about,
    draw_lines,
    interleaved,
    peak_extra,
    ratio,
    shown,
    write_json,
)
from torch import Tensor

from cacheformers.modeling.memories.base import BaseShape
from cacheformers.modeling.memories.infini_attention import (
    InfiniAttentionOptions,
    InfiniParts,
    attend_segments,
    make_parts,
)
from cacheformers.modeling.memories.near_far import Reads, one_pass

HEADS, WIDTH = 12, 64
SCALING = WIDTH**-0.5
CLOSED = (0.0, 0.8, 1.0)  # shares of tokens whose gates are closed, chosen at random
QUICK = {"tokens": [512, 1024], "gated_tokens": 1024, "segment_tokens": 128, "window_tokens": 64, "rounds": 2}


@torch.no_grad()
def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--gated_tokens", type=int, default=8192, help="gated attention reads no longer texts")
    parser.add_argument("--segment_tokens", type=int, default=2048, help="of Infini-attention")
    parser.add_argument("--window_tokens", type=int, default=512, help="of gated attention")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "costs", help="folder for the results")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)

    torch.manual_seed(0)
    rows = []
    for tokens in options.tokens:
        rows += measure(tokens, options)
    settings = {name: str(value) for name, value in vars(options).items() if name != "output"}
    result = {"about": about(), "heads": HEADS, "width": WIDTH, "settings": settings, "rows": rows}
    print(write_json(options.output, "attention_memories", result))
    table = markdown(result)
    (options.output / "attention_memories.md").write_text(table, encoding="utf-8")
    print(table)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row["attention"], []).append((row["tokens"], row["seconds"]))
    title = f"Attention alone, {HEADS} heads of {WIDTH}"
    draw_lines(options.output / "attention_memories.png", title, "tokens", "seconds", lines)


def measure(tokens: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All kinds of attention over a text of one length."""
    q, k, v = (torch.randn(1, HEADS, tokens, WIDTH) for _ in range(3))
    reads: dict[str, Reads] = {}
    runs: dict[str, Callable[[], Any]] = {
        "full": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "Infini": infini(q, k, v, options.segment_tokens),
    }
    if tokens <= options.gated_tokens:
        for closed in CLOSED:
            name = f"gated, {closed:.0%} closed"
            runs[name] = gated(q, k, v, options.window_tokens, closed, reads, name)
    times = interleaved(runs, options.rounds)
    rows = []
    for name, run in runs.items():
        row: dict[str, Any] = {"attention": name, "tokens": tokens, **ratio(times, name, "full")}
        row |= {"peak_extra_bytes": peak_extra(run), "output_bytes": q.nbytes}
        if name in reads:
            read = reads[name]
            row |= {"skipped_share": read.skipped_share, "near_pairs": read.near_pairs, "far_pairs": read.far_pairs}
        rows.append(row | {"times": times[name]})
        print(f"{name}, {tokens:,} tokens: {row['seconds']:.3f} s, {shown(row)} of full attention")
    return rows


def infini(q: Tensor, k: Tensor, v: Tensor, segment_tokens: int) -> Callable[[], Any]:
    """Infini-attention, linear rule, four segments at a time: what goes from one part to the next is M and z."""
    base = BaseShape("llama", HEADS * WIDTH, HEADS, HEADS, WIDTH, 1, 1, segment_tokens, rotary=True)
    options = InfiniAttentionOptions(base=base, layers=(0,), segment_tokens=segment_tokens)
    parts = InfiniParts(**make_parts(options))  # type: ignore[arg-type]

    def run() -> Tensor:
        output, held = torch.empty_like(q), None
        for start in range(0, q.shape[2], 4 * segment_tokens):
            queries, keys, values = (tensor[:, :, start : start + 4 * segment_tokens] for tensor in (q, k, v))
            found, held = attend_segments(options, parts, queries, keys, values, queries, keys, SCALING, held=held)
            output[:, :, start : start + 4 * segment_tokens] = found
        return output

    return run


def gated(
    q: Tensor, k: Tensor, v: Tensor, window: int, closed: float, reads: dict[str, Reads], name: str
) -> Callable[[], Any]:
    """Gated attention in which a share of the tokens has closed gates; what it read goes to `reads[name]`."""
    gates = torch.rand(1, 1, q.shape[2])
    gates = gates.masked_fill(torch.rand_like(gates) < closed, 0)

    def run() -> Tensor:
        output, reads[name] = one_pass(q, k, v, gates, window, SCALING)
        return output

    return run


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    facts, settings = result["about"], result["settings"]
    lines = [
        "# Attention with memories beside full attention",
        "",
        f"`{facts['command']}`",
        "",
        f"Commit {facts['commit']}, {facts['date']}; {facts['processor']}, {facts['machine']}; torch {facts['torch']}. "
        f"{HEADS} heads of {WIDTH}, Infini-attention with segments of {settings['segment_tokens']}, gated attention "
        f"with a window of {settings['window_tokens']} and threshold 0; {settings['rounds']} rounds. In brackets the "
        "middle half of the rounds. Pairs are of a query and a key, over all heads, masked ones of a tile included.",
        "",
        "| attention | tokens | seconds | of full attention | peak MiB beyond inputs and output | far skipped "
        "| million pairs: near, far |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        beyond = (row["peak_extra_bytes"] - row["output_bytes"]) / 2**20
        counted = "near_pairs" in row
        cells = [
            row["attention"],
            f"{row['tokens']:,}",
            f"{row['seconds']:.3f}",
            shown(row, 3),
            f"{beyond:.1f}",
            f"{row['skipped_share']:.1%}" if counted else "",
            f"{row['near_pairs'] / 1e6:,.0f}, {row['far_pairs'] / 1e6:,.0f}" if counted else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "![Time by length](attention_memories.png)", ""])


if __name__ == "__main__":
    main()
