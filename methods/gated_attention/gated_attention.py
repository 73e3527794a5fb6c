"""Gated attention: each token decides whether it looks beyond a window (Liao & Chang, MIT 6.7960 course report).

    g_t = sigmoid(a_t),  a_t = linear or MLP of x_t        x is the input of the layer's self-attention
    P_t = (1 - g_t) P_near + g_t P_all                     softmax over the last w tokens, and over all tokens so far
    loss = CE + sparsity_weight * mean g(1 - g) + mean_weight * mean g

The report's softmax over one logit is 1 for every token, and the sign of its sparsity term pushes gates to 0.5; hence
the sigmoid and the plus here (`sparsity_sign="paper"` is for study). A gate below `threshold` reads nothing far, in
prefill and in decoding. All keys and values stay, since a later token may open its gate, except in heads that
`far_heads` fixes for good (as DuoAttention does, Xiao et al. 2024, arXiv 2410.10819).

With `far_distance` D, P_all takes the tokens before the last w as if they all stood D tokens before the query (as
ReRoPE does, Su 2023, https://kexue.fm/archives/9708): a query turned to position D sees keys before rotation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cacheformers.methods.gated_attention.options import GatedAttentionOptions
from cacheformers.methods.gated_attention.state import GatedReading, KeyValues
from cacheformers.modeling.attention import AttentionInputs, project
from cacheformers.modeling.memory import refuse_not_finite
from cacheformers.modeling.method import first_numbers
from cacheformers.modeling.rotary import turned_back

STRETCH = (-0.1, 1.1)  # hard-concrete gates (Louizos et al. 2018, arXiv 1712.01312) are stretched to this, then clipped


class GatedParts(NamedTuple):
    """The trained parts of one layer, both with a bias.

    Shapes: `token_gate` `[channels, h or gate_hidden]`; `token_gate_hidden` `[gate_hidden, h]`.
    """

    token_gate: nn.Linear
    token_gate_hidden: nn.Linear | None = None

    @property
    def fingerprint(self) -> tuple[float, ...]:
        return first_numbers(self.token_gate.weight, self.token_gate.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute a `[rows, channels, time]` from x `[rows, time, h]`, in float32 or better."""
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        if self.token_gate_hidden is not None:
            hidden = F.gelu(project(self.token_gate_hidden, hidden))
        return project(self.token_gate, hidden).transpose(1, 2)


def make_parts(options: GatedAttentionOptions, *_: Any) -> dict[str, nn.Module]:
    """Make the parts of one layer. At first every gate is sigmoid(gate_bias)."""
    size, hidden = options.base.hidden_size, options.gate_hidden
    gate = nn.Linear(hidden or size, options.channels)
    nn.init.zeros_(gate.weight)
    nn.init.constant_(gate.bias, options.gate_bias)
    parts: dict[str, nn.Module] = {"token_gate": gate}
    if hidden:
        parts["token_gate_hidden"] = nn.Linear(size, hidden)
    return parts


def gates_for_training(options: GatedAttentionOptions, logits: Tensor) -> Tensor:
    """Return g in training."""
    if options.gate_choice == "soft":
        return torch.sigmoid(logits)
    if options.gate_choice == "straight_through":
        soft = torch.sigmoid(logits)
        return soft + ((soft > 0.5).to(soft.dtype) - soft).detach()
    noise = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
    noisy = torch.sigmoid((logits + torch.logit(noise)) / options.gate_temperature)
    return stretched(noisy) if options.gate_choice == "hard_concrete" else noisy


def gates_for_inference(options: GatedAttentionOptions, logits: Tensor) -> Tensor:
    """Return g in inference: without noise, and with the threshold."""
    gates = torch.sigmoid(logits)
    if options.gate_choice == "straight_through":
        return (gates > 0.5).to(gates.dtype)
    if options.gate_choice == "hard_concrete":
        gates = stretched(gates)
    gates = gates.masked_fill(gates < options.threshold, 0)
    return gates.masked_fill(gates > 1 - options.threshold, 1)


def stretched(gates: Tensor) -> Tensor:
    low, high = STRETCH
    return (gates * (high - low) + low).clamp(0, 1)


def fix_heads(options: GatedAttentionOptions, means: dict[int, Tensor], least: float = 0.5) -> GatedAttentionOptions:
    """Return options in which each head sees either everything or its window, for good.

    Args:
        means: mean gates over some text by layer, `[channels]`.
        least: a kv head sees everything if the mean gate of one of its query heads is at least this.
    """
    kv_heads, fixed = options.base.kv_heads, []
    for layer, mean in sorted(means.items()):
        highest = mean.expand(max(len(mean), kv_heads)).unflatten(0, (kv_heads, -1)).amax(1)
        fixed.append((layer, tuple((highest >= least).nonzero()[:, 0].tolist())))
    return replace(options, far_heads=tuple(fixed))


