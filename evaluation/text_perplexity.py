"""The perplexity of a model on texts: in windows, or with its memory.

cacheformers perplexity --base BASE --mode segment --texts BOOK.txt --window 1024
cacheformers perplexity --base BASE --mode sliding --texts wiki.test.raw.gz --stride 512
cacheformers perplexity --base BASE --adapter ADAPTER --mode memory --texts books.jsonl.gz
"""

from __future__ import annotations

import codecs
import gzip
import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import PartialState
from peft import PeftConfig
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from cacheformers.common.base_model import ModelOptions, short_name
from cacheformers.common.environment import environment, origin_lines
from cacheformers.common.files import write_json
from cacheformers.common.plots import save_figures
from cacheformers.common.recipe import RecipeParser, option
from cacheformers.common.sources import FORMATS, load_texts
from cacheformers.evaluation.held_out import HeldOut, Losses, token_nats, window_nats
from cacheformers.evaluation.loading import load, memory_config, prepare
from cacheformers.evaluation.plots import by_position
from cacheformers.evaluation.readers import Remembering
from cacheformers.evaluation.run import Measure, Run, between, by_last_occurrence, by_place, table
from cacheformers.modeling.architectures import WholeConfig, find_decoder, unwrap
from cacheformers.modeling.method import active_options


@dataclass(frozen=True)
class Text(HeldOut):
    """The part of a document that is read, perhaps with a BOS token before it, which does not count.

    Attributes:
        tokens, words, bytes: how many it has. White space separates words; bytes are those of UTF-8.
    """

    tokens: int
    words: int
    bytes: int


def read_texts(
    paths: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    text_field: str = "text",
    bos: bool = False,
    documents: int | None = None,
    tokens: int | None = None,
) -> list[Text]:
    """Read the first documents of files, folders and datasets of the Hub, each up to a number of tokens.

    Args:
        paths: see `find_sources`. A file of any other kind is one document of raw UTF-8 text (.gz: compressed).
        bos: put the tokenizer's BOS token before each document. No other special token is added.

    Raises:
        FileNotFoundError, ValueError: a path does not exist or cannot be read, or holds only white space.
    """
    if bos and tokenizer.bos_token_id is None:
        raise ValueError("The tokenizer has no BOS token: leave out --bos.")
    found: list[Text] = []
    for path in paths:
        raw = Path(path).is_file() and not path.endswith(tuple(FORMATS))
        for number, text in enumerate([raw_text(Path(path))] if raw else load_texts([path], text_field)):
            if len(found) == documents:
                break
            made = tokenized(f"{Path(path).name}, document {number}", text or "", tokenizer, bos, tokens)
            if len(made.ids) > 1 and made.words:  # one token alone predicts nothing
                found.append(made)
    if not found:
        raise ValueError(f"There is no document of two tokens or more in {', '.join(paths)}.")
    return found


def raw_text(file: Path) -> str:
    """Read a file as text with its line ends, less a character cut off at its end; raise ValueError if damaged."""
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return codecs.getincrementaldecoder("utf-8")().decode(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{file} cannot be read as gzip ({error}): the file is damaged or cut off.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text: its byte {error.start:,} is not UTF-8.") from error


def tokenized(name: str, text: str, tokenizer: PreTrainedTokenizerBase, bos: bool, tokens: int | None) -> Text:
    """Tokenize a document's beginning, and count its words, characters and bytes."""
    if tokens is not None and not tokenizer.is_fast:
        raise ValueError("--tokens needs a fast tokenizer, which says where in the text a token ends.")
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokens is not None, verbose=False)
    ids = encoded.input_ids
    if tokens is not None and len(ids) > tokens:
        ids, text = ids[:tokens], text[: encoded.offset_mapping[tokens - 1][1]]
    start = [tokenizer.bos_token_id] if bos else []
    read = torch.tensor([*start, *ids], dtype=torch.long)
    return Text(read, len(text), name, len(ids), len(text.split()), len(text.encode()))


FIRST_BUCKET, FIRST_IN_WINDOW = 1024, 128  # tokens; later buckets of positions double
LONGEST_WORD = 100  # nats; a text with more per word is not divided into words by white space


