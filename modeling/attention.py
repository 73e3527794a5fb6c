"""How a memory takes part in self-attention: between the queries, keys and values of a layer and its output projection.

A memory that works on heads needs queries, keys and values, which exist only inside attention. transformers lets
attention functions be registered by name, and every attention module looks its function up. The function registered
here calls the one that the model had before, unless the module has an active memory:

    self_attn(x):  q, k, v = ...;  rotate q, k;  prepend keys of the local window;  attention function;  W_o
                                                                                    ^ method.attend(inputs)

Its name contains the former one (`cacheformers_sdpa` calls `sdpa`), so nothing else has to remember it. A memory
compares tokens across segments, where rotary positions mean nothing, so it can have queries and keys before rotation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cacheformers.modeling.memory import SegmentCall
from cacheformers.modeling.rotary import Rotation, layer_rotation

PREFIX = "cacheformers_"
FORMER = ("sdpa", "eager")  # functions that take the masks that local windows need

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass
class AttentionInputs:
    """The inputs of one layer's self-attention, and what it would return without the memory.

    Attributes:
        module: the attention module.
        query: rotated, `[rows, heads, time, d_head]`; some models have scaled it already (OPT).
        key, value: of the local window and the new tokens, rotated, `[rows, kv_heads, columns + time, d_head]`.
        call: the forward that this is a part of.
        compute: the former attention function over these tensors.
        scaling: of the scores of `query` and `key`.
        hidden: x, from which the module computes all of these, `[rows, time, h]`.
        inverse: turns states of the new tokens back, in float32 or better; None where they are not turned.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    call: SegmentCall
    compute: Callable[[], tuple[Tensor, Tensor | None]]
    scaling: float
    hidden: Tensor
    inverse: Rotation | None

    @cached_property
    def local(self) -> Tensor:
        """What self-attention returns without the memory, `[rows, time, heads, d_head]`."""
        return self.compute()[0]

    @cached_property
    def plain_query(self) -> Tensor:
        """Queries before rotation and scale, `[rows, heads, time, d_head]`, in float32 or better."""
        plain = self._unrotated(self.query)
        own: float = self.module.scaling  # type: ignore[assignment]  # OPT applies it to queries
        return plain if own == self.scaling else plain * (self.scaling / own)

    @cached_property
    def plain_key(self) -> Tensor:
        """Keys of the new tokens before rotation, `[rows, kv_heads, time, d_head]`, in float32 or better."""
        return self._unrotated(self.new_key)

    @property
    def new_key(self) -> Tensor:
        """Rotated keys of the new tokens, `[rows, kv_heads, time, d_head]`."""
        return self.key[:, :, -self.query.shape[2] :]

    @property
    def new_value(self) -> Tensor:
        """Values of the new tokens, `[rows, kv_heads, time, d_head]`."""
        return self.value[:, :, -self.query.shape[2] :]

    def _unrotated(self, states: Tensor) -> Tensor:
        exact = states.to(torch.promote_types(states.dtype, torch.float32))
        return exact if self.inverse is None else self.inverse.turn(exact)


def project(linear: nn.Linear, inputs: Tensor) -> Tensor:
    """Apply a linear layer in the dtype of its inputs `[..., h]`, whatever the dtype its weights are trained in."""
    bias = linear.bias
    return F.linear(inputs, linear.weight.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))


def by_kv_head(queries: Tensor, kv_heads: int) -> Tensor:
    """Group queries `[rows, heads, tokens, d]` by kv head, `[rows, kv_heads, group*tokens, d]`.

    The tokens of one query head stay together.
    """
    return queries.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def by_head(grouped: Tensor, tokens: int) -> Tensor:
    """Undo `by_kv_head`."""
    return grouped.unflatten(2, (-1, tokens)).flatten(1, 2)


def fused_on_cpu(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute attention without a gradient by PyTorch's kernel for CPUs.

    Returns:
        The output, `[rows, heads, time, d]`, and the log-sum-exp of scores, which `F.scaled_dot_product_attention` does
        not give, `[rows, heads, time]`.
    """
    fused: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, attn_mask=bias, scale=scaling
    )
    return fused


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
    """Compute attention with the memory where one is active on the module, else with the former function."""
    default: AttentionFunction = sys.modules[type(module).__module__].eager_attention_forward
    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(former, default)
    compute = partial(function, module, query, key, value, attention_mask, **kwargs)
    memory: Any = getattr(module, "memory", None)
    call = kwargs.get("memory_state")
    if not isinstance(call, SegmentCall) or memory is None or memory.options is None:
        return compute()
    if memory.method.attend is None:  # beside attention; another model with the same configuration object routed this
        return compute()
    if kwargs.get("dropout") and module.layer_idx in call.memory.state.own_layers:
        raise ValueError(
            f"{memory.method.title} drops no attention weights, but the base has attention_dropout "
            f"{kwargs['dropout']}: load it with attention_dropout=0 to train."
        )
    hidden, inverse = call.scratch.pop(f"inputs {module.layer_idx}")
    inputs = AttentionInputs(module, query, key, value, call, compute, kwargs["scaling"], hidden, inverse)
    return memory.method.attend(memory.options, memory.layer, memory.active_parts, inputs), None


for _former in FORMER:
    AttentionInterface.register(PREFIX + _former, partial(attention, former=_former))
    AttentionMaskInterface.register(PREFIX + _former, ALL_MASK_ATTENTION_FUNCTIONS[_former])


def former_attention(implementation: str) -> str:
    """Return the name of the attention implementation without a memory in it."""
    return implementation.removeprefix(PREFIX)


def route_attention(model: PreTrainedModel) -> None:
    """Make every layer call `attention`; raise ValueError if the former function cannot take the masks."""
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
    """Pre-hook of self-attention: keep its input and inverse rotation in the call's scratch, for `attention`."""
    call = kwargs.get("memory_state")
    if isinstance(call, SegmentCall):
        implementation: str = module.config._attn_implementation  # type: ignore[union-attr, assignment]  # a configuration
        if not implementation.startswith(PREFIX):
            raise ValueError(
                f"set_attn_implementation({implementation!r}) took the memory out of attention: name "
                f"{PREFIX + FORMER[0]!r} or {PREFIX + FORMER[1]!r}, or choose before the memory is put in."
            )
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        angles = kwargs.get("position_embeddings")
        rotation, inverse = layer_rotation(module, angles), None
        if rotation is not None:
            known, inverse = call.scratch.get("inverse rotation", (None, None))
            if known is not angles:  # most layers share them
                inverse = rotation.exact(torch.promote_types(rotation.cos.dtype, torch.float32)).inverse
                call.scratch["inverse rotation"] = angles, inverse
        call.scratch[f"inputs {module.layer_idx}"] = hidden, inverse
