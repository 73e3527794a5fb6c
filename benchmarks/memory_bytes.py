"""What answers are worth when a memory file is thinned, and how much of its text a stranger reads off its entries.

cacheformers fetch; python recipes/fetch_plays.py
python recipes/make_facts.py data/library --seed 1 --documents 1 --words 1500 --plays data/plays/valid/*.md
python benchmarks/memory_bytes.py data/library --adapter model_cards/answers_facts --output runs/memory_bytes

Each text of the folder is read once. Its questions (`records/facts.jsonl`) are asked of the whole memory, and of what
fits a number of bytes on disk, by every rule. An answer is right if it holds every word of the right one. The rule
"unused" counts what is retrieved for questions of the same kinds about other people.

Then, without the model: which token was it that an entry is of? It is guessed from pairs of an entry and its token in
all texts but one, for the entries of that one: by the nearest known entry, and by a linear map to token embeddings.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import Panel, draw_lines
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import cacheformers
from cacheformers.cli.model import load_model
from cacheformers.common.environment import environment
from cacheformers.common.files import write_json
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.thinning import Entries, retrievals, thin

OTHERS = "What does {} keep at home?|What does {} paint?|What did {} find in the garden?|What is {} afraid of?"
NAMES = {"oldest": "without the oldest", "unused": "without the least used", "merge": "neighbors merged"}
PEOPLE = "Anna Boris Clara David Elena Frank Greta Henry Irene James"  # of the pool; asked of memories without them


def main() -> None:
    """Read, ask, thin, ask again; write a JSON file and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what recipes/make_facts.py wrote")
    parser.add_argument("--adapter", default="model_cards/answers_facts", help="(default: %(default)s)")
    parser.add_argument("--model", default="", help="base model (default: the adapter's own)")
    parser.add_argument("--kib", type=int, nargs="+", default=[600, 400, 200, 100], help="sizes (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="folder for memory_bytes.json and .png")
    options = parser.parse_args()
    start = time.perf_counter()
    model, tokenizer = load_model(options.model, options.adapter, None, "float32")
    records = [json.loads(line) for line in (options.folder / "records" / "facts.jsonl").read_text().splitlines()]
    texts = list(dict.fromkeys(record["context"] for record in records))
    memories = [cacheformers.read_text(model, tokenizer, text, name=str(number)) for number, text in enumerate(texts)]
    asked = [[record for record in records if record["context"] == text] for text in texts]
    used = [use(model, tokenizer, memory, records) for memory, records in zip(memories, asked, strict=True)]
    rows: list[dict[str, Any]] = []

    def measure(rule: str, int8: bool, kib: int | None) -> None:
        right, sizes, kept = 0, [], []
        for memory, records, counts in zip(memories, asked, used, strict=True):
            thinned = memory if kib is None else thin(memory, kib * 1024, rule, int8, counts)
            saved, size = saved_and_loaded(thinned, model, int8)
            sizes.append(size)
            kept.append(thinned.tokens_read[0])
            right += sum(answered(model, tokenizer, saved, record) for record in records)
        row = {"rule": rule, "int8": int8, "bytes": max(sizes), "entries": max(kept), "right": right}
        rows.append({**row, "questions": sum(map(len, asked))})
        print(rows[-1], flush=True)

    measure("all", False, None)
    measure("all", True, None)
    for kib in options.kib:
        for rule in NAMES:
            measure(rule, True, kib)
    found = {"answers": rows, "tokens": [memory.tokens_read[0] for memory in memories]}
    found["guesses"] = guesses(model, memories, [tokenizer(text).input_ids for text in texts])
    print(found["guesses"])
    seconds = round(time.perf_counter() - start)
    write_json(
        options.output / "memory_bytes.json", {**found, "seconds": seconds, "environment": environment(model.device)}
    )
    draw(options.output / "memory_bytes.png", rows)


def use(model: Any, tokenizer: PreTrainedTokenizerBase, memory: MemoryCache, records: list[dict[str, Any]]) -> Tensor:
    """Count what is retrieved for questions that are not asked later, `[tokens]`."""
    asked = {record["input"] for record in records}
    kinds = OTHERS.split("|")
    questions = [kinds[number % len(kinds)].format(name) for number, name in enumerate(PEOPLE.split())]
    retrieved = []
    for question in questions:
        if question not in asked:
            conversation = cacheformers.Conversation(model, tokenizer, memory)
            answer = conversation.ask(question, max_new_tokens=8, explain=True)
            retrieved += [*answer.asked, *answer.retrieved]
    return retrievals(retrieved, memory.tokens_read[0])


def saved_and_loaded(memory: MemoryCache, model: Any, int8: bool) -> tuple[MemoryCache, int]:
    """Return what comes back from the disk, and its bytes there."""
    with tempfile.TemporaryDirectory() as folder:
        memory.save(folder, int8=int8)
        return cacheformers.load_memory(folder, model), sum(path.stat().st_size for path in Path(folder).iterdir())


def answered(model: Any, tokenizer: PreTrainedTokenizerBase, memory: MemoryCache, record: dict[str, Any]) -> bool:
    """Whether an answer holds every word of the right one."""
    answer = cacheformers.Conversation(model, tokenizer, memory).ask(record["input"], max_new_tokens=12)
    return set(record["answers"][0].lower().split()) <= set(answer.text.lower().strip(".").split())


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw right answers against bytes on disk, a line for each rule, from the whole memory in 8 bits down."""
    lines = {
        name: [
            (row["bytes"] / 1024, 100 * row["right"] / row["questions"])
            for row in rows
            if row["int8"] and row["rule"] in ("all", rule)
        ]
        for rule, name in NAMES.items()
    }
    draw_lines(path, [[Panel("Answers from a smaller memory", "KiB on disk", "right, %", lines)]], log=False)


def guesses(model: Any, memories: list[MemoryCache], ids: list[list[int]]) -> dict[str, float]:
    """Return the share of the last text's tokens that are guessed from its entries."""
    keys = [next(iter(Entries.of(memory).stores.values()))[0].float() for memory in memories]
    known, labels = torch.cat(keys[:-1]), torch.tensor(sum(ids[:-1], []))
    secret, truth = keys[-1], torch.tensor(ids[-1])
    nearest = torch.cat([torch.cdist(part, known).argmin(1) for part in secret.split(512)])
    found = {"most frequent token": float((truth == labels.mode().values).float().mean())}
    found["nearest known entry"] = float((labels[nearest] == truth).float().mean())
    embeddings = torch.nn.functional.normalize(model.get_input_embeddings().weight.detach().float(), dim=1)
    inputs = torch.cat([known, torch.ones(len(known), 1)], 1).double()
    square = inputs.T @ inputs + 10 * torch.eye(inputs.shape[1], dtype=torch.double)
    weights = torch.linalg.solve(square, inputs.T @ embeddings[labels].double()).float()
    mapped = torch.cat([secret, torch.ones(len(secret), 1)], 1) @ weights
    best = torch.cat([(part @ embeddings.T).topk(5).indices for part in mapped.split(512)])
    found["linear map, first guess"] = float((best[:, 0] == truth).float().mean())
    found["linear map, one of five"] = float((best == truth[:, None]).any(1).float().mean())
    return found


if __name__ == "__main__":
    main()
