"""Documents: checked before work starts, tokenized when their turn comes, in an order that only a seed decides.

They stand in an endless row, and lanes take them by their position in it. `Documents` has all of them at hand and
shuffles them anew each epoch; `StreamedDocuments` reads them in order, once an epoch, and shuffles block by block.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cacheformers.common.chats import load_chats
from cacheformers.common.recipe import option
from cacheformers.common.sources import TEXT, UNREADABLE, chats_instead, load_places, load_texts, stream_texts

SAMPLED = 16  # documents that a fingerprint looks at
CHECKED = 10_000  # documents of a stream among which one must be long enough


@dataclass
class DataOptions:
    """Which documents to train on."""

    _argument_group_name = "documents"
    train: list[str] = option(
        help="Documents to train on: files, folders and datasets of the Hub. JSON lines (.jsonl, .jsonl.gz) and "
        ".parquet hold one document a row; .txt and .md are one document each. Datasets are named owner/name, "
        "owner/name:config or owner/name:config:split."
    )
    text_field: str = option(TEXT, help="The field of a JSON line, or the column, that holds a document's text.")
    label_field: str | None = option(
        None,
        help="A field with [start, end] pairs of places in the text, in characters: only tokens that lie there are "
        "learned, such as answers; the others are read. Segments without any take no step. Default: all are learned.",
    )
    messages_field: str | None = option(
        None,
        help="A field with chats, lists of messages with role and content, instead of texts: they are written in the "
        "tokenizer's chat template, and only what assistants say is learned. Default: messages, where there is such a "
        "field and none that is called text.",
    )
    min_tokens: int = option(2, help="Leave out documents with fewer tokens (the paper: 20000).")
    max_tokens: int | None = option(
        None,
        help="Read only this many tokens of each document, from its beginning. Default: all. Methods that show "
        "self-attention whole documents need it: at most the base's positions.",
    )
    stream: bool = option(
        False,
        help="Read the documents in order, as training goes on, instead of loading all of them before it starts: for "
        "data larger than the disk.",
    )
    shuffle_block: int = option(
        1000, help="With stream: number of documents that are shuffled together. They are held in memory."
    )


def open_documents(
    paths: Sequence[str], tokenizer: PreTrainedTokenizerBase, options: DataOptions, split: str = "train"
) -> Documents | StreamedDocuments:
    """Open the documents of files, folders and Hub datasets, of `paths` instead of `options.train`.

    Args:
        split: which files of a folder are read whose names say that they belong to several splits.

    Raises:
        FileNotFoundError, ValueError: something is not there, cannot be read or has no such field; see `find_sources`.
    """
    if options.shuffle_block <= 0:
        raise ValueError(f"shuffle_block must be greater than 0, got {options.shuffle_block}.")
    if options.max_tokens is not None and options.max_tokens < 2:
        raise ValueError(f"max_tokens must be at least 2, got {options.max_tokens}.")
    if options.label_field is not None and (options.stream or not tokenizer.is_fast):
        raise ValueError("label_field takes a fast tokenizer, and documents that are loaded: leave out --stream.")
    read: dict[str, Any] = {"min_tokens": options.min_tokens, "sources": paths, "max_tokens": options.max_tokens}
    chats = options.messages_field
    if chats is None and options.text_field == TEXT:
        chats = chats_instead(paths, split, options.stream)
    if chats is not None:
        if options.stream or options.label_field is not None or not tokenizer.is_fast:
            raise ValueError(
                f"The field {chats!r} holds chats: they take a fast tokenizer, and neither --stream nor --label_field."
            )
        texts, answers = load_chats(paths, chats, tokenizer, split)
        return Documents(texts, tokenizer, places=answers, special_tokens=False, **read)
    if options.stream:
        stream = stream_texts(paths, options.text_field, split)
        return StreamedDocuments(stream, tokenizer, shuffle_block=options.shuffle_block, **read)
    places = None if options.label_field is None else load_places(paths, options.label_field, split)
    return Documents(load_texts(paths, options.text_field, split), tokenizer, places=places, **read)


def check_lengths(options: DataOptions, memory: Any) -> None:
    """Raise ValueError where documents may be longer than self-attention sees with these options of a memory."""
    most = memory.base.max_positions
    if memory.positions > most and not (options.max_tokens and options.max_tokens <= most):
        raise ValueError(
            f"Self-attention sees whole documents here, and the base model has {most} positions: give --max_tokens "
            f"{most} or less, to read only the beginning of each document."
        )


@dataclass(frozen=True)
class Piece:
    """A part of a document, which lanes read in segments.

    Attributes:
        tokens: `[tokens]`. The last one is only a label, unless it is `context`.
        learned: which tokens may be labels, bool `[tokens]`; None: all of them.
        context: nothing of it is learned; pieces that are asked follow.
        asked: a question and its answer: one segment, which is forgotten before the next piece.
        asking: number of its last tokens that are the question, after all context, and the answer.
        gold: which tokens of the document before it hold the answer.
        teacher: the same answer, after what a teacher with full attention sees before it, `[tokens]`.
        recalled: makes a question again, from the model and its memory of the context, with passages that this recalls.
    """

    tokens: Tensor
    learned: Tensor | None = None
    context: bool = False
    asked: bool = False
    asking: int = 0
    gold: tuple[range, ...] = ()
    teacher: Tensor | None = None
    recalled: Callable[[Any, Any], Piece] | None = None

    @property
    def inputs(self) -> Tensor:
        """The tokens that are read, `[tokens]` or one fewer."""
        return self.tokens if self.context else self.tokens[:-1]

    def labels(self, start: int, length: int, ignored: int) -> Tensor:
        """The token after each of `length` inputs from `start` on, `ignored` where nothing is learned."""
        if self.context:
            return torch.full((length,), ignored)
        targets = self.tokens[start + 1 : start + 1 + length]
        return targets if self.learned is None else targets.where(self.learned[start + 1 : start + 1 + length], ignored)


class DocumentRow(ABC):
    """Documents in an endless row: what lanes need to know of them.

    Args:
        min_tokens: documents with fewer tokens are left out.
        sources: the paths and names they come from.
        max_tokens: how many tokens of each document are read; None for all.
        special_tokens: let the tokenizer add its special tokens; False for texts that have theirs.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        min_tokens: int,
        sources: Sequence[str],
        max_tokens: int | None = None,
        special_tokens: bool = True,
    ) -> None:
        self.tokenizer, self.min_tokens, self.sources = tokenizer, min_tokens, list(sources)
        self.max_tokens, self.special_tokens = max_tokens, special_tokens
        self.least = max(min_tokens, 2)  # one token alone predicts nothing

    @abstractmethod
    def at(self, position: int, seed: int) -> int:
        """Return the index of the document at a position of the endless row; only the seed decides it."""

    @abstractmethod
    def text(self, index: int) -> str | None:
        """Return the text of one document."""

    def release(self, position: int) -> None:  # noqa: B027  # few rows hold texts
        """Let go of the documents before this position of the endless row, unless all stay in memory anyway."""

    @abstractmethod
    def check(self, segment_tokens: int) -> None:
        """Check that at least one document is longer than a segment (reads until it finds one).

        Raises:
            ValueError: all documents are empty or left out, none is longer than a segment, or nothing is to be learned.
        """

    @abstractmethod
    def _first_texts(self) -> Iterable[str | None]:
        """Return texts that distinguish these documents from others."""

    def tokens(self, index: int) -> Tensor:
        """Return the ids of one document, `[tokens]`; empty if it is left out."""
        return self._tokens(self.text(index))

    def learned(self, index: int) -> Tensor | None:
        """Mark the tokens of one document that may be labels, bool `[tokens]`; None for all of them."""
        return None

    def total_tokens(self) -> int | None:
        """Estimate the tokens of all documents; None where that takes reading a stream to its end."""
        return None

    def pieces(self, index: int) -> list[Piece]:
        """Return the pieces of one document in the order in which they are read; none if it is left out."""
        tokens = self.tokens(index)
        return [Piece(tokens, self.learned(index))] if len(tokens) else []

    def name(self, index: int) -> str:
        """Name a document for errors and logs: its index and its first words."""
        words = (self.text(index) or "").split(maxsplit=8)
        start = " ".join(words[:8])[:60]
        return f'document {index} ("{start} ...")' if start else f"document {index} (empty)"

    def identity(self) -> dict[str, Any]:
        """Describe these documents for a comparison when a run is resumed; the same on every machine."""
        texts = [text or "" for text in self._first_texts()]
        beginnings = [self.tokenizer(text[:1000], verbose=False)["input_ids"] for text in texts]
        return {
            "sources": [Path(source).name if Path(source).exists() else source for source in self.sources],
            "min_tokens": self.min_tokens,
            "texts": fingerprint(texts),
            "tokenizer": fingerprint([sorted(self.tokenizer.get_vocab().items()), beginnings]),
        }

    def _tokens(self, text: str | None) -> Tensor:
        given = {"verbose": False, "add_special_tokens": self.special_tokens}
        ids = self.tokenizer(text, **given)["input_ids"] if text and self._may_suffice(text) else []
        return torch.tensor(ids[: self.max_tokens] if len(ids) >= self.least else [], dtype=torch.long)

    def _may_suffice(self, text: str) -> bool:
        """Whether a text can have enough tokens: there is at most one a byte, whatever the vocabulary.

        Bytes count after normalization, which may lengthen a text; tokenizers may put a space before it, and special
        tokens around it.
        """
        if len(text) >= self.least or not self.tokenizer.is_fast:
            return True
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        normalized = normalizer.normalize_str(text) if normalizer else text
        most = len(normalized.encode()) + 1 + self.tokenizer.num_special_tokens_to_add()
        return most >= self.least

    def _check(self, texts: Iterable[str | None], segment_tokens: int, limit: int | None = None) -> None:
        count, longest, blank = 0, 0, True
        for text in islice(texts, limit):
            count, longest = count + 1, max(longest, len(self._tokens(text)))
            blank = blank and not (text or "").strip()
            if longest > segment_tokens + 1:  # the last token is only ever a label
                return
        total = f"the first {count:,}" if count == limit else f"{count:,}"
        if blank:
            raise ValueError(f"All {total} documents are empty.")
        if longest == 0:
            raise ValueError(f"All {total} documents have fewer than {self.least} tokens.")
        raise ValueError(
            f"The longest of {total} documents has {longest} tokens, which is not more than one segment of "
            f"{segment_tokens} and the label after it: nothing would ever be remembered. Give longer documents or a "
            "smaller segment_tokens."
        )


