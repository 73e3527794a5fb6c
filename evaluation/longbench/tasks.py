"""The 21 tasks in the papers' order, what the official configuration says of each, and their prompt templates.

Templates are read from an installed lm-eval or from a file, never shipped, always verified.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Task:
    """One data set.

    Attributes:
        category: its heading in the papers' tables.
        metric: a name of `metrics.METRICS`.
        new_tokens: how long an answer may be.
        chat: chat models get the prompt in their chat template.
        first_line: only the first line of a prediction is scored.
        stops_at_newline: generation ends at the first newline, after at least one token.
    """

    name: str
    category: str
    metric: str
    new_tokens: int
    chat: bool = True
    first_line: bool = False
    stops_at_newline: bool = False


SINGLE, MULTI, SUMMARIES = "Single-document QA", "Multi-document QA", "Summarization"
FEW_SHOT, SYNTHETIC, CODE = "Few-shot learning", "Synthetic tasks", "Code completion"

TASKS = {
    task.name: task
    for task in (
        Task("narrativeqa", SINGLE, "qa_f1_score", 128),
        Task("qasper", SINGLE, "qa_f1_score", 128),
        Task("multifieldqa_en", SINGLE, "qa_f1_score", 64),
        Task("multifieldqa_zh", SINGLE, "qa_f1_zh_score", 64),
        Task("hotpotqa", MULTI, "qa_f1_score", 32),
        Task("2wikimqa", MULTI, "qa_f1_score", 32),
        Task("musique", MULTI, "qa_f1_score", 32),
        Task("dureader", MULTI, "rouge_zh_score", 128),
        Task("gov_report", SUMMARIES, "rouge_score", 512),
        Task("qmsum", SUMMARIES, "rouge_score", 512),
        Task("multi_news", SUMMARIES, "rouge_score", 512),
        Task("vcsum", SUMMARIES, "rouge_zh_score", 512),
        Task("trec", FEW_SHOT, "classification_score", 64, chat=False, first_line=True),
        Task("triviaqa", FEW_SHOT, "qa_f1_score", 32, chat=False, first_line=True),
        Task("samsum", FEW_SHOT, "rouge_score", 128, chat=False, first_line=True, stops_at_newline=True),
        Task("lsht", FEW_SHOT, "classification_score", 64, chat=False, first_line=True),
        Task("passage_count", SYNTHETIC, "count_score", 32),
        Task("passage_retrieval_en", SYNTHETIC, "retrieval_score", 32),
        Task("passage_retrieval_zh", SYNTHETIC, "retrieval_zh_score", 32),
        Task("lcc", CODE, "code_sim_score", 64, chat=False),
        Task("repobench-p", CODE, "code_sim_score", 64, chat=False),
    )
}
# What a record of one's own sets may be: one of LongBench's tasks, or how a sentence of the text goes on.
QUOTE = "quote"
FORMS = {**TASKS, QUOTE: Task(QUOTE, SYNTHETIC, "qa_f1_score", 32)}
OWN_TEMPLATES = {QUOTE: "Here is a text:\n{context}\n\nContinue this sentence of the text with its next words: {input}"}
# LongBench-E: 13 of them, with records of all lengths.
NOT_IN_E = {
    *("narrativeqa", "multifieldqa_zh", "musique", "dureader"),
    *("qmsum", "vcsum", "lsht", "passage_retrieval_zh"),
}
E_TASKS = tuple(name for name in TASKS if name not in NOT_IN_E)
# A model's positions -> the official limit of its prompts.
MAX_LENGTHS = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500}
BUCKETS = ("0-4k", "4-8k", "8k+")


def bucket(length: int) -> str:
    """Return LongBench-E's bucket of a record by its `length` (words, or characters in Chinese)."""
    return BUCKETS[(length >= 4000) + (length >= 8000)]


def chosen_tasks(names: list[str] | None, e: bool, own: Sequence[str] = ()) -> list[str]:
    """Return the names of tasks in the papers' order: those given, or all of LongBench or LongBench-E.

    Args:
        own: tasks of the data that LongBench does not have. They are known too, and by default they are all.

    Raises:
        ValueError: one does not exist; names those that do.
    """
    known = [*(E_TASKS if e else TASKS), *own]
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        which = "LongBench-E has" if e else "LongBench has"
        raise ValueError(f"tasks: {', '.join(unknown)} does not exist; {which} {', '.join(known)}.")
    if names is None and own:
        return list(own)
    return [name for name in known if names is None or name in names]


