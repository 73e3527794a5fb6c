"""The format of a memory folder: an index, and the safetensors files that it names, with checksums."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cacheformers.modeling.origin import digest
from cacheformers.modeling.search.store import Ring

FORMAT, VERSIONS = "cacheformers memory", (1, 2)  # 2: entries may be int8, with a scale each
INDEX, LOCK = "index.json", ".lock"
OWN_FILE = re.compile(r"[0-9a-f]{32}\.(new|tail)\.safetensors|index\.json\.tmp")


class MemoryFileError(ValueError):
    """A memory folder cannot be used: it is damaged, foreign, or of another model, adapter or tokenizer."""


@dataclass(frozen=True)
class Piece:
    """A part of something that only grows: its numbers `start` to `start + count` are the rows of one tensor.

    Entries keep their numbers for life. Entry n is row n - start of the tensor; in a piece with as many entries as the
    ring has places it is row n modulo that number.
    """

    file: str
    tensor: str
    start: int
    count: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.count < 1:
            raise ValueError(f"a piece of {self.count} rows from {self.start}")

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Row:
    """One document of a memory.

    Attributes:
        source: name of its text; None if unknown.
        streams: pieces of `rings.LAYER.keys`, `rings.LAYER.values`, `text` (UTF-8) and `offsets`, in order.
    """

    tokens_read: int
    source: str | None
    streams: dict[str, list[Piece]]


@dataclass(frozen=True)
class Store:
    """The rings of one layer: entries per row, their width, the width of their values, their precision."""

    capacity: int
    width: int
    value_width: int | None
    dtype: str

    @classmethod
    def of(cls, ring: Ring) -> Store:
        value_width = None if ring.values is None else ring.values.shape[2]
        return cls(ring.capacity, ring.keys.shape[2], value_width, NAMES[ring.keys.dtype])


@dataclass(frozen=True)
class Reader:
    """The model that read the memory, see `Origin`; options and fingerprint are of the adapter."""

    method: str
    options: dict[str, Any]
    fingerprint: list[float]
    identity: dict[str, str]
    tokenizer: str
    base: str
    adapter: str


@dataclass(frozen=True)
class Held:
    """A tensor of a file."""

    dtype: str
    shape: list[int]
    sha256: str


@dataclass(frozen=True)
class File:
    """A safetensors file."""

    bytes: int
    tensors: dict[str, Held]


@dataclass(frozen=True)
class Index:
    """Everything but the tensors.

    Attributes:
        save: name of the save that wrote it, a new one each time.
        stores: by the layer whose states they hold.
        tail: the file of what changes between saves: open segments, local keys and values, positions of rows.
    """

    save: str
    reader: Reader
    stores: dict[int, Store]
    rows: list[Row]
    tail: str
    files: dict[str, File]

    def write(self, folder: Path) -> None:
        """Replace the index of a folder in one step."""
        kinds = {held.dtype for file in self.files.values() for held in file.tensors.values()}
        contents = {"format": FORMAT, "version": 2 if "I8" in kinds else 1, **asdict(self)}
        contents["stores"] = {str(layer): store for layer, store in contents["stores"].items()}
        draft = folder / f"{INDEX}.tmp"
        with open(draft, "w", encoding="utf-8") as file:
            json.dump({**contents, "sha256": checksum(contents)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync(folder)  # the named files must be on the disk before the index
        os.replace(draft, folder / INDEX)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(contents: dict[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, independent of its layout."""
    return digest(json.dumps(contents, sort_keys=True, ensure_ascii=True).encode())


