"""The checks of the whole prompt when `generate()` is called; a forward sees only a part of it.

Model classes of this package inherit them (`ChecksPrompts`). A model that gets an adapter has them as attributes of the
object, which call the methods of its class (`GenerationChecks`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cacheformers.modeling.architectures import find_decoder
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.segments import active_options


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
        check_prompt(self, args, kwargs)  # type: ignore[arg-type]
        return super().generate(*args, **in_one_forward(kwargs))  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse continuous batching."""
        check_batching(self)  # type: ignore[arg-type]
        return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]


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
