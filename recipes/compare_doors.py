"""Load an adapter through AutoModelForCausalLM and through PeftModel and compare their logits on a text.

python recipes/compare_doors.py runs/smollm2_books ../shared/data/books/valid.jsonl.gz
"""

from __future__ import annotations

import argparse

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import cacheformers  # noqa: F401  (makes the adapter types known)
from cacheformers.common.sources import load_texts


@torch.no_grad()
def main() -> None:
    """Print the largest difference; fail if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", help="adapter folder or Hub id")
    parser.add_argument("text", help=".txt or .md file, or JSON lines with a field 'text'")
    parser.add_argument("--tokens", type=int, default=3000, help="how much of the first document to read")
    parser.add_argument("--dtype", default="float32", help="of the base model")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.adapter)
    text = next(text for text in load_texts([options.text]) if text)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, : options.tokens]
    base = PeftConfig.from_pretrained(options.adapter).base_model_name_or_path
    auto = AutoModelForCausalLM.from_pretrained(options.adapter, dtype=options.dtype).eval()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=options.dtype)
    left, right = auto(ids).logits, PeftModel.from_pretrained(plain, options.adapter).eval()(ids).logits
    difference = float((left - right).abs().max())
    print(f"{ids.shape[1]:,} tokens, {options.dtype}: largest difference of logits {difference:g}")
    if difference > 0:
        raise SystemExit("The two doors differ.")


if __name__ == "__main__":
    main()
