"""BABILong's records: LongBench's, with a form of their own; and the official ones, from files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cacheformers.evaluation.babilong.tasks import ANSWERS, NEW_TOKENS, check_answer
from cacheformers.evaluation.lengths.options import Cell, cell_name, label
from cacheformers.evaluation.longbench.records import Record, dataset_rows, records_identity
from cacheformers.evaluation.longbench.tasks import SYNTHETIC, Task


class Story(Record):
    """A question about a text with facts; `template` is the task, `task` the cell: the task and the length."""

    @property
    def form(self) -> Task:
        return Task(self.template, SYNTHETIC, "babilong", NEW_TOKENS)


def make_story(
    task: str, tokens: int, id: str, question: str, context: str, answer: str, gold: Sequence[tuple[int, int]] = ()
) -> Story:
    asked = cell_name(task, tokens), id, question, context, [answer]
    return Story(*asked, len(context.split()), list(ANSWERS[task]), task, tuple(gold))


def load_official(folder: Path, task: str, tokens: int, records: int) -> Cell:
    """Load the official records of a task and a length, from the files whose paths name both (`qa1/4k.json`).

    Raises:
        FileNotFoundError, ValueError: there are no such files, they have other fields, or too few records.
    """
    found: list[Record] = []
    for where, row in official_rows(folder, task, tokens):
        wrong = [name for name in ("input", "question", "target") if not isinstance(row.get(name), str)]
        if wrong:
            raise ValueError(f"{where} has no {' and no '.join(wrong)}, as the official records have.")
        answer = check_answer(task, row["target"], where)
        found.append(make_story(task, tokens, str(len(found)), row["question"], row["input"], answer))
    if len(found) < records:
        raise ValueError(f"{folder} has {len(found):,} records of {cell_name(task, tokens)}: give --records of that.")
    return found[:records], records_identity(found)


def official_rows(folder: Path, task: str, tokens: int) -> Iterator[tuple[str, Any]]:
    """Yield the rows of the files of a task and a length, each with its name in errors."""
    files = {file: file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*"))}
    words = [rf"(?<![a-z0-9]){word}(?![a-z0-9])" for word in (task, label(tokens).lower())]
    kinds = {".json": "json", ".jsonl": "json", ".jsonl.gz": "json", ".parquet": "parquet"}
    chosen = [
        (kind, file)
        for file, path in files.items()
        for suffix, kind in kinds.items()
        if path.endswith(suffix) and all(re.search(word, path.lower()) for word in words)
    ]
    if not chosen or len({file.parent for _, file in chosen}) > 1:
        there = ", ".join(files[file] for _, file in chosen) or "no file"
        raise FileNotFoundError(
            f"{folder} holds {there} for {task} and {label(tokens)}. It takes JSON, JSON lines or parquet in one "
            f"folder, whose paths name both, such as {task}/{label(tokens).lower()}.json."
        )
    for kind, file in chosen:
        yield from dataset_rows(str(file), kind, data_files=str(file), split="train")
