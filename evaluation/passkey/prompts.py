"""Cases and their prompts: introduction, filler, needle, filler, question, joined as tokens to an exact length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cacheformers.evaluation.longbench.prompts import Encoded
from cacheformers.evaluation.passkey.filler import Filler
from cacheformers.evaluation.passkey.wordings import Wording


@dataclass(frozen=True)
class Case:
    """One prompt.

    Attributes:
        length: tokens of the whole prompt, without the answer.
        depth: where the needle stands: per cent of the filler before it.
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
    """All cases, the shortest first. What one hides depends on nothing but itself and the seed."""
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
        """The prompt, and where its question begins.

        Raises:
            ValueError: it is too short for the needle.
        """
        intro, needle, question = self.parts(case)
        room = self.room(case)
        start = self.filler.start(room, randomness(self.seed, case.length, case.depth, case.trial, 1))
        end = start + room
        place = self.filler.split(start, end, case.depth / 100)
        before, after = (self.filler.ids[a:b].tolist() for a, b in ((start, place), (place, end)))
        return Encoded([*intro, *before, *needle, *after, *question], case.length - len(question))

    def parts(self, case: Case) -> tuple[list[int], list[int], list[int]]:
        """Introduction, needle and question, each a line of its own."""
        special: list[int] = self.tokenizer("").input_ids  # such as a token for the beginning
        wording = self.wording
        return (
            [*special, *self.encode(f"{wording.intro}\n")],
            self.encode(f"\n{wording.needle.format(key=case.key)}\n"),
            self.encode(f"\n{wording.question}"),
        )

    def room(self, case: Case) -> int:
        """Tokens of filler that a prompt has place for.

        Raises:
            ValueError: there is none.
        """
        taken = sum(map(len, self.parts(case)))
        if taken > case.length:
            raise ValueError(
                f"A prompt of {case.length} tokens is too short: introduction, needle and question alone take {taken}. "
                "Give longer --lengths."
            )
        return case.length - taken

    def new_tokens(self, case: Case) -> int:
        """How long an answer may be: the key and enough to see that it has ended."""
        return len(self.encode(f" {case.key}")) + 3

    def encode(self, text: str) -> list[int]:
        found: Any = self.tokenizer(text, add_special_tokens=False).input_ids
        return list(found)
