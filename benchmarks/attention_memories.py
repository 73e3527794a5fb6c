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
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Panel, Points, draw_lines, interleaved, opening, parser, peak_extra, ratio, save, shown, table
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
    given = parser(__doc__)
    given.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    given.add_argument("--gated_tokens", type=int, default=8192, help="gated attention reads no longer texts")
    given.add_argument("--segment_tokens", type=int, default=2048, help="of Infini-attention")
    given.add_argument("--window_tokens", type=int, default=512, help="of gated attention")
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--quick", action="store_true")
    options = given.parse_args()
    if options.quick:
        vars(options).update(QUICK)

    torch.manual_seed(0)
    rows = [row for tokens in options.tokens for row in measure(tokens, options)]
    path = save("attention_memories", options, {"heads": HEADS, "width": WIDTH, "rows": rows}, page)
    names = dict.fromkeys(row["attention"] for row in rows)
    lines: dict[str, Points] = {
        name: [(row["tokens"], row["seconds"]) for row in rows if row["attention"] == name] for name in names
    }
    draw_lines(path, [[Panel(f"Attention alone, {HEADS} heads of {WIDTH}", "tokens", "seconds", lines)]])


def measure(tokens: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all kinds of attention over a text of one length."""
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
    """Return a run of Infini-attention, linear rule, four segments at a time; M and z pass from part to part."""
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
    """Return a run of gated attention in which a share of the gates is closed; it counts into `reads[name]`."""
    gates = torch.rand(1, 1, q.shape[2])
    gates = gates.masked_fill(torch.rand_like(gates) < closed, 0)

    def run() -> Tensor:
        output, reads[name] = one_pass(q, k, v, gates, window, SCALING)
        return output

    return run


def page(result: dict[str, Any]) -> str:
    """Format the result as a page."""
    chosen = result["settings"]
    text = (
        f"{HEADS} heads of {WIDTH}, Infini-attention with segments of {chosen['segment_tokens']}, gated attention "
        f"with a window of {chosen['window_tokens']} and threshold 0; {chosen['rounds']} rounds. In brackets the "
        "middle half of the rounds. Pairs are of a query and a key, over all heads, masked ones of a tile included."
    )
    titles = ["attention", "tokens", "seconds", "of full attention", "peak MiB beyond inputs and output", "far skipped"]
    rows = []
    for row in result["rows"]:
        beyond = (row["peak_extra_bytes"] - row["output_bytes"]) / 2**20
        cells = [row["attention"], f"{row['tokens']:,}", f"{row['seconds']:.3f}", shown(row, 3), f"{beyond:.1f}"]
        if "near_pairs" in row:
            pairs = f"{row['near_pairs'] / 1e6:,.0f}, {row['far_pairs'] / 1e6:,.0f}"
        rows.append([*cells, f"{row['skipped_share']:.1%}", pairs] if "near_pairs" in row else [*cells, "", ""])
    lines = opening("Attention with memories beside full attention", result, text)
    lines += table([*titles, "million pairs: near, far"], rows)
    return "\n".join([*lines, "![Time by length](attention_memories.png)", ""])


if __name__ == "__main__":
    main()
