"""What is checked when `generate()` is called: its prompt is whole there, and cut when a forward sees it.

A model of this package checks in methods of its own (`ChecksPrompts`). The model that an adapter is put on gets the
same checks as attributes of the object, before its class's methods, and `remove()` takes them off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cacheformers.modeling.attach import active_options, find_decoder
from cacheformers.modeling.cache import MemoryCache


class GenerationChecks:
    """Checks before `generate()` and continuous batching of one model.

    Args:
        model: a causal language model of transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        names = [name for name in ("generate", "init_continuous_batching") if hasattr(model, name)]
        self.former: dict[str, Any] = {name: getattr(model, name) for name in names}
        for name in names:
            setattr(model, name, getattr(self, name))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as before, unless the memory has seen other ids than the prompt's."""
        check_prompt(self.model, args, kwargs)
        return self.former["generate"](*args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse continuous batching while a memory is active."""
        check_batching(self.model)
        return self.former["init_continuous_batching"](*args, **kwargs)

    def remove(self) -> None:
        """Take the checks off."""
        for name, former in self.former.items():
            delattr(self.model, name)
            if getattr(self.model, name) != former:  # somebody else's, on this object
                setattr(self.model, name, former)


class ChecksPrompts:
    """The same checks in a model class of this package, in front of transformers' own mixin."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, unless the memory has seen other ids than the prompt's."""
        check_prompt(self, args, kwargs)  # type: ignore[arg-type]
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a memory cannot follow it."""
        check_batching(self)  # type: ignore[arg-type]
        return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]


def check_prompt(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a prompt that does not begin with what its memory has seen since the last `read()`.

    Raises:
        ValueError: names what to do instead.
    """
    memory = kwargs.get("past_key_values")
    given = (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids"))
    ids = next((ids for ids in given if ids is not None), None)
    if not isinstance(memory, MemoryCache) or not memory.visible or not isinstance(ids, Tensor) or ids.dim() != 2:
        return
    mask, seen = kwargs.get("attention_mask"), memory.visible
    if mask is not None and mask.shape[1] != ids.shape[1]:
        return  # over all ids, so these are the new ones: generate() skips none
    if ids.shape[1] > seen and begins_with(ids[:, :seen], memory, masks(model, ids, kwargs)):
        return
    raise ValueError(
        f"This memory has seen {seen} ids since the last read(), and generate() skips as many ids of its prompt; but "
        f"this prompt of {ids.shape[1]} ids does not go on from them. To ask several questions of one text, pass "
        "memory.clone() each time; to go on, pass all ids since the last read(), and new ones after them."
    )


def masks(model: Any, ids: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
    """Which ids may count as tokens, `[rows, time]`: as given, or else all, or as generate() guesses from padding."""
    mask = kwargs.get("attention_mask")
    if mask is not None:
        return [mask.bool()]
    config = kwargs.get("generation_config") or model.generation_config
    padding = kwargs.get("pad_token_id", getattr(config, "pad_token_id", None))
    everything = torch.ones_like(ids, dtype=torch.bool)
    return [everything] if padding is None else [everything, ids != padding]


def begins_with(ids: Tensor, memory: MemoryCache, reals: list[Tensor]) -> bool:
    """Whether a memory has seen these ids `[rows, seen]`; rows of either may be repeated (beams)."""
    rows, held = len(ids), memory.batch_size
    most = max(rows, held)
    if most % rows or most % held:
        return True  # the forward says that they do not fit
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
    """Refuse continuous batching while a memory is active.

    Raises:
        ValueError: names what to do instead.
    """
    if active_options(find_decoder(model)) is not None:
        raise ValueError(
            "Continuous batching (generate_batch, cache_implementation='paged') mixes requests in one row, which a "
            "memory cannot follow: call generate() with a batch of prompts, or disable the adapter."
        )
