"""`cacheformers read`: a text becomes a memory file."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from torch import Tensor
from tqdm.auto import tqdm

import cacheformers
from cacheformers.adapters.folders import own_base
from cacheformers.cli.inspection import kept, remedy
from cacheformers.cli.model import lasting_name, load_model
from cacheformers.common.texts import load_text
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.files.index import INDEX
from cacheformers.modeling.files.save import check_place
from cacheformers.modeling.origin import Source, tokenized, tokenizer_hash


def read(options: argparse.Namespace) -> None:
    """Read what has not been read yet."""
    check_place(options.output)
    name, text = load_text(options.book, options.document, options.text_field, options.encoding)
    if options.document is None and name != options.book:
        print(f"{name}, the longest one, is read: --document chooses another.")
    model, tokenizer = load_model(options.model or "", options.adapter or "", options.device, options.dtype)
    ids, source = tokenized(tokenizer, text, name)
    if (options.output / INDEX).exists() and not options.overwrite:
        memory = cacheformers.load_memory(options.output, model, tokenizer=tokenizer)
        check_same(memory, source, options)
    else:
        memory = cacheformers.new_memory(model, 1, options.cache_size)
        memory.origin.sources, memory.origin.tokenizer = [source], tokenizer_hash(tokenizer)
        memory.origin.base = lasting_name(options.model or own_base(options.adapter))
        memory.origin.adapter = lasting_name(options.adapter)
    before, start = memory.tokens_read[0], time.perf_counter()
    if before == len(ids):
        print(f"{options.output} holds all of {name} already: {kept(memory)}")
        return
    if before:
        print(f"{options.output} holds the first {before:,} tokens of {name}: going on.")
    size = min((ring.capacity for ring in memory.state.rings.values()), default=len(ids))
    if size < len(ids):
        print(f"{name} has {len(ids):,} tokens; the memory will keep the newest {size:,}{remedy(memory, len(ids))}.")
    read_on(model, memory, ids, options)
    memory.save(options.output)
    seconds, size = time.perf_counter() - start, sum(path.stat().st_size for path in options.output.iterdir())
    print(
        f"Read {len(ids) - before:,} tokens in {seconds:,.0f} s. {options.output}: {size / 2**20:.1f} MiB, "
        f"{size / len(ids):,.0f} bytes a token read.\n{kept(memory)}"
    )


def read_on(model: object, memory: MemoryCache, ids: Tensor, options: argparse.Namespace) -> None:
    """Read to the end, and save after every --checkpoint segments."""
    with tqdm(total=len(ids), initial=memory.tokens_read[0], unit=" tokens", unit_scale=True, desc="Reading") as bar:
        for count, tokens in enumerate(read_segments(model, memory, ids), 1):
            bar.update(tokens)
            if options.checkpoint and count % options.checkpoint == 0 and memory.tokens_read[0] < len(ids):
                memory.save(options.output, append=bool(memory.origin.saved))


def read_segments(model: object, memory: MemoryCache, ids: Tensor) -> Iterator[int]:
    """Read on to the end of `ids` `[tokens]`, a segment at a time, and yield the number of tokens of each."""
    step = len(ids) if memory.state.forward_is_segment else memory.window.segment_tokens
    for start in range(memory.tokens_read[0], len(ids), step):
        cacheformers.read(model, ids[start : start + step], progress=False, memory=memory)  # type: ignore[arg-type]  # a model, which is not typed here
        yield min(step, len(ids) - start)


def check_same(memory: MemoryCache, source: Source, options: argparse.Namespace) -> None:
    """Raise ValueError for the memory of another text, or of another size than --cache-size."""
    sizes = {ring.capacity for ring in memory.state.rings.values()} - {options.cache_size}
    if options.cache_size is not None and sizes:
        raise ValueError(
            f"{options.output} keeps {max(sizes):,} entries. Leave --cache-size out to go on with it, or add "
            "--overwrite to read from the start."
        )
    there = memory.origin.sources[0]
    if memory.batch_size != 1 or there is None or there.text != source.text:
        raise ValueError(
            f"{options.output} is the memory of {'another text' if there is None else there.name}, not of this one. "
            "Choose another -o, or replace it with --overwrite."
        )
    if len(there.offsets) != len(source.offsets):
        raise ValueError(
            f"{options.output} was thinned, and reading cannot go on from it: replace it with --overwrite."
        )
