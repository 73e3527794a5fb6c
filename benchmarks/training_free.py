"""What reading without training is worth: the loss of right answers about facts in a text that was read before.

    cacheformers fetch && python recipes/fetch_plays.py
    python recipes/make_facts.py data/facts --documents 1 \\
        --plays data/plays/valid/hamlet.md data/plays/valid/the-tempest.md
    python benchmarks/training_free.py data/facts/records  # half an hour on one core

Every row reads the texts by its own rule, then sees the question and the answer. Results: training_free.json and .md.
"""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from measuring import opening, parser, save, table
from peft import get_peft_model
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import cacheformers
from cacheformers.evaluation.longbench.prompts import Encoded, encode, fill, in_chat
from cacheformers.evaluation.longbench.records import Record, load_records
from cacheformers.evaluation.longbench.tasks import load_templates

WINDOW = {"window_tokens": 256, "pool_tokens": 32, "long": False, "overlap": False, "target_modules": []}
SO_FAR = {"sink": True, "selection": "prefix"}
BEFORE = {"sink": True, "select_rows": 8}  # chosen by the 8 tokens before
MEANS = {**SO_FAR, "representatives": "mean"}
TOKENS = {"representatives": "tokens", "pool_vectors": 4, "packed": True}
QUESTIONS_ALONE = {**MEANS, "select_rows": 8, "reading_retrieves": False}
RECIPE = {"topk": 48, "far_distance": 64}
ROWS: dict[str, dict[str, Any] | None] = {
    "full attention": None,
    "window alone": {"cache": False},
    "16 segments, means, read at 512": {**MEANS, "topk": 16, "far_distance": 512},
    "16 segments, means, true distance": {**MEANS, "topk": 16},
    "48 segments, means, read at 512": {**MEANS, "topk": 48, "far_distance": 512},
    "48 segments, means, read at 64": {**MEANS, "topk": 48, "far_distance": 64},
    "48 segments, means, true distance": {**MEANS, "topk": 48},
    "48 segments, compressed (random), true distance": {**SO_FAR, "pool_vectors": 1, "topk": 48},
    "48 segments, means, read at 64, by blocks of 8": {
        **BEFORE,
        "representatives": "mean",
        "topk": 48,
        "far_distance": 64,
    },
    "48 segments, tokens, packed, by blocks of 8": {**BEFORE, **TOKENS, "topk": 48},
    "16 segments, tokens, packed, by blocks of 8": {**BEFORE, **TOKENS, "topk": 16},
    "48 segments, means, packed, for questions alone": {**QUESTIONS_ALONE, "topk": 48, "packed": True},
    "16 segments, means, packed, for questions alone": {**QUESTIONS_ALONE, "topk": 16, "packed": True},
    "48 segments, means, read at 64, for questions alone": {**QUESTIONS_ALONE, **RECIPE},
    "the same, in 8 bits": {**QUESTIONS_ALONE, **RECIPE, "cache_int8": True},
    "the same, the newest 2,048 tokens": {**QUESTIONS_ALONE, **RECIPE, "cache_tokens": 2048},
}


def main() -> None:
    """Measure every row."""
    arguments = parser(__doc__)
    arguments.add_argument("records", type=Path, help="folder with a set of recipes/make_facts.py")
    arguments.add_argument("--base", default="data/smollm2-135m-instruct", help="(default: %(default)s)")
    arguments.add_argument("--rows", type=int, nargs="+", help="numbers of rows, from 0 (default: all)")
    options = arguments.parse_args()
    tokenizer: Any = AutoTokenizer.from_pretrained(options.base)
    records = load_records(str(options.records), "facts")
    found: dict[str, Any] = {}
    for number in tqdm(options.rows or range(len(ROWS)), desc="Rows"):
        name = list(ROWS)[number]
        start = time.perf_counter()
        losses = answer_losses(load(options.base, ROWS[name]), tokenizer, records, ROWS[name] is not None)
        error = stdev(losses) / math.sqrt(len(losses))
        found[name] = {"loss": mean(losses), "error": error, "seconds": time.perf_counter() - start}
    save("training_free", options, {"rows": found}, page)


def page(result: dict[str, Any]) -> str:
    """Return the page of a result."""
    text = "Mean loss of the tokens of right answers, in nats, after the texts were read and with the question alone."
    rows = [
        [name, f"{row['loss']:.2f}", f"{row['error']:.2f}", f"{row['seconds']:.0f}"]
        for name, row in result["rows"].items()
    ]
    return "\n".join(
        [*opening("Reading without training", result, text), *table(["", "loss", "standard error", "seconds"], rows)]
    )


def load(base: str, settings: dict[str, Any] | None) -> Any:
    """Load the base, with an adapter that is not trained if there are settings of one."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if settings is not None:
        config = cacheformers.CacheFormerAdapterConfig(task_type="CAUSAL_LM", **{**WINDOW, **settings})
        model = get_peft_model(model, config)
    return model.eval()


@torch.no_grad()
def answer_losses(model: Any, tokenizer: Any, records: list[Record], remembers: bool) -> list[float]:
    """Read each text once, and return the mean loss of the tokens of each question's answer."""
    caches: dict[str, Any] = {}
    losses = []
    for record in records:
        prompt = prompt_of(record, tokenizer)
        if record.context not in caches:
            ids = torch.tensor([prompt.read])
            caches[record.context] = (
                cacheformers.read(model, ids, progress=False)
                if remembers
                else model(ids, use_cache=True, logits_to_keep=1).past_key_values
            )
        cache = caches[record.context]
        cache = cache.clone() if remembers else copy.deepcopy(cache)
        answer = tokenizer(record.answers[0], add_special_tokens=False).input_ids
        logits = model(torch.tensor([prompt.asked + answer]), past_key_values=cache, use_cache=True).logits[0]
        losses.append(float(F.cross_entropy(logits[-len(answer) - 1 : -1].float(), torch.tensor(answer))))
    return losses


def prompt_of(record: Record, tokenizer: Any) -> Encoded:
    """Return LongBench's prompt for a question about a text, in the chat form."""
    template = load_templates(["multifieldqa_en"])["multifieldqa_en"]
    return encode(in_chat(fill(template, record), tokenizer), tokenizer, split=True)


if __name__ == "__main__":
    main()
