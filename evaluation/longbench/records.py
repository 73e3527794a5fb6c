"""LongBench's records, from a folder of JSON lines or parquet files, or from the Hub; checked before anything runs."""

from __future__ import annotations

import gzip
import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import load_dataset

from cacheformers.common.documents import fingerprint
from cacheformers.common.sources import HUB_ID, UNREADABLE
from cacheformers.evaluation.longbench.metrics import PARAGRAPHS
from cacheformers.evaluation.longbench.tasks import FORMS, TASKS, Task

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
FIELDS = {"input": str, "context": str, "answers": list, "length": int}


@dataclass(frozen=True)
class Record:
    """A question about a text.

    Attributes:
        id: unique within the task.
        length: words, or characters in Chinese, as in the data.
        all_classes: the labels of a classification task, as in the data.
        template: the LongBench task whose prompt and metric it has; the task itself in LongBench's own data.
        gold: where in the context the answer's passages are, `(start, end)` in characters; empty if nobody knows.
        begun: how the answer begins: the end of the prompt, in a chat template the beginning of the model's turn.
    """

    task: str
    id: str
    input: str
    context: str
    answers: list[str]
    length: int
    all_classes: list[str] | None
    template: str = ""
    gold: tuple[tuple[int, int], ...] = ()
    begun: str = ""

    @property
    def form(self) -> Task:
        """The task whose prompt and metric it has."""
        return FORMS[self.template or self.task]

    @property
    def characters(self) -> int:
        return len(self.context) + len(self.input)


def load_records(data: str, task: str, e: bool = False) -> list[Record]:
    """Load the records of a task, in the order of the data.

    Args:
        data: a folder that holds `TASK.jsonl`, `.jsonl.gz` or `.parquet` (`TASK_e` for LongBench-E), itself or in its
            subfolder `data`; or a dataset of the Hub with a configuration for each task and a split `test`.

    Raises:
        FileNotFoundError, ValueError: there is no such data; a record is damaged or incomplete, or another template's.
    """
    name = f"{task}_e" if e else task
    if Path(data).exists():
        rows = file_rows(task_file(Path(data), name))
    elif HUB_ID.fullmatch(data):
        rows = dataset_rows(f"{data}:{name}", data, name, split="test")
    else:
        raise FileNotFoundError(f"{data} does not exist.")
    records = [checked(task, number, row, where) for number, (where, row) in enumerate(rows)]
    if not records:
        raise ValueError(f"{data} holds no record of {name}.")
    id, count = Counter(record.id for record in records).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{data}: several records of {name} have the _id {id!r}.")
    forms = sorted({record.form.name for record in records})
    if len(forms) > 1:
        raise ValueError(
            f"{data}: the records of {name} name several templates ({', '.join(forms)}), whose metrics and lengths of "
            "answers differ: put each into a file of its own."
        )
    return records


def limited(records: list[Record], limit: int | None, seed: int | None) -> list[Record]:
    """Take the first `limit` records, or with a seed a random choice, in the order of the data."""
    if limit is None or limit >= len(records):
        return records
    picked = range(limit) if seed is None else sorted(random.Random(seed).sample(range(len(records)), limit))
    return [records[place] for place in picked]


def own_tasks(data: str) -> list[str]:
    """Return the tasks in a folder if none of them is LongBench's: sets of one's own, in the same form."""
    files = sorted(file for file in Path(data).glob("*") if file.name.endswith(SUFFIXES))
    names = [task_name(file) for file in files]
    return [] if any(name.removesuffix("_e") in TASKS for name in names) else names


def task_name(file: Path) -> str:
    """Return the name of a file without what says its kind."""
    return file.name[: -max(len(suffix) for suffix in SUFFIXES if file.name.endswith(suffix))]


def task_file(folder: Path, name: str) -> Path:
    """Find the file of a task in a folder."""
    for candidate in (place / f"{name}{suffix}" for place in (folder, folder / "data") for suffix in SUFFIXES):
        if candidate.is_file():
            return candidate
    there = sorted({task_name(file) for file in folder.rglob("*") if file.name.endswith(SUFFIXES)})
    raise FileNotFoundError(
        f"{folder} holds no {name}.jsonl, .jsonl.gz or .parquet. Choose with --tasks among what is there: "
        f"{', '.join(there) or 'nothing'}."
    )


