"""Folders that are written whole or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """A folder to fill; it becomes `out` at the end of the block, and nothing is left of it after an error.

    Raises:
        ValueError: `out` exists and is not an empty folder.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already: choose another folder to write.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        complete = Path(scratch) / "complete"
        complete.mkdir()
        yield complete
        if out.exists():
            out.rmdir()
        complete.rename(out)