def read_index(folder: Path) -> Index:
    """Read the index of a memory folder; raise MemoryFileError if it is missing, damaged or of a later version."""
    path = folder / INDEX
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MemoryFileError(f"{folder} is not a memory: it is not a folder with an {INDEX}.") from error
    except (ValueError, RecursionError) as error:
        raise MemoryFileError(f"{path} is damaged, or of something else: {error}") from error
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise MemoryFileError(f"{path} is not the index of a memory.")
    if contents.get("version") not in VERSIONS:
        raise MemoryFileError(
            f"{path} has version {contents.get('version')!r} of the format, this release reads {VERSIONS[-1]}. Use the "
            "release that wrote it, or read the text again."
        )
    if contents.pop("sha256", None) != checksum(contents):
        raise MemoryFileError(f"{path} is damaged: its checksum is wrong. Read the text again.")
    del contents["format"], contents["version"]
    try:
        index: Index = decode(Index, contents)
        check(index)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise MemoryFileError(f"{path} is damaged: {error}.") from error
    return index


def decode(kind: Any, value: Any) -> Any:
    """Build a value of type `kind` from JSON; raise TypeError or ValueError if it does not fit."""
    outer, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if outer is UnionType:
        return None if value is None else decode(inner[0], value)
    wanted: Any = dict if is_dataclass(kind) else outer or kind
    if type(value) is not wanted:
        raise TypeError(f"{value!r:.50} is not a {wanted.__name__}")
    if wanted is dict and outer is None:
        types = get_type_hints(kind)
        if value.keys() != {field.name for field in fields(kind)}:
            raise ValueError(f"{kind.__name__} has {sorted(value)}")
        return kind(**{name: decode(types[name], item) for name, item in value.items()})
    if outer is list:
        return [decode(inner[0], item) for item in value]
    if outer is dict:
        return {inner[0](key): decode(inner[1], item) for key, item in value.items()}
    return value


def check(index: Index) -> None:
    """Raise KeyError or ValueError unless every piece is in a listed tensor and follows the one before."""
    wrong = [name for name in index.files if not OWN_FILE.fullmatch(name)]
    if wrong or index.tail not in index.files:
        raise ValueError(f"its files are {wrong or index.tail}")
    for row in index.rows:
        for name, pieces in row.streams.items():
            if any(index.files[piece.file].tensors[piece.tensor].shape[0] != piece.count for piece in pieces):
                raise ValueError(f"{name} has a piece of the wrong size")
            if any(following.start != piece.end for piece, following in pairwise(pieces)):
                raise ValueError(f"{name} has a gap")


# As safetensors calls them.
DTYPES = {
    "BOOL": torch.bool,
    "I8": torch.int8,
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
    """Write tensors to the disk, and describe them for the index; raise OSError if that fails."""
    held = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    try:
        save_file(held, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    shutil.copymode(path.parent / LOCK, path)  # safetensors makes its files private
    sync(path)
    return File(path.stat().st_size, {name: describe(tensor) for name, tensor in held.items()})


def describe(tensor: Tensor) -> Held:
    """Describe a contiguous tensor on the CPU for the index."""
    numbers = tensor.flatten().as_strided((tensor.numel(),), (1,))  # a single number may have any stride
    return Held(NAMES[tensor.dtype], list(tensor.shape), digest(numbers.view(torch.uint8).numpy().data))


class Shards:
    """The tensors of a folder's files; raises MemoryFileError if a file is missing, or differs from the index.

    Args:
        verify: compare checksums, and copy tensors into memory. Otherwise they stay memory-mapped.
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
        """Read one tensor; raise MemoryFileError if its checksum is wrong."""
        held = self.files[file].tensors[name]
        tensor: Tensor = self.handles[file].get_tensor(name)
        if not self.verify:
            return tensor
        tensor = tensor.clone()
        if describe(tensor) != held:
            raise MemoryFileError(f"{self.folder / file} is damaged: {name} has a wrong checksum. Read the text again.")
        return tensor

    def entries(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """Read entries; those that only the file keeps as int8 in the given precision."""
        tensor = self.get(piece.file, piece.tensor)
        if dtype == torch.int8 or tensor.dtype != torch.int8:
            return tensor
        return (tensor.float() * self.get(piece.file, f"{piece.tensor}.scale")).to(dtype)

    def all(self, file: str) -> dict[str, Tensor]:
        """Read every tensor of a file."""
        return {name: self.get(file, name) for name in self.files[file].tensors}
