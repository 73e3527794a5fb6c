"""A folder of checkpoints, each of them whole or not there.

All processes write their files into a hidden folder; when everything is on disk, the first process renames it. A run
that is killed at any moment leaves the checkpoints that it had.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from cacheformers.common.files import sync, write_text

WRITING, REMOVING = ".writing-", ".removing-"  # folders that are not checkpoints yet, or no longer
CONTENTS = "checkpoint.json"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written; those before it are as they were."""


class Checkpoints:
    """The checkpoints of one run, `step-00000100` and so on. Every process of the run makes the same calls.

    Args:
        folder: made when the first checkpoint is written. All processes must see the same one.
        keep: how many are kept; the oldest go first.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep
        self.process = PartialState()

    def paths(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("step-*") if path.is_dir())

    def claim(self) -> None:
        """See to it that the run can write, and that no other run writes into the same folder at the same time.

        Raises:
            CheckpointError: it cannot, or another one does.
        """
        failure = ""
        if self.process.is_main_process:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = FileLock(self.folder.parent / ".lock", timeout=0)
                self._lock.acquire()
                with NamedTemporaryFile(dir=self.folder, prefix=WRITING) as probe:
                    probe.write(b"0")
            except Timeout:
                failure = f"Another run writes into {self.folder.parent} just now: choose another --output."
            except OSError as error:
                failure = f"{self.folder} cannot be written to: {error}"
        failures = broadcast_object_list([failure])
        if failures[0]:
            raise CheckpointError(failures[0])

    def save(self, step: int, write: Callable[[Path], None], contents: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove what is too old.

        Args:
            write: called on every process with the folder to write this process's files into.
            contents: what `load` returns (JSON).

        Raises:
            CheckpointError: a process could not write, because the disk is full for example.
        """
        final = self.folder / f"step-{step:08d}"
        draft = self.folder / f"{WRITING}{final.name}"
        self._together(draft, lambda: self._clean(draft))
        self._together(draft, lambda: write(draft))
        self._together(draft, lambda: self._finish(draft, final, contents))
        try:
            self._rotate(final)
        except OSError as error:
            warnings.warn(f"Old checkpoints could not be removed: {error}", stacklevel=2)
        return final

    def newest(self) -> Path | None:
        """The last good checkpoint; None if there is none. Damaged ones are passed over with a warning."""
        found: list[Path | None] = [None]
        if self.process.is_main_process:
            found[0] = next((path for path in reversed(self.paths()) if self._whole(path)), None)
        return broadcast_object_list(found)[0]

    def clear(self) -> None:
        """Remove all checkpoints, to start anew."""
        if self.process.is_main_process:
            for path in self.paths():
                self._remove(path)
        self.process.wait_for_everyone()

    def load(self, path: Path) -> dict[str, Any]:
        """What `save` was given as contents."""
        contents: dict[str, Any] = json.loads((path / CONTENTS).read_text(encoding="utf-8"))["contents"]
        return contents

    def _together(self, draft: Path, action: Callable[[], None]) -> None:
        """Do something on every process; if one fails, remove the draft and raise on all."""
        failure = ""
        try:
            action()
        except (OSError, SafetensorError) as error:
            failure = f"process {self.process.process_index}: {error}"
        failures = [text for text in gather_object([failure]) if text]
        if not failures:
            return
        if self.process.is_main_process:
            shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"The checkpoint {draft.name.removeprefix(WRITING)} was not written ({'; '.join(failures)})."
        )

    def _clean(self, draft: Path) -> None:
        """Remove what runs that were killed have left, and make the folder to write into."""
        if not self.process.is_main_process:
            return
        for prefix in (WRITING, REMOVING):
            for left in self.folder.glob(f"{prefix}*"):
                if left.is_dir():
                    shutil.rmtree(left)
                else:
                    left.unlink()
        draft.mkdir(parents=True)

    def _finish(self, draft: Path, final: Path, contents: dict[str, Any]) -> None:
        if not self.process.is_main_process:
            return
        sizes = {path.name: path.stat().st_size for path in sorted(draft.iterdir())}
        write_text(draft / CONTENTS, json.dumps({"files": sizes, "contents": contents}) + "\n")
        sync(draft)
        if final.exists():  # damaged
            self._remove(final)
        os.rename(draft, final)
        sync(self.folder)

    def _rotate(self, final: Path) -> None:
        """Remove what is too old, and what is left of steps that this run repeats."""
        if not self.process.is_main_process:
            return
        paths = self.paths()
        place = paths.index(final)
        for path in paths[place + 1 :] + paths[: max(place + 1 - self.keep, 0)]:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        hidden = path.with_name(f"{REMOVING}{path.name}")
        os.rename(path, hidden)  # from here on it is no checkpoint any more, whatever is still left of it
        shutil.rmtree(hidden)

    def _whole(self, path: Path) -> bool:
        """Whether every file that belongs to a checkpoint is there in its full size."""
        try:
            files = json.loads((path / CONTENTS).read_text(encoding="utf-8"))["files"]
            damaged = [name for name, size in files.items() if (path / name).stat().st_size != size]
        except (OSError, ValueError, KeyError) as error:
            damaged = [str(error)]
        if damaged:
            warnings.warn(f"The checkpoint {path} is damaged ({', '.join(damaged)}): it is not used.", stacklevel=2)
        return not damaged