# SHA-256 of each template of the official config/dataset2prompt.json (UTF-8).
SHA256 = {
    "narrativeqa": "aada7ed24b06abace5b0045ac3bcfe06fc831a6cf434f0ecfd99fb7b3d299e1c",
    "qasper": "0fbdd123fe7f83d6d6a9c583ca28cb29d68e523bf8fec01a0cf2dcd11037775d",
    "multifieldqa_en": "20b4666a2de8a1f701bdb6c4e015fa9f8758d64b361d841f7766df6c9ceba770",
    "multifieldqa_zh": "344b3a4e557cd5470c661b3d6b374339717e1257a6c01f628d22322d4a554b94",
    "hotpotqa": "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
    "2wikimqa": "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
    "musique": "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
    "dureader": "ae53329f51b17908e08b8c6bf366987282b8b38c0ee35275ebd7b79e9b30eff2",
    "gov_report": "91c25d585b189ced91c9280efcb4ecb5dcff9548cd4e3bfae66c68025b569e95",
    "qmsum": "dca23b678fe0183bbd9555b57947022aed1b85739da5ad7e1b4708dd0c71c409",
    "multi_news": "2af3f28c40b902e6535d4910510d51653613c49de9b2fc287c5958395061101d",
    "vcsum": "3e5d8241bc9b512eb4929c1ba80882a44f50b446bc2b1d9d79eff030dd10dc27",
    "trec": "0eff8bebdba99d91e9d7d91b6ab39455ac74648bea92c9255c9f68c62175b2db",
    "triviaqa": "00a802e6377e72fca39b169cf6c28893bedf23ba7286b03ecd15867c3e27a7c4",
    "samsum": "a68d884234907eefcaa0eacf7b2997f60fa46603988dceae6a44f9b49f045b3f",
    "lsht": "f3edabdf7fae53d6cadfa7a10f3574d114302161c46dacecd5d30763204bbbf3",
    "passage_count": "986550b6c61009c629a4535766d94b7b51e2b2b9e1ed169e4ecb54417466e964",
    "passage_retrieval_en": "39b96b7fa52bdd2aa2bde34ea199158505201b9a0a2c3ce94e80249293f60431",
    "passage_retrieval_zh": "c1e2346e245eb365bc33a1503cde2e473948a2aad51c3e4c72893e61ab074d60",
    "lcc": "6a1f24cf0bb83cd90f1fca8f0dd24801626c2aaea29db834ddc83b950e71190e",
    "repobench-p": "ee9ec182ea5ffeb70a7140d55baea97264a8612d88226d323afa90859c36240c",
}
# How lm-eval's templates differ from the official ones, apart from the names of their fields.
ENDINGS = {"lcc": "\n", "repobench-p": "\n", "passage_count": " ", "passage_retrieval_en": " "}
TWO_NEWLINES = ("triviaqa", "samsum")


def load_templates(tasks: Iterable[str], file: str | None = None) -> dict[str, str]:
    """Return the template of each task, with the fields `{context}` and `{input}`.

    Args:
        file: the official `dataset2prompt.json`. Default: what the installed lm-eval ships.

    Raises:
        ImportError, OSError: lm-eval is not installed, or the file cannot be read.
        ValueError: a template is missing, or is not the official one.
    """
    own = {task: OWN_TEMPLATES[task] for task in tasks if task in OWN_TEMPLATES}
    official = [task for task in tasks if task not in own]
    found = {task: from_lm_eval(task) for task in official} if file is None else from_file(Path(file), official)
    source = f"lm-eval in {lm_eval_folder()}" if file is None else file
    changed = [task for task, text in found.items() if hashlib.sha256(text.encode()).hexdigest() != SHA256[task]]
    if changed:
        raise ValueError(
            f"The prompt templates of {', '.join(changed)} from {source} are not the official ones (SHA-256). Scores "
            "would compare with nothing: give the official config/dataset2prompt.json with --prompts, or install "
            "lm-eval 0.4.13."
        )
    return found | own


def from_lm_eval(task: str) -> str:
    """Read lm-eval's template of a task, and make it equal to the official one."""
    path = lm_eval_folder() / f"{task}.yaml"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: install lm-eval 0.4.13, or give --prompts.")
    text: str = yaml.load(path.read_text(encoding="utf-8"), TaskLoader)["doc_to_text"]
    text = text.replace("{{question}}", "{input}").replace("{{context}}", "{context}") + ENDINGS.get(task, "")
    return text.replace("{context}\n{input}", "{context}\n\n{input}") if task in TWO_NEWLINES else text


def lm_eval_folder() -> Path:
    """Find the LongBench tasks of the installed lm-eval, without importing it."""
    spec = find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "The prompt templates are read from lm-eval, which is not installed. Run: pip install "
            '"cacheformers[eval]", or give the official config/dataset2prompt.json with --prompts.'
        )
    return Path(spec.submodule_search_locations[0]) / "tasks" / "longbench"


class TaskLoader(yaml.SafeLoader):
    """Reads lm-eval's task files, and ignores the Python functions that they name."""


TaskLoader.add_multi_constructor("!function", lambda loader, suffix, node: None)


def from_file(path: Path, tasks: Iterable[str]) -> dict[str, str]:
    """Read templates from a JSON file that maps tasks to them."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from error
    missing = [task for task in tasks if not isinstance(found, dict) or not isinstance(found.get(task), str)]
    if missing:
        raise ValueError(f"{path} has no template for {', '.join(missing)}.")
    return {task: found[task] for task in tasks}
