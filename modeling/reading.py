"""`read` documents of any length into a memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from cacheformers.modeling.architectures import find_decoder, is_whole, unwrap
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.inputs import refuse_looking_ahead
from cacheformers.modeling.method import required_options
from cacheformers.modeling.offloading import device_of
from cacheformers.modeling.origin import tokenized, tokenizer_hash
from cacheformers.modeling.segments import close_segments, identity, match_rows, new_memory, reader

PADDING = 128  # tokens of padding that take less time than one more forward


@torch.no_grad()
def read(
    model: nn.Module,
    input_ids: Tensor | list[list[int]] | list[Tensor],
    attention_mask: Tensor | None = None,
    flush: bool = True,
    progress: bool = True,
    memory: MemoryCache | None = None,
    cache_size: int | None = None,
    batch_size: int | None = None,
) -> MemoryCache:
    """Read documents segment by segment, and return the memory of them (Neurocache, section 3.1).

    Only what the method remembers grows with the length of the documents. Documents are read side by side, the longest
    first, and each leaves the batch where it ends, so that next to nothing is computed of padding.

    Args:
        model: a causal language model with an active memory adapter (PeftModel or not).
        input_ids: `[tokens]`, `[documents, tokens]`, or a list of documents of different lengths.
        attention_mask: `[documents, tokens]`, 0 for padding on either side.
        flush: close the last, partial segment, so that its states can be retrieved and later tokens begin a new
            segment. False leaves it open for later tokens.
        progress: show a progress bar.
        memory: continue with this memory instead of an empty one.
        cache_size: number of entries of the empty memory, instead of the configured one.
        batch_size: most documents that are read side by side; None for all. The memory returned holds all of them, in
            their order.

    Raises:
        ValueError: an empty document, an id outside the vocabulary, no active memory adapter, or a memory of another
            model.
    """
    decoder: Any = find_decoder(unwrap(model))
    documents = rows_of(input_ids, attention_mask)
    check_ids(documents, decoder.config.vocab_size)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    options = required_options(decoder)
    refuse_looking_ahead(options)
    if memory is None:
        memory = new_memory(model, len(documents), cache_size)
    else:
        if cache_size is not None:
            raise ValueError("cache_size is for an empty memory; this one has its size already.")
        match_rows(decoder, memory, len(documents), options)
    most = options.base.max_positions
    lengths = [len(document) for document in documents]
    longest = max(before + count for before, count in zip(memory.tokens_read, lengths, strict=True))
    if options.positions > most and longest > most:
        warnings.warn(
            f"This method does not restart positions, and the model has {most:,}: it has not learned to read the "
            f"tokens after them, up to {longest:,}.",
            stacklevel=2,
        )
    if not (decoder.training or memory.origin.identity):
        memory.origin.identity = identity(decoder)
    order = sorted(range(len(documents)), key=lambda row: -lengths[row])
    size = batch_size or len(order)
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    step = options.segment_tokens
    bar = tqdm(total=sum(lengths), unit=" tokens", unit_scale=True, desc="Reading", disable=not progress)
    with bar, text_of(memory):
        if len(batches) == len(set(lengths)) == 1:
            read_batch(decoder, memory, documents, step, flush, bar)
        else:
            parts = []
            for rows in batches:
                part = memory.clone()
                part.select(rows)
                parts += read_batch(decoder, part, [documents[row] for row in rows], step, flush, bar)
            whole, *others = parts
            whole.join(others)
            whole.select(torch.tensor(order).argsort().tolist())
            vars(memory).update(vars(whole))  # only now, so that an error leaves it as it was
    memory.forget_ids()
    return memory


@contextmanager
def text_of(memory: MemoryCache) -> Iterator[None]:
    """Say that what comes next is a text to be remembered, and no question about it."""
    memory.state.reading = True
    try:
        yield
    finally:
        memory.state.reading, memory.state.expected_tokens = False, 0


def read_batch(
    decoder: Any, memory: MemoryCache, documents: Sequence[Tensor], step: int, flush: bool, bar: tqdm[Any]
) -> list[MemoryCache]:
    """Read documents `[tokens]`, the longest first, side by side into a memory.

    Args:
        step: tokens of a segment.

    Returns:
        Memories that together hold the rows in their order. The first is `memory`, without the documents that ended
        before the longest.
    """
    uncut = memory.state.forward_is_segment
    run = reader(decoder, memory) if flush else decoder
    lengths = torch.tensor([len(document) for document in documents])
    memory.state.expected_tokens = int((torch.tensor(memory.tokens_read) + lengths).max())
    ended: list[MemoryCache] = []
    start, resting = 0, False
    while len(lengths):
        end = start + step if uncut else next_end(lengths, start, step)
        ids = nn.utils.rnn.pad_sequence(
            [document[start:end] for document in documents[: len(lengths)]], batch_first=True
        )
        real = torch.arange(start, start + ids.shape[1]) < lengths[:, None]
        needed = reader(decoder, memory, int(lengths[-1]) - start) if run is decoder else run
        resting |= needed is not run
        try:
            read_segment(needed, memory, ids, real)
        except BaseException:
            if resting:
                memory.forget_window()  # not all layers have read it
            raise
        bar.update(int(real.sum()))
        start = end
        rows, stay = len(lengths), int((lengths > end).sum())
        if stay < rows:
            left = memory
            if stay:
                left = memory.clone()
                left.select(range(stay, rows))
                memory.select(range(stay))
            if uncut:
                left.forget_columns()
            elif flush and not is_whole(decoder):
                close_segments(decoder, left, range(left.batch_size))
            ended.insert(0, left)
            lengths = lengths[:stay]
    return ended


def read_segment(decoder: nn.Module, memory: MemoryCache, ids: Tensor, real: Tensor) -> None:
    """Run ids `[rows, time]`, of which `real` are tokens."""
    device = device_of(decoder)
    decoder(
        input_ids=ids.to(device),
        attention_mask=None if bool(real.all()) else real.to(device),
        past_key_values=memory,
        use_cache=not memory.state.forward_is_segment,
        memory_keep=1,
    )


def next_end(lengths: Tensor, start: int, step: int) -> int:
    """Return where the next forward of all rows ends: with the segment, or before it, where rows end.

    Args:
        lengths: of the rows, `[rows]`; all are longer than `start`.
        step: tokens of a segment.
    """
    closing = start - start % step + step
    ends = sorted({*lengths[lengths < closing].tolist(), min(closing, int(lengths.max()))})
    fitting = [end for end in ends if int((end - lengths).clamp(min=0).sum()) <= PADDING]
    return fitting[-1]


def read_text(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    name: str = "",
    flush: bool = True,
    progress: bool = True,
    memory: MemoryCache | None = None,
    cache_size: int | None = None,
) -> MemoryCache:
    """Read one text, and keep it beside the memory, so that every entry can be traced back to its characters.

    Args:
        model: as for `read`.
        tokenizer: a fast one, which knows the characters of each token.
        text: of any length.
        name: of the text, for people.
        flush: as for `read`.
        progress: show a progress bar.
        memory: continue with this memory; the text follows what it has read.
        cache_size: as for `read`.

    Raises:
        ValueError: an empty text, a tokenizer without offsets or another one than before, a memory of several rows or
            of tokens without their text; and the errors of `read`.
    """
    ids, source = tokenized(tokenizer, text, name, begins=memory is None or memory.tokens_read == [0])
    if memory is None:
        memory = new_memory(model, 1, cache_size)
    if memory.batch_size != 1:
        raise ValueError(f"A text is one document, the memory holds {memory.batch_size}: use memory.select([row]).")
    before, origin = memory.origin.sources[0], memory.origin
    if (0 if before is None else len(before.offsets)) != memory.tokens_read[0]:
        raise ValueError("The memory has read tokens whose text it does not know: begin a new one, or use read().")
    if origin.tokenizer not in ("", tokenizer_hash(tokenizer)):
        raise ValueError("The memory was read with another tokenizer: go on with the same one.")
    read(model, ids, flush=flush, progress=progress, memory=memory)
    origin.tokenizer = tokenizer_hash(tokenizer)
    origin.sources = [source if before is None else before.followed_by(source)]
    return memory


def rows_of(documents: Tensor | list[list[int]] | list[Tensor], attention_mask: Tensor | None) -> list[Tensor]:
    """Return the ids of each document, `[tokens]`, on the CPU."""
    if isinstance(documents, Tensor):
        documents = documents[None] if documents.dim() == 1 else documents
        if documents.dim() != 2:
            raise ValueError(f"input_ids must be [tokens] or [documents, tokens], got shape {tuple(documents.shape)}.")
        if attention_mask is None:
            return list(documents.cpu())
        if attention_mask.shape != documents.shape:
            raise ValueError(
                f"attention_mask {tuple(attention_mask.shape)} and input_ids {tuple(documents.shape)} differ in shape."
            )
        return [row[mask.bool()].cpu() for row, mask in zip(documents, attention_mask, strict=True)]
    if isinstance(documents, str | Mapping) or any(isinstance(row, str) for row in documents):
        raise ValueError(
            "Documents must be token ids, a tensor or a list: pass tokenizer(text).input_ids, or use read_text()."
        )
    if attention_mask is not None:
        raise ValueError("A list of documents needs no attention_mask: leave padding out of the lists.")
    documents = [documents] if documents and isinstance(documents[0], int) else documents
    rows = [torch.as_tensor(row).cpu() for row in documents]
    if any(row.dim() != 1 for row in rows):
        raise ValueError("Each document of a list must be a list or tensor of ids, [tokens].")
    return [row if len(row) else row.long() for row in rows]


def check_ids(documents: Sequence[Tensor], vocab_size: int) -> None:
    """Raise ValueError for no or empty documents, and for ids that the model has no embedding for."""
    if not documents:
        raise ValueError("There is no document to read.")
    empty = [row for row, document in enumerate(documents) if not len(document)]
    if empty:
        raise ValueError(f"Documents {empty} are empty: there is nothing to read.")
    for document in documents:
        if document.is_floating_point():
            raise ValueError(f"input_ids must be integers, got {document.dtype}.")
    low, high = min(int(document.min()) for document in documents), max(int(document.max()) for document in documents)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"Token ids range from {low} to {high}, but the vocabulary has {vocab_size} entries: was the text "
            "tokenized with another model's tokenizer?"
        )