def attend(options: GatedAttentionOptions, layer: int, parts: GatedParts, inputs: AttentionInputs) -> Tensor:
    """Compute gated attention of new columns to all visible ones, `[rows, time, heads, d]`."""
    call, reading = inputs.call, inputs.call.reading
    if reading.counted is None:
        time = call.real.shape[1]
        reading.counted = call.real & (call.visible.cumsum(1)[:, -time:] > options.window_tokens)
        reading.visible = call.visible
    fixed = () if reading.closed else options.fixed(layer)
    if fixed is not None:
        return attend_fixed(options, layer, fixed, inputs).transpose(1, 2)
    logits = parts.logits(inputs.hidden)
    make_gates = gates_for_training if inputs.module.training else gates_for_inference
    reading.gates[layer] = torch.sigmoid(logits)
    gates = make_gates(options, logits)
    return attend_heads(options, layer, inputs, inputs.query, slice(None), gates).transpose(1, 2)


def attend_heads(
    options: GatedAttentionOptions,
    layer: int,
    inputs: AttentionInputs,
    queries: Tensor,
    heads: slice | Tensor,
    gates: Tensor,
    name: str = "far",
) -> Tensor:
    """Append the new columns of some kv heads, and compute the attention of their queries, `[rows, heads, time, d]`.

    Args:
        name: "near" for heads that see their window alone, whatever the gates.
    """
    reading: GatedReading = inputs.call.reading
    far: tuple[Tensor, KeyValues] | None = None
    keys, values = inputs.new_key[:, heads], inputs.new_value[:, heads]
    if layer == options.layers[-1] and not torch.is_grad_enabled():  # in training the loss shows NaN
        refuse_not_finite(torch.cat([keys, values], -1).transpose(1, 2).flatten(2), inputs.call.real)
    if options.far_distance and name == "far":
        flat = reading.append("far", layer, turned_back(keys, inputs.inverse), values)
        far, name = (turned_to(options.far_distance, layer, inputs, queries), flat), "window"
    held = reading.append(name, layer, keys, values)
    return reading.attention(queries, held, gates, options.window_tokens, inputs.scaling, inputs.call, far)


def turned_to(position: int, layer: int, inputs: AttentionInputs, queries: Tensor) -> Tensor:
    """Turn queries `[rows, heads, time, d]` from their positions to the same one."""
    exact = queries.to(torch.promote_types(queries.dtype, torch.float32))
    rotate = inputs.call.rotate
    assert rotate is not None
    return rotate(turned_back(exact, inputs.inverse), torch.tensor([[position]]), layer).to(queries.dtype)


def attend_fixed(
    options: GatedAttentionOptions, layer: int, far_heads: tuple[int, ...], inputs: AttentionInputs
) -> Tensor:
    """Compute attention of a layer whose heads are fixed, `[rows, heads, time, d]`."""
    kv_heads, queries = options.base.kv_heads, inputs.query
    near_heads = tuple(head for head in range(kv_heads) if head not in far_heads)
    by_group = queries.unflatten(1, (kv_heads, -1))
    mixed = torch.empty_like(by_group)
    for name, heads in (("far", far_heads), ("near", near_heads)):
        if not heads:
            continue
        index = torch.tensor(heads, device=queries.device)
        gates = queries.new_full((len(queries), len(heads), queries.shape[2]), float(name == "far"))
        asked = by_group[:, index].flatten(1, 2)
        found = attend_heads(options, layer, inputs, asked, index, gates, name)
        mixed = mixed.index_copy(1, index, found.unflatten(1, (len(heads), -1)))
    return mixed.flatten(1, 2)


class NaiveAttention(NamedTuple):
    """The result of `naive`: `output*` `[heads, time, d]`, `shares*` `[heads, time, time]`, `lse_*` `[heads, time]`."""

    output: Tensor
    output_near: Tensor
    output_all: Tensor
    shares: Tensor
    shares_near: Tensor
    shares_all: Tensor
    lse_near: Tensor
    lse_all: Tensor


def naive(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    gates: Tensor,
    window: int,
    scaling: float,
    far_distance: int = 0,
    rotate: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> NaiveAttention:
    """Specify gated attention: one document, token by token, in the plainest way.

    Shapes: queries, keys and values `[(kv_)heads, time, d]`; gates `[channels, time]`.

    Args:
        far_distance: 0 for true distances.
        rotate: turns `[tokens, d]` by `[tokens]` positions; queries and keys are then before rotation.
    """
    heads, time, _ = queries.shape
    found: list[list[tuple[Tensor, ...]]] = []
    for head in range(heads):
        kv_head, gate = head // (heads // len(keys)), gates[head // (heads // len(gates))]
        found.append([])
        for t in range(time):
            first = max(t - window + 1, 0)
            asked = queries[head, t].expand(t + 1, -1)
            if rotate is not None:
                distances = t - torch.arange(t + 1)
                if far_distance:
                    distances[:first] = far_distance
                asked = rotate(asked, distances)
            scores = (asked * keys[kv_head, : t + 1]).sum(-1) * scaling
            everything = torch.softmax(scores, 0)
            near = F.pad(torch.softmax(scores[first:], 0), (first, 0))
            shares = (1 - gate[t]) * near + gate[t] * everything
            outputs = [kind @ values[kv_head, : t + 1] for kind in (shares, near, everything)]
            padded = [F.pad(kind, (0, time - t - 1)) for kind in (shares, near, everything)]
            found[-1].append((*outputs, *padded, scores[first:].logsumexp(0), scores.logsumexp(0)))
    return NaiveAttention(
        *(torch.stack([torch.stack([token[i] for token in head]) for head in found]) for i in range(8))
    )
