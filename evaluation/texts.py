"""Texts to measure a perplexity on: any form of document, and any other file, as raw text."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cacheformers.common.sources import FORMATS, load_texts


@dataclass(frozen=True)
class Text:
    """What is read of a document.

    Attributes:
        ids: `[tokens]`, with a BOS token if asked for.
        tokens, words, characters, bytes: their numbers, without a BOS token. White space separates words; bytes are
            those of UTF-8.
    """

    name: str
    ids: Tensor
    tokens: int
    words: int
    characters: int
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
        for number, text in enumerate(load(path, text_field)):
            if len(found) == documents:
                break
            made = tokenized(f"{Path(path).name}, document {number}", text or "", tokenizer, bos, tokens)
            if len(made.ids) > 1 and made.words:  # one token alone predicts nothing
                found.append(made)
    if not found:
        raise ValueError(f"There is no document of two tokens or more in {', '.join(paths)}.")
    return found


def load(path: str, text_field: str) -> Sequence[str | None]:
    """Load the documents of one path."""
    file = Path(path)
    raw = file.is_file() and not file.name.endswith(tuple(FORMATS))
    return [raw_text(file)] if raw else load_texts([path], text_field)


def raw_text(file: Path) -> str:
    """Read a file as text with its line ends; drop a character that the end of the file cuts off.

    Raises:
        ValueError: the file is not UTF-8, or not valid gzip.
    """
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return codecs.getincrementaldecoder("utf-8")().decode(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{file} cannot be read as gzip ({error}): the file is damaged or cut off.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text: its byte {error.start:,} is not UTF-8.") from error


def tokenized(name: str, text: str, tokenizer: PreTrainedTokenizerBase, bos: bool, tokens: int | None) -> Text:
    """Tokenize a document's beginning, and count what it stands for."""
    cut = tokens is not None
    if cut and not tokenizer.is_fast:
        raise ValueError("--tokens needs a fast tokenizer, which says where in the text a token ends.")
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=cut, verbose=False)
    ids = encoded.input_ids
    if tokens is not None and len(ids) > tokens:
        ids, text = ids[:tokens], text[: encoded.offset_mapping[tokens - 1][1]]
    start = [tokenizer.bos_token_id] if bos else []
    read = torch.tensor([*start, *ids], dtype=torch.long)
    return Text(name, read, len(ids), len(text.split()), len(text), len(text.encode()))
