"""Memory of gated attention whose heads are fixed: what is held after so many tokens, by how many heads see everything.

    python benchmarks/fixed_heads.py
    python benchmarks/fixed_heads.py --quick    # a short text, to see that it runs

A Llama of 4 layers with 12 heads of 64 and random weights, which make no difference to memory; every layer is gated,
with a window of 512 tokens. "Gates decide" keeps every key and value, since a gate may open later. Process memory is
what the process holds beyond what it held before reading. Results: fixed_heads.json, .md and .png.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, about, draw_lines, held, write_json
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--segment_tokens", type=int, default=1024)
    parser.add_argument("--window_tokens", type=int, default=512)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "costs", help="folder for the results")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(tokens=1024, segment_tokens=256, window_tokens=128)

    rows = []
    for far in FAR:
        rows.append({"far_heads": far, **read(far, options)})
        last = rows[-1]["samples"][-1]
        print(f"{title(far)}: {last['state_bytes'] / 2**20:.1f} MiB held, {rows[-1]['seconds']:.0f} s")
    settings = {name: str(value) for name, value in vars(options).items() if name != "output"}
    result = {"about": about(), "layers": LAYERS, "kv_heads": KV_HEADS, "settings": settings, "rows": rows}
    print(write_json(options.output, "fixed_heads", result))
    table = markdown(result)
    (options.output / "fixed_heads.md").write_text(table, encoding="utf-8")
    print(table)
    lines = {
        title(row["far_heads"]): [(sample["tokens"], sample["state_bytes"] / 2**20) for sample in row["samples"]]
        for row in rows
    }
    draw_lines(options.output / "fixed_heads.png", "Keys and values held", "tokens read", "MiB", lines, log=False)


def read(far: int | None, options: argparse.Namespace) -> dict[str, Any]:
    """Read a text segment by segment, and look at memory after each."""
    model = gated_model(far, options)
    ids = torch.randint(0, VOCABULARY, (1, options.tokens))
    model(input_ids=ids[:, :1], logits_to_keep=1)  # whatever a first forward sets up
    ctypes.CDLL(None).malloc_trim(0)
    before, start, samples = held("VmRSS"), time.perf_counter(), []
    memory = cacheformers.new_memory(model, 1)
    for segment in ids.split(options.segment_tokens, 1):
        model(input_ids=segment, past_key_values=memory, logits_to_keep=1)
        ctypes.CDLL(None).malloc_trim(0)
        process = held("VmRSS") - before
        samples.append({"tokens": memory.tokens_read[0], "state_bytes": memory.nbytes, "process_bytes": process})
    seconds, state = time.perf_counter() - start, memory.state
    assert isinstance(state, GatedState)
    far_pairs = sum(reads.far_pairs for reads in state.reads.values())
    return {"seconds": seconds, "far_pairs": far_pairs, "samples": samples}


def gated_model(far: int | None, options: argparse.Namespace) -> nn.Module:
    """A random base with gates in every layer; `far` heads of each layer see everything for good."""
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


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    facts, settings = result["about"], result["settings"]
    whole = result["rows"][0]["samples"][-1]
    lines = [
        "# Gated attention with fixed heads: memory",
        "",
        f"`{facts['command']}`",
        "",
        f"Commit {facts['commit']}, {facts['date']}; {facts['processor']}, {facts['machine']}; torch {facts['torch']}. "
        f"{LAYERS} layers of {KV_HEADS} heads of 64, float32, window {settings['window_tokens']}, segments of "
        f"{settings['segment_tokens']}; after {whole['tokens']:,} tokens. Times are of one run each.",
        "",
        "| | keys and values held, MiB | of gates decide | process, MiB more than before | of gates decide "
        "| million pairs of query and far key | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        last = row["samples"][-1]
        cells = [title(row["far_heads"])]
        for name in ("state_bytes", "process_bytes"):
            cells += [f"{last[name] / 2**20:.1f}", f"{last[name] / whole[name]:.3f}"]
        cells += [f"{row['far_pairs'] / 1e6:,.0f}", f"{row['seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "![Held by tokens read](fixed_heads.png)", ""])


if __name__ == "__main__":
    main()
