"""How a memory takes part in self-attention: between the queries, keys and values of a layer and its output projection.

A memory that works on heads cannot stand beside self-attention: what it needs exists only inside. transformers lets
attention functions be registered by name, and every attention module looks its function up. Ours hands the call to the
function that the model had before, unless the module has an active memory:

    self_attn(x):  q, k, v = ...;  rotate q, k;  keys of the local window before k;  attention function;  W_o
                                                                                     ^ memory.attend(inputs)

The name of our function carries the former one (`cacheformers_sdpa` calls `sdpa`), so nothing else has to remember it.
Positions: a memory compares tokens across segments, where rotary positions have no meaning, so it sees queries and keys
as they were before their rotation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cacheformers.modeling.attending import AttentionInputs
from cacheformers.modeling.memory import SegmentCall

PREFIX = "cacheformers_"
FORMER = ("sdpa", "eager")  # functions that take the masks that local windows need

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


class AttendingMemory(Protocol):
    """A memory, under the name `memory` on an attention module, that takes part in attention."""

    @property
    def options(self) -> Any:
        """Options of the active memory; None while none is active here."""

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """What attention returns instead, `[rows, time, heads, d_head]`."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    former: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that models look up: the former one, and a memory where one is active."""
    default: AttentionFunction = sys.modules[type(module).__module__].eager_attention_forward
    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(former, default)
    compute = partial(function, module, query, key, value, attention_mask, **kwargs)
    memory: AttendingMemory | None = getattr(module, "memory", None)
    call = kwargs.get("memory_state")
    if not isinstance(call, SegmentCall) or memory is None or memory.options is None:
        return compute()
    hidden, rotation = call.scratch.pop(f"inputs {module.layer_idx}")
    inputs = AttentionInputs(module, query, key, value, call, compute, kwargs["scaling"], hidden, rotation)
    return memory.attend(inputs), None


for _former in FORMER:
    AttentionInterface.register(PREFIX + _former, partial(attention, former=_former))
    AttentionMaskInterface.register(PREFIX + _former, ALL_MASK_ATTENTION_FUNCTIONS[_former])


def former_attention(implementation: str) -> str:
    """The attention implementation that a model had, or has, without a memory in it."""
    return implementation.removeprefix(PREFIX)


def route_attention(model: PreTrainedModel) -> None:
    """Let attention of every layer go through `attention`; without an active memory it computes what it did before.

    Raises:
        ValueError: the model's attention cannot be routed.
    """
    former = former_attention(model.config._attn_implementation)
    if former not in FORMER:
        raise ValueError(
            f"attn_implementation={former!r} cannot take a memory inside attention: load the model with "
            f"attn_implementation={FORMER[0]!r}."
        )
    model.set_attn_implementation(PREFIX + former)


def restore_attention(model: PreTrainedModel) -> None:
    """Undo `route_attention`, where it was done."""
    if model.config._attn_implementation.startswith(PREFIX):
        model.set_attn_implementation(former_attention(model.config._attn_implementation))


def keep_inputs(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of an attention module: its input and rotation go into the call's scratch, for `attention`.

    Raises:
        ValueError: attention does not go through `attention` any more, so the memory would be passed over.
    """
    call = kwargs.get("memory_state")
    if isinstance(call, SegmentCall):
        implementation: str = module.config._attn_implementation  # type: ignore[union-attr, assignment]
        if not implementation.startswith(PREFIX):
            raise ValueError(
                f"set_attn_implementation({implementation!r}) took the memory out of attention: name "
                f"{PREFIX + FORMER[0]!r} or {PREFIX + FORMER[1]!r}, or choose before the memory is put in."
            )
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        call.scratch[f"inputs {module.layer_idx}"] = hidden, kwargs.get("position_embeddings")
