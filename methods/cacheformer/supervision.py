"""Queries that learn to find the segments which answer a question, as those of retrieval heads do.

    q_t -> q_t + W x_t                  where segments are chosen, x the input of self-attention, W zero at first
    p_t(segment) = sum over its representatives v of softmax_v <q_t, v> / sqrt(d_head)
    loss(t) = - mean of log p_t(passage)

p_t of a passage is the sum over the segments that hold a part of it, and the mean over the query heads that share keys;
the loss is a mean over the passages that answer and the key-value heads. Attention itself keeps q_t, and keys stay as
they are, so W learns from questions alone, and no gradient goes through what was read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cacheformers.methods.cacheformer.state import CacheFormerState
from cacheformers.modeling.attention import AttentionInputs, project
from cacheformers.modeling.memory import Gold
from cacheformers.modeling.supervision import passage_loss


def looking_queries(query: nn.Linear, inputs: AttentionInputs) -> Tensor:
    """Return the queries that choose segments, before rotation and scale, `[rows, heads, time, head_dim]`."""
    plain = inputs.plain_query.detach()
    learned = project(query, inputs.hidden.detach().to(plain.dtype))
    return plain + learned.unflatten(-1, (plain.shape[1], -1)).transpose(1, 2)


def retrieval_loss(
    queries: Tensor, read: Sequence[int], state: CacheFormerState, gold: Gold | None, start: int = 0
) -> Tensor:
    """How far the tokens that ask are from choosing the segments that answer; its gradient reaches W.

    Segments that the first of these tokens may not retrieve, because they are in its window, do not count.

    Args:
        queries: `asking`, scaled, `[rows, heads, time, width of a representative]`.
        read: tokens that each row had read before these.
        state: of the layer, after these tokens.
        gold: None for no question, and a loss of 0.
        start: columns of the forward before these.

    Returns:
        The sum of the module's loss(t) over these asking tokens, of rows whose passages can be retrieved, over the
        number of all that `gold` names.
    """
    options, vectors = state.options, state.shelves["long_keys"].whole.detach()
    loss = queries[:1, :1, :1].sum() * 0  # every process has the same graph
    if gold is None:
        return loss
    size, time = options.pool_tokens, queries.shape[2]
    most = vectors.shape[2] // options.pool_vectors  # none where the memory is off
    gone = state.missing("long_keys", torch.tensor(state.tokens_read)).tolist()
    for row, before in enumerate(read):
        asks = gold.asking[row, start : start + time].to(queries.device)
        allowed = min(int(options.admissible(options.block_start(torch.tensor(before)))) - gone[row], most)
        held = [*range(min(options.sinks, allowed)), *range(options.sinks + gone[row], allowed + gone[row])]
        place = {number: index for index, number in enumerate(held)}
        spans = [range(own.start // size, (own.stop - 1) // size + 1) for own in gold.passages[row]]
        passages = [found for span in spans if (found := [place[number] for number in span if number in place])]
        if not asks.any() or not passages:
            continue
        known = vectors[row, :, : allowed * options.pool_vectors].to(queries.dtype)
        asked = queries[row][:, asks].unflatten(0, (options.kv_heads, -1))  # [kv_heads, group, tokens, width]
        chances = torch.log_softmax(torch.einsum("hgtd,hnd->hgtn", asked, known), -1)
        loss = loss + passage_loss(chances.unflatten(-1, (allowed, -1)).logsumexp(-1), passages)
    return loss / gold.asking.sum().clamp(min=1).to(queries.device)
