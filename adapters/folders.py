"""Folders of models: a base model's must be there, and a new one is written whole or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils.hub import cached_file


def check_base_folder(base: str | Path, adapter: str | Path = "") -> None:
    """Raise an error that says where a base model was looked for if it is neither a folder nor on the Hub.

    transformers reports a folder that does not exist as a network problem or as a wrong Hub id.

    Args:
        base: folder or Hub id. A Hub id is looked up on the Hub, or offline in its cache.
        adapter: the adapter that names this base, if one does.

    Raises:
        FileNotFoundError: names the folder, what the Hub answered, and what to do.
    """
    if Path(base).is_dir():
        return
    missing = f"there is no folder {Path(base).absolute()}"
    name = str(base)
    if not name.startswith(("/", ".", "~")) and name.count("/") < 2:  # it may be a Hub id
        try:
            cached_file(name, "config.json")
            return
        except OSError as error:
            missing += f", and the Hugging Face Hub gave no such model ({' '.join(str(error).split())})"
    remedy = "Check the path; a relative one starts at the current folder."
    if adapter:
        remedy = f"The adapter {adapter} names this base: give the folder where it is now with --base."
    raise FileNotFoundError(f"The base model {base} was not found: {missing}. {remedy}")


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
