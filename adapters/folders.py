"""Folders of adapters and models: written whole or not at all, and not taken for one another."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peft import PeftConfig
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file


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


def load_adapter_config(place: str | Path) -> PeftConfig:
    """Load the configuration of an adapter.

    Args:
        place: folder or Hub id.

    Raises:
        ValueError: it holds a model, or nothing of the kind.
    """
    absent = {"_raise_exceptions_for_missing_entries": False}
    if find_adapter_config_file(str(place)) is None and cached_file(str(place), "config.json", **absent) is not None:
        raise ValueError(
            f"{place} holds a model, not an adapter. A model with a memory of its own, such as an exported one, is "
            "given as the model (--base, where there is that option), and --adapter is left out."
        )
    return PeftConfig.from_pretrained(str(place))
