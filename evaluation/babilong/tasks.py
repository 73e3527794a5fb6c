"""BABILong's tasks: what may be answered, how an answer is scored, and the prompts.

The instructions and examples are the paper's, as the installed lm-eval has them: read from there, never shipped, always
verified.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from cacheformers.common.documents import fingerprint
from cacheformers.evaluation.longbench.tasks import TaskLoader, lm_eval_folder

NEW_TOKENS = 15
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
# Task -> its possible answers; several of them are an answer with commas (qa8).
ANSWERS = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), PLACES),
    "qa5": ("Bill", "Fred", "Jeff", "Mary", *THINGS),
    "qa6": ("yes", "no"),
    "qa7": ("none", "one", "two", "three"),
    "qa8": ("nothing", *THINGS),
    "qa9": ("yes", "no"),
    "qa10": ("yes", "no", "maybe"),
}


def score(task: str, prediction: str, answer: str, question: str) -> float:
    """Return 1 if the answer is all that the first sentence of a prediction names of the task's answers, else 0.

    Answers that the question itself names do not count: they are never right.
    """
    sentence = re.split(r"[.\n<]", prediction.strip())[0]  # "<" begins an example or a context that is made up
    return float(named(task, sentence) - named(task, question) == set(answer.lower().split(",")))


def named(task: str, text: str) -> set[str]:
    """Return the answers of a task that are words of a text, in lower case."""
    words = set(re.findall(r"\w+", text.lower()))
    return {answer.lower() for answer in ANSWERS[task]} & words


def check_answer(task: str, answer: Any, where: str) -> str:
    """Return an answer; raise ValueError unless it is one of the task's."""
    known = {label.lower() for label in ANSWERS[task]}
    if not isinstance(answer, str) or not set(answer.lower().split(",")) <= known:
        raise ValueError(f"{where}: the answer {answer!r} is none of those of {task}: {', '.join(ANSWERS[task])}.")
    return answer


FORMAT = re.compile(r"\n(?=Always return your answer|Your answer should)")  # before what the answer should look like
TEMPLATE = "{instruction}\n\n{examples}\n\n{form}\n\n<context>\n{{context}}\n</context>\n\nQuestion: {{input}}"
EXAMPLE = "<example>\n{input} {question}\nAnswer: {target}\n</example>"
VERIFIED = "9416346c970bf5a5"  # of all prompts, made of lm-eval 0.4.13


def load_prompts() -> dict[str, str]:
    """Return the prompt of each task, with the fields `{context}` and `{input}`.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: it has other prompts.
    """
    folder = lm_eval_folder().parent / "babilong"
    try:
        prompts = {task: make_prompt(folder / f"babilong_{task}.yaml") for task in ANSWERS}
    except (OSError, KeyError, ValueError):
        prompts = {}
    if fingerprint(prompts) != VERIFIED:
        raise ValueError(f"{folder} has not the prompts of lm-eval 0.4.13, which BABILong is run with: install that.")
    return prompts


def make_prompt(file: Any) -> str:
    """Put lm-eval's description and examples of a task into the order of the paper's prompts."""
    found = yaml.load(file.read_text(encoding="utf-8"), TaskLoader)
    instruction, form = FORMAT.split(found["description"].strip())
    samples: Sequence[dict[str, str]] = found["fewshot_config"]["samples"]
    examples = "\n\n".join(EXAMPLE.format(**sample) for sample in samples)
    return TEMPLATE.format(instruction=instruction, examples=examples, form=form)