class Documents(DocumentRow):
    """Texts with the tokenizer that turns them into ids.

    Args:
        texts: one string a document; None and empty strings count as empty documents.
        places: `[start, end]` pairs, in characters, of what is learned of each text. None: all of it.
    """

    def __init__(
        self,
        texts: Sequence[str | None],
        tokenizer: PreTrainedTokenizerBase,
        min_tokens: int = 2,
        sources: Sequence[str] = (),
        places: Sequence[list[list[int]] | None] | None = None,
        max_tokens: int | None = None,
        special_tokens: bool = True,
    ) -> None:
        super().__init__(tokenizer, min_tokens, sources, max_tokens, special_tokens)
        self.texts, self.places = texts, places

    def __len__(self) -> int:
        return len(self.texts)

    def __str__(self) -> str:
        return f"{len(self):,} documents"

    def at(self, position: int, seed: int) -> int:
        """Return the index of the document at a position of the endless row: one permutation per epoch."""
        epoch, place = divmod(position, len(self))
        return int(permutation(seed, epoch, len(self))[place])

    def text(self, index: int) -> str | None:
        return self.texts[index]

    def check(self, segment_tokens: int) -> None:
        self._check(self.texts, segment_tokens)
        if self.places is not None:
            self._check_places()

    def learned(self, index: int) -> Tensor | None:
        """Mark the tokens of one document that may be labels: those that share a character with its places."""
        if self.places is None:
            return None
        given = {"verbose": False, "add_special_tokens": self.special_tokens}
        encoded = self.tokenizer(self.texts[index] or "", return_offsets_mapping=True, **given)
        starts, ends = torch.tensor(encoded["offset_mapping"]).reshape(-1, 2).T
        learned = torch.zeros(len(starts), dtype=torch.bool)
        for start, end in self.places[index] or []:
            learned |= (starts < end) & (start < ends)
        return learned[: self.max_tokens]

    def total_tokens(self) -> int:
        """Estimate the tokens of all documents from their characters, and those of some documents."""
        texts = [self.texts[index] or "" for index in self._sampled()]
        given = {"verbose": False, "add_special_tokens": self.special_tokens}
        tokens = sum(len(self.tokenizer(text, **given)["input_ids"]) for text in texts)
        rate = tokens / max(sum(map(len, texts)), 1)
        counts = (rate * len(text or "") for text in self.texts)
        return round(sum(min(count, self.max_tokens or count) for count in counts if count >= self.least))

    def _check_places(self) -> None:
        assert self.places is not None
        for index, (text, places) in enumerate(zip(self.texts, self.places, strict=True)):
            for place in places or []:
                if len(place) != 2 or not 0 <= place[0] < place[1] <= len(text or ""):
                    raise ValueError(f"{self.name(index)}: {place} is no [start, end] in {len(text or '')} characters.")
        for index in range(len(self)):
            learned = self.learned(index)
            if learned is not None and learned[1:].any() and len(self.tokens(index)):
                return
        raise ValueError("No document that is long enough has a place to learn: nothing would ever be learned.")

    def identity(self) -> dict[str, Any]:
        places = {} if self.places is None else {"places": fingerprint([self.places[i] for i in self._sampled()])}
        return {"documents": len(self), **super().identity(), **places}

    def _first_texts(self) -> list[str | None]:
        return [self.texts[index] for index in self._sampled()]

    def _sampled(self) -> list[int]:
        return [int(index) for index in np.linspace(0, len(self) - 1, min(SAMPLED, len(self)))]


