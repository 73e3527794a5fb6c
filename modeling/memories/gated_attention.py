"""Gated attention: each token decides whether it looks beyond a window (Liao & Chang, MIT 6.7960 course report).

    g_t = sigmoid(a_t),  a_t = linear or MLP of x_t        x is the input of the layer's self-attention
    P_t = (1 - g_t) P_near + g_t P_all                     softmax over the last w tokens, and over all tokens so far
    loss = CE + sparsity_weight * mean g(1 - g) + mean_weight * mean g

The report's softmax over one logit is 1 for every token, and its sparsity term has the sign that pushes gates to 0.5;
hence the sigmoid and the plus (`sparsity_sign="paper"` is for study). Where a gate is below `threshold` nothing far is
read, in prefill and in decoding. Keys and values all stay, since a later token may open its gate, except in heads that
`far_heads` fixes for good (as DuoAttention does, Xiao et al. 2024, arXiv 2410.10819).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cacheformers.modeling.memories.attending import AttentionInputs
from cacheformers.modeling.memories.base import BaseShape, LocalWindow, SegmentCall
from cacheformers.modeling.memories.checks import check_at_least, check_choices, check_layers
from cacheformers.modeling.memories.gated_state import GatedReading, GatedState
from cacheformers.modeling.memories.method import first_numbers
from cacheformers.modeling.memories.settings import chosen_layers

EVERYTHING = 2**40  # tokens that stay visible
STRETCH = (-0.1, 1.1)  # hard-concrete gates (Louizos et al. 2018, arXiv 1712.01312) are stretched to this, then clipped


@dataclass(repr=False)  # transformers prints a configuration
class GatedAttentionSettings:
    """Fields of `GatedAttentionAdapterConfig` and `GatedAttentionConfig`. Layers count from 0."""

    window_tokens: int = field(
        default=512, metadata={"help": "Tokens that a closed gate sees (w); the token itself counts."}
    )
    layers: list[int] | None = field(default=None, metadata={"help": "Layers with gates. Default: all."})
    gate_hidden: int | None = field(
        default=None, metadata={"help": "Width of the gate's hidden layer. Default: a linear gate."}
    )
    gate_per: str = field(default="layer", metadata={"help": "One gate a 'layer', 'head' or 'kv_head'."})
    gate_bias: float = field(
        default=4.0,
        metadata={
            "help": "Where gates start, before the sigmoid: 4 keeps the base's function nearly, inf exactly; 0 is for "
            "a model from scratch."
        },
    )
    gate_choice: str = field(
        default="soft",
        metadata={
            "help": "How gates are made in training: 'soft'; or, for the last phase, 'straight_through' (0 or 1 "
            "forward, soft backward), 'gumbel' (a noisy sigmoid) or 'hard_concrete' (noisy, stretched, clipped)."
        },
    )
    gate_temperature: float = field(default=2 / 3, metadata={"help": "Temperature of the noisy choices."})
    sparsity_weight: float = field(
        default=0.0, metadata={"help": "Weight of mean g(1 - g) in `memory.state.loss`: gates go to 0 or 1."}
    )
    mean_weight: float = field(default=0.0, metadata={"help": "Weight of mean g in `memory.state.loss`: gates close."})
    sparsity_sign: str = field(
        default="+", metadata={"help": "'+', or for study 'paper', which pushes gates to 0.5 instead."}
    )
    threshold: float = field(
        default=0.0,
        metadata={
            "help": "In inference gates below it are 0, and nothing far is read; gates above 1 - threshold are 1. 0 "
            "computes what was trained."
        },
    )
    segment_tokens: int = field(
        default=2048, metadata={"help": "Tokens that one forward takes; it bounds activations, and changes no result."}
    )
    far_heads: dict[int, list[int]] | None = field(
        default=None,
        metadata={
            "help": "Layer -> its kv heads that see everything; the others see the window, and keep no more. The gates "
            "of such a layer are not asked. Default: gates decide everywhere."
        },
    )

    def resolve(self, base: BaseShape) -> GatedAttentionOptions:
        """The method's options for one base model.

        Raises:
            ValueError: an option that does not fit the base model.
        """
        options = {field.name: getattr(self, field.name) for field in fields(GatedAttentionSettings)}
        far_heads = {int(layer): tuple(heads) for layer, heads in (self.far_heads or {}).items()}  # JSON has text keys
        return GatedAttentionOptions(
            base=base,
            **{
                **options,
                "layers": chosen_layers(self.layers, base),
                "far_heads": tuple(sorted(far_heads.items())),
            },
        )


@dataclass(frozen=True)
class GatedAttentionOptions:
    """The method's options, resolved against a base model (see `GatedAttentionSettings` for each one's meaning).

    Raises:
        ValueError: an option that does not fit the base model.
    """

    base: BaseShape
    layers: tuple[int, ...]
    window_tokens: int = 512
    gate_hidden: int | None = None
    gate_per: Literal["layer", "head", "kv_head"] = "layer"
    gate_bias: float = 4.0
    gate_choice: Literal["soft", "straight_through", "gumbel", "hard_concrete"] = "soft"
    gate_temperature: float = 2 / 3
    sparsity_weight: float = 0.0
    mean_weight: float = 0.0
    sparsity_sign: Literal["+", "paper"] = "+"
    threshold: float = 0.0
    segment_tokens: int = 2048
    far_heads: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        check_layers(self.layers, self.base)
        check_at_least(1, self, "window_tokens", "segment_tokens", *(["gate_hidden"] if self.gate_hidden else []))
        check_at_least(0, self, "sparsity_weight", "mean_weight")
        check_choices(
            self,
            gate_per=("layer", "head", "kv_head"),
            gate_choice=("soft", "straight_through", "gumbel", "hard_concrete"),
            sparsity_sign=("+", "paper"),
        )
        if self.gate_hidden == 0:
            raise ValueError("gate_hidden 0 has no units: leave it out for a linear gate.")
        if not self.gate_temperature > 0:
            raise ValueError(f"gate_temperature must be positive, got {self.gate_temperature}.")
        if not 0 <= self.threshold <= 0.5:
            raise ValueError(f"threshold must be between 0 and 0.5, got {self.threshold}.")
        if self.base.sliding_window is not None:
            raise ValueError(
                f"This base's layers see only {self.base.sliding_window} tokens back, and gates would open on "
                "everything: load the base with sliding_window=None, or choose another."
            )
        for layer, kv_heads in self.far_heads:
            if layer not in self.layers or not set(kv_heads) <= set(range(self.base.kv_heads)):
                raise ValueError(
                    f"far_heads names layer {layer} with kv heads {list(kv_heads)}: the method's layers are "
                    f"{list(self.layers)}, and this base model has {self.base.kv_heads} kv heads."
                )

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers whose output the method changes."""
        return self.layers

    @property
    def window(self) -> LocalWindow:
        """What stays visible: everything. (Near and far are the attention's own matter.)"""
        return LocalWindow(self.segment_tokens, EVERYTHING)

    @property
    def near_tokens(self) -> int:
        """Before gates matter, the window must be full."""
        return self.window_tokens

    @property
    def channels(self) -> int:
        """Gates of a token in a layer."""
        return {"layer": 1, "head": self.base.heads, "kv_head": self.base.kv_heads}[self.gate_per]

    def fixed(self, layer: int) -> tuple[int, ...] | None:
        """The kv heads of a layer that see everything; None where gates decide."""
        return dict(self.far_heads).get(layer)

    @property
    def signature(self) -> dict[str, Any]:
        """What two models must share to exchange a memory."""
        options = asdict(self)
        shared = ("base", "layers", "window_tokens", "far_heads")
        return {"method": "gated_attention", **{name: options[name] for name in shared}}

    def new_state(
        self,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool = False,
        cache_size: int | None = None,
    ) -> GatedState:
        """An empty memory.

        Args:
            devices: of each augmented layer.
            dtype: of the model's activations.
            keep_values: nothing is encoded anew in training, so this changes nothing.
            cache_size: 0 for one in which all gates are closed: tokens see their window.

        Raises:
            ValueError: another cache_size was asked for.
        """
        if cache_size:
            raise ValueError("Gated attention keeps every key and value: leave cache_size out, or 0 for closed gates.")
        return GatedState(self, devices, closed=cache_size == 0)


