"""What a forward with a memory takes: everything else gets an error before anything is computed."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cacheformers.modeling.attach import LayerMemory, MemoryOptions

UNREAD_FORWARDS = 8  # of training, after which a memory that was never read is reported


def check_positions(position_ids: Tensor | None, real: Tensor) -> None:
    """Refuse packed documents and gaps: positions are the memory's own, and others would be overlooked."""
    if position_ids is None or position_ids.shape[-1] != real.shape[1] or real.shape[1] < 2:
        return
    steps = position_ids.cpu().expand(len(real), -1).diff(dim=1)[real[:, 1:] & real[:, :-1]]
    if bool((steps <= 0).any()):
        raise ValueError("position_ids restart within a row: give each document a row of its own, do not pack them.")
    if bool((steps > 1).any()):
        raise ValueError("position_ids leave positions out: a memory counts every token by itself. Leave them out.")


def check_checkpointing(decoder: Any) -> None:
    """Refuse reentrant activation checkpointing, which loses gradients to what layers share."""
    if not (decoder.training and getattr(decoder, "gradient_checkpointing", False)):
        return
    function = getattr(decoder.layers[0], "_gradient_checkpointing_func", None)
    if getattr(function, "keywords", {}).get("use_reentrant"):
        raise ValueError('Activation checkpointing needs use_reentrant=False: enable it with {"use_reentrant": False}.')


def watch_training(memory: LayerMemory, options: MemoryOptions, real: Tensor, carried: bool) -> None:
    """Warn once if training forwards never read the memory, because every row is short and starts without one.

    Args:
        memory: of the lowest layer, which counts the forwards; its count ends with the first one that may read.
        real: which columns are tokens, `[rows, time]`.
        carried: the caller passed in a memory, which earlier segments may have filled.
    """
    near = options.near_tokens
    if near is None or memory.unread_forwards == UNREAD_FORWARDS:
        return
    # The last token of a row predicts nothing, so one token more than `near` trains no memory either.
    if carried or int(real.sum(1).max()) > near + 1:
        memory.unread_forwards = UNREAD_FORWARDS
        return
    memory.unread_forwards += 1
    if memory.unread_forwards == UNREAD_FORWARDS:
        warnings.warn(
            f"The memory is not being trained: in the first {UNREAD_FORWARDS} training forwards every row had at most "
            f"{near + 1:,} tokens and started without a memory, and {near:,} tokens are read before the memory is. Its "
            "weights get no gradient. Train on longer rows (at least two segments), choose a smaller segment_tokens "
            "or window_tokens, or carry the memory from row to row as train_adapt.py does.",
            stacklevel=2,
        )


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse what a memory cannot follow, before anything is computed."""
    if kwargs.get("return_dict") is False:
        raise ValueError("The decoder needs return_dict=True here; ask the whole model for tuples instead.")
    if kwargs.get("input_ids") is None:
        raise ValueError("A memory follows token ids: pass input_ids, not inputs_embeds.")
    check_shape(kwargs["input_ids"])
    mask = kwargs.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        raise ValueError(
            "A memory needs a 2D attention_mask (1 for tokens, 0 for padding): it makes the 4D masks itself."
        )


def check_shape(ids: Any) -> None:
    """Refuse ids that are not `[rows, time]`, and none at all; None is none of ours."""
    if ids is None:
        return
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        given = f"shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"input_ids must be a tensor [rows, time], got {given}.")
    if not ids.numel():
        raise ValueError(
            f"input_ids is empty, shape {tuple(ids.shape)}: there is nothing to read. (To go on with what generate() "
            "returned, pass all ids since the last read(), not only the new ones.)"
        )


def check_causal(options: MemoryOptions, kwargs: dict[str, Any], keep: int | None) -> None:
    """Raise ValueError if `generate(use_cache=False)` reads with a rule that looks ahead.

    No cache passes by that could refuse. What `generate` asks for is known by the positions that it gives to a forward
    of which it wants one logit.
    """
    if keep == 1 and kwargs.get("use_cache") is False and kwargs.get("position_ids") is not None:
        refuse_looking_ahead(options)


def refuse_looking_ahead(options: Any) -> None:
    """Raise ValueError if a rule needs tokens that a decoder does not have."""
    if not getattr(options, "causal", True):
        raise ValueError(
            "selection='paper_block' chooses with tokens that do not exist while decoding: it cannot generate, nor "
            "read into a memory. Use selection='previous_block' (or 'token', 'prefix')."
        )


def real_tokens(mask: Tensor | None, ids: Tensor, visible: int) -> Tensor:
    """Which of the new ids are tokens, `[rows, time]` on the host, from a mask over the new or over all visible ids."""
    rows, time = ids.shape
    if mask is None:
        return torch.ones(rows, time, dtype=torch.bool)
    if mask.shape not in ((rows, time), (rows, visible + time)):
        more = f" or {(rows, visible + time)} (all ids since the last read)" if visible else ""
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; expected {(rows, time)} (the new ids){more}.")
    return mask[:, -time:].bool().cpu()