class StreamedDocuments(DocumentRow):
    """Documents read in order from a stream that begins again where it ends.

    Block b is documents b * shuffle_block to (b + 1) * shuffle_block - 1 of the endless stream, and the same places of
    the endless row, permuted. So the order depends on the seed alone, and a position is enough to go on from. Blocks
    are held from when a document of theirs is asked for until `release`.

    Args:
        texts: rows of one column, a document each.
        shuffle_block: documents that are shuffled together.
    """

    def __init__(
        self,
        texts: IterableDataset,
        tokenizer: PreTrainedTokenizerBase,
        min_tokens: int = 2,
        shuffle_block: int = 1000,
        sources: Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(tokenizer, min_tokens, sources, max_tokens)
        self.texts, self.shuffle_block = texts, shuffle_block
        self._length: int | None = None  # documents of the stream, once its end has been seen
        self._blocks: dict[int, list[str | None]] = {}
        self._first = 0  # no block before this one is needed
        self._next = 0  # the block that the reader comes to next
        self._reader: Iterator[str | None] | None = None

    def __str__(self) -> str:
        return f"documents streamed from {', '.join(self.sources) or 'a dataset'}"

    def at(self, position: int, seed: int) -> int:
        """Return the index in the endless stream of the document at a position: one permutation per block."""
        block, place = divmod(position, self.shuffle_block)
        return block * self.shuffle_block + int(permutation(seed, block, self.shuffle_block)[place])

    def text(self, index: int) -> str | None:
        """Return the text of one document by its index in the endless stream, reading on or starting over as needed."""
        block, place = divmod(index, self.shuffle_block)
        if block not in self._blocks and (self._reader is None or block < self._next):
            self._next = min(self._first, block)
            self._reader = self._endless(self._next * self.shuffle_block)
        while block not in self._blocks:
            assert self._reader is not None
            self._blocks[self._next] = list(islice(self._reader, self.shuffle_block))
            self._next += 1
        return self._blocks[block][place]

    def release(self, position: int) -> None:
        """Let go of the blocks before this position of the endless row. After a restart, reading begins there."""
        self._first = position // self.shuffle_block
        self._blocks = {block: texts for block, texts in self._blocks.items() if block >= self._first}

    def check(self, segment_tokens: int) -> None:
        """See to it that some document goes beyond a segment, among the first 10,000 (reads on until it finds one)."""
        self._check(self._from(0), segment_tokens, CHECKED)

    def identity(self) -> dict[str, Any]:
        return {"shuffle_block": self.shuffle_block, **super().identity()}

    def _first_texts(self) -> Iterable[str | None]:
        return islice(self._from(0), SAMPLED)

    def _endless(self, index: int) -> Iterator[str | None]:
        """Texts of the endless stream from document `index` on."""
        while True:
            start = stop = index if self._length is None else index % self._length
            for text in self._from(start):
                yield text
                stop += 1
            if self._length is None:
                # Nothing came where the stream is shorter than `start`: by how much, only counting tells.
                counted = self.texts.with_format("arrow").iter(batch_size=1000)
                self._length = stop if stop > start else sum(map(len, counted))
            if self._length == 0:
                raise ValueError(f"There is no document in {self}.")
            index += stop - start

    def _from(self, start: int) -> Iterator[str | None]:
        """Texts of the stream from document `start` to its end."""
        index = start
        try:
            for row in self.texts.skip(start):
                (text,) = row.values()
                yield text
                index += 1
        except UNREADABLE as error:
            raise ValueError(f"Document {index} of the {self} cannot be read: {error}") from error


@lru_cache(maxsize=2)  # lanes stand in the same epoch or block, or in neighboring ones
def permutation(seed: int, number: int, length: int) -> np.ndarray:
    """Return the order of an epoch's or a block's documents, `[length]`."""
    return np.random.default_rng((seed, number)).permutation(length)


def fingerprint(value: Any) -> str:
    """Hash a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
