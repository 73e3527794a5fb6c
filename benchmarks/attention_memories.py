"""Time of Infini-attention and gated attention beside full causal attention: 12 heads of 64, one row, no gradients.

    OMP_NUM_THREADS=2 python benchmarks/attention_memories.py

Times are processor seconds over all threads, the least of several runs: on a machine that does other work too they are
steadier than the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from cacheformers.modeling.memories.base import BaseShape
from cacheformers.modeling.memories.infini_attention import (
    InfiniAttentionOptions,
    InfiniParts,
    attend_segments,
    make_parts,
)
from cacheformers.modeling.memories.near_far import one_pass

HEADS, WIDTH = 12, 64
SCALING = WIDTH**-0.5


def seconds(run: Callable[[], Any], times: int = 3) -> float:
    """The least processor time of a few runs."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return min(taken)


def inputs(tokens: int) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, tokens, WIDTH) for _ in range(3)]


def full(tokens: int) -> float:
    """Full causal attention."""
    q, k, v = inputs(tokens)
    return seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))


def infini(tokens: int, segment_tokens: int) -> float:
    """Infini-attention, linear rule."""
    base = BaseShape("llama", HEADS * WIDTH, HEADS, HEADS, WIDTH, 1, 1, segment_tokens, rotary=True)
    options = InfiniAttentionOptions(base=base, layers=(0,), segment_tokens=segment_tokens)
    parts = InfiniParts(**make_parts(options))  # type: ignore[arg-type]
    q, k, v = inputs(tokens)
    return seconds(lambda: attend_segments(options, parts, q, k, v, q, k, SCALING))


def gated(tokens: int, window: int, closed: float) -> float:
    """Gated attention in which a share of the tokens, chosen at random, has closed gates."""
    gates = torch.rand(1, 1, tokens)
    gates = gates.masked_fill(gates < closed, 0)
    q, k, v = inputs(tokens)
    return seconds(lambda: one_pass(q, k, v, gates, window, SCALING))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--infini_tokens", type=int, default=32768)
    parser.add_argument("--segment_tokens", type=int, default=2048)
    parser.add_argument("--gated_tokens", type=int, default=8192)
    parser.add_argument("--window_tokens", type=int, default=512)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("| attention | tokens | seconds | of full attention |\n|---|---|---|---|")
    for tokens, rows in (
        (
            options.infini_tokens,
            {f"Infini, segments of {options.segment_tokens}": lambda n: infini(n, options.segment_tokens)},
        ),
        (
            options.gated_tokens,
            {
                f"gated, window {options.window_tokens}, {closed:.0%} closed": lambda n, closed=closed: gated(
                    n, options.window_tokens, closed
                )
                for closed in (0.0, 0.8, 1.0)
            },
        ),
    ):
        whole = full(tokens)
        print(f"| full | {tokens:,} | {whole:.2f} | 1 |")
        runs: Mapping[str, Callable[..., float]] = rows
        for name, run in runs.items():
            taken = run(tokens)
            print(f"| {name} | {tokens:,} | {taken:.2f} | {taken / whole:.3f} |")


if __name__ == "__main__":
    main()
