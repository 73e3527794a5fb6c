"""The perplexity of a model on texts: in windows, or with its memory.

python -m cacheformers.evaluation.perplexity --base BASE --mode segment --texts BOOK.txt --window 1024
python -m cacheformers.evaluation.perplexity --base BASE --mode sliding --texts wiki.test.raw.gz --stride 512
python -m cacheformers.evaluation.perplexity --base BASE --adapter ADAPTER --mode memory --texts books.jsonl.gz
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from accelerate import PartialState
from numpy.typing import NDArray
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PretrainedConfig

from cacheformers.adapters.folders import load_adapter_config
from cacheformers.evaluation.perplexity import HeldOut, Losses, token_nats
from cacheformers.evaluation.plots import by_position, can_draw
from cacheformers.evaluation.processes import make_state
from cacheformers.evaluation.readers import Decoding, Remembering
from cacheformers.evaluation.remembering import memory_config
from cacheformers.evaluation.run import Measure, Run
from cacheformers.evaluation.tables import between, table
from cacheformers.evaluation.texts import Text, read_texts
from cacheformers.evaluation.tokens import bucket_name, position_edges
from cacheformers.evaluation.windows import window_nats
from cacheformers.modeling.attach import active_options, find_decoder, unwrap
from cacheformers.modeling.models.configuration_cacheformer import CacheFormerConfig
from cacheformers.training.base_model import ModelOptions, base_config, base_folder, load_base, load_tokenizer
from cacheformers.training.checkpoints import write_text
from cacheformers.training.environment import environment, origin_lines
from cacheformers.training.gguf_base import is_gguf
from cacheformers.training.options import RecipeParser, option

FIRST_BUCKET, FIRST_IN_WINDOW = 1024, 128  # tokens; later buckets of positions double
LONGEST_WORD = 100  # nats; what takes more is no word


@dataclass
class PerplexityOptions:
    """Which texts are read, and how.

    Raises:
        ValueError: options that make no sense together.
    """

    texts: list[str] = option(
        help="What is read: files, folders and datasets of the Hub, in the forms of train_adapt.py's --train. A file "
        "of any other kind is one document of raw UTF-8 text (.gz: compressed), such as WikiText's and enwik8."
    )
    mode: Literal["sliding", "segment", "memory"] = option(
        help="'segment': windows side by side, each read by itself; the first token of each is not predicted. "
        "'sliding': overlapping windows, a token is scored in the first that holds it. 'memory': with the model's "
        "memory (a CacheFormer: its decoding state), from the beginning of a document to its end."
    )
    output: str = option("runs/perplexity", help="Folder for result.json and position.png.")
    adapter: str | None = option(None, help="Adapter folder or Hub id. One with a memory is for the mode 'memory'.")
    window: int | None = option(
        None, help="Tokens of a window. Default: the model's positions; for a CacheFormer its segment_tokens."
    )
    stride: int | None = option(None, help="Sliding: tokens from window to window. Default: half a window.")
    stepwise: bool = option(
        False,
        help="Sliding and segment: give each token a forward of its own that ends just before it. Slow, and the same "
        "for every model but a CacheFormer with 'paper_block', of which only this is what a decoder would obtain.",
    )
    text_field: str = option("text", help="The field of a JSON line, or the column, that holds a document's text.")
    documents: int | None = option(None, help="Read only the first so many documents.")
    tokens: int | None = option(None, help="Read only the first so many tokens of each document.")
    bos: bool = option(False, help="Put the tokenizer's BOS token before each document.")
    words: int | None = option(
        None,
        help="Take the texts for so many words. Default: as many as white space separates. Tables on WikiText-103 "
        "count words and line ends of the tokenised files, for raw ones as well: 217646 (valid) and 245569 (test).",
    )
    rows: int = option(1, help="Windows, or documents with memory, that each process reads side by side.")
    plots: bool = option(True, help="Draw a plot (needs matplotlib).")

    def __post_init__(self) -> None:
        given = asdict(self)
        for name, least in (("window", 2), ("stride", 1), ("documents", 1), ("tokens", 2), ("words", 1), ("rows", 1)):
            if given[name] is not None and given[name] < least:
                raise ValueError(f"{name} must be at least {least}, got {given[name]}.")
        if self.words is not None and (self.documents or self.tokens):
            raise ValueError("words is for whole texts: leave it out with documents or tokens.")
        if self.mode == "memory" and self.window is not None:
            raise ValueError("window is for sliding and segment: a memory's segments are as long as it was made for.")
        if self.mode == "memory" and self.stepwise:
            raise ValueError(
                "stepwise is for sliding and segment: what is read with a memory sees nothing after itself."
            )
        if self.mode != "sliding" and self.stride is not None:
            raise ValueError(f"stride is for sliding, not for {self.mode}.")


PerplexityOptions._argument_group_name = "perplexity"  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Windows:
    """Tokens of a window, and from one to the next."""

    tokens: int
    stride: int


def main(arguments: list[str] | None = None) -> None:
    """Measure as the options say."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = RecipeParser([ModelOptions, PerplexityOptions], "The perplexity of a model on texts.")
    model, options = parser.parse(arguments)
    state = make_state(model.device)
    try:
        if is_gguf(model.base):
            with state.main_process_first():  # it is converted once
                base_folder(model.base)
        config, tokenizer = base_config(model.base), load_tokenizer(model.base)
        adapter = None if options.adapter is None else load_adapter_config(options.adapter)
        windows = check(options, model.base, config, adapter)
        texts = read_texts(options.texts, tokenizer, options.text_field, options.bos, options.documents, options.tokens)
        Path(options.output).mkdir(parents=True, exist_ok=True)
        loaded: nn.Module = load_base(model, state.device)[0]
        if options.adapter is not None:
            loaded = PeftModel.from_pretrained(loaded, options.adapter)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    try:
        losses = read(loaded, texts, windows, options)
    except FloatingPointError as error:
        sys.exit(f"\n{error}")
    if state.is_main_process:
        report(make_result(texts, losses, windows, model, options, state, arguments), options)
    state.destroy_process_group()


