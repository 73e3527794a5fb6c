"""Memories inside attention beside full causal attention: time, peak memory, pairs of query and key that are read.

    python benchmarks/attention.py                                      # an hour on one core
    python benchmarks/attention.py --training --tokens 4096 16384       # forward and backward
    python benchmarks/attention.py --quick                              # short texts, to see that it runs

12 heads of 64, one row, random numbers; full attention is torch's own fused one, and Infini-attention goes from
segment to segment. Runs of one length take turns in one process; a ratio is of two runs of the same round. Peak memory
is what a run holds at most beyond its inputs, its output included. Gated attention counts its pairs itself. Results:
attention.json, .md and .png (--training: attention_training).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Panel, Points, draw_lines, interleaved, opening, parser, peak_extra, ratio, save, shown, table
from torch import Tensor

from cacheformers.methods import infini_attention
from cacheformers.methods.cacheformer import cacheformer
from cacheformers.methods.cacheformer.attention import attend
from cacheformers.methods.gated_attention.near_far import Reads, one_pass
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.memory import BaseShape

HEADS, WIDTH = 12, 64
SCALING = WIDTH**-0.5
CLOSED = (0.0, 0.8, 1.0)  # shares of tokens whose gates are closed, chosen at random
PAPER = cacheformer.CacheFormerOptions(
    heads=HEADS, kv_heads=HEADS, head_dim=WIDTH, window_tokens=128, overlap=False
)  # s 16, r 4, k 7
CACHEFORMERS = {
    "window alone": replace(PAPER, long=False, cache=False),
    "Transformer-LS": replace(PAPER, cache=False),
    "s 128, r 1, k 2": replace(PAPER, pool_tokens=128, pool_vectors=1, topk=2),
    "s 16, r 4, k 7": PAPER,
    "s 16, r 4, k 7, overlap": replace(PAPER, overlap=True),
    "s 16, r 4, k 7, by token": replace(PAPER, selection="token"),
}
QUICK = {"tokens": [512, 1024], "gated_tokens": 1024, "segment_tokens": 128, "window_tokens": 64, "rounds": 2}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    """Measure, print, write."""
    given = parser(__doc__)
    given.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    given.add_argument("--training", action="store_true", help="with gradients of queries, keys and values")
    given.add_argument("--gated_tokens", type=int, default=8192, help="gated attention reads no longer texts")
    given.add_argument("--segment_tokens", type=int, default=2048, help="of Infini-attention")
    given.add_argument("--window_tokens", type=int, default=512, help="of gated attention")
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="a GPU measures in bfloat16")
    given.add_argument("--quick", action="store_true")
    options = given.parse_args()
    if options.quick:
        vars(options).update(QUICK)

    torch.manual_seed(0)
    rows = [row for tokens in options.tokens for row in measure(tokens, options)]
    name = "attention_training" if options.training else "attention"
    path = save(name, options, {"heads": HEADS, "width": WIDTH, "rows": rows}, page)
    lines: dict[str, Points] = {}
    for row in rows:
        lines.setdefault(row["attention"], []).append((row["tokens"], row["seconds"]))
    draw_lines(path, [[Panel(f"Attention alone, {HEADS} heads of {WIDTH}", "tokens", "seconds", lines)]])


def measure(tokens: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all kinds of attention over a text of one length."""
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    q, k, v, gradient = (torch.randn(1, HEADS, tokens, WIDTH, device=options.device, dtype=dtype) for _ in range(4))
    leaves = [tensor.requires_grad_(options.training) for tensor in (q, k, v)]
    reads: dict[str, Reads] = {}

    def run(attention: Attention) -> None:
        with torch.set_grad_enabled(options.training):
            output = attention(q, k, v)
        if options.training:
            output.backward(gradient)
            for leaf in leaves:
                leaf.grad = None

    found = kinds(tokens, options, reads)
    runs = {name: lambda attention=attention: run(attention) for name, attention in found.items()}
    times = interleaved(runs, options.rounds, options.device)
    rows = []
    for name, timed in runs.items():
        row: dict[str, Any] = {"attention": name, "tokens": tokens, **ratio(times, name, "full")}
        row |= {"peak_extra_bytes": peak_extra(timed, options.device), "output_bytes": q.nbytes}
        if name in reads:
            read = reads[name]
            row |= {"skipped_share": read.skipped_share, "near_pairs": read.near_pairs, "far_pairs": read.far_pairs}
        rows.append(row)
        print(f"{name}, {tokens:,} tokens: {row['seconds']:.3f} s, {shown(row)} of full attention", flush=True)
    return rows