@dataclass
class PerplexityOptions:
    """Which texts are read, and how; options that contradict each other raise ValueError."""

    _argument_group_name = "perplexity"
    texts: list[str] = option(
        help="Files, folders and datasets of the Hub to read, in the forms of train_adapt.py's --train. A file "
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
        help="Sliding and segment: predict each token by a forward that ends just before it. Slow. It changes only a "
        "CacheFormer with 'paper_block', for which it shows what a decoder would reach.",
    )
    text_field: str = option("text", help="The field of a JSON line, or the column, that holds a document's text.")
    documents: int | None = option(None, help="Read only the first N documents.")
    tokens: int | None = option(None, help="Read only the first N tokens of each document.")
    bos: bool = option(False, help="Put the tokenizer's BOS token before each document.")
    words: int | None = option(
        None,
        help="Number of words to divide by. Default: as many as white space separates. Tables on WikiText-103 "
        "count words and line ends of the tokenized files, for raw ones as well: 217646 (valid) and 245569 (test).",
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
            raise ValueError("stepwise is for sliding and segment: with a memory, a token never sees later ones.")
        if self.mode != "sliding" and self.stride is not None:
            raise ValueError(f"stride is for sliding, not for {self.mode}.")


@dataclass(frozen=True)
class Windows:
    """The size of a window in tokens, and the step from one to the next."""

    tokens: int
    stride: int


def main(arguments: list[str] | None = None) -> None:
    """Measure as the options say."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = RecipeParser([ModelOptions, PerplexityOptions], "The perplexity of a model on texts.")
    model, options = parser.parse(arguments)
    try:
        state, config, tokenizer, adapter = prepare(model, options.adapter)
        windows = check(options, model.base, config, adapter)
        texts = read_texts(options.texts, tokenizer, options.text_field, options.bos, options.documents, options.tokens)
        Path(options.output).mkdir(parents=True, exist_ok=True)
        loaded = load(model, options.adapter, state.device)
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
    """Return the windows to read, None with a memory; raise ValueError if the model cannot read in this mode."""
    whole = config if isinstance(config, WholeConfig) else None  # reads in windows and with its state
    remembers = whole is None and memory_config(config, adapter) is not None
    if options.mode == "memory":
        if whole is not None and not whole.causal:
            raise ValueError(
                "selection='paper_block' chooses with tokens that do not exist while decoding. Use the mode segment, "
                "with --stepwise for what a decoder would reach."
            )
        if whole is None and not remembers:
            raise ValueError("The mode memory takes a model with a memory: give an --adapter that has one.")
        return None
    if remembers:
        raise ValueError(
            f"The mode {options.mode} reads by self-attention alone, but {options.adapter or base} has a memory: use "
            "the mode memory, or give its base without it."
        )
    positions = whole.segment_tokens if whole is not None else config.get_text_config().max_position_embeddings
    tokens = options.window or positions
    if whole is None and tokens > positions:  # a CacheFormer has no last position
        raise ValueError(f"A window of {tokens:,} tokens exceeds the model's {positions:,} positions.")
    stride = tokens if options.mode == "segment" else options.stride or tokens // 2
    if stride > tokens:
        raise ValueError(f"A stride of {stride:,} would leave tokens out between windows of {tokens:,}.")
    return Windows(tokens, stride)


def read(model: nn.Module, texts: Sequence[Text], windows: Windows | None, options: PerplexityOptions) -> list[Losses]:
    """Return the losses of each text's tokens from the second on; NaN where one is not predicted."""
    rows, title, ids = options.rows, options.mode.capitalize(), [text.ids for text in texts]
    if windows is not None:
        return window_nats(model, ids, windows.tokens, windows.stride, rows, title, options.stepwise)
    config: Any = unwrap(model).config
    memory: Any = None if isinstance(config, WholeConfig) else active_options(find_decoder(unwrap(model)))
    size = config.segment_tokens if memory is None else memory.window.segment_tokens
    return token_nats(model, texts, Remembering(), size, rows, title)


def make_result(
    texts: Sequence[Text],
    losses: Sequence[Losses],
    windows: Windows | None,
    model: ModelOptions,
    options: PerplexityOptions,
    state: PartialState,
    arguments: list[str],
) -> dict[str, Any]:
    """Collect everything about a run, for JSON."""
    name = short_name(options.adapter or model.base)
    counts = {unit: sum(getattr(text, unit) for text in texts) for unit in ("tokens", "words", "characters", "bytes")}
    counts["words"] = options.words or counts["words"]
    total = Measure.of(losses, [np.isfinite(each) for each in losses])
    measures = by_place(losses, [np.arange(len(each)) for each in losses], FIRST_BUCKET)
    occurred = by_last_occurrence(losses, [text.ids.numpy() for text in texts], FIRST_BUCKET)
    return {
        "name": f"{name}-{options.mode}{'-stepwise' if options.stepwise else ''}",
        "kind": "perplexity",
        "mode": options.mode,
        "windows": None if windows is None else asdict(windows),
        "texts": {**counts, "documents": [text.name for text in texts]},
        **rates(total, counts),
        **total.as_dict(),
        "by_position": {name: part.as_dict() for name, part in measures.items()},
        "by_place_in_window": {name: part.as_dict() for name, part in places_in_window(losses, windows).items()},
        "by_last_occurrence": {name: part.as_dict() for name, part in occurred.items()},
        "options": {**asdict(model), **asdict(options)},
        "command": ["cacheformers", "perplexity", *arguments],
        "environment": environment(state.device, state.num_processes, model.base),
    }


def as_run(result: dict[str, Any]) -> Run:
    """Return a result as a run, whose classes of tokens are by how far back the same id occurred last."""
    positions, occurred = (
        {name: Measure.from_dict(part) for name, part in result[by].items()}
        for by in ("by_position", "by_last_occurrence")
    )
    texts = result["texts"]
    return Run(texts["documents"], texts["characters"], Measure.from_dict(result), positions, occurred)


def rates(total: Measure, counts: dict[str, int]) -> dict[str, float | None]:
    """Convert the mean loss to other units than tokens, by the number of each in the texts.

    A token that is not predicted (the first) counts as the mean of the others. A text that white space does
    not divide into words, such as Chinese, has no perplexity per word.

    Args:
        counts: tokens, words, characters and bytes of the texts.
    """
    nats = total.nats / total.tokens * counts["tokens"]  # of the texts
    word, bits = nats / counts["words"], nats / math.log(2)
    return {
        "word_perplexity": math.exp(word) if word < LONGEST_WORD else None,
        "bits_per_character": bits / counts["characters"],
        "bits_per_byte": bits / counts["bytes"],
    }


def places_in_window(losses: Sequence[Losses], windows: Windows | None) -> dict[str, Measure]:
    """Measure by the number of tokens of the window before each; nothing where windows overlap."""
    if windows is None or windows.stride < windows.tokens:
        return {}
    return by_place(losses, [np.arange(len(each)) % windows.tokens for each in losses], FIRST_IN_WINDOW)


def report(result: dict[str, Any], options: PerplexityOptions) -> None:
    """Print the numbers, and write them and a plot."""
    row = [f"{result['tokens']:,}", f"{result['perplexity']:.3f}", between(result["interval"], 3)]
    row += ["-" if result["word_perplexity"] is None else f"{result['word_perplexity']:.3f}"]
    row += [f"{result[name]:.4f}" for name in ("bits_per_character", "bits_per_byte")]
    titles = ["", "tokens", "perplexity", "95 %", "per word", "bits/character", "bits/byte"]
    print(f"\n{table(titles, [[result['name'], *row]])}")
    for title, name in (
        ("by tokens before, document", "by_position"),
        ("window", "by_place_in_window"),
        ("by tokens since its id occurred last", "by_last_occurrence"),
    ):
        if result[name]:
            values = [f"{part['perplexity']:.3f}" for part in result[name].values()]
            print(f"\n{table([title, *result[name]], [[result['name'], *values]])}")
    folder = Path(options.output)
    write_json(folder / "result.json", result, indent=1)
    if options.plots:
        save_figures({folder / "position.png": lambda: by_position({result["name"]: as_run(result)})})
    print("\n".join(["", *origin_lines([result]), f"{folder / 'result.json'} has all numbers."]))