def check(
    options: PerplexityOptions, base: str, config: PretrainedConfig, adapter: PeftConfig | None
) -> Windows | None:
    """The windows that are read, None with a memory.

    Raises:
        ValueError: this model cannot read so.
    """
    whole = config if isinstance(config, CacheFormerConfig) else None  # reads in windows and with its state
    remembers = whole is None and memory_config(config, adapter) is not None
    if options.mode == "memory":
        if whole is not None and not whole.attention_options().causal:
            raise ValueError(
                "selection='paper_block' chooses with tokens that do not exist while decoding. Use the mode segment, "
                "and with --stepwise for what a decoder would obtain."
            )
        if whole is None and not remembers:
            raise ValueError("The mode memory takes a model with a memory: give an --adapter that has one.")
        return None
    if remembers:
        raise ValueError(
            f"The mode {options.mode} reads by self-attention alone, but {options.adapter or base} has a memory: use "
            "the mode memory, or give its base without it."
        )
    if whole is not None:
        tokens = options.window or whole.segment_tokens  # it has no last position
    else:
        positions = config.get_text_config().max_position_embeddings
        tokens = options.window or positions
        if tokens > positions:
            raise ValueError(f"A window of {tokens:,} tokens exceeds the model's {positions:,} positions.")
    stride = tokens if options.mode == "segment" else options.stride or tokens // 2
    if stride > tokens:
        raise ValueError(f"A stride of {stride:,} would leave tokens out between windows of {tokens:,}.")
    return Windows(tokens, stride)


def read(model: nn.Module, texts: Sequence[Text], windows: Windows | None, options: PerplexityOptions) -> list[Losses]:
    """The losses of each text's tokens from the second on; NaN where one is not predicted."""
    rows, title, ids = options.rows, options.mode.capitalize(), [text.ids for text in texts]
    if windows is not None:
        return window_nats(model, ids, windows.tokens, windows.stride, rows, title, options.stepwise)
    documents = [HeldOut(text.ids, text.characters, text.name) for text in texts]
    whole = unwrap(model).config
    if isinstance(whole, CacheFormerConfig):
        return token_nats(model, documents, Decoding(), whole.segment_tokens, rows, title)
    memory = active_options(find_decoder(unwrap(model)))
    assert memory is not None
    return token_nats(model, documents, Remembering(), memory.window.segment_tokens, rows, title)


