"""Entries of a trained memory for a million tokens of real books, to measure search on: what would be in its ring.

    python benchmarks/collect_states.py --adapter runs/smollm2_books --tokens 1048576      # half an hour on one core

Only the layers below the storing one are computed, in segments, and W_p. The file holds `entries` `[tokens, d]`, oldest
first, and `queries`: the entries of the tokens that follow.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheformers.common.sources import load_texts
from cacheformers.modeling.architectures import find_decoder, unwrap
from cacheformers.modeling.segments import active_memories


@torch.no_grad()
def main() -> None:
    """Read, encode, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="a Neurocache adapter")
    parser.add_argument("--books", default="../shared/data/books/train.jsonl.gz", help="JSON lines with a field text")
    parser.add_argument("--tokens", type=int, default=1048576)
    parser.add_argument("--queries", type=int, default=16384)
    parser.add_argument("--segment", type=int, default=1024)
    parser.add_argument("--output", type=Path, default=Path("data/states.safetensors"))
    options = parser.parse_args()

    name = PeftConfig.from_pretrained(options.adapter).base_model_name_or_path
    base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, options.adapter).eval()
    memory: Any = active_memories(find_decoder(unwrap(model)))[0]
    storing = memory.options.layers[0]
    base.model.layers = base.model.layers[: storing + 1]
    found: list[torch.Tensor] = []
    base.model.layers[storing].self_attn.register_forward_pre_hook(
        lambda module, given, named: found.append(memory.active_parts.encode(named["hidden_states"])[0]),
        with_kwargs=True,
    )
    wanted, tokenizer = options.tokens + options.queries, AutoTokenizer.from_pretrained(name)
    texts = (torch.tensor(tokenizer(text).input_ids) for text in load_texts([options.books]))
    segments = (segment for ids in texts for segment in ids.split(options.segment))
    with tqdm(total=wanted, unit=" tokens") as bar, model.disable_adapter():
        for segment in segments:
            base.model(input_ids=segment[None], use_cache=False)
            bar.update(len(segment))
            if bar.n >= wanted:
                break
    entries = torch.cat(found)[:wanted]
    if len(entries) < wanted:
        raise SystemExit(f"The books have only {len(entries):,} tokens: lower --tokens.")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    parts = {"entries": entries[: options.tokens], "queries": entries[options.tokens :]}
    save_file({key: part.contiguous() for key, part in parts.items()}, options.output)
    print(f"Wrote {options.output}: {len(parts['entries']):,} entries of {entries.shape[1]} numbers.")


if __name__ == "__main__":
    main()