def kinds(tokens: int, options: argparse.Namespace, reads: dict[str, Reads]) -> dict[str, Attention]:
    """Return each kind of attention by name; gated attention puts what it has read into `reads`."""
    found: dict[str, Attention] = {
        "full": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "Infini": infini(options),
    }
    for name, chosen in CACHEFORMERS.items():
        found[f"CacheFormer, {name}"] = compressed(chosen, options.device)
    for closed in CLOSED if tokens <= options.gated_tokens else ():
        name = f"gated, {closed:.0%} closed"
        found[name] = gated(tokens, closed, options, reads, name)
    return found


def infini(options: argparse.Namespace) -> Attention:
    """Return Infini-attention, linear rule, segment by segment; M and z pass from segment to segment."""
    size = options.segment_tokens
    base = BaseShape("llama", HEADS * WIDTH, HEADS, HEADS, WIDTH, 1, 1, size, rotary=True)
    chosen = infini_attention.InfiniAttentionOptions(base=base, layers=(0,), segment_tokens=size)
    made = {name: module.to(options.device) for name, module in infini_attention.make_parts(chosen).items()}
    parts = infini_attention.InfiniParts(**made)  # type: ignore[arg-type]  # modules by name

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        memory = MemoryCache(chosen.new_state(1, {0: q.device}, q.dtype), chosen.window, 1, {})
        outputs = []
        for queries, keys, values in zip(*(tensor.split(size, 2) for tensor in (q, k, v)), strict=True):
            memory.close(memory.timeline.full_rows(), None)
            call = memory.begin(torch.ones(1, queries.shape[2], dtype=torch.bool))
            near = F.scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(1, 2)
            inputs: Any = SimpleNamespace(local=near, plain_query=queries, plain_key=keys, new_value=values, call=call)
            outputs.append(infini_attention.attend(chosen, 0, parts, inputs))
            memory.end(call)
        return torch.cat(outputs, 1).transpose(1, 2)

    return attention


def compressed(chosen: cacheformer.CacheFormerOptions, device: str) -> Attention:
    """Return CacheFormer's attention, whose keys are its values."""
    made = {name: module.to(device) for name, module in cacheformer.make_parts(chosen).items()}
    parts = cacheformer.CacheFormerParts(**made)  # type: ignore[arg-type]  # as above
    return lambda q, k, v: attend(chosen, parts, cacheformer.Projected(q, k, None))


def gated(tokens: int, closed: float, options: argparse.Namespace, reads: dict[str, Reads], name: str) -> Attention:
    """Return gated attention in which a share of the gates is closed; it puts what it has read into `reads[name]`."""
    gates = torch.rand(1, 1, tokens, device=options.device)
    gates = gates.masked_fill(torch.rand_like(gates) < closed, 0)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output, reads[name] = one_pass(q, k, v, gates, options.window_tokens, SCALING)
        return output

    return attention


def page(result: dict[str, Any]) -> str:
    """Format the result as a page."""
    chosen = result["settings"]
    text = (
        f"{HEADS} heads of {WIDTH}, Infini-attention with segments of {chosen['segment_tokens']}, gated attention "
        f"with a window of {chosen['window_tokens']} and threshold 0, CacheFormer with one of 128; {chosen['rounds']} "
        "rounds. In brackets the middle half of the rounds. Pairs are of a query and a key, over all heads, masked "
        "ones of a tile included."
    )
    titles = ["attention", "tokens", "seconds", "of full attention", "peak MiB beyond inputs and output", "far skipped"]
    rows = []
    for row in result["rows"]:
        beyond = (row["peak_extra_bytes"] - row["output_bytes"]) / 2**20
        cells = [row["attention"], f"{row['tokens']:,}", f"{row['seconds']:.3f}", shown(row, 3), f"{beyond:.1f}"]
        if "near_pairs" in row:
            cells += [f"{row['skipped_share']:.1%}", f"{row['near_pairs'] / 1e6:,.0f}, {row['far_pairs'] / 1e6:,.0f}"]
        rows.append([*cells, "", ""][:7])
    name = "attention_training" if chosen["training"] == "True" else "attention"
    lines = opening("Attention with memories beside full attention", result, text)
    lines += table([*titles, "million pairs: near, far"], rows)
    return "\n".join([*lines, f"![Time by length]({name}.png)", ""])


if __name__ == "__main__":
    main()
