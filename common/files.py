"""Files that are on the disk when the function that writes them returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from cacheformers.modeling.files.index import sync as sync


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file and see it onto the disk."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata)
    sync(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file and see it onto the disk."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Write a JSON file, and the folder it is in, and see it onto the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")
