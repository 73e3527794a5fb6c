"""RULER's tasks: their settings, the words of their prompts, and how an answer is scored.

The words of the prompts are RULER's as the installed lm-eval has them: read from there, never shipped, always verified.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheformers.common.documents import fingerprint
from cacheformers.evaluation.longbench.tasks import lm_eval_folder

HOPS = 4  # of a chain of variables


@dataclass(frozen=True)
class Needles:
    """What is hidden (RULER's table 5).

    Attributes:
        haystack: 'noise' (sentences about grass), 'books', or 'needles' with other keys.
        key, value: 'words', 'numbers' or 'uuids'.
        keys: how many; `queries` of them are asked for. Each has `values`.
    """

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("books"),
    "niah_single_3": Needles("books", value="uuids"),
    "niah_multikey_1": Needles("books", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuids", value="uuids"),
    "niah_multivalue": Needles("books", values=4),
    "niah_multiquery": Needles("books", keys=4, queries=4),
}
# Task -> tokens that an answer may take.
NEW_TOKENS = {**dict.fromkeys(NEEDLES, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
QUESTIONS = ("qa_1", "qa_2")


def score(task: str, prediction: str, answers: Sequence[str]) -> dict[str, float]:
    """Score a prediction by the answers that occur in it, whatever their case.

    Returns:
        found: the share of the answers (`string_match_all`).
        score: the same; in question answering, whose answers are alternatives, 1 for any (`string_match_part`).
    """
    text = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip().lower()
    found = [answer.lower() in text for answer in answers]
    share = sum(found) / len(found)
    return {"score": float(any(found)) if task in QUESTIONS else share, "found": share}


@dataclass(frozen=True)
class Wording:
    """A prompt: a template with the fields `{context}` and `{input}`, and how the answer begins, with `{input}`."""

    template: str
    begun: str


@dataclass(frozen=True)
class Wordings:
    """The words of all tasks.

    Attributes:
        needle: with the fields `{type_needle_v}`, `{key}` and `{value}`.
        document: with the fields `{i}` and `{document}`.
    """

    tasks: dict[str, Wording]
    needle: str
    document: str


VERIFIED = "b8c28ab79c881cbd"  # of all words, read from lm-eval 0.4.13


def load_wordings() -> Wordings:
    """Return the words of the prompts.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: it has other prompts.
    """
    folder = lm_eval_folder().parent / "ruler"
    try:
        needles = literals(folder / "niah_utils.py")["TEMPLATE"]
        questions = literals(folder / "qa_utils.py")
        wordings = Wordings(
            {
                **{task: needle_wording(needles, settings) for task, settings in NEEDLES.items()},
                "vt": own_wording(literals(folder / "vt_utils.py")["CONFIG"]["variable_tracking"]),
                "cwe": own_wording(literals(folder / "cwe_utils.py")["CONFIG"]),
                "fwe": own_wording(literals(folder / "fwe_utils.py")["CONFIG"]),
                **dict.fromkeys(QUESTIONS, own_wording(questions["CONFIG"])),
            },
            literals(folder / "prepare_niah.py")["NEEDLE"],
            questions["DOCUMENT_PROMPT"],
        )
        found = [[[each.template, each.begun] for each in wordings.tasks.values()], wordings.needle, wordings.document]
    except (OSError, KeyError, SyntaxError):
        found = []
    if fingerprint(found) != VERIFIED:
        raise ValueError(f"{folder} has not the prompts of lm-eval 0.4.13, which RULER is run with: install that.")
    return wordings


def literals(file: Path) -> dict[str, Any]:
    """Return what a Python file assigns to names at its top, where that is a literal; the file is not run."""
    found = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def needle_wording(template: str, settings: Needles) -> Wording:
    """Name what is hidden, in the singular where it is one; the answer begins with the question's words."""
    one = settings.queries * settings.values == 1
    if one:
        template = template.replace("Some ", "A ").replace(" are all ", " is ").replace(" are ", " is ")
    kind = settings.value.removesuffix("s") if one else settings.value
    template = template.replace("{type_needle_v}", kind).replace("{query}", "{input}")
    asked = template.rpartition(" the special ")[2].rstrip("?")
    return Wording(template, f"The special {asked} {'is' if one else 'are'}")


def own_wording(config: dict[str, str]) -> Wording:
    fields = {"{query}": "{input}", "{num_v}": str(HOPS + 1)}
    texts = [config["template"], config["answer_prefix"].strip()]
    for name, text in fields.items():
        texts = [each.replace(name, text) for each in texts]
    return Wording(*texts)
