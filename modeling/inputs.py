"""The checks of what is passed to a forward and to `generate()` with a memory, before anything is computed.

A forward sees only a part of a prompt, so `generate()` checks it whole. Model classes of this package inherit these
checks (`ChecksPrompts`). A model that gets an adapter has them as attributes of the object, which call the methods of
its class (`GenerationChecks`).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from cacheformers.modeling.architectures import find_decoder
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.method import MethodOnLayer, active_options

UNREAD_FORWARDS = 8  # of training, after which a memory that was never read is reported


def check_positions(position_ids: Tensor | None, real: Tensor) -> None:
    """Raise ValueError for packed documents and gaps: a memory counts positions itself and ignores those passed."""
    if position_ids is None or position_ids.shape[-1] != real.shape[1] or real.shape[1] < 2:
        return
    steps = position_ids.cpu().expand(len(real), -1).diff(dim=1)[real[:, 1:] & real[:, :-1]]
    if bool((steps <= 0).any()):
        raise ValueError("position_ids restart within a row: give each document its own row, do not pack them.")
    if bool((steps > 1).any()):
        raise ValueError("position_ids leave positions out, but a memory counts every token itself: do not pass them.")


def watch_training(memory: MethodOnLayer, options: Any, real: Tensor, carried: bool) -> None:
    """Warn once if training forwards never read the memory, because every row is short and starts without one.

    Args:
        memory: on the lowest layer; it counts forwards until the first that may read.
        real: which columns are tokens, `[rows, time]`.
        carried: the caller passed a memory, which earlier segments may have filled.
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


def check_arguments(decoder: Any, options: Any, kwargs: dict[str, Any], keep: int | None) -> None:
    """Raise ValueError for arguments and settings that a memory cannot follow.

    Args:
        kwargs: of the decoder.
        keep: how many of the last hidden states are wanted; None for all.
    """
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
    # `generate(use_cache=False)` passes no cache that could refuse; it passes positions and wants one logit.
    if keep == 1 and kwargs.get("use_cache") is False and kwargs.get("position_ids") is not None:
        refuse_looking_ahead(options)
    if decoder.training and getattr(decoder, "gradient_checkpointing", False):
        function = getattr(decoder.layers[0], "_gradient_checkpointing_func", None)
        if getattr(function, "keywords", {}).get("use_reentrant"):  # it loses gradients of what layers share
            raise ValueError(
                'Activation checkpointing needs use_reentrant=False: enable it with {"use_reentrant": False}.'
            )


def check_shape(ids: Any) -> None:
    """Raise ValueError unless ids is a non-empty `[rows, time]` tensor; None is left to the model."""
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


def refuse_looking_ahead(options: Any) -> None:
    """Raise ValueError if a method's rule needs later tokens, which do not exist while decoding."""
    if not getattr(options, "causal", True):
        raise ValueError(
            "selection='paper_block' chooses with tokens that do not exist while decoding: it cannot generate, nor "
            "read into a memory. Use selection='previous_block' (or 'token', 'prefix')."
        )


def real_tokens(mask: Tensor | None, ids: Tensor, visible: int) -> Tensor:
    """Return which of the new ids are tokens, `[rows, time]`, on the host.

    Args:
        mask: over the new ids or over all visible ones.
        visible: ids seen before the new ones.
    """
    rows, time = ids.shape
    if mask is None:
        return torch.ones(rows, time, dtype=torch.bool)
    if mask.shape not in ((rows, time), (rows, visible + time)):
        more = f" or {(rows, visible + time)} (all ids since the last read)" if visible else ""
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; expected {(rows, time)} (the new ids){more}.")
    return mask[:, -time:].bool().cpu()


