"""Files that are on the disk when the function that writes them returns."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file and see it onto the disk."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata)
    sync(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file and see it onto the disk."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
