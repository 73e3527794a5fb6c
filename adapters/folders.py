"""Folders of adapters and models: find them, tell them apart, and write them completely or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peft import PeftConfig
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file


def check_base_folder(base: str | Path, adapter: str | Path = "", option: str = "--base") -> None:
    """Raise FileNotFoundError unless a base model is a folder or on the Hub; the error says where it was searched for.

    transformers reports a missing folder as a network problem or as a wrong Hub id.

    Args:
        base: folder or Hub id, which is searched for on the Hub, or offline in its cache.
        adapter: the adapter that names this base, if any.
        option: the command's option for a base; empty if it has none.
    """
    missing = not_found(base, "config.json")
    if not missing:
        return
    remedy = "Check the path; a relative one starts at the current folder."
    if adapter:
        remedy = f"The adapter {adapter} names this base: {new_base(option)}."
    raise FileNotFoundError(f"The base model {base} was not found: {missing}. {remedy}")


def new_base(option: str = "") -> str:
    """Say how to name an adapter's base: by a command's option, or without one in the adapter's own file."""
    file = "write its folder or Hub id into base_model_name_or_path of its adapter_config.json"
    return f"give its folder or Hub id with {option}" if option else file


def check_adapter_folder(adapter: str | Path) -> None:
    """Raise FileNotFoundError unless an adapter is a folder or on the Hub, and ValueError if it is a model."""
    folder = Path(adapter)
    if (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{adapter} holds a model, not an adapter. A model with a memory of its own, such as an exported one, is "
            "given as the model (--model or --base, whichever there is), and --adapter is left out."
        )
    missing = not_found(adapter, "adapter_config.json")
    if missing:
        raise FileNotFoundError(
            f"The adapter {adapter} was not found: {missing}. Check the path; a relative one starts at the current "
            "folder."
        )


def load_adapter_config(place: str | Path) -> PeftConfig:
    """Load the configuration of an adapter from a folder or the Hub, checked by `check_adapter_folder`."""
    check_adapter_folder(place)
    return PeftConfig.from_pretrained(str(place))


def not_found(place: str | Path, file: str) -> str:
    """Return where a folder or Hub id with a file was searched for, and the Hub's answer; empty if it exists."""
    if Path(place).is_dir():
        return ""
    missing, name = f"there is no folder {Path(place).absolute()}", str(place)
    if not name.startswith(("/", ".", "~")) and name.count("/") < 2:  # it may be a Hub id
        try:
            cached_file(name, file)
            return ""
        except OSError as error:
            missing += f", and the Hugging Face Hub gave no such model ({' '.join(str(error).split())})"
    return missing


@contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `out` (new or empty) at the end, or is removed after an error."""
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


def own_base(adapter: str) -> str:
    """Return the name of the base model of an adapter."""
    return PeftConfig.from_pretrained(adapter).base_model_name_or_path or ""


def own_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of an adapter or a model; for an adapter without one, that of its base."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return AutoTokenizer.from_pretrained(own_base(name))