class GenerationChecks:
    """The checks of one causal language model of transformers, until `remove()`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        names = [name for name in ("generate", "init_continuous_batching") if hasattr(model, name)]
        self.former: dict[str, Any] = {name: getattr(model, name) for name in names}
        for name in names:
            setattr(model, name, getattr(self, name))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Check the prompt, then generate as before."""
        check_prompt(self.model, args, kwargs)
        return self.former["generate"](*args, **in_one_forward(kwargs))

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse continuous batching while a memory is active, else do as before."""
        check_batching(self.model)
        return self.former["init_continuous_batching"](*args, **kwargs)

    def remove(self) -> None:
        """Remove the checks from the model."""
        for name, former in self.former.items():
            delattr(self.model, name)
            if getattr(self.model, name) != former:  # an attribute of this object that was there before
                setattr(self.model, name, former)


class ChecksPrompts:
    """The checks of a model class of this package, before `GenerationMixin` among its bases."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Check the prompt, then generate as in transformers."""
        check_prompt(self, args, kwargs)  # type: ignore[arg-type]  # mixed into a model
        return super().generate(*args, **in_one_forward(kwargs))  # type: ignore[misc]  # the model's

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse continuous batching."""
        check_batching(self)  # type: ignore[arg-type]  # mixed into a model
        return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]  # the model's


def check_prompt(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError unless the prompt begins with the ids that its memory has seen since the last `read()`."""
    memory = kwargs.get("past_key_values")
    given = (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids"))
    ids = next((ids for ids in given if ids is not None), None)
    if not isinstance(memory, MemoryCache) or not memory.visible or not isinstance(ids, Tensor) or ids.dim() != 2:
        return
    mask, seen = kwargs.get("attention_mask"), memory.visible
    if mask is not None and mask.shape[1] != ids.shape[1]:
        return  # the mask is over all ids, so the prompt is the new ones, and generate() skips none
    if ids.shape[1] > seen and begins_with(ids[:, :seen], memory, masks(model, ids, kwargs)):
        return
    raise ValueError(
        f"This memory has seen {seen} ids since the last read(), and generate() skips as many ids of its prompt; but "
        f"this prompt of {ids.shape[1]} ids does not go on from them. To ask several questions of one text, pass "
        "memory.clone() each time; to go on, pass all ids since the last read(), and new ones after them."
    )


def in_one_forward(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave out `prefill_chunk_size` where the memory has tokens in its window; a forward goes by segments anyway.

    transformers 5.17 reads such a prompt from its beginning in chunks, what the memory has seen as well; 5.23 does not.
    """
    memory = kwargs.get("past_key_values")
    return {**kwargs, "prefill_chunk_size": None} if isinstance(memory, MemoryCache) and memory.visible else kwargs


def masks(model: Any, ids: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the possible masks `[rows, time]`: the given one, else all ones and what generate() makes of padding."""
    mask = kwargs.get("attention_mask")
    if mask is not None:
        return [mask.bool()]
    config = kwargs.get("generation_config") or model.generation_config
    padding = kwargs.get("pad_token_id", getattr(config, "pad_token_id", None))
    everything = torch.ones_like(ids, dtype=torch.bool)
    return [everything] if padding is None else [everything, ids != padding]


def begins_with(ids: Tensor, memory: MemoryCache, reals: list[Tensor]) -> bool:
    """Whether a memory has seen exactly these ids `[rows, seen]`; rows of either may be repeated (beams)."""
    rows, held = len(ids), memory.batch_size
    most = max(rows, held)
    if most % rows or most % held:
        return True  # the forward reports that the rows do not fit
    index = torch.arange(held).repeat_interleave(most // held)
    seen, tokens_read = memory.seen.clone(), [memory.tokens_read[row] for row in index.tolist()]
    seen.select(index)
    again = most // rows
    return any(
        seen.agree_with(
            ids.repeat_interleave(again, 0), real[:, : ids.shape[1]].repeat_interleave(again, 0), tokens_read
        )
        for real in reals
    )


def check_batching(model: nn.Module) -> None:
    """Raise ValueError if a memory is active: continuous batching mixes requests in one row."""
    if active_options(find_decoder(model)) is not None:
        raise ValueError(
            "Continuous batching (generate_batch, cache_implementation='paged') mixes requests in one row, which a "
            "memory cannot follow: call generate() with a batch of prompts, or disable the adapter."
        )