# Gates


class GatedParts(NamedTuple):
    """The trained parts that one layer holds.

    Shapes: `token_gate` `[channels, h or gate_hidden]` and a bias; `token_gate_hidden` `[gate_hidden, h]` and a bias.
    """

    token_gate: nn.Linear
    token_gate_hidden: nn.Linear | None = None

    @property
    def fingerprint(self) -> tuple[float, ...]:
        return first_numbers(self.token_gate.weight, self.token_gate.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """a `[rows, channels, time]` of x `[rows, time, h]`, in float32 or better."""
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        if self.token_gate_hidden is not None:
            hidden = F.gelu(applied(self.token_gate_hidden, hidden))
        return applied(self.token_gate, hidden).transpose(1, 2)


def applied(linear: nn.Linear, inputs: Tensor) -> Tensor:
    """A linear layer in the dtype of its inputs."""
    return F.linear(inputs, linear.weight.to(inputs.dtype), linear.bias.to(inputs.dtype))


def make_parts(options: GatedAttentionOptions, *_: Any) -> dict[str, nn.Module]:
    """The parts that a layer trains: every token's gate is sigmoid(gate_bias) at first."""
    size, hidden = options.base.hidden_size, options.gate_hidden
    gate = nn.Linear(hidden or size, options.channels)
    nn.init.zeros_(gate.weight)
    nn.init.constant_(gate.bias, options.gate_bias)
    parts: dict[str, nn.Module] = {"token_gate": gate}
    if hidden:
        parts["token_gate_hidden"] = nn.Linear(size, hidden)
    return parts


def gates_for_training(options: GatedAttentionOptions, logits: Tensor) -> Tensor:
    """Gates by which outputs are mixed in training."""
    if options.gate_choice == "soft":
        return torch.sigmoid(logits)
    if options.gate_choice == "straight_through":
        soft = torch.sigmoid(logits)
        return soft + ((soft > 0.5).to(soft.dtype) - soft).detach()
    noise = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
    noisy = torch.sigmoid((logits + torch.logit(noise)) / options.gate_temperature)
    return stretched(noisy) if options.gate_choice == "hard_concrete" else noisy


def gates_for_inference(options: GatedAttentionOptions, logits: Tensor) -> Tensor:
    """The same without noise, and with the threshold."""
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
    """Options in which each head sees either everything or its window, for good.

    Args:
        means: mean gate by layer, `[channels]` (`GatedState.gate_means` over some text).
        least: a kv head sees everything if the mean gate of one of its query heads is at least this.
    """
    kv_heads, fixed = options.base.kv_heads, []
    for layer, mean in sorted(means.items()):
        highest = mean.expand(max(len(mean), kv_heads)).unflatten(0, (kv_heads, -1)).amax(1)
        fixed.append((layer, tuple((highest >= least).nonzero()[:, 0].tolist())))
    return replace(options, far_heads=tuple(fixed))


# Attention


def attend(
    options: GatedAttentionOptions,
    layer: int,
    parts: GatedParts,
    hidden: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    call: SegmentCall,
    training: bool,
) -> Tensor:
    """Gated attention of new columns over all visible ones.

    Args:
        hidden: x, the input of the layer's self-attention, `[rows, time, h]`.
        queries, keys, values: of the new columns, as local attention takes them, `[rows, (kv_)heads, time, d]`.
        training: gates as in training; in inference they have the threshold.

    Returns:
        `[rows, time, heads, d]`.
    """
    reading: GatedReading = call.reading
    if reading.counted is None:
        reading.counted, reading.visible = counted_tokens(call, options.window_tokens), call.visible
    fixed = () if reading.closed else options.fixed(layer)
    if fixed is not None:
        return attend_fixed(options, layer, fixed, queries, keys, values, scaling, call).transpose(1, 2)
    logits = parts.logits(hidden)
    gates = gates_for_training(options, logits) if training else gates_for_inference(options, logits)
    reading.gates[layer] = torch.sigmoid(logits)
    held = reading.append("far", layer, keys, values)
    output = reading.attention(layer, queries, held, gates, options.window_tokens, scaling, call)
    return output.transpose(1, 2)


def attend_inputs(options: GatedAttentionOptions, layer: int, parts: GatedParts, inputs: AttentionInputs) -> Tensor:
    """`attend`, given what the attention module computes."""
    return attend(
        options,
        layer,
        parts,
        inputs.hidden,
        inputs.query,
        inputs.new_key,
        inputs.new_value,
        inputs.scaling,
        inputs.call,
        inputs.module.training,
    )


def attend_fixed(
    options: GatedAttentionOptions,
    layer: int,
    far_heads: tuple[int, ...],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    call: SegmentCall,
) -> Tensor:
    """Attention of a layer whose heads are fixed, `[rows, heads, time, d]`."""
    reading: GatedReading = call.reading
    kv_heads = options.base.kv_heads
    near_heads = tuple(head for head in range(kv_heads) if head not in far_heads)
    by_group = queries.unflatten(1, (kv_heads, -1))
    mixed = torch.empty_like(by_group)
    for name, heads in (("far", far_heads), ("near", near_heads)):
        if not heads:
            continue
        index = torch.tensor(heads, device=queries.device)
        held = reading.append(name, layer, keys[:, index], values[:, index])
        gates = queries.new_full((len(queries), len(heads), queries.shape[2]), float(name == "far"))
        asked = by_group[:, index].flatten(1, 2)
        found = reading.attention(layer, asked, held, gates, options.window_tokens, scaling, call)
        mixed = mixed.index_copy(1, index, found.unflatten(1, (len(heads), -1)))
    return mixed.flatten(1, 2)


def counted_tokens(call: SegmentCall, window: int) -> Tensor:
    """Which new columns are tokens with something far from them, `[rows, time]`."""
    time = call.real.shape[1]
    return call.real & (call.visible.cumsum(1)[:, -time:] > window)


# The specification


class NaiveAttention(NamedTuple):
    """What `naive` returns: outputs `[heads, time, d]`, probabilities `[heads, time, time]`, log-sum-exps
    `[heads, time]`."""

    output: Tensor
    output_near: Tensor
    output_all: Tensor
    shares: Tensor
    shares_near: Tensor
    shares_all: Tensor
    lse_near: Tensor
    lse_all: Tensor


def naive(queries: Tensor, keys: Tensor, values: Tensor, gates: Tensor, window: int, scaling: float) -> NaiveAttention:
    """The specification: gated attention over one document, token by token, in the plainest way.

    Args:
        queries, keys, values: `[(kv_)heads, time, d]`.
        gates: `[channels, time]`.
    """
    heads, time, _ = queries.shape
    found: list[list[tuple[Tensor, ...]]] = []
    for head in range(heads):
        kv_head, gate = head // (heads // len(keys)), gates[head // (heads // len(gates))]
        found.append([])
        for t in range(time):
            scores = keys[kv_head, : t + 1] @ queries[head, t] * scaling
            first = max(t - window + 1, 0)
            everything = torch.softmax(scores, 0)
            near = F.pad(torch.softmax(scores[first:], 0), (first, 0))
            shares = (1 - gate[t]) * near + gate[t] * everything
            outputs = [kind @ values[kv_head, : t + 1] for kind in (shares, near, everything)]
            padded = [F.pad(kind, (0, time - t - 1)) for kind in (shares, near, everything)]
            found[-1].append((*outputs, *padded, scores[first:].logsumexp(0), scores.logsumexp(0)))
    return NaiveAttention(
        *(torch.stack([torch.stack([token[i] for token in head]) for head in found]) for i in range(8))
    )
