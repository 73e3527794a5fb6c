"""Write a `MemoryCache` to a folder: new files, then the index that names them; then unused files are removed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from cacheformers.modeling.files.index import (
    FORMAT,
    INDEX,
    LOCK,
    OWN_FILE,
    Index,
    MemoryFileError,
    Piece,
    Reader,
    Row,
    Store,
    describe,
    read_index,
    sync,
    write_file,
)
from cacheformers.modeling.search.store import Ring, as_int8


@dataclass(frozen=True)
class Stream:
    """Something that grows only at its end: it has the numbers `first` to `end`, of which `take` returns some."""

    first: int
    end: int
    take: Callable[[int, int], Tensor]


def save_memory(memory: Any, folder: Path, append: bool, int8: bool = False) -> None:
    """Save as `MemoryCache.save` describes."""
    if memory.options is None:
        raise ValueError("Only a memory made by read(), new_memory() or a forward can be saved.")
    check_place(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / LOCK):
        before = earlier_save(memory, folder) if append else None
        save = uuid.uuid4().hex
        try:
            index = write(memory, folder, save, before, int8)
        except OSError:
            for path in folder.glob(f"{save}.*"):
                path.unlink()
            raise
        sync(folder)
        for path in folder.iterdir():  # of earlier saves, finished or not
            if OWN_FILE.fullmatch(path.name) and path.name not in index.files:
                path.unlink()
    memory.origin.saved = save


def check_place(folder: Path) -> None:
    """Raise MemoryFileError or PermissionError unless a folder is writable, and new, empty, or that of a memory."""
    if not folder.exists():
        parent = next(parent for parent in folder.absolute().parents if parent.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise PermissionError(f"{folder} cannot be made: {parent} is not a folder that can be written to.")
        return
    if not folder.is_dir():
        raise MemoryFileError(f"{folder} is a file, but a memory is a folder: choose another name.")
    if (folder / INDEX).exists():
        foreign = [] if FORMAT.encode() in (folder / INDEX).read_bytes()[:100] else [INDEX]
    else:
        foreign = sorted(
            path.name for path in folder.iterdir() if path.name != LOCK and not OWN_FILE.fullmatch(path.name)
        )
    if foreign:
        raise MemoryFileError(f"{folder} holds something else ({', '.join(foreign[:3])}): choose another folder.")


def earlier_save(memory: Any, folder: Path) -> Index | None:
    """Return the save that a memory continues, None for an empty folder; raise MemoryFileError for another save."""
    if not (folder / INDEX).exists():
        return None
    index = read_index(folder)
    if index.save != memory.origin.saved:
        raise MemoryFileError(
            f"{folder} does not hold what this memory goes on from (another memory was saved there since, or this "
            "memory's rows were changed). Save without append to replace it, or save to another folder."
        )
    return index


def write(memory: Any, folder: Path, save: str, before: Index | None, int8: bool) -> Index:
    """Write what is not in the folder yet, then the index, and return it."""
    new, tail = f"{save}.new.safetensors", f"{save}.tail.safetensors"
    fresh: dict[str, Tensor] = {}
    rows: list[Row] = []
    for number in range(memory.batch_size):
        twin = sharing(memory, number)
        streams = {}
        for name, stream in row_streams(memory, number).items():
            if name.startswith("rings.") and twin < number and name in rows[twin].streams:
                streams[name] = rows[twin].streams[name]
                continue
            pieces = continued(before, number, name, stream)
            start = pieces[-1].end if pieces else stream.first
            if stream.end > start:
                pieces.append(Piece(new, f"{number}.{name}", start, stream.end - start))
                taken, stored = stream.take(start, stream.end), f"{number}.{name}"
                if int8 and name.startswith("rings.") and taken.dtype != torch.int8:
                    taken, fresh[f"{stored}.scale"] = as_int8(taken)
                fresh[stored] = taken
            streams[name] = pieces
        source = memory.origin.sources[number]
        rows.append(Row(memory.tokens_read[number], None if source is None else source.name, streams))

    files = {} if before is None else dict(before.files)
    if fresh:
        files[new] = write_file(folder / new, fresh)
    rest = {name: tensor for name, tensor in memory.state_dict().items() if not name.startswith("state.rings.")}
    rest |= {f"capacity.{layer}": torch.tensor(ring.capacity) for layer, ring in memory.state.rings.items()}
    if memory.state.off:  # stores say so by having no places, but not every method has stores
        rest["off"] = torch.tensor(True)
    files[tail] = write_file(folder / tail, rest)
    used = {tail, *(piece.file for row in rows for pieces in row.streams.values() for piece in pieces)}
    stores = {layer: Store.of(ring) for layer, ring in memory.state.rings.items()}
    index = Index(save, reader(memory), stores, rows, tail, {name: files[name] for name in sorted(used)})
    index.write(folder)
    return index


def sharing(memory: Any, row: int) -> int:
    """Return the first row that shares all its rings with `row`."""
    rings = memory.state.rings.values()
    return next(first for first in range(row + 1) if all(ring.owner[first] == ring.owner[row] for ring in rings))


def row_streams(memory: Any, row: int) -> dict[str, Stream]:
    """Return what only grows of a row: entries, and the text."""
    streams: dict[str, Stream] = {}
    for layer, ring in memory.state.rings.items():
        entries = ring.entries(row)
        for name, store in (("keys", ring.keys), ("values", ring.values)):
            if store is not None:
                take = taker(ring, store[ring.owner[row]])
                streams[f"rings.{layer}.{name}"] = Stream(entries.first, entries.first + entries.count, take)
    source = memory.origin.sources[row]
    if source is not None:
        text = torch.frombuffer(bytearray(source.text.encode("utf-8", "surrogatepass")), dtype=torch.uint8)
        offsets = source.covering(memory.tokens_read[row]).offsets
        streams["text"] = Stream(0, len(text), lambda start, end: text[start:end])
        streams["offsets"] = Stream(0, len(offsets), lambda start, end: offsets[start:end])
    return streams


def taker(ring: Ring, store: Tensor) -> Callable[[int, int], Tensor]:
    """Return a function that selects entries of one row `[allocated, width]` by their lifelong numbers."""

    def take(start: int, end: int) -> Tensor:
        if start == 0 or end - start == ring.capacity:
            return store[: end - start]
        return store[torch.arange(start, end, device=store.device) % ring.capacity]

    return take


def continued(before: Index | None, row: int, name: str, stream: Stream) -> list[Piece]:
    """Return the pieces of an earlier save that are still needed."""
    if before is None:
        return []
    pieces = [piece for piece in before.rows[row].streams.get(name, []) if piece.end > stream.first]
    if name.startswith("rings."):
        return pieces
    for piece in pieces:  # the text may have been changed since
        same = piece.end <= stream.end and describe(stream.take(piece.start, piece.end))
        if same != before.files[piece.file].tensors[piece.tensor]:
            return []
    return pieces


def reader(memory: Any) -> Reader:
    """Describe the model that read, for the index."""
    origin = memory.origin
    return Reader(
        method=memory.signature["method"],
        options=asdict(memory.options),
        fingerprint=list(memory.fingerprint),
        identity=origin.identity,
        tokenizer=origin.tokenizer,
        base=origin.base,
        adapter=origin.adapter,
    )
