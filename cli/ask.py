"""`cacheformers ask`: answer from a memory file."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.ma import masked_where
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, TextStreamer

import cacheformers
from cacheformers.cli.inspection import kept
from cacheformers.cli.model import load_model
from cacheformers.common.plots import heat_map, save_figures
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.files.index import read_index
from cacheformers.modeling.reading import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PASSAGE, SHOWN = 40, 3  # tokens of a passage, and how many are shown


def ask(options: argparse.Namespace) -> None:
    """Load the model once and answer every question."""
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
    if options.explain and not memory.state.retrieves:
        raise ValueError(
            "--explain shows what was retrieved, and this memory's method retrieves nothing: leave it out. It is for "
            "Neurocache and the Memorizing Transformer."
        )
    ids = prompt(tokenizer, question, shown_text(memory, tokenizer, question, options)).to(model.device)
    if options.prompt != "question":
        memory = memory.with_window(ids.shape[1] + options.max_new_tokens)
    trace = Trace(memory) if memory.state.retrieves else None
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
        if save_figures({picture: lambda: draw(trace, tokens, question)}):
            print(f"\nHeat map: {picture}")


def shown_text(
    memory: MemoryCache, tokenizer: PreTrainedTokenizerBase, question: str, options: argparse.Namespace
) -> str:
    """Return what self-attention sees of the text beside the question: nothing, its end, its ends, or what BM25 finds.

    Raises:
        ValueError: the memory does not hold its text.
    """
    if options.prompt == "question":
        return ""
    # They import datasets, which takes a second.
    from cacheformers.evaluation.longbench.prompts import Prompt, cut_beginning, cut_middle
    from cacheformers.evaluation.longbench.retrieval import BM25, retrieved

    source = memory.origin.sources[0]
    if source is None:
        raise ValueError("The memory was saved without its text, so none of it can be shown: leave out --prompt.")
    text, length = source.text[: int(source.offsets[-1, 1])], options.prompt_tokens
    if options.prompt == "retrieved":
        chunk_tokens = 260  # of 200 words
        return retrieved(text, question, BM25(), 200, max(1, length // chunk_tokens))
    cut = cut_beginning if options.prompt == "tail" else cut_middle
    return cut(Prompt(text, len(text)), tokenizer, length).text


def prompt(tokenizer: PreTrainedTokenizerBase, question: str, text: str = "") -> Tensor:
    """Encode a question after the text that is shown, in the tokenizer's chat template if it has one, `[1, tokens]`."""
    text = f"{text}\n\n" if text else ""
    if tokenizer.chat_template is None:
        return tokenizer(f"{text}\nQuestion: {question}\nAnswer:", return_tensors="pt").input_ids
    turns = [{"role": "user", "content": text + question}]
    chat: Any = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids: Tensor = chat["input_ids"]
    return ids


TOKEN_PASSAGE, TOKEN_SHOWN = 16, 2  # tokens of a passage, and how many are shown for a token
BINS = 120  # stretches of the document in the picture
FORGOTTEN = "0.8"  # gray


def print_tokens(trace: Trace, tokens: list[str]) -> None:
    """Print, for each token of the answer, the passages that it retrieved most often."""
    print(f"\nEach token of the answer, and where its {len(trace.chosen[0])} searches hit:")
    for token, numbers in zip(tokens, trace.chosen, strict=True):
        name = quoted(token)
        for passage in trace.passages([numbers], TOKEN_PASSAGE, TOKEN_SHOWN):
            print(f"  {name:<16} {passage.times:>2} near token {passage.first:>9,}: {passage.text}")
            name = ""
        if name:
            print(f"  {name:<16}  nothing")


def quoted(token: str) -> str:
    """Quote a token so that its spaces and line ends are visible."""
    return json.dumps(token, ensure_ascii=False)


def counts(retrieved: list[Tensor], length: int) -> Tensor:
    """Count how often each stretch of a document of `length` tokens was retrieved for each token, `[tokens, BINS]`."""
    bins = min(BINS, length)
    places = [(numbers * bins // length).clamp(max=bins - 1) for numbers in retrieved]
    return torch.stack([torch.bincount(place, minlength=bins) for place in places])


def draw(trace: Trace, tokens: list[str], title: str) -> Figure:
    """Draw which parts of the document each token of the answer retrieved; what the memory has forgotten is gray."""
    from matplotlib import colormaps

    length = trace.memory.tokens_read[0]
    forgotten = length - trace.memory.tokens_kept[0]
    table = counts(trace.chosen, length)
    ends = torch.arange(1, table.shape[1] + 1) * length // table.shape[1]
    gone = (ends <= forgotten) & (table == 0)  # what was retrieved just before it was forgotten stays visible
    figure, (axes,) = heat_map(
        {title: masked_where(gone.numpy(), table.numpy())},
        ("token of the document" + (f" (gray: the first {forgotten:,}, forgotten)" if forgotten else ""), ""),
        "times retrieved",
        (9, 1.5 + 0.16 * len(tokens)),
        [quoted(token) for token in tokens],
        cmap=colormaps["magma_r"].with_extremes(bad=FORGOTTEN),
        extent=(0, length, len(tokens) - 0.5, -0.5),
    )
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure
