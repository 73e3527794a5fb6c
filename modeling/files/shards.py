"""Safetensors files of a memory folder: written once, never changed, checked when they are read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cacheformers.modeling.files.index import LOCK, File, Held, MemoryFileError
from cacheformers.modeling.origin import digest

# As safetensors calls them.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_file(path: Path, tensors: dict[str, Tensor]) -> File:
    """Write tensors so that they are on disk, and say what the index must say of them.

    Raises:
        OSError: they cannot be written.
    """
    held = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    try:
        save_file(held, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    shutil.copymode(path.parent / LOCK, path)  # safetensors makes it private
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return File(path.stat().st_size, {name: describe(tensor) for name, tensor in held.items()})


def describe(tensor: Tensor) -> Held:
    """What the index says of a contiguous tensor on the CPU."""
    numbers = tensor.flatten().as_strided((tensor.numel(),), (1,))  # a single number may have any stride
    return Held(NAMES[tensor.dtype], list(tensor.shape), digest(numbers.view(torch.uint8).numpy().data))


class Shards:
    """The tensors of a folder's files.

    Args:
        verify: compare checksums, and hold what was compared. Otherwise tensors stay memory-mapped.

    Raises:
        MemoryFileError: a file is missing, or not what the index says.
    """

    def __init__(self, folder: Path, files: dict[str, File], verify: bool) -> None:
        self.folder, self.files, self.verify = folder, files, verify
        self.handles: dict[str, Any] = {name: self._open(name, file) for name, file in files.items()}

    def _open(self, name: str, expected: File) -> Any:
        path = self.folder / name
        try:
            size = path.stat().st_size
            handle: Any = safe_open(path, "pt")
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  (no dictionary)
            found = {name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in slices.items()}
        except FileNotFoundError as error:
            raise MemoryFileError(f"{path} is missing. Read the text again.") from error
        except (SafetensorError, OSError) as error:
            raise MemoryFileError(f"{path} is damaged ({error}). Read the text again.") from error
        if size != expected.bytes or found != {k: (held.dtype, held.shape) for k, held in expected.tensors.items()}:
            raise MemoryFileError(f"{path} is not the file that the index describes. Read the text again.")
        return handle

    def get(self, file: str, name: str) -> Tensor:
        """One tensor.

        Raises:
            MemoryFileError: its checksum is wrong.
        """
        held = self.files[file].tensors[name]
        tensor: Tensor = self.handles[file].get_tensor(name)
        if not self.verify:
            return tensor
        tensor = tensor.clone()
        if describe(tensor) != held:
            raise MemoryFileError(f"{self.folder / file} is damaged: {name} has a wrong checksum. Read the text again.")
        return tensor

    def all(self, file: str) -> dict[str, Tensor]:
        """Every tensor of a file."""
        return {name: self.get(file, name) for name in self.files[file].tensors}
