"""The text of the passkey task: the needle, the filler around it, and prompts of an exact number of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cacheformers.common.documents import fingerprint
from cacheformers.common.sources import FORMATS, load_texts
from cacheformers.evaluation.longbench.prompts import Encoded

INTRO = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the important information there."
)
REPEATED = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
# Words that are common, and not in the texts above.
WORDS = (
    *("anchor", "basket", "candle", "dragon", "engine", "forest", "garden", "hammer", "island", "jacket", "kettle"),
    *("ladder", "marble", "orange", "pepper", "rabbit", "saddle", "silver", "ticket", "violin", "wallet", "window"),
)


@dataclass(frozen=True)
class Wording:
    """A needle, and the sentences around it.

    Attributes:
        needle: with `{key}` for what is hidden.
        question: the end of the prompt; the answer follows after a space.
        keys: words to hide; if empty, a number of five digits is hidden.
    """

    needle: str
    question: str
    keys: tuple[str, ...] = ()
    intro: str = INTRO

    def draw(self, random: np.random.Generator) -> str:
        """Choose something to hide."""
        return str(random.choice(self.keys)) if self.keys else str(random.integers(10_000, 100_000))

    def score(self, answer: str, key: str) -> float:
        """Return 1 if the first number (or word, where a word is hidden) of an answer is the key, else 0."""
        found = re.search(r"[^\W\d_]+" if self.keys else r"\d+", answer)
        return float(found is not None and found[0].lower() == key)


NEEDLES = {
    "passkey": Wording(
        "The pass key is {key}. Remember it. {key} is the pass key.", "What is the pass key? The pass key is"
    ),
    "number": Wording(
        "The magic number of the lighthouse is {key}.",
        "What is the magic number of the lighthouse? The magic number of the lighthouse is",
    ),
    "word": Wording("The secret word is {key}.", "What is the secret word? The secret word is", WORDS),
}


REPEAT = "repeat"
SENTENCE = re.compile(r"[.!?][\"'\u201d\u2019)_]*\s+(?=\S)")  # what is between two sentences
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
        """Choose where a part of `tokens` tokens begins: at a sentence among the first `tokens` tokens."""
        if not self.varied:
            return 0
        last = min(tokens, len(self.ids) - tokens)
        return int(random.choice(self.starts[: np.searchsorted(self.starts, last, side="right")]))

    def split(self, start: int, end: int, share: float) -> int:
        """Return the beginning of a sentence, the start or the end: whichever divides a part best in this ratio."""
        first, last = np.searchsorted(self.starts, (start, end))
        places = np.array([start, *self.starts[first:last], end])
        return int(places[np.abs(places - (start + share * (end - start))).argmin()])

    def identity(self) -> str:
        """Hash its beginning."""
        return fingerprint([self.varied, self.ids[:IDENTIFYING].tolist()])


def load_filler(name: str, text_field: str, tokenizer: PreTrainedTokenizerBase, longest: int) -> Filler:
    """Load the filler for prompts of up to `longest` tokens: 'repeat', or a file of texts in a field.

    Raises:
        FileNotFoundError, ValueError: there is no such file, it cannot be read, or it is too short.
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
    """Join texts until there are enough tokens."""
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
    """Return a text's ids, and the indices of the tokens with which its sentences begin."""
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ends = np.array([end for _, end in encoded.offset_mapping])
    places = [0, *(match.end() for match in SENTENCE.finditer(text))]
    starts = np.unique(np.searchsorted(ends, places, side="right"))
    return np.array(encoded.input_ids, np.int64), starts[starts < len(ends)].astype(np.int64)


@dataclass(frozen=True)
class Case:
    """One prompt.

    Attributes:
        length: tokens of the whole prompt, without the answer.
        depth: percentage of the filler that is before the needle.
        trial: number among the cases of this length and depth.
        key: what is hidden.
    """

    length: int
    depth: float
    trial: int
    key: str

    @property
    def id(self) -> str:
        return f"{self.length}-{self.depth:g}-{self.trial}"


def make_cases(wording: Wording, lengths: Sequence[int], depths: Sequence[float], trials: int, seed: int) -> list[Case]:
    """Make all cases, the shortest first. What one hides depends only on itself and the seed."""
    return [
        Case(length, depth, trial, wording.draw(randomness(seed, length, depth, trial)))
        for length in lengths
        for trial in range(trials)
        for depth in depths
    ]


def randomness(seed: int, length: int, depth: float, trial: int, purpose: int = 0) -> np.random.Generator:
    return np.random.default_rng((seed, length, round(1000 * depth), trial, purpose))


@dataclass(frozen=True)
class PromptMaker:
    """Makes prompts of cases."""

    wording: Wording
    filler: Filler
    tokenizer: PreTrainedTokenizerBase
    seed: int

    def __call__(self, case: Case) -> Encoded:
        """Return the prompt, and where its question begins; raise ValueError if it is too short for the needle."""
        intro, needle, question = self.parts(case)
        room = self.room(case)
        start = self.filler.start(room, randomness(self.seed, case.length, case.depth, case.trial, 1))
        end = start + room
        place = self.filler.split(start, end, case.depth / 100)
        before, after = (self.filler.ids[a:b].tolist() for a, b in ((start, place), (place, end)))
        return Encoded([*intro, *before, *needle, *after, *question], case.length - len(question))

    def parts(self, case: Case) -> tuple[list[int], list[int], list[int]]:
        """Return introduction, needle and question, each a line of its own."""
        special: list[int] = self.tokenizer("").input_ids  # such as a token for the beginning
        wording = self.wording
        return (
            [*special, *self.encode(f"{wording.intro}\n")],
            self.encode(f"\n{wording.needle.format(key=case.key)}\n"),
            self.encode(f"\n{wording.question}"),
        )

    def room(self, case: Case) -> int:
        """Return how many tokens of filler fit into a prompt; raise ValueError if none do."""
        taken = sum(map(len, self.parts(case)))
        if taken > case.length:
            raise ValueError(
                f"A prompt of {case.length} tokens is too short: introduction, needle and question alone take {taken}. "
                "Give longer --lengths."
            )
        return case.length - taken

    def new_tokens(self, case: Case) -> int:
        """Return how long an answer may be: the key, and enough to see that it has ended."""
        return len(self.encode(f" {case.key}")) + 3

    def encode(self, text: str) -> list[int]:
        found: Any = self.tokenizer(text, add_special_tokens=False).input_ids
        return list(found)
