"""A folder of checkpoints, each of which is complete or absent.

All processes write their files into a hidden folder; when everything is on disk, the first process renames it. A run
that is killed at any moment leaves its earlier checkpoints intact.
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

WRITING, REMOVING = ".writing-", ".removing-"  # prefixes of folders that are not yet checkpoints, or no longer
CONTENTS = "checkpoint.json"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written; earlier ones are unchanged."""


class Checkpoints:
    """The checkpoints of one run, `step-00000100` and so on. Every process of the run makes the same calls.

    Args:
        folder: the same for all processes; created when it is missing.
        keep: number of checkpoints that are kept; the oldest are removed first.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep
        self.process = PartialState()

    def paths(self) -> list[Path]:
        """List finished checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("step-*") if path.is_dir())

    def claim(self) -> None:
        """Lock the folder for this run; raise CheckpointError if another run holds it, or it cannot be written to."""
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
        """Write a checkpoint, then remove those that are too old.

        Args:
            write: called on every process with the folder to write this process's files into.
            contents: what `load` returns (JSON).

        Raises:
            CheckpointError: a process could not write, for example because the disk is full.
        """
        final = self.folder / f"step-{step:08d}"
        draft = self.folder / f"{WRITING}{final.name}"
        is_main = self.process.is_main_process
        self._together(draft, lambda: self._clean(draft) if is_main else None)
        self._together(draft, lambda: write(draft))
        self._together(draft, lambda: self._finish(draft, final, contents) if is_main else None)
        try:
            if is_main:
                self._rotate(final)
        except OSError as error:
            warnings.warn(f"Old checkpoints could not be removed: {error}", stacklevel=2)
        return final

    def newest(self) -> Path | None:
        """Return the last good checkpoint or None. Damaged ones are skipped with a warning."""
        found: list[Path | None] = [None]
        if self.process.is_main_process:
            found[0] = next((path for path in reversed(self.paths()) if self._whole(path)), None)
        return broadcast_object_list(found)[0]

    def clear(self) -> None:
        """Remove all checkpoints."""
        if self.process.is_main_process:
            for path in self.paths():
                self._remove(path)
        self.process.wait_for_everyone()

    def load(self, path: Path) -> dict[str, Any]:
        """Return the contents that `save` was given."""
        contents: dict[str, Any] = json.loads((path / CONTENTS).read_text(encoding="utf-8"))["contents"]
        return contents

    def _together(self, draft: Path, action: Callable[[], None]) -> None:
        """Run an action on every process; if one fails, remove the draft and raise on all."""
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
        """Remove the remains of runs that were killed, and create the folder to write into."""
        for left in (*self.folder.glob(f"{WRITING}*"), *self.folder.glob(f"{REMOVING}*")):
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()
        draft.mkdir(parents=True)

    def _finish(self, draft: Path, final: Path, contents: dict[str, Any]) -> None:
        sizes = {path.name: path.stat().st_size for path in sorted(draft.iterdir())}
        write_text(draft / CONTENTS, json.dumps({"files": sizes, "contents": contents}) + "\n")
        sync(draft)
        if final.exists():  # damaged
            self._remove(final)
        os.rename(draft, final)
        sync(self.folder)

    def _rotate(self, final: Path) -> None:
        """Remove checkpoints that are too old, and those of steps that this run repeats."""
        paths = self.paths()
        place = paths.index(final)
        for path in paths[place + 1 :] + paths[: max(place + 1 - self.keep, 0)]:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        hidden = path.with_name(f"{REMOVING}{path.name}")
        os.rename(path, hidden)  # from here on it is not a checkpoint, even if removing it is interrupted
        shutil.rmtree(hidden)

    def _whole(self, path: Path) -> bool:
        """Check that every file of a checkpoint exists in its full size; warn if not."""
        try:
            files = json.loads((path / CONTENTS).read_text(encoding="utf-8"))["files"]
            damaged = [name for name, size in files.items() if (path / name).stat().st_size != size]
        except (OSError, ValueError, KeyError) as error:
            damaged = [str(error)]
        if damaged:
            warnings.warn(f"The checkpoint {path} is damaged ({', '.join(damaged)}): it is not used.", stacklevel=2)
        return not damaged
