"""Describe memories: `cacheformers inspect`, and how much of a text a memory keeps."""

from __future__ import annotations

import argparse
import textwrap

from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.files.index import Index, read_index
from cacheformers.modeling.files.load import load_memory


def inspect(options: argparse.Namespace) -> None:
    """Print what the memory file holds."""
    memory = load_memory(options.memory, verify=not options.no_verify)
    index = read_index(options.memory)
    size = sum(file.bytes for file in index.files.values())
    tokens = sum(memory.tokens_read)
    print(
        f"{options.memory}: {tokens:,} tokens, {size / 2**20:.1f} MiB, {size / max(tokens, 1):,.0f} bytes a token read"
    )
    lines = {"read by": described_reader(index), **stores(memory), **documents(memory)}
    lines["files"] = f"{len(index.files)}, checksums " + ("not compared" if options.no_verify else "right")
    for name, text in lines.items():
        print(textwrap.fill(f"  {name:<12}{text}", 120, subsequent_indent=" " * 14, break_on_hyphens=False))


def described_reader(index: Index) -> str:
    reader, base = index.reader, index.reader.options["base"]
    names = [f"adapter {reader.adapter}"] if reader.adapter else []
    names += [f"base {reader.base}"] if reader.base else []
    return ", ".join(
        [
            reader.method,
            f"segments of {reader.options['segment_tokens']:,} tokens",
            *names,
            f"{base['model_type']} of {base['layers']} layers of {base['hidden_size']:,}",
            f"adapter's hash {reader.identity.get('adapter', 'unknown')[:12]}",
        ]
    )


def stores(memory: MemoryCache) -> dict[str, str]:
    """Describe each store, and each row if there are several."""
    lines = {}
    for layer, ring in memory.state.rings.items():
        for row in range(memory.batch_size):
            entries = ring.entries(row)
            lines[f"layer {layer}" + (f", row {row}" if memory.batch_size > 1 else "")] = (
                f"{entries.count:,} entries (at most {ring.capacity:,}) of {ring.width} numbers, "
                f"{str(ring.keys.dtype).removeprefix('torch.')}, of the tokens from {entries.first:,}"
            )
    return lines


def documents(memory: MemoryCache) -> dict[str, str]:
    """Describe each document."""
    lines = {}
    for row, (source, read) in enumerate(zip(memory.origin.sources, memory.tokens_read, strict=True)):
        waiting = int(memory.timeline.open[row].sum())
        text = f"{read:,} tokens read" + (f", {waiting:,} of them in an open segment" if waiting else "")
        if source is not None:
            text += f", of {len(source.offsets):,}, of {source.name}, {len(source.text):,} characters: "
            text += f"“{' '.join(source.text[:200].split())[:80]}...”"
        lines["document" + (f" {row}" if memory.batch_size > 1 else "")] = text
    return lines


def kept(memory: MemoryCache) -> str:
    """Return a sentence on how much of its document a memory keeps."""
    read, held, source = memory.tokens_read[0], memory.tokens_kept[0], memory.origin.sources[0]
    if source is not None and read < len(source.offsets):
        return (
            f"{read:,} of {len(source.offsets):,} tokens read, then it was interrupted: give `cacheformers read` again "
            "to go on."
        )
    if held == read:
        return f"{read:,} tokens read, and the memory keeps all of them."
    return f"{read:,} tokens read, of which the memory keeps the newest {held:,}{remedy(memory, read)}."


def remedy(memory: MemoryCache, tokens: int) -> str:
    """Name the --cache-size that keeps all tokens, and its bytes, in parentheses; empty where no size does."""
    rings = memory.state.rings.values()
    if not rings:
        return ""
    stores = [store for ring in rings for store in (ring.keys, ring.values) if store is not None]
    entry = sum(store.shape[2] * store.element_size() for store in stores)
    return f" (to keep all, read with --overwrite --cache-size {tokens}: {tokens * entry / 2**20:.1f} MiB)"
