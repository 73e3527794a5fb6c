"""Load the model that reads and answers, by the names that a user or a memory file gives."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from cacheformers.adapters.folders import (
    check_adapter_folder,
    check_base_folder,
    new_base,
    own_base,
    own_tokenizer,
)


def load_model(
    base: str, adapter: str, device: str | None, dtype: str, option: str = "--model"
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load a model with its memory, ready to read, and its tokenizer.

    Args:
        base: folder or Hub id; empty for the adapter's own.
        adapter: folder or Hub id; empty for a base with a memory of its own.
        option: the command's option for the base; empty if it has none.

    Raises:
        OSError, ValueError: neither is given, one does not exist, or the device cannot be used.
    """
    if not (base or adapter):
        raise ValueError("Which model? Give --adapter ADAPTER (a memory adapter's folder or Hub id).")
    check_device(device)
    if adapter:
        check_adapter_folder(adapter)
    named = base or own_base(adapter)
    if not named:
        raise ValueError(f"The adapter {adapter} does not name its base model: {new_base(option)}.")
    check_base_folder(named, "" if base else adapter, option)
    model: Any = AutoModelForCausalLM.from_pretrained(base or adapter, dtype=dtype)
    if base and adapter:
        with warnings.catch_warnings():  # PEFT 0.21 asks for a name that transformers 5.23 has renamed
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            model = PeftModel.from_pretrained(model, adapter)
    model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model.eval(), AutoTokenizer.from_pretrained(base) if base else own_tokenizer(adapter)


def check_device(device: str | None) -> None:
    """Raise ValueError if tensors cannot be put on a device."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # PyTorch asserts that it was built for a device
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"--device {device} cannot be used here ({reason}). Leave it out to take a GPU if there is one, and the "
            "CPU if not."
        ) from error


def lasting_name(name: str | None) -> str:
    """Return a name that means the same in another working directory."""
    return str(Path(name).resolve()) if name and Path(name).exists() else name or ""
