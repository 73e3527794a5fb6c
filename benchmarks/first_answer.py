"""Seconds from a memory file to the first token of an answer, beyond importing and loading the model.

    cacheformers fetch
    python benchmarks/first_answer.py       # about two minutes

The file holds 131,072 entries, and the text that they are of. The entries are random numbers: what they say makes no
difference to the time. Each round is a fresh process, in which nothing has run but the loading of the model. In `cold`
rounds the system has dropped the memory file from its cache before, in `warm` ones it holds it; `unchecked` ones are
warm, and leave the checksums out (`verify=False`). Results: first_answer.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measuring import parser, save
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import cacheformers
from cacheformers.modeling.architectures import find_decoder, unwrap
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.origin import Source, tokenized, tokenizer_hash
from cacheformers.modeling.segments import identity

QUESTION = "Who tells this story?"
KINDS = ("cold", "warm", "unchecked")


def main() -> None:
    """Write a memory file, ask in fresh processes, and write the results."""
    given = parser(__doc__)
    given.add_argument("--base", default="data/smollm2-135m-instruct", help="(default: %(default)s)")
    given.add_argument("--adapter", default="model_cards/answers_questions", help="(default: %(default)s)")
    given.add_argument("--books", type=Path, default=Path("../shared/data/books/valid.jsonl.gz"), help="JSON lines")
    given.add_argument("--memory", type=Path, default=Path("runs/first_answer.memory"), help="(default: %(default)s)")
    given.add_argument("--entries", type=int, default=131072, help="(default: %(default)s)")
    given.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    given.add_argument("--alone", choices=KINDS, help=argparse.SUPPRESS)
    options = given.parse_args()
    if options.alone:
        print(json.dumps(ask(options, options.alone == "unchecked")))
        return
    write(options)
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(options.rounds):
        for kind in KINDS:
            if kind == "cold":
                drop_from_cache(options.memory)
            command = [sys.executable, *sys.argv, "--alone", kind]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rounds[kind].append(json.loads(done.stdout.splitlines()[-1]))
    for kind, found in rounds.items():
        print(kind, {name: round(statistics.median(each[name] for each in found), 3) for name in found[0]})
    size = sum(path.stat().st_size for path in options.memory.iterdir())
    save("first_answer", options, {"bytes": size, "seconds": rounds}, indent=None)


def load_model(options: argparse.Namespace) -> tuple[Any, Any]:
    """Load the model that reads and its tokenizer."""
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    return PeftModel.from_pretrained(base, options.adapter).eval(), AutoTokenizer.from_pretrained(options.base)


def write(options: argparse.Namespace) -> None:
    """Write a memory file as `read_text` would leave it, with random entries."""
    model, tokenizer = load_model(options)
    with gzip.open(options.books, "rt", encoding="utf-8") as file:
        text = "\n".join(json.loads(line)["text"] for line, _ in zip(file, range(8), strict=False))
    ids, source = tokenized(tokenizer, text, "books.txt")
    assert len(ids) >= options.entries, "the books are too short"
    end = int(source.offsets[options.entries - 1, 1])
    memory: MemoryCache = cacheformers.new_memory(model, 1, options.entries)
    for ring in memory.state.rings.values():
        ring.append(0, torch.randn(options.entries, ring.width))
    memory.timeline.tokens_read = [options.entries]
    memory.origin.sources = [Source(source.name, text[:end], source.offsets[: options.entries])]
    memory.origin.tokenizer = tokenizer_hash(tokenizer)
    memory.origin.identity = identity(find_decoder(unwrap(model)))
    memory.save(options.memory)


def drop_from_cache(folder: Path) -> None:
    """Ask the system to forget the contents of a folder's files, which are on the disk."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def ask(options: argparse.Namespace, unchecked: bool) -> dict[str, float]:
    """Return the seconds of loading the model and the file, and of everything until the first token.

    `both` is file and answer, `processor` the processor's seconds of both, whatever else runs on the machine.
    """
    start = time.perf_counter()
    model, tokenizer = load_model(options)
    loaded, processor = time.perf_counter(), time.process_time()
    memory = cacheformers.load_memory(options.memory, model, verify=not unchecked, tokenizer=tokenizer)
    opened = time.perf_counter()
    cacheformers.Conversation(model, tokenizer, memory).ask(QUESTION, max_new_tokens=1)
    answered, processor = time.perf_counter(), time.process_time() - processor
    found = {"model": loaded - start, "file": opened - loaded, "answer": answered - opened, "both": answered - loaded}
    return {**found, "processor": processor}


if __name__ == "__main__":
    main()
