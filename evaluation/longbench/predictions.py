"""Predictions on disk, in the official layout: `pred/MODEL/TASK.jsonl`, a line a record.

Lines are appended and on the disk as soon as a batch is answered. A run that is killed at any moment leaves whole lines
and at most one that is cut off, which the next start removes. When a task is done its lines are in the order of the
data, whichever process answered first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

from cacheformers.common.files import sync, write_text
from cacheformers.evaluation.longbench.records import Record
from cacheformers.training.settings import check_resumable

SETTINGS = "settings.json"
TIMES = "times.ndjson"  # the official scorer takes every file whose name ends in jsonl for a task
OPTIONAL = {"cache_size"}  # settings that are recorded only where they are given
ADDED = ("tokenizer", "generation_config")  # which earlier versions did not record; what they are now is believed
PREDICTED: dict[str, Any] = {"_id": str, "pred": str}
TIMED: dict[str, Any] = {"_id": str, "task": str, "seconds": (int, float), "peak_bytes": int}


class PredictionError(RuntimeError):
    """Predictions cannot be written, or are not those of this run."""


class Predictions:
    """The predictions of one model and method. Every process of the run makes the same calls, except for `append`.

    Args:
        folder: `pred/MODEL`, or `pred_e/MODEL`.
        settings: what all its predictions must have in common (JSON).
        data: task -> hash of all its records. A later run may add tasks and choose other records, but not change one.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], data: dict[str, str]) -> None:
        self.folder, self.settings, self.data = folder, settings, data
        self.process = PartialState()
        self.done: dict[str, set[str]] = {}

    def check(self) -> None:
        """Raise ValueError if the folder holds predictions of other settings, or a file there is damaged."""
        file = self.folder / SETTINGS
        if not file.exists() and any(self.folder.glob("*.jsonl")):
            raise ValueError(f"{self.folder} holds predictions of unknown settings: choose another --output.")
        if not file.exists():
            return
        saved = read_settings(file)
        believed = {name: self.settings[name] for name in ADDED if name in self.settings}
        saved["settings"] = {**believed, **saved["settings"]}
        missing = [name for name in self.settings if name not in {*saved["settings"], *OPTIONAL}]
        if missing:
            raise ValueError(
                f"{file} is of an older version, which did not record {' and '.join(missing)}: the predictions beside "
                "it may be another model's. Choose another --output, or start anew with --overwrite."
            )
        known = {task: value for task, value in saved["data"].items() if task in self.data}
        here = {task: self.data[task] for task in known}
        check_resumable({**saved["settings"], **prefixed(known)}, {**self.settings, **prefixed(here)}, str(self.folder))
        self._answered()

    def start(self, overwrite: bool) -> None:
        """Claim the folder, remove what a killed run has cut off, and find out what is done.

        Raises:
            PredictionError: another run writes here; a line is damaged.
        """
        found: list[Any] = ["", {}]
        if self.process.is_main_process:
            try:
                found[1] = self._start(overwrite)
            except Timeout:
                found[0] = f"Another run writes into {self.folder} just now: choose another --output."
            except (OSError, ValueError) as error:
                found[0] = str(error)
        failure, self.done = broadcast_object_list(found)
        if failure:
            raise PredictionError(failure)

    def _start(self, overwrite: bool) -> dict[str, set[str]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._claim = FileLock(self.folder / ".lock", timeout=0)
        self._claim.acquire()
        saved: dict[str, Any] = {"data": {}}
        if overwrite:
            for path in (*self.folder.glob("*.jsonl"), self.folder / TIMES):
                path.unlink(missing_ok=True)
        elif (self.folder / SETTINGS).exists():
            saved = read_settings(self.folder / SETTINGS)
        contents = {"settings": self.settings, "data": {**saved["data"], **self.data}}
        replace(self.folder / SETTINGS, json.dumps(contents, indent=1) + "\n")
        for path in filter(Path.exists, (self.folder / TIMES, *map(self._file, self.data))):
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # what follows the last whole line
        return self._answered()

    def _answered(self) -> dict[str, set[str]]:
        """Return task -> the records that are done: those with a prediction and its cost."""
        found = {task: {line["_id"] for line in read_lines(self._file(task), PREDICTED)} for task in self.data}
        path = self.folder / TIMES
        if any(found.values()) and not path.exists():
            raise ValueError(
                f"{path} is missing, which says what the predictions beside it have cost: put it back, or start anew "
                "with --overwrite."
            )
        timed = {(line["task"], line["_id"]) for line in read_lines(path, TIMED)}
        return {task: {id for id in own if (task, id) in timed} for task, own in found.items()}

    def append(self, task: str, lines: Sequence[dict[str, Any]], times: Sequence[dict[str, Any]]) -> None:
        """Write the lines of some records and their costs; they are on the disk when this returns."""
        with FileLock(self.folder / ".writing"):
            append(self.folder / TIMES, times)  # first: what a kill separates is answered and timed again
            append(self._file(task), lines)

    def finish(self, records: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
        """Sort the lines like the records, each with an `id`, and return the predictions; other processes get nothing.

        What other runs have answered, with a larger limit, stays behind them.
        """
        self.process.wait_for_everyone()
        if not self.process.is_main_process:
            return {}
        found = {}
        for task, own in records.items():
            lines = {line["_id"]: line for line in read_lines(self._file(task), PREDICTED)}
            chosen = [lines.pop(record.id) for record in own]
            replace(self._file(task), as_text([*chosen, *lines.values()]))
            found[task] = [line["pred"] for line in chosen]
        self._claim.release()
        return found

    def times(self, records: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
        """Return the costs of these records as `append` got them."""
        last = {(line["task"], line["_id"]): line for line in read_lines(self.folder / TIMES, TIMED)}
        return [last[task, record.id] for task, own in records.items() for record in own]

    def _file(self, task: str) -> Path:
        return self.folder / f"{task}.jsonl"


def prediction_line(record: Record, prediction: str) -> dict[str, Any]:
    """Make a line of the official layout, with the record's id."""
    kept = {name: getattr(record, name) for name in ("answers", "all_classes", "length")}
    return {"pred": prediction, **kept, "_id": record.id}


def prefixed(data: dict[str, str]) -> dict[str, str]:
    return {f"records of {task}": value for task, value in data.items()}


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings that `Predictions` wrote; raise ValueError if the file is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not (isinstance(found, dict) and all(isinstance(found.get(name), dict) for name in ("settings", "data"))):
        raise ValueError(
            f"{path} is damaged, so nobody knows which model made the predictions beside it: choose another --output, "
            "or start anew with --overwrite."
        )
    return found


def read_lines(path: Path, fields: dict[str, type | tuple[type, ...]]) -> list[dict[str, Any]]:
    """Read a file's whole lines, none without a file; raise ValueError for one without these fields of these types."""
    found: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError("it is not a JSON object")
            wrong = [name for name, kind in fields.items() if not isinstance(line.get(name), kind)]
            if wrong:
                raise ValueError(f"it has no {' and no '.join(wrong)}, or not as it was written")
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is damaged ({error}): remove the line, so that its record is answered again, "
                "or start anew with --overwrite."
            ) from error
        found.append(line)
    return found


def as_text(lines: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Add lines to a file, and wait until they are on the disk."""
    with path.open("ab", buffering=0) as file:
        file.write(as_text(lines).encode())
        os.fsync(file.fileno())


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name}")
    write_text(draft, text)
    os.replace(draft, path)
    sync(path.parent)
