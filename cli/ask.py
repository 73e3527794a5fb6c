"""`cacheformers ask`: answer from a memory file."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, TextStreamer

import cacheformers
from cacheformers.cli.explain import heat_map, print_tokens
from cacheformers.cli.kept import kept
from cacheformers.cli.model import load_model
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.files.index import read_index
from cacheformers.modeling.tracing import Trace

PASSAGE, SHOWN = 40, 3  # tokens of a passage, and how many are shown


def ask(options: argparse.Namespace) -> None:
    """Load once, answer every question."""
    if not all(question.strip() for question in options.questions):
        raise ValueError("There is an empty question.")
    start = time.perf_counter()
    reader = read_index(options.memory).reader
    names = (options.model or reader.base, options.adapter or reader.adapter)
    model, tokenizer = load_model(*names, options.device, options.dtype)
    loaded = time.perf_counter()
    memory = cacheformers.load_memory(options.memory, model, not options.no_verify, tokenizer)
    if memory.batch_size != 1:
        raise ValueError(
            f"{options.memory} holds {memory.batch_size} documents: ask it in Python, with memory.select()."
        )
    print(f"{kept(memory)} Loaded in {time.perf_counter() - loaded:.2f} s (the model took {loaded - start:.1f} s).")
    for number, question in enumerate(options.questions):
        picture = options.heat_map or Path(f"{options.memory.resolve().with_suffix('')}.png")
        if number:
            picture = picture.with_name(f"{picture.stem}_{number + 1}{picture.suffix}")
        answer(model, tokenizer, memory.clone(), question, options, picture)


def answer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    memory: MemoryCache,
    question: str,
    options: argparse.Namespace,
    picture: Path,
) -> None:
    """Print a question, its answer, and what was retrieved for them."""
    trace = Trace(memory) if memory.state.retrieves else None
    if trace is None and options.explain:
        raise ValueError(
            "--explain shows what was retrieved, and this memory's method retrieves nothing: leave it out. It is for "
            "Neurocache and the Memorizing Transformer."
        )
    ids = prompt(tokenizer, question).to(model.device)
    print(f"\nQ: {question}\nA: ", end="", flush=True)
    produced = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=memory,
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        logits_processor=LogitsProcessorList([trace] if trace else []),
    )
    if trace is None:
        return
    print("\nWhat question and answer retrieved most:")
    for passage in trace.passages(trace.asked + trace.chosen, PASSAGE, SHOWN):
        print(f"  token {passage.first:,} ({passage.times} times): {passage.text}")
    if options.explain:
        tokens = [str(tokenizer.decode([token])) for token in produced[0, ids.shape[1] :].tolist()]
        print_tokens(trace, tokens)
        heat_map(trace, tokens, picture, question)
        print(f"\nHeat map: {picture}")


def prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> Tensor:
    """The question as ids `[1, tokens]`, through the chat template where the tokenizer has one."""
    if tokenizer.chat_template is None:
        return tokenizer(f"\nQuestion: {question}\nAnswer:", return_tensors="pt").input_ids
    chat: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids: Tensor = chat["input_ids"]
    return ids
