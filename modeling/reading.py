"""`read` documents of any length into a memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
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


@torch.no_grad()
def read(
    model: nn.Module,
    input_ids: Tensor | list[list[int]] | list[Tensor],
    attention_mask: Tensor | None = None,
    flush: bool = True,
    progress: bool = True,
    memory: MemoryCache | None = None,
    cache_size: int | None = None,
) -> MemoryCache:
    """Read documents segment by segment, and return the memory of them (Neurocache, section 3.1).

    Only what the method remembers grows with the length of the documents.

    Args:
        model: a causal language model with an active memory adapter (PeftModel or not).
        input_ids: `[tokens]`, `[documents, tokens]`, or a list of documents of different lengths.
        attention_mask: `[documents, tokens]`, 0 for padding on either side.
        flush: close the last, partial segment, so that its states can be retrieved and later tokens begin a new
            segment. False leaves it open for later tokens.
        progress: show a progress bar.
        memory: continue with this memory instead of an empty one.
        cache_size: number of entries of the empty memory, instead of the configured one.

    Raises:
        ValueError: an empty document, an id outside the vocabulary, no active memory adapter, or a memory of another
            model.
    """
    decoder: Any = find_decoder(unwrap(model))
    ids, lengths = pack(input_ids, attention_mask)
    check_ids(ids, lengths, decoder.config.vocab_size)
    options = required_options(decoder)
    refuse_looking_ahead(options)
    if memory is None:
        memory = new_memory(model, len(ids), cache_size)
    else:
        if cache_size is not None:
            raise ValueError("cache_size is for an empty memory; this one has its size already.")
        match_rows(decoder, memory, len(ids), options)
    most = options.base.max_positions
    longest = max(before + count for before, count in zip(memory.tokens_read, lengths.tolist(), strict=True))
    if options.positions > most and longest > most:
        warnings.warn(
            f"This method does not restart positions, and the model has {most:,}: it has not learned to read the "
            f"tokens after them, up to {longest:,}.",
            stacklevel=2,
        )
    if not (decoder.training or memory.origin.identity):
        memory.origin.identity = identity(decoder)
    device = device_of(decoder)
    step = options.segment_tokens
    time = torch.arange(ids.shape[1])
    run = reader(decoder, memory) if flush else decoder
    with tqdm(total=int(lengths.sum()), unit=" tokens", unit_scale=True, desc="Reading", disable=not progress) as bar:
        for start in range(0, ids.shape[1], step):
            real = time[start : start + step] < lengths[:, None]
            run(
                input_ids=ids[:, start : start + step].to(device),
                attention_mask=None if bool(real.all()) else real.to(device),
                past_key_values=memory,
                use_cache=not memory.state.forward_is_segment,
                memory_keep=1,
            )
            bar.update(int(real.sum()))
    if memory.state.forward_is_segment:
        memory.forget_columns()
    elif flush and not is_whole(decoder):
        close_segments(decoder, memory, range(memory.batch_size))
    memory.forget_ids()
    return memory


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


def pack(documents: Tensor | list[list[int]] | list[Tensor], attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the documents as one tensor `[documents, longest]`, padded on the right, and their lengths."""
    if isinstance(documents, Tensor):
        documents = documents[None] if documents.dim() == 1 else documents
        if documents.dim() != 2:
            raise ValueError(f"input_ids must be [tokens] or [documents, tokens], got shape {tuple(documents.shape)}.")
        if attention_mask is None:
            return documents.cpu(), torch.full((len(documents),), documents.shape[1])
        if attention_mask.shape != documents.shape:
            raise ValueError(
                f"attention_mask {tuple(attention_mask.shape)} and input_ids {tuple(documents.shape)} differ in shape."
            )
        rows = [row[mask.bool()].cpu() for row, mask in zip(documents, attention_mask, strict=True)]
    else:
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
        rows = [row if len(row) else row.long() for row in rows]
    if not rows:
        raise ValueError("There is no document to read.")
    lengths = torch.tensor([len(row) for row in rows])
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths


def check_ids(ids: Tensor, lengths: Tensor, vocab_size: int) -> None:
    """Raise ValueError for empty documents, and for ids that the model has no embedding for."""
    empty = (lengths == 0).nonzero()[:, 0].tolist()
    if empty or ids.numel() == 0:
        raise ValueError(f"Documents {empty or [0]} are empty: there is nothing to read.")
    if ids.is_floating_point():
        raise ValueError(f"input_ids must be integers, got {ids.dtype}.")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"Token ids range from {low} to {high}, but the vocabulary has {vocab_size} entries: was the text "
            "tokenized with another model's tokenizer?"
        )