def make_result(
    texts: Sequence[Text],
    losses: Sequence[Losses],
    windows: Windows | None,
    model: ModelOptions,
    options: PerplexityOptions,
    state: PartialState,
    arguments: list[str],
) -> dict[str, Any]:
    """Everything about a run, for JSON."""
    name = Path(options.adapter or model.base).name
    counts = {unit: sum(getattr(text, unit) for text in texts) for unit in ("tokens", "words", "characters", "bytes")}
    counts["words"] = options.words or counts["words"]
    total = chosen(losses, [np.isfinite(each) for each in losses])
    return {
        "name": f"{name}-{options.mode}{'-stepwise' if options.stepwise else ''}",
        "kind": "perplexity",
        "mode": options.mode,
        "windows": None if windows is None else asdict(windows),
        "texts": {**counts, "documents": [text.name for text in texts]},
        **rates(total, counts),
        **total.as_dict(),
        "by_position": as_dicts(positions(losses)),
        "by_place_in_window": as_dicts(places_in_window(losses, windows)),
        "options": {**asdict(model), **asdict(options)},
        "command": ["python", "-m", "cacheformers.evaluation.perplexity", *arguments],
        "environment": environment(state.device, state.num_processes, model.base),
    }


def rates(total: Measure, counts: dict[str, int]) -> dict[str, float | None]:
    """The mean loss per other units than tokens, by how many of them the texts have for each token.

    A token that is not predicted (the first) counts as the mean of the others. Per word there is none where the texts
    are not divided into words by white space, such as Chinese.

    Args:
        counts: tokens, words, characters and bytes of the texts.
    """
    nats = total.nats / total.tokens
    bits = {
        f"bits_per_{unit}": nats / math.log(2) * counts["tokens"] / counts[f"{unit}s"] for unit in ("character", "byte")
    }
    word = nats * counts["tokens"] / counts["words"]
    return {"word_perplexity": math.exp(word) if word < LONGEST_WORD else None, **bits}


def positions(losses: Sequence[Losses]) -> dict[str, Measure]:
    """By how many tokens of the document stand before."""
    return by_place(losses, [np.arange(len(each)) for each in losses], FIRST_BUCKET)


def places_in_window(losses: Sequence[Losses], windows: Windows | None) -> dict[str, Measure]:
    """By how many tokens of the window stand before, where windows stand side by side; else nothing."""
    if windows is None or windows.stride < windows.tokens:
        return {}
    return by_place(losses, [np.arange(len(each)) % windows.tokens for each in losses], FIRST_IN_WINDOW)


def as_dicts(parts: dict[str, Measure]) -> dict[str, dict[str, Any]]:
    """For JSON."""
    return {name: measure.as_dict() for name, measure in parts.items()}


def by_place(losses: Sequence[Losses], places: Sequence[NDArray[np.int64]], first: int) -> dict[str, Measure]:
    """By the place that each loss has, in buckets that double from the first one on."""
    edges = position_edges(max(int(place.max()) + 1 for place in places), first)
    found = {
        bucket_name(start, end): chosen(
            losses,
            [np.isfinite(each) & (start <= place) & (place < end) for each, place in zip(losses, places, strict=True)],
        )
        for start, end in pairwise(edges)
    }
    return {name: measure for name, measure in found.items() if measure.tokens}


def chosen(losses: Sequence[Losses], masks: Sequence[NDArray[np.bool_]]) -> Measure:
    """The measure of some tokens of each document."""
    picked = [each[mask] for each, mask in zip(losses, masks, strict=True)]
    return Measure(
        np.array([each.sum(dtype=np.float64) for each in picked]), np.array([float(len(each)) for each in picked])
    )


def report(result: dict[str, Any], options: PerplexityOptions) -> None:
    """Print the numbers; write them and a plot."""
    row = [f"{result['tokens']:,}", f"{result['perplexity']:.3f}", between(result["interval"], 3)]
    row += ["-" if result["word_perplexity"] is None else f"{result['word_perplexity']:.3f}"]
    row += [f"{result[name]:.4f}" for name in ("bits_per_character", "bits_per_byte")]
    titles = ["", "tokens", "perplexity", "95 %", "per word", "bits/character", "bits/byte"]
    print(f"\n{table(titles, [[result['name'], *row]])}")
    for title, name in (("by tokens before, document", "by_position"), ("window", "by_place_in_window")):
        if result[name]:
            values = [f"{part['perplexity']:.3f}" for part in result[name].values()]
            print(f"\n{table([title, *result[name]], [[result['name'], *values]])}")
    parts = result["by_position"]
    folder = Path(options.output)
    write_text(folder / "result.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if options.plots and can_draw("The plot"):
        measures = {name: Measure.from_dict(part) for name, part in parts.items()}
        run = Run(result["texts"]["documents"], result["texts"]["characters"], Measure.from_dict(result), measures, {})
        by_position({result["name"]: run}).savefig(folder / "position.png")
    print("\n".join(["", *origin_lines([result]), f"{folder / 'result.json'} has all numbers."]))
