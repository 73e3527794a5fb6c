"""The text around the needle: as tokens, with the places where sentences begin."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cacheformers.common.documents import fingerprint
from cacheformers.common.sources import FORMATS, load_texts
from cacheformers.evaluation.passkey.wordings import REPEATED

REPEAT = "repeat"
SENTENCE = re.compile(r"[.!?][\"'\u201d\u2019)_]*\s+(?=\S)")  # what stands between two sentences
IDENTIFYING = 10_000  # tokens at the beginning by which a filler is known
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Filler:
    """Text to hide something in.

    Attributes:
        ids: `[tokens]`.
        starts: where sentences begin, ascending, from 0.
        varied: prompts take different parts of it; else all take its beginning.
    """

    ids: Ids
    starts: Ids
    varied: bool

    def start(self, tokens: int, random: np.random.Generator) -> int:
        """Where a part of so many tokens begins: at a sentence, among the first so many tokens."""
        if not self.varied:
            return 0
        last = min(tokens, len(self.ids) - tokens)
        return int(random.choice(self.starts[: np.searchsorted(self.starts, last, side="right")]))

    def split(self, start: int, end: int, share: float) -> int:
        """The beginning of a sentence, the start or the end: whichever divides a part in this ratio best."""
        first, last = np.searchsorted(self.starts, (start, end))
        places = np.array([start, *self.starts[first:last], end])
        return int(places[np.abs(places - (start + share * (end - start))).argmin()])

    def identity(self) -> str:
        """A short hash of its beginning."""
        return fingerprint([self.varied, self.ids[:IDENTIFYING].tolist()])


def load_filler(name: str, text_field: str, tokenizer: PreTrainedTokenizerBase, longest: int) -> Filler:
    """The filler for prompts of up to `longest` tokens.

    Args:
        name: 'repeat', or a file of texts.
        text_field: the field or column that holds a text.

    Raises:
        FileNotFoundError, ValueError: no such file, not readable, or not enough text in it.
    """
    if name == REPEAT:
        times = 1 + max(longest, IDENTIFYING) // len(encode(REPEATED, tokenizer)[0])
        return joined([REPEATED * (times + times // 8 + 1)], tokenizer, longest, varied=False)
    if not Path(name).exists():
        raise FileNotFoundError(
            f"filler {name!r} is neither {REPEAT!r} nor a file or folder that exists ({', '.join(FORMATS)})."
        )
    found = joined(load_texts([name], text_field), tokenizer, max(2 * longest, IDENTIFYING), varied=True)
    if len(found.ids) < longest:
        raise ValueError(
            f"{name} has {len(found.ids):,} tokens, too few to fill {longest:,}: give more text or shorter --lengths."
        )
    return found


def joined(texts: Iterable[str | None], tokenizer: PreTrainedTokenizerBase, enough: int, varied: bool) -> Filler:
    """Texts one after the other, until there are enough tokens."""
    ids, starts, total = [], [], 0
    for text in texts:
        if text and text.strip():
            own, places = encode(text, tokenizer)
            ids.append(own)
            starts.append(places + total)
            total += len(own)
        if total >= enough:
            break
    if not ids:
        return Filler(np.zeros(0, np.int64), np.zeros(1, np.int64), varied)
    return Filler(np.concatenate(ids), np.concatenate(starts), varied)


def encode(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[Ids, Ids]:
    """A text's ids, and the tokens with which its sentences begin."""
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ends = np.array([end for _, end in encoded.offset_mapping])
    places = [0, *(match.end() for match in SENTENCE.finditer(text))]
    starts = np.unique(np.searchsorted(ends, places, side="right"))
    return np.array(encoded.input_ids, np.int64), starts[starts < len(ends)].astype(np.int64)
