"""What the task says: how the needle is announced, what it says, how it is asked for, what is repeated around it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

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
        question: comes last; the answer follows after a space.
        keys: what is hidden is one of these. None: a number of five digits.
    """

    needle: str
    question: str
    keys: tuple[str, ...] = ()
    intro: str = INTRO

    def draw(self, random: np.random.Generator) -> str:
        """Something to hide."""
        return str(random.choice(self.keys)) if self.keys else str(random.integers(10_000, 100_000))

    def score(self, answer: str, key: str) -> float:
        """1 if the first number (word, where a word is hidden) of an answer is the key, else 0."""
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
