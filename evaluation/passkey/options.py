"""What is asked, as options of the command."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cacheformers.common.recipe import option
from cacheformers.evaluation.passkey.filler import REPEAT
from cacheformers.evaluation.passkey.wordings import NEEDLES

UNITS = {"": 1, "K": 1024, "M": 1024 * 1024}


@dataclass
class PasskeyOptions:
    """Which prompts are made, and who answers them.

    Raises:
        ValueError: a number that makes no sense, or a needle that does not exist.
    """

    adapter: str | None = option(
        None,
        help="Adapter folder or Hub id. With a memory: the text is read into it, segment by segment, and the question "
        "is a segment of its own. Without one, or without adapter (base model alone): all is one prompt, which must "
        "fit the model's positions.",
    )
    output: str = option("runs/passkey", help="Folder for answers, result.json, table.md and heatmap.png.")
    lengths: list[str] = field(
        default_factory=lambda: ["1K", "2K", "4K"],
        metadata={"help": "Tokens of prompts, exactly: 5000, 4K (4096), 1M (1048576)."},
    )
    depths: list[float] = field(
        default_factory=lambda: [0.0, 25.0, 50.0, 75.0, 100.0],
        metadata={"help": "Where the key is hidden: per cent of the text before it. 0 is the beginning."},
    )
    trials: int = option(1, help="Keys for each length and depth.")
    needle: str = option(
        "passkey",
        help="What is hidden: 'passkey' (the papers' sentences), 'number' (said once, about something), 'word' (no "
        "digits that stand out).",
    )
    filler: str = option(
        REPEAT,
        help="The text around it: 'repeat' (the papers' sentences about grass, over and over) or a file of real text, "
        "such as books (.txt, .jsonl, .jsonl.gz, .parquet), of which each case takes another part.",
    )
    text_field: str = option("text", help="The field of a JSON line of the filler, or the column, that holds its text.")
    cache_size: int | None = option(
        None, help="Entries that the memory holds. Default: as many as the adapter was trained with."
    )
    forget: bool = option(
        False, help="Let the memory forget the beginning of texts that it cannot hold. Default: that is an error."
    )
    limit: int | None = option(None, help="Only so many cases of each length, for a try.")
    seed: int = option(0, help="Fixes the keys, and which parts of the filler are taken.")
    overwrite: bool = option(False, help="Start anew where there are answers of other settings.")
    plots: bool = option(True, help="Draw the heat map (needs matplotlib).")

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("There are no --lengths.")
        if self.needle not in NEEDLES:
            raise ValueError(f"needle {self.needle!r} is none of {', '.join(NEEDLES)}.")
        if not self.depths or any(not 0 <= depth <= 100 for depth in self.depths):
            raise ValueError(f"depths are per cent, 0 to 100, got {self.depths}.")
        for name in ("trials", "limit", "cache_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}.")

    @property
    def tokens(self) -> list[int]:
        """The lengths as numbers, the shortest first."""
        return sorted({parse_length(length) for length in self.lengths})


PasskeyOptions._argument_group_name = "passkey"  # type: ignore[attr-defined]


def parse_length(text: str) -> int:
    """`4096`, `4K` or `1M` as a number.

    Raises:
        ValueError: another form, or 0.
    """
    match = re.fullmatch(r"(\d+)([KM]?)", text.upper())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"lengths: {text!r} is no number of tokens such as 5000, 4K or 1M.")
    return int(match[1]) * UNITS[match[2]]
