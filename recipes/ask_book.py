"""Read a whole book into a memory with an adapter, and answer a question about it.

python recipes/ask_book.py runs/smollm2_books ../shared/data/books/test.jsonl.gz "Who tells this story?"
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TextStreamer

import cacheformers
from cacheformers.training.sources import load_texts

PARTS = 8
PASSAGE, SHOWN = 40, 3  # tokens of a passage, and how many are shown


def main() -> None:
    """Read, report memory after every eighth of the book, answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", help="adapter folder or Hub id")
    parser.add_argument("book", help=".txt or .md file, or JSON lines with a field 'text'")
    parser.add_argument("question")
    parser.add_argument("--document", type=int, help="which document of the file, from 0 (default: the longest)")
    parser.add_argument("--max-new-tokens", type=int, default=60)
    options = parser.parse_args()

    texts = [text for text in load_texts([options.book]) if text]
    text = max(texts, key=len) if options.document is None else texts[options.document]
    tokenizer = AutoTokenizer.from_pretrained(options.adapter)
    model = AutoModelForCausalLM.from_pretrained(options.adapter).eval()
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids

    memory, start = cacheformers.new_memory(model, 1), time.perf_counter()
    parts = list(ids.chunk(PARTS, dim=1))
    for number, part in enumerate(parts, 1):
        cacheformers.read(model, part, memory=memory, flush=number == len(parts))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        held = memory.nbytes / 2**20
        print(f"{memory.tokens_read[0]:>9,} tokens: {held:7.1f} MiB of memory, process peak {peak:,.0f} MiB")
    print(f"Read {ids.shape[1]:,} tokens in {time.perf_counter() - start:.0f} s.\n\nQ: {options.question}\nA: ", end="")

    question = prompt(tokenizer, options.question)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(
        question,
        attention_mask=torch.ones_like(question),
        past_key_values=memory,
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
        streamer=streamer,
    )
    print("\nWhat question and answer retrieved most:")
    for place, votes, passage in passages(memory, ids[0]):
        print(f"  token {place:,} ({votes} times): {' '.join(str(tokenizer.decode(passage)).split())}")


def passages(memory: cacheformers.MemoryCache, ids: torch.Tensor) -> list[tuple[int, int, torch.Tensor]]:
    """The stretches of a book that the tokens of the open segment retrieved most often: place, how often, ids."""
    state: Any = memory.state
    ring = next(iter(state.rings.values()))
    forgotten = ring.written[ring.owner[0]] - ring.count(0)  # entries, one a token, that have made room
    hits = torch.cat([found[0].flatten() for found in state.hits.values()])
    votes = torch.bincount((forgotten + hits[hits >= 0]) // PASSAGE)
    best = votes.topk(min(SHOWN, len(votes)))
    return [
        (int(index) * PASSAGE, int(times), ids[int(index) * PASSAGE : (int(index) + 1) * PASSAGE])
        for times, index in zip(best.values, best.indices, strict=True)
        if times
    ]


def prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> torch.Tensor:
    """The question as ids `[1, tokens]`, through the chat template where the tokenizer has one."""
    if tokenizer.chat_template is None:
        return tokenizer(f"\nQuestion: {question}\nAnswer:", return_tensors="pt").input_ids
    chat: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids: torch.Tensor = chat["input_ids"]
    return ids


if __name__ == "__main__":
    main()
