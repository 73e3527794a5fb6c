"""`cacheformers ask`: answer from a memory file, one question at a time or in a conversation."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.ma import masked_where
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

import cacheformers
from cacheformers.cli.inspection import kept
from cacheformers.cli.model import load_model
from cacheformers.common import plots
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.conversation import Answer, Conversation
from cacheformers.modeling.files.index import read_index
from cacheformers.modeling.method import retrieving_methods

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def ask(options: argparse.Namespace) -> None:
    """Load the model once, then answer every question, or hold a conversation."""
    check(options)
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
    first = begin(model, tokenizer, memory, options)
    print(
        f"{kept(memory)} Loaded in {time.perf_counter() - loaded:.2f} s (the model took {loaded - start:.1f} s).",
        file=sys.stderr if options.json else sys.stdout,
    )
    if not options.questions:
        chat(first, options)
        return
    for number, question in enumerate(options.questions):
        conversation = begin(model, tokenizer, memory, options)
        if not options.json:
            print(f"\nQ: {question}\nA: ", end="", flush=True)
        say(conversation, question, options, number)


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together, before anything is loaded."""
    if not all(question.strip() for question in options.questions):
        raise ValueError("There is an empty question.")
    if options.prompt_tokens is not None and options.prompt_tokens < 2:
        raise ValueError(f"--prompt-tokens must be at least 2, got {options.prompt_tokens}.")
    if options.heat_map and (options.json or not options.explain):
        raise ValueError("--heat-map is the picture that --explain draws: give --explain, without --json.")


def begin(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, memory: MemoryCache, options: argparse.Namespace
) -> Conversation:
    """Begin a conversation in which questions are asked alone, or by `--prompt` with a part of the text before them.

    Without `--prompt` that is what a memory recalls which attention does not see.

    Raises:
        ValueError: `--explain` of a memory that retrieves nothing, or `--prompt-tokens` where no text is shown.
    """
    check_explain(options.explain, memory.state.retrieves)
    prompt = options.prompt or ("question" if memory.state.attends else "recalled")
    if prompt == "question":
        if options.prompt_tokens is not None:
            raise ValueError(
                "--prompt-tokens says how much of the text --prompt shows: give --prompt recalled or another."
            )
        return Conversation(model, tokenizer, memory)
    from cacheformers.evaluation.showing import PROMPT_TOKENS, PassageConversation

    return PassageConversation(model, tokenizer, memory, prompt, options.prompt_tokens or PROMPT_TOKENS)


def check_explain(explain: bool, retrieves: bool) -> None:
    """Raise ValueError where what was retrieved is to be shown of a memory that retrieves nothing."""
    if explain and not retrieves:
        raise ValueError(
            "--explain shows what was retrieved, and this memory's method retrieves nothing: leave it out. It is for "
            f"{retrieving_methods()}."
        )


def chat(conversation: Conversation, options: argparse.Namespace) -> None:
    """Ask what is typed, line by line, until the end of the input."""
    typed = sys.stdin.isatty() and not options.json
    if typed:
        how = "follows on the ones before" if conversation.follows else "is answered by itself, with its passages"
        print(f"Ask; each question {how}. Ctrl-C stops an answer, Ctrl-D ends.")
    number = 0
    while True:
        try:
            question = input("\nQ: " if typed else "")
        except EOFError:
            return
        if not question.strip():
            continue
        if not options.json:
            print("A: " if typed else f"\nQ: {question}\nA: ", end="", flush=True)
        say(conversation, question, options, number)
        number += 1


def picture(options: argparse.Namespace, number: int) -> Path:
    """Name the heat map of a question."""
    first: Path = options.heat_map or Path(f"{options.memory.resolve().with_suffix('')}.png")
    return first.with_name(f"{first.stem}_{number + 1}{first.suffix}") if number else first


def say(conversation: Conversation, question: str, options: argparse.Namespace, number: int) -> None:
    """Print an answer as it comes, and what was retrieved for it; or one JSON object.

    Args:
        number: of the question, from 0.
    """
    explain = conversation.retrieves
    pieces = conversation.ask(question, max_new_tokens=options.max_new_tokens, stream=True, explain=explain)
    try:
        for piece in pieces:
            if not options.json:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if options.questions:
            raise
        pieces.close()  # the answer so far is a part of the conversation
    answer = conversation.turns[-1]
    tokens = [str(conversation.tokenizer.decode([token])) for token in answer.tokens]
    if options.json:
        print(json.dumps(described(answer, tokens, options.explain), ensure_ascii=False), flush=True)
        return
    print()
    if conversation.memory is None or not explain:
        return
    print("What question and answer retrieved most:")
    for passage in answer.retrieved_most:
        named = f"{passage.document}, " if conversation.memory.origin.parts else ""
        print(f"  {named}token {passage.first:,} ({passage.times} times): {passage.text}")
    if options.explain:
        print_tokens(answer, tokens)
        heat_map = picture(options, number)
        memory = conversation.memory
        if plots.save_figures({heat_map: lambda: draw(answer, memory, tokens)}):
            print(f"\nHeat map: {heat_map}")


def described(answer: Answer, tokens: list[str], explain: bool) -> dict[str, Any]:
    """Return an answer as JSON, with `explain` also what each of its tokens retrieved."""
    found: dict[str, Any] = {"question": answer.question, "answer": answer.text, "finished": answer.finished}
    found["passages"] = [asdict(passage) for passage in answer.retrieved_most]
    if explain:
        found["retrieves"] = answer.retrieves
        found["tokens"] = [
            {"token": token, "passages": [asdict(passage) for passage in passages]}
            for token, passages in zip(tokens, answer.passages, strict=True)
        ]
    return found


BINS = 120  # stretches of the document in the picture
FORGOTTEN = "0.8"  # gray


def print_tokens(answer: Answer, tokens: list[str]) -> None:
    """Print, for each token of the answer, the passages that it retrieved most often."""
    print(f"\nEach token of the answer, and where most of what it retrieved is (in each layer {answer.retrieves}):")
    for token, passages in zip(tokens, answer.passages, strict=True):
        name = quoted(token)
        for passage in passages:
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


def draw(answer: Answer, memory: MemoryCache, tokens: list[str]) -> Figure:
    """Draw which parts of the document each token of the answer retrieved; what the memory has forgotten is gray."""
    from matplotlib import colormaps

    length = memory.tokens_read[0]
    forgotten = length - memory.tokens_kept[0]
    table = counts([numbers[numbers < length] for numbers in answer.retrieved], length)
    ends = torch.arange(1, table.shape[1] + 1) * length // table.shape[1]
    gone = (ends <= forgotten) & (table == 0)  # what was retrieved just before it was forgotten stays visible
    figure, (axes,) = plots.heat_map(
        {answer.question: masked_where(gone.numpy(), table.numpy())},
        ("token of the document" + (f" (gray: the first {forgotten:,}, forgotten)" if forgotten else ""), ""),
        "times retrieved",
        (9, 1.5 + 0.16 * len(tokens)),
        [quoted(token) for token in tokens],
        cmap=colormaps["magma_r"].with_extremes(bad=FORGOTTEN),
        extent=(0, length, len(tokens) - 0.5, -0.5),
    )
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure
