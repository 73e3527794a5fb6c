"""Measure what a gated attention with fixed heads holds, by how many heads see everything.

    python benchmarks/fixed_heads.py
    python benchmarks/fixed_heads.py --quick    # a short text, to see that it runs

A Llama of 4 layers with 12 heads of 64 and random weights, which make no difference to memory; every layer is gated,
with a window of 512 tokens. "Gates decide" keeps every key and value, since a gate may open later. Process memory is
what the process holds beyond what it held before reading. Results: fixed_heads.json, .md and .png.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from measuring import Panel, draw_lines, opening, parser, save, table, trimmed
from models import Shape, base_model
from peft import get_peft_model
from torch import nn
from transformers import LlamaConfig

import cacheformers
from cacheformers.modeling.memories.gated_state import GatedState

LAYERS, KV_HEADS, VOCABULARY = 4, 12, 512
FAR = (None, 6, 3, 0)  # kv heads of each layer that see everything; None: gates decide


@torch.no_grad()
def main() -> None:
    """Measure, print, write."""
    given = parser(__doc__)
    given.add_argument("--tokens", type=int, default=16384)
    given.add_argument("--segment_tokens", type=int, default=1024)
    given.add_argument("--window_tokens", type=int, default=512)
    given.add_argument("--quick", action="store_true")
    options = given.parse_args()
    if options.quick:
        vars(options).update(tokens=1024, segment_tokens=256, window_tokens=128)

    rows = []
    for far in FAR:
        rows.append({"far_heads": far, **read(far, options)})
        last = rows[-1]["samples"][-1]
        print(f"{title(far)}: {last['state_bytes'] / 2**20:.1f} MiB held, {rows[-1]['seconds']:.0f} s")
    path = save("fixed_heads", options, {"layers": LAYERS, "kv_heads": KV_HEADS, "rows": rows}, page)
    lines = {title(row["far_heads"]): [(s["tokens"], s["state_bytes"] / 2**20) for s in row["samples"]] for row in rows}
    draw_lines(path, [[Panel("Keys and values held", "tokens read", "MiB", lines)]], log=False)


def read(far: int | None, options: argparse.Namespace) -> dict[str, Any]:
    """Read a text segment by segment, and record memory after each."""
    model = gated_model(far, options)
    ids = torch.randint(0, VOCABULARY, (1, options.tokens))
    model(input_ids=ids[:, :1], logits_to_keep=1)  # a first forward allocates what stays
    before, start, samples = trimmed(), time.perf_counter(), []
    memory = cacheformers.new_memory(model, 1)
    for segment in ids.split(options.segment_tokens, 1):
        model(input_ids=segment, past_key_values=memory, logits_to_keep=1)
        sizes = {"state_bytes": memory.nbytes, "process_bytes": trimmed() - before}
        samples.append({"tokens": memory.tokens_read[0], **sizes})
    seconds, state = time.perf_counter() - start, memory.state
    assert isinstance(state, GatedState)
    far_pairs = sum(reads.far_pairs for reads in state.reads.values())
    return {"seconds": seconds, "far_pairs": far_pairs, "samples": samples}


def gated_model(far: int | None, options: argparse.Namespace) -> nn.Module:
    """Build a random base with gates in every layer; `far` heads of each layer see everything for good."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS,
        max_position_embeddings=options.tokens,
    )
    adapter = cacheformers.GatedAttentionAdapterConfig(
        target_modules=[],
        segment_tokens=options.segment_tokens,
        window_tokens=options.window_tokens,
        far_heads=None if far is None else {layer: list(range(far)) for layer in range(LAYERS)},
    )
    return get_peft_model(base_model(Shape(config, 0), torch.float32), adapter).eval()


def title(far: int | None) -> str:
    return "gates decide" if far is None else f"{far} of {KV_HEADS} heads far"


def page(result: dict[str, Any]) -> str:
    """Format the result as a page."""
    chosen, whole = result["settings"], result["rows"][0]["samples"][-1]
    text = (
        f"{LAYERS} layers of {KV_HEADS} heads of 64, float32, window {chosen['window_tokens']}, segments of "
        f"{chosen['segment_tokens']}; after {whole['tokens']:,} tokens. Times are of one run each."
    )
    titles = ["", "keys and values held, MiB", "of gates decide", "process, MiB more than before", "of gates decide"]
    rows = []
    for row in result["rows"]:
        last, cells = row["samples"][-1], [title(row["far_heads"])]
        for name in ("state_bytes", "process_bytes"):
            cells += [f"{last[name] / 2**20:.1f}", f"{last[name] / whole[name]:.3f}"]
        rows.append([*cells, f"{row['far_pairs'] / 1e6:,.0f}", f"{row['seconds']:.0f}"])
    lines = opening("Gated attention with fixed heads: memory", result, text)
    lines += table([*titles, "million pairs of query and far key", "seconds"], rows)
    return "\n".join([*lines, "![Held by tokens read](fixed_heads.png)", ""])


if __name__ == "__main__":
    main()