def file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file, each with its name in errors."""
    if path.suffix == ".parquet":
        yield from dataset_rows(str(path), "parquet", data_files=str(path), split="train")
        return
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield f"{path}, line {number}", json.loads(line)
    except json.JSONDecodeError as error:
        where = f"{path}, line {number}"
        raise ValueError(f"{where} is not valid JSON ({error}): the file is damaged or cut off.") from error
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error}): the file is damaged or cut off.") from error


def dataset_rows(title: str, *arguments: Any, **options: Any) -> Iterator[tuple[str, Any]]:
    """Yield the rows of what `load_dataset` loads."""
    try:
        rows: Iterable[Any] = load_dataset(*arguments, **options)
    except UNREADABLE as error:
        raise ValueError(
            f"{title} cannot be read: {error}\nThe dataset of the Hub must hold parquet or JSON files (dataset scripts "
            "no longer run), with a configuration for each task."
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{title}, row {number}", row


def checked(task: str, number: int, row: Any, where: str) -> Record:
    """Make a record of a row; raise ValueError if it lacks LongBench's form, an answer or a context."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object.")
    wrong = [name for name, kind in FIELDS.items() if not isinstance(row.get(name), kind)]
    if wrong:
        raise ValueError(
            f"{where} has no {' and no '.join(wrong)} of LongBench's form (input and context: text, answers: a list of "
            "texts, length: a number). Copies of the data whose prompts are filled in already do not serve."
        )
    answers = row["answers"]
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"{where} has no answers: it cannot be scored.")
    if not row["context"].strip():
        raise ValueError(f"{where} has an empty context.")
    classes = row.get("all_classes")
    template = task if task in TASKS else str(row.get("template"))
    if template not in FORMS:
        raise ValueError(
            f"{where}: {task} is not a task of LongBench, so its records need a field template that names one, whose "
            f"prompt and metric they have: {', '.join(FORMS)}."
        )
    if template in ("trec", "lsht") and not classes:
        raise ValueError(f"{where} has no all_classes, which {template} is scored with.")
    if classes and not (isinstance(classes, list) and all(isinstance(label, str) for label in classes)):
        raise ValueError(f"{where} has all_classes that are not a list of texts: {task} cannot be scored.")
    pattern = PARAGRAPHS.get(template, "")
    unnamed = next((answer for answer in answers if not re.search(pattern, answer)), None)
    if unnamed is not None:
        raise ValueError(
            f"{where} has the answer {unnamed!r}, in which no number follows {pattern.partition('(')[0]!r}: it cannot "
            f"be scored. Correct the line, or leave out {template} with --tasks."
        )
    try:
        gold = tuple((int(start), int(end)) for start, end in row.get("gold") or ())
    except (TypeError, ValueError):
        raise ValueError(f"{where} has a gold that is not a list of [start, end] pairs.") from None
    if any(not 0 <= start < end <= len(row["context"]) for start, end in gold):
        raise ValueError(f"{where} has a gold passage outside its context of {len(row['context']):,} characters.")
    id = str(row.get("_id", number))
    texts = {"_id": [id], "input": [row["input"]], "context": [row["context"]], "answers": answers}
    check_surrogates({**texts, "all_classes": classes or []}, where)
    return Record(task, id, row["input"], row["context"], answers, row["length"], classes, template, gold)


def check_surrogates(texts: dict[str, list[str]], where: str) -> None:
    """Raise ValueError for texts that cannot be encoded."""
    for name, own in texts.items():
        try:
            "".join(own).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where} has half a surrogate pair in its {name} ({error.reason}, character {error.start}): a text "
                "cut within a character. Correct the line, or remove it."
            ) from error


def records_identity(records: Iterable[Record]) -> str:
    """Hash records, to tell runs apart; where a set is not LongBench's, also whose prompts its records have."""
    own: list[list[Any]] = []
    for record in records:
        template = [] if record.task in TASKS else [record.template]
        own.append([record.id, record.input, record.context, record.answers, *template])
    return fingerprint(own)
