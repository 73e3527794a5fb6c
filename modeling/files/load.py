"""Make a memory from a folder that `MemoryCache.save` wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from cacheformers.modeling.architectures import find_decoder, unwrap
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.files.index import DTYPES, Index, MemoryFileError, Piece, Row, Shards, Store, read_index
from cacheformers.modeling.memory import BaseShape
from cacheformers.modeling.method import options_named, required_options
from cacheformers.modeling.offloading import device_of, layer_devices
from cacheformers.modeling.origin import Origin, Source, tokenizer_hash
from cacheformers.modeling.segments import check_signature, match_rows


def load_memory(
    path: str | Path,
    model: nn.Module | None = None,
    verify: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> MemoryCache:
    """Load the memory that was saved in a folder.

    Args:
        path: the folder.
        model: the model that will use the memory, which is put on its device; it must be the model that read it.
            Without one the memory is on the CPU, and the first forward checks the model.
        verify: compare the checksum of every tensor. False keeps tensors of one piece memory-mapped, so that loading
            takes no time, but damaged entries go unnoticed.
        tokenizer: encodes the questions; it must be the one that encoded the text.

    Raises:
        MemoryFileError: the folder holds no memory, a damaged one, or one of another model, adapter or tokenizer.
    """
    folder = Path(path)
    while True:
        index = read_index(folder)
        try:
            return assemble(folder, index, model, verify, tokenizer)
        except MemoryFileError:
            if read_index(folder).save == index.save:  # otherwise it was saved again meanwhile
                raise


def assemble(
    folder: Path, index: Index, model: nn.Module | None, verify: bool, tokenizer: PreTrainedTokenizerBase | None
) -> MemoryCache:
    """Make the checks that need no tensors, then read the tensors."""
    if tokenizer is not None and index.reader.tokenizer not in ("", tokenizer_hash(tokenizer)):
        raise MemoryFileError(
            f"{folder} was read with another tokenizer than this one: load the tokenizer of its base model."
        )
    try:
        values = {name: frozen(value) for name, value in index.reader.options.items()}
        options = options_named(index.reader.method)(**{**values, "base": BaseShape(**values["base"])})
    except (KeyError, TypeError, ValueError) as error:
        raise MemoryFileError(
            f"{folder} was read with options that this release does not know ({error}). Use the release that wrote "
            "it, or read the text again."
        ) from error
    decoder: Any = None if model is None else find_decoder(unwrap(model))
    active = None if decoder is None else required_options(decoder)
    try:
        if active is not None:
            check_signature(active.signature, options.signature)
        memory = empty_memory(folder, index, options, decoder)
        if active is not None:
            match_rows(decoder, memory, memory.batch_size, active)
    except MemoryFileError:
        raise
    except ValueError as error:
        raise MemoryFileError(f"{folder}: {error}") from error

    shards = Shards(folder, index.files, verify)
    try:
        fill(memory, index, shards, "cpu" if decoder is None else device_of(decoder))
    except MemoryFileError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, AttributeError) as error:
        raise MemoryFileError(f"{folder} is damaged: its parts do not fit together ({error}).") from error
    return memory


def fill(memory: MemoryCache, index: Index, shards: Shards, device: torch.device | str) -> None:
    """Put the contents of a folder into an empty memory."""
    tensors = shards.all(index.tail)
    tensors.pop("off", None)
    for layer, store in index.stores.items():
        capacity = tensors.pop(f"capacity.{layer}", None)  # earlier releases wrote it into the index alone
        if capacity is not None and int(capacity) != store.capacity:
            raise ValueError(f"the store of layer {layer} has {int(capacity)} places, not {store.capacity}")
        for name, tensor in ring_tensors(shards, index.rows, layer, store).items():
            tensors[f"state.rings.{layer}.{name}"] = tensor
    memory.load_state_dict(tensors, device)
    waiting = memory.timeline.open.sum(1).tolist()
    for number, row in enumerate(index.rows):
        entries = {ring.written[ring.owner[number]] for ring in memory.state.rings.values() if ring.capacity}
        if memory.tokens_read[number] != row.tokens_read or entries - {row.tokens_read - waiting[number]}:
            raise ValueError(f"row {number} has read {row.tokens_read} tokens")
    memory.origin.sources, memory.origin.saved = [source(shards, row) for row in index.rows], index.save


def frozen(value: Any) -> Any:
    """Turn lists into tuples, at any depth."""
    return tuple(frozen(item) for item in value) if isinstance(value, list) else value


def empty_memory(folder: Path, index: Index, options: Any, decoder: Any) -> MemoryCache:
    """Make an empty memory with the stores of the index; raise MemoryFileError if its options make others."""
    devices = (
        dict.fromkeys(options.layers, torch.device("cpu"))
        if decoder is None
        else layer_devices(decoder, options.layers)
    )
    keep_values = any(store.value_width is not None for store in index.stores.values())
    off = 0 if "off" in index.files[index.tail].tensors else None
    capacity = next((store.capacity for store in index.stores.values()), off)
    state = options.new_state(len(index.rows), devices, torch.float32, keep_values, capacity)
    if state.rings.keys() != index.stores.keys():
        raise MemoryFileError(f"{folder} is damaged: its options ask for other stores than it holds.")
    for layer, store in index.stores.items():
        ring, dtype = state.rings[layer], DTYPES.get(store.dtype)
        if dtype is None or store != replace(Store.of(ring), dtype=store.dtype):
            raise MemoryFileError(f"{folder} is damaged: its options ask for a store of another size.")
        ring.keys = ring.keys.to(dtype)  # the precision it was read in
        ring.values = None if ring.values is None else ring.values.to(dtype)
    memory = MemoryCache(state, options.window, len(index.rows), options.signature)
    reader = index.reader
    memory.options, memory.fingerprint = options, tuple(reader.fingerprint)
    memory.origin = Origin(reader.identity, False, reader.tokenizer, reader.base, reader.adapter, memory.origin.sources)
    return memory


def ring_tensors(shards: Shards, rows: list[Row], layer: int, store: Store) -> dict[str, Tensor]:
    """Return the `state_dict` of a ring; rows with the same pieces share a physical row."""
    streams = [row.streams.get(f"rings.{layer}.keys", []) for row in rows]
    physical = [pieces for number, pieces in enumerate(streams) if pieces not in streams[:number]]
    owner = [physical.index(pieces) for pieces in streams]
    leading = [owner.index(number) for number in range(len(physical))]  # one row of each physical row
    written = [pieces[-1].end if pieces else 0 for pieces in physical]
    tensors = {"written": torch.tensor(written), "owner": torch.tensor(owner)}
    widths = {"keys": store.width} if store.value_width is None else {"keys": store.width, "values": store.value_width}
    for name, width in widths.items():
        held = [
            entries(shards, rows[row].streams.get(f"rings.{layer}.{name}", []), end, store, width)
            for row, end in zip(leading, written, strict=True)
        ]
        tensors[name] = held[0][None] if len(held) == 1 else nn.utils.rnn.pad_sequence(held, batch_first=True)
    return tensors


def entries(shards: Shards, pieces: list[Piece], written: int, store: Store, width: int) -> Tensor:
    """Return one row's entries in the ring's order, `[min(written, capacity), width]`; not copied if in one piece."""
    count = min(written, store.capacity)
    if (pieces[-1].end if pieces else 0) != written or (pieces and pieces[0].start > written - count):
        raise MemoryFileError(f"{shards.folder} is damaged: entries are missing.")
    dtype = DTYPES[store.dtype]
    parts = [shards.entries(piece, dtype) for piece in pieces]
    if any(part.dtype != dtype or part.shape[1:] != (width,) for part in parts):
        raise MemoryFileError(f"{shards.folder} is damaged: entries have another size or precision.")
    if len(parts) == 1 and (pieces[0].start == 0 or len(parts[0]) == store.capacity) and len(parts[0]) == count:
        return parts[0]
    together = torch.zeros(count, width, dtype=dtype)
    for piece, part in zip(pieces, parts, strict=True):
        numbers = torch.arange(piece.start, piece.end)
        here = part[numbers % store.capacity] if piece.count == store.capacity else part
        kept = numbers >= written - count
        together[numbers[kept] % store.capacity] = here[kept]
    return together


def source(shards: Shards, row: Row) -> Source | None:
    """Return a row's text, if it was saved."""
    if row.source is None:
        return None
    text, offsets = (
        torch.cat([shards.get(piece.file, piece.tensor) for piece in row.streams[name]]) for name in ("text", "offsets")
    )
    if text.dtype != torch.uint8 or offsets.dtype != torch.int32 or offsets.shape[1:] != (2,):
        raise ValueError("a text is not stored as one")
    found = Source(row.source, text.numpy().tobytes().decode("utf-8", "surrogatepass"), offsets)
    if len(offsets) < row.tokens_read or int(offsets[-1:, 1].sum()) > len(found.text):
        raise ValueError("a text is shorter than what was read of it")
    return found
