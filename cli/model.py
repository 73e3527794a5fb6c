"""The model that reads and answers, by the names that a user or a memory file gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from cacheformers.evaluation.remembering import own_tokenizer


def load_model(base: str, adapter: str, device: str | None, dtype: str) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model with its memory, ready to read, and its tokenizer.

    Args:
        base: folder or Hub id; empty for the adapter's own.
        adapter: folder or Hub id; empty for a base with a memory of its own.

    Raises:
        ValueError: neither is given.
        OSError: not found.
    """
    if not (base or adapter):
        raise ValueError("Which model? Give --adapter ADAPTER (a memory adapter's folder or Hub id).")
    model: Any = AutoModelForCausalLM.from_pretrained(base or adapter, dtype=dtype)
    if base and adapter:
        model = PeftModel.from_pretrained(model, adapter)
    model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model.eval(), load_tokenizer(base, adapter)


def load_tokenizer(base: str, adapter: str) -> PreTrainedTokenizerBase:
    """The adapter's tokenizer, or, where it was saved without one, its base model's."""
    return AutoTokenizer.from_pretrained(base) if base else own_tokenizer(adapter)


def lasting_name(name: str | None) -> str:
    """A name that means the same in another working directory."""
    return str(Path(name).resolve()) if name and Path(name).exists() else name or ""
