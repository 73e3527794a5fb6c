"""Seconds and peak memory against the tokens of a text that is read, for full attention, a window, and each memory.

    python benchmarks/reading.py                       # to a million tokens, about forty minutes of one CPU core
    python benchmarks/reading.py --longest 65536 --methods "full attention" neurocache

The base is a Llama of 4 layers of 256 with random weights, in float32; windows and segments have 512 tokens. Each
method has a process of its own, which reads texts of 1,024 tokens, of twice as many, and so on, each from its
beginning, until one takes longer than the limit. Seconds are the processor's, of one thread, so other work on the
machine matters little. Peak memory is what the process holds beyond the model. Results: reading.json and .png.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch
from measuring import Panel, draw_lines, parser, peak_extra, save
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import cacheformers

SHORTEST, SEGMENT, VOCABULARY = 1024, 512, 1024
FULL = "full attention"
RETRIEVAL = {"representatives": "mean", "long": False, "overlap": False, "sink": True, "topk": 16, "select_rows": 64}
METHODS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "window": (cacheformers.WindowedAdapterConfig, {"segment_tokens": SEGMENT}),
    "neurocache": (cacheformers.NeurocacheAdapterConfig, {"segment_tokens": SEGMENT, "cache_size": 16384}),
    "memorizing": (cacheformers.MemorizingAdapterConfig, {"segment_tokens": SEGMENT, "cache_size": 16384}),
    "infini-attention": (cacheformers.InfiniAttentionAdapterConfig, {"segment_tokens": SEGMENT}),
    "gated deltanet": (cacheformers.GatedDeltaNetAdapterConfig, {"segment_tokens": SEGMENT}),
    "recurrent memory": (cacheformers.RecurrentMemoryAdapterConfig, {"segment_tokens": SEGMENT}),
    "gated attention": (cacheformers.GatedAttentionAdapterConfig, {}),
    "cacheformer": (cacheformers.CacheFormerAdapterConfig, {"window_tokens": SEGMENT // 2}),
    "cacheformer's cache alone": (
        cacheformers.CacheFormerAdapterConfig,
        {**RETRIEVAL, "window_tokens": SEGMENT // 2, "pool_tokens": 32, "packed": True},
    ),
}


def main() -> None:
    """Measure each method in its process, write the results and draw them."""
    given = parser(__doc__)
    given.add_argument("--methods", nargs="+", choices=[FULL, *METHODS], default=[FULL, *METHODS])
    given.add_argument("--longest", type=int, default=2**20, help="tokens of the longest text (default: %(default)s)")
    given.add_argument("--limit", type=float, default=120, help="seconds of a last text (default: %(default)s)")
    given.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = given.parse_args()
    if options.alone:
        return measure(options.methods[0], options.longest, options.limit)
    rows = {}
    for name in options.methods:
        command = [sys.executable, __file__, "--alone", "--methods", name]
        command += ["--longest", str(options.longest), "--limit", str(options.limit)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows[name] = [json.loads(line) for line in done.stdout.splitlines()]
        print(name, rows[name][-1], flush=True)
    path = save("reading", options, {"rows": rows}, indent=None)
    seconds = {name: [(row["tokens"], row["seconds"]) for row in found] for name, found in rows.items()}
    peaks = {name: [(row["tokens"], row["bytes"] / 2**20) for row in found] for name, found in rows.items()}
    memory = Panel("Peak memory", "tokens read", "MiB", peaks)
    draw_lines(path, [[Panel("Time", "tokens read", "seconds of one core", seconds), memory]])


def measure(name: str, longest: int, limit: float) -> None:
    """Print a line of JSON for each text that a method reads."""
    model = make_model(name)
    read(model, torch.zeros(1, SHORTEST, dtype=torch.long))  # warms up
    tokens, seconds = SHORTEST, 0.0
    while tokens <= longest and seconds <= limit:
        ids = torch.randint(0, VOCABULARY, (1, tokens))
        start = time.process_time()
        peak = peak_extra(partial(read, model, ids))
        seconds = time.process_time() - start
        print(json.dumps({"tokens": tokens, "seconds": round(seconds, 3), "bytes": peak}), flush=True)
        tokens *= 2


def make_model(name: str) -> Any:
    """Build the base, with a method that keeps its default options where none is given above."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=2**20,
    )
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if name == FULL:
        return base.eval()
    kind, options = METHODS[name]
    return get_peft_model(base, kind(task_type="CAUSAL_LM", target_modules=[], **options)).eval()


def read(model: Any, ids: torch.Tensor) -> Any:
    """Read a text; full attention in parts, too, so that it holds keys and values, and no matrix of all scores."""
    if isinstance(model, PeftModel):
        return cacheformers.read(model, ids, progress=False)
    cache = DynamicCache()
    for part in ids.split(SHORTEST, 1):
        model.model(input_ids=part, past_key_values=cache)
    return cache


if __name__ == "__main__":
    main()
