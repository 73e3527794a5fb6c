"""Lengths: how they are given and shown, and the options of what is asked at several of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cacheformers.common.recipe import option
from cacheformers.evaluation.longbench.methods import AnsweringOptions
from cacheformers.evaluation.longbench.records import Record
from cacheformers.evaluation.run import short

UNITS = {"": 1, "K": 1024, "M": 1024 * 1024}
Cell = tuple[list[Record], str]  # the records of a task and a length, and a hash of all that more of them depend on


def parse_length(text: str) -> int:
    """Turn `4096`, `4K` or `1M` into a number; raise ValueError for another form, or 0."""
    match = re.fullmatch(r"(\d+)([KM]?)", text.upper())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"lengths: {text!r} is not a number of tokens such as 5000, 4K or 1M.")
    return int(match[1]) * UNITS[match[2]]


def label(tokens: int) -> str:
    """Format a length as in the papers: 0K, 4K, 1M."""
    return short(tokens) if tokens else "0K"


def cell_name(task: str, tokens: int) -> str:
    return f"{task}-{label(tokens)}"


@dataclass
class LengthOptions(AnsweringOptions):
    """Which tasks are asked at which lengths, and how they are answered; ValueError for a wrong name or number."""

    known: ClassVar[Sequence[str]] = ()

    text_field: str = option("text", help="The field of a JSON line of the books, or the column, that holds the text.")
    tasks: list[str] = field(default_factory=list)
    lengths: list[str] = field(default_factory=list)
    records: int = option(50, help="Questions for each task and length. More may be asked later.")
    seed: int = option(0, help="Fixes which questions are asked, and where in the text the answers are hidden.")
    output: str = option("runs/lengths", help="Folder for answers, results, tables and heat maps.")

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [task for task in self.tasks if task not in self.known]
        if unknown or not self.tasks or not self.tokens:
            raise ValueError(
                f"tasks: {', '.join(unknown) or 'none'}; give some of {', '.join(self.known)}, and --lengths."
            )
        if self.records < 1 or self.seed < 0:
            raise ValueError(f"records {self.records} must be at least 1, and seed {self.seed} not negative.")

    @property
    def tokens(self) -> list[int]:
        """Return the lengths as numbers, the shortest first."""
        return sorted({parse_length(text) for text in self.lengths})

    @property
    def common(self) -> dict[str, Any]:
        return {**super().common, "seed": self.seed}
