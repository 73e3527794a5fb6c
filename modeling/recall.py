"""`recall`: which parts of what a memory has read are nearest a question, by the memory's own entries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.method import retrieving_methods
from cacheformers.modeling.offloading import device_of


@torch.no_grad()
def recall(
    model: nn.Module,
    memory: MemoryCache,
    query_ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    row: int = 0,
    skip: int = 0,
) -> Tensor:
    """Score parts of a document by the nearness of its entries to a query (late interaction: ColBERT, section 3.3).

        score(span) = sum over the query's tokens of max over the span's tokens of nearness(query token, token)

    Nearness is what the method compares (`MemoryState.nearness`), or 1 for what a token has retrieved where it compares
    nothing that can be added up, as Neurocache without `hit_scores`. Retrieval heads score in their own way
    (`MemoryState.span_scores`). The memory stays as it is.

    Args:
        query_ids: the query, and what is read before it.
        spans: first and last + 1 of the tokens of each part, counted from the first token that the memory has read.
        row: the document.
        skip: how many of `query_ids` come before the query. Without any, the query's first tokens find little: they are
            attention sinks, and have nothing before them as the tokens of the document have.

    Returns:
        `[spans]`, float32; an empty span has -1 for each of the query's tokens.

    Raises:
        ValueError: an empty query, a method that does not retrieve or whose self-attention sees more than the open
            segment, or an open segment in the memory.
    """
    read = memory.tokens_read[row]
    return asked(model, memory, query_ids, row, skip).state.span_scores(len(query_ids) - skip, skip, read, spans)


@torch.no_grad()
def asked(model: nn.Module, memory: MemoryCache, query_ids: Sequence[int], row: int = 0, skip: int = 0) -> MemoryCache:
    """Return a copy of one row of a memory that has just seen a query; see `recall` for arguments and errors.

    A query that is shorter than a segment sees what the local window shows of the text, a longer one only itself.
    """
    if not memory.state.retrieves:
        raise ValueError(
            f"This memory's method retrieves nothing, so it cannot recall passages. {retrieving_methods()} can."
        )
    if len(query_ids) <= skip:
        raise ValueError("There is an empty query: nothing can be recalled.")
    alone = memory.with_window(len(query_ids) + 1)  # which also refuses a memory that cannot be asked like this
    seen = memory.clone() if len(query_ids) < memory.window.segment_tokens else alone
    seen.select([row])
    ids = torch.tensor([list(query_ids)], device=device_of(model))
    model(input_ids=ids, past_key_values=seen, use_cache=True, logits_to_keep=1)
    return seen
