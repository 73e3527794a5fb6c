"""Books, as sentences: real text to hide something in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cacheformers.common.sources import load_texts

READ = 1_000_000  # tokens of books that texts up to half of this length are hidden in
SPARE = 64  # tokens more than wanted, of which the end is cut off
# Between two sentences. No name or title ends one: Mr. Smith, J. Smith.
BORDER = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"'\u201d\u2019)_]))"
    r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bMs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\b[A-Z]\.)"
    r" (?=[\"'\u201c\u2018(_]*[A-Z])"
)


@dataclass(frozen=True, eq=False)
class Books:
    """Sentences of books.

    Attributes:
        ends: number of tokens up to each sentence's end, `[sentences]`.
    """

    sentences: list[str]
    ends: NDArray[np.int64]

    def part(self, tokens: int) -> Books:
        """Return the beginning, from which texts of this length are taken, whatever the other lengths are."""
        last = int(np.searchsorted(self.ends, max(READ, 2 * tokens))) + 1
        return Books(self.sentences[:last], self.ends[:last])


def load_books(paths: Sequence[str], text_field: str, tokenizer: PreTrainedTokenizerBase, longest: int) -> Books:
    """Load as many books as texts of up to `longest` tokens need; they are joined where one is too short.

    Raises:
        FileNotFoundError, ValueError: there is no such file, it cannot be read, or all together are too short.
    """
    sentences: list[str] = []
    counts: list[NDArray[np.int64]] = []
    total = 0
    for book in load_texts(paths, text_field):
        own = list(split(book or ""))
        text: Any = tokenizer(" ".join(own), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ends = np.cumsum([len(sentence) + 1 for sentence in own]) - 1
        counts.append(total + np.searchsorted([end for _, end in text.offset_mapping], ends, side="right"))
        sentences += own
        total += len(text.input_ids)
        if total > max(READ, 2 * longest):
            break
    if total < longest + SPARE:
        raise ValueError(
            f"{', '.join(paths)}: {total:,} tokens, too few for a text of {longest:,} and {SPARE} to spare. Give more "
            "--books, or shorter --lengths."
        )
    return Books(sentences, np.concatenate(counts))


def split(text: str) -> Iterator[str]:
    """Yield the sentences of a text, each in a line; a paragraph ends one, too."""
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.strip():
            yield from BORDER.split(" ".join(paragraph.split()))
