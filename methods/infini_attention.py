"""Infini-attention: a memory of constant size beside local attention (Munkhdalai et al. 2024, arXiv 2404.07143).

    A_mem = s(Q) M / (s(Q) z)                                    what closed segments hold; s(x) = ELU(x) + 1
    A     = sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot      one beta a query head; 1 is all memory
    M    += s(K)^T V,  z += sum of s(K)                          when a segment closes; the rule "delta" stores V minus
                                                                 what M returned for K before

The memory takes Q and K without rotary position and scale. A_dot is the base's own attention within its local window.
M and z are float32 or better, because sums in half precision stall after a few hundred tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.adapters.registration import register
from cacheformers.modeling.attention import AttentionInputs, by_head, by_kv_head
from cacheformers.modeling.composite import CompositeConfig, CompositeForCausalLM, CompositeModel
from cacheformers.modeling.memory import MemoryState, SegmentCall, joined, keep_columns, part
from cacheformers.modeling.method import MemoryMethod, Share, share_statistics
from cacheformers.modeling.settings import (
    LocalWindowOptions,
    LocalWindowSettings,
    check_choices,
    check_layers,
    chosen_layers,
    setting,
)


@dataclass(repr=False)  # transformers prints a configuration
class InfiniAttentionSettings(LocalWindowSettings):
    """Fields of `InfiniAttentionAdapterConfig` and `InfiniAttentionConfig`. Layers count from 0."""

    segment_tokens: int = setting(2048, "Tokens after which a segment enters the memory (N).")
    layers: list[int] | None = setting(None, "Layers with a memory. Default: all (paper).")
    rule: str = setting(
        "linear", "'linear' stores values; 'delta' stores them minus what the memory returned for their keys."
    )
    empty: str = setting(
        "bypass",
        "While nothing is stored, 'bypass' leaves attention as it is; 'literal' takes the formula literally and "
        "multiplies attention by 1 - sigmoid(beta), which changes a pretrained model.",
        free=True,
    )
    truncated: bool = setting(
        False, "For study: no gradient through stored segments, so the model cannot learn what to store.", free=True
    )


@dataclass(kw_only=True)
class InfiniAttentionOptions(InfiniAttentionSettings, LocalWindowOptions):
    """`InfiniAttentionSettings` resolved against a base model; ValueError if an option does not fit it."""

    layers: tuple[int, ...]  # type: ignore[assignment]  # resolved

    def __post_init__(self) -> None:
        self.layers = chosen_layers(self.layers, self.base)
        check_layers(self.layers, self.base)
        check_choices(self, rule=("linear", "delta"), empty=("bypass", "literal"))
        self.check_local_window()

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return self.layers


class InfiniParts(NamedTuple):
    """The trained parts of one layer: `beta` `[heads]`, 0 at first. It needs a high learning rate and no decay."""

    beta: Share


def make_parts(options: InfiniAttentionOptions, *_: Any) -> dict[str, nn.Module]:
    """Make the parts of one layer. At first each head takes half of its output from the memory."""
    return {"beta": Share(options.base.heads)}


def feature(inputs: Tensor) -> Tensor:
    """Compute s(x) = ELU(x) + 1 in float32 or better, by exp: it does not round to 0 where ELU rounds to -1."""
    exact = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    return torch.exp(exact.clamp(max=0)) + torch.relu(exact)


class Compressed(NamedTuple):
    """The memory of one layer.

    Attributes:
        matrix: M `[rows, kv_heads, ..., d_k, d_v]`.
        norm: z `[rows, kv_heads, ..., d_k]`.
        known: whether anything is stored, `[rows, ...]`. It is not read off z, so no epsilon is needed.
    """

    matrix: Tensor
    norm: Tensor
    known: Tensor

    def recall(self, features: Tensor) -> Tensor:
        """Return A_mem for s(Q) or s(K) `[rows, kv_heads, ..., tokens, d_k]`; exactly 0 where nothing is known."""
        weights = features @ self.norm[..., None]
        return features @ self.matrix / torch.where(self.known[:, None, ..., None, None], weights, 1)

    def update(self, rule: str, keys: Tensor, values: Tensor) -> Compressed:
        """Return the memory after one more segment of tokens, `keys` `[rows, kv_heads, tokens, d_k]`."""
        features = feature(keys)
        values = values.to(features.dtype)
        if rule == "delta":
            values = values - self.recall(features)
        return Compressed(self.matrix + features.mT @ values, self.norm + features.sum(-2), torch.ones_like(self.known))

    def each(self, change: Callable[[Tensor], Tensor]) -> Compressed:
        """Apply a function to every tensor."""
        return Compressed(*map(change, self))


def empty_memory(rows: int, kv_heads: int, sizes: tuple[int, int], dtype: torch.dtype, device: Any) -> Compressed:
    """Make an empty memory. `sizes` are d_k and d_v; `dtype` is that of the activations."""
    dtype = torch.promote_types(dtype, torch.float32)
    return Compressed(
        torch.zeros(rows, kv_heads, *sizes, dtype=dtype, device=device),
        torch.zeros(rows, kv_heads, sizes[0], dtype=dtype, device=device),
        torch.zeros(rows, dtype=torch.bool, device=device),
    )


def mix(options: InfiniAttentionOptions, shares: Tensor, near: Tensor, far: Tensor, known: Tensor) -> Tensor:
    """Return sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot, in the dtype of `near`.

    Shapes: shares (sigmoid(beta)) `[heads]`; near (A_dot) and far (A_mem) `[rows, heads, ..., tokens, d_v]`; known
    `[rows, ...]`.
    """
    shares = shares.view(1, -1, *[1] * (near.dim() - 2))
    if options.empty == "bypass":
        shares = shares * known[:, None, ..., None, None]
    return (shares * far + (1 - shares) * near.to(far.dtype)).to(near.dtype)


def attend(
    options: InfiniAttentionOptions,
    layer: int,
    parts: InfiniParts,
    near: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    call: SegmentCall,
) -> Tensor:
    """Compute Infini-attention of new columns in which no segment closes, `[rows, time, heads, d_v]`.

    Args:
        near: A_dot, `[rows, time, heads, d_v]`.
        queries, keys: without rotary positions and scale, `[rows, (kv_)heads, time, d_k]`.
        values: `[rows, kv_heads, time, d_v]`.
    """
    reading: InfiniReading = call.reading
    reading.new_keys[layer], reading.new_values[layer] = keys, values
    held = reading.held[layer]
    far = by_head(held.recall(feature(by_kv_head(queries, options.base.kv_heads))), queries.shape[2])
    return mix(options, parts.beta.shares(), near.transpose(1, 2), far, held.known).transpose(1, 2)


def attend_inputs(options: InfiniAttentionOptions, layer: int, parts: InfiniParts, inputs: AttentionInputs) -> Tensor:
    """Call `attend` with what the attention module computes."""
    near, _ = inputs.local
    return attend(options, layer, parts, near, inputs.plain_query, inputs.plain_key, inputs.new_value, inputs.call)


def attend_segments(
    options: InfiniAttentionOptions,
    parts: InfiniParts,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    local_queries: Tensor,
    local_keys: Tensor,
    scaling: float,
    real: Tensor | None = None,
    held: Compressed | None = None,
    segments_at_once: int = 4,
) -> tuple[Tensor, Compressed]:
    """Compute Infini-attention of rows that begin with a segment, several segments at once.

    With the linear rule M and z before each segment are prefix sums, taken over `segments_at_once` segments so that
    memory does not grow with the text. The delta rule goes from segment to segment.

    Args:
        queries, keys: without rotary positions and scale, `[rows, (kv_)heads, time, d_k]`.
        values: `[rows, kv_heads, time, d_v]`.
        local_queries, local_keys, scaling: as local attention takes them.
        real: which columns are tokens, `[rows, time]`; None for all. Segments count from each row's first token.
        held: the memory of earlier segments; None for an empty one.

    Returns:
        A `[rows, heads, time, d_v]`, and the memory of all complete segments.

    Raises:
        ValueError: the local window keeps tokens of closed segments.
    """
    if options.window.kept_tokens or options.window.sink_tokens:
        raise ValueError("Local windows that keep earlier tokens are read one segment at a time.")
    rows, kv_heads, time, _ = keys.shape
    inputs: tuple[Tensor, ...] = (queries, keys, values, local_queries, local_keys)
    order, counts = None, torch.full((rows,), time, device=keys.device)
    if real is not None and not bool(real.all()):
        order = torch.argsort((~real).long(), dim=1, stable=True).to(keys.device)  # tokens first
        inputs = tuple(keep_columns(tensor, order, 2) for tensor in inputs)
        counts = real.sum(1).to(keys.device)
    if held is None:
        held = empty_memory(rows, kv_heads, (keys.shape[-1], values.shape[-1]), keys.dtype, keys.device)
    shares, outputs, start = parts.beta.shares(), [], 0
    while start < time:
        length = min(options.segment_tokens, time - start)
        segments = min(segments_at_once, (time - start) // length)
        end = start + segments * length
        q, k, v, local_q, local_k = (tensor[:, :, start:end].unflatten(2, (segments, length)) for tensor in inputs)
        ends = start + length * torch.arange(1, segments + 1, device=keys.device)
        complete = (ends <= counts[:, None]) & (length == options.segment_tokens)  # [rows, segments]
        before, held = scan(options, held, k, v, complete)
        far = by_head(before.recall(feature(by_kv_head(q, kv_heads))), length)
        near = local_attention(local_q, local_k, v, scaling)
        outputs.append(mix(options, shares, near, far, before.known).flatten(2, 3))
        start = end
    output = torch.cat(outputs, 2)
    return (output if order is None else keep_columns(output, torch.argsort(order, dim=1), 2)), held


def scan(
    options: InfiniAttentionOptions, held: Compressed, keys: Tensor, values: Tensor, complete: Tensor
) -> tuple[Compressed, Compressed]:
    """Return the memory before each segment, and the memory after the last one.

    Args:
        keys, values: `[rows, kv_heads, segments, tokens, d]`.
        complete: which segments are stored, `[rows, segments]`.
    """
    stored = complete[:, None, :, None, None]
    known = torch.cat([held.known[:, None], complete], 1).cummax(1).values
    if options.rule == "linear":
        features = feature(keys)
        new = features.mT @ values.to(features.dtype) * stored, features.sum(-2) * stored[..., 0]
        matrix, norm = (
            torch.cat([old[:, :, None], added.detach() if options.truncated else added], 2).cumsum(2)
            for old, added in zip(held[:2], new, strict=True)
        )
    else:
        steps = [held]
        for segment in range(keys.shape[2]):
            old, keep = steps[-1]._replace(known=known[:, segment]), stored[:, :, segment]
            new_one = old.update("delta", keys[:, :, segment], values[:, :, segment])
            step = old._replace(
                matrix=torch.where(keep, new_one.matrix, old.matrix),
                norm=torch.where(keep[..., 0], new_one.norm, old.norm),
            )
            steps.append(step.each(Tensor.detach) if options.truncated else step)
        matrix, norm = (torch.stack(list(side), 2) for side in list(zip(*steps, strict=True))[:2])
    before = Compressed(matrix[:, :, :-1], norm[:, :, :-1], known[:, :-1])
    return before, Compressed(matrix[:, :, -1], norm[:, :, -1], known[:, -1])


def local_attention(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Compute causal attention within each segment, `[rows, heads, segments, tokens, d_v]`."""
    rows = len(queries)
    queries, keys, values = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (queries, keys, values))
    output = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
    return output.unflatten(0, (rows, -1)).transpose(1, 2)


@dataclass
class InfiniReading:
    """What one forward reads and leaves behind, by layer."""

    held: dict[int, Compressed]
    new_keys: dict[int, Tensor] = field(default_factory=dict)
    new_values: dict[int, Tensor] = field(default_factory=dict)


class InfiniState(MemoryState):
    """M and z of every layer, and the keys and values of open segments. Nothing is written in place.

    `MemoryMethod.new_state` has the arguments. With cache_size 0 the memory stays empty.

    Attributes:
        held: memories by layer.
        keys, values: of open segments by layer, without rotary positions, `[rows, kv_heads, columns, d_head]`.
    """

    def __init__(
        self,
        options: InfiniAttentionOptions,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool,
        cache_size: int | None,
    ) -> None:
        if cache_size:
            raise ValueError("Infini-attention has a memory of one size: leave cache_size out, or 0 for none.")
        self.rule, self.truncated, self.stays_empty = options.rule, options.truncated, cache_size == 0
        sizes = (options.base.head_dim, options.base.head_dim)
        self.held = {
            layer: empty_memory(rows, options.base.kv_heads, sizes, dtype, devices[layer]) for layer in options.layers
        }
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def begin(self) -> InfiniReading:
        return InfiniReading(dict(self.held))

    def end(self, reading: InfiniReading) -> None:
        for held, new in ((self.keys, reading.new_keys), (self.values, reading.new_values)):
            for layer, tensor in new.items():
                held[layer] = torch.cat([held[layer], tensor], 2) if layer in held else tensor

    def check(self, row: int, columns: Tensor) -> None:
        for layer in self.held:
            for held in (self.keys[layer], self.values[layer]):
                if not bool(torch.isfinite(held[row][:, columns.to(held.device)]).all()):
                    raise ValueError(
                        f"The open segment of row {row} holds NaN or Inf in layer {layer}; nothing was stored, and "
                        "what was read before is unchanged. Check the model's weights and dtype (float16 overflows in "
                        f"many models: use bfloat16), then go on from a clone() taken before, or reset([{row}])."
                    )

    def commit(self, row: int, columns: Tensor) -> None:
        if self.stays_empty:
            return
        for layer, held in self.held.items():
            index = torch.tensor([row], device=held.norm.device)
            chosen = columns.to(index.device)
            keys, values = (side[layer][row : row + 1, :, chosen] for side in (self.keys, self.values))
            new = held.each(lambda tensor: tensor[row : row + 1]).update(self.rule, keys, values)
            new = new.each(Tensor.detach) if self.truncated else new
            pairs = zip(held, new, strict=True)
            self.held[layer] = Compressed(*(old.index_copy(0, index, changed) for old, changed in pairs))

    def detach(self) -> None:
        """Cut the autograd graph, so that no gradient of the next step reaches what this one stored."""
        self._change(Tensor.detach)

    def kept(self, row: int, closed: int) -> int:
        return 0 if self.stays_empty else closed

    def keep(self, columns: Tensor) -> None:
        for held in (self.keys, self.values):
            held.update({layer: keep_columns(tensor, columns, 2) for layer, tensor in held.items()})

    def reset(self, rows: Sequence[int]) -> None:
        for layer, held in self.held.items():
            index = torch.tensor(rows, dtype=torch.long, device=held.norm.device)
            self.held[layer] = Compressed(*(tensor.index_fill(0, index, 0) for tensor in held))

    def select(self, rows: Sequence[int]) -> None:
        self._change(lambda tensor: tensor[torch.tensor(rows, dtype=torch.long, device=tensor.device)])

    def clone(self) -> InfiniState:
        twin = copy.copy(self)
        twin.held, twin.keys, twin.values = dict(self.held), dict(self.keys), dict(self.values)
        return twin

    def to(self, device: torch.device | str) -> None:
        self._change(lambda tensor: tensor.to(device))

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.held = {layer: held.each(change) for layer, held in self.held.items()}
        for waiting in (self.keys, self.values):
            waiting.update({layer: change(tensor) for layer, tensor in waiting.items()})

    def state_dict(self) -> dict[str, Tensor]:
        held = joined(**{str(layer): held._asdict() for layer, held in self.held.items()})
        return joined(held=held, keys=self.keys, values=self.values)

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        devices = {layer: held.norm.device for layer, held in self.held.items()}
        for layer, device in devices.items():
            saved = part(tensors, f"held.{layer}")
            self.held[layer] = Compressed(**{name: tensor.to(device) for name, tensor in saved.items()})
        self.keys, self.values = (
            {int(layer): held.to(devices[int(layer)]) for layer, held in part(tensors, name).items()}
            for name in ("keys", "values")
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state_dict().values())


class NaiveDocument(NamedTuple):
    """What `naive` returns.

    Attributes:
        output, dot, mem: A, A_dot and A_mem, `[heads, time, d_v]`.
        matrices, norms: M and z after each segment, including a partial last one.
    """

    output: Tensor
    dot: Tensor
    mem: Tensor
    matrices: list[Tensor]
    norms: list[Tensor]


def naive(
    options: InfiniAttentionOptions,
    beta: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    local_queries: Tensor,
    local_keys: Tensor,
    scaling: float,
) -> NaiveDocument:
    """Specify Infini-attention: one document, token by token, in the plainest way.

    Arguments are those of `attend_segments`, of one row; `beta` is `[heads]`.
    """
    heads, time, _ = queries.shape
    kv_heads, length = len(keys), options.segment_tokens
    matrix, norm = keys.new_zeros(kv_heads, keys.shape[-1], values.shape[-1]), keys.new_zeros(kv_heads, keys.shape[-1])
    rows: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = [([], [], []) for _ in range(heads)]
    matrices, norms = [], []
    for start in range(0, time, length):
        end = min(start + length, time)
        for head, (output, dot, mem) in enumerate(rows):
            kv_head, share = head // (heads // kv_heads), 1 / (1 + torch.exp(-beta[head]))
            for t in range(start, end):
                scores = local_keys[kv_head, start : t + 1] @ local_queries[head, t] * scaling
                near = torch.softmax(scores, 0) @ values[kv_head, start : t + 1]
                far = torch.zeros_like(near)
                if start > 0:
                    asked = F.elu(queries[head, t]) + 1
                    far = asked @ matrix[kv_head] / (asked @ norm[kv_head])
                bypassed = start == 0 and options.empty == "bypass"
                output.append(near if bypassed else share * far + (1 - share) * near)
                dot.append(near)
                mem.append(far)
        old_matrix, old_norm = matrix, norm
        for t in range(start, end):
            stored = F.elu(keys[:, t]) + 1
            value = values[:, t]
            if options.rule == "delta" and start > 0:
                weight = torch.einsum("hk,hk->h", stored, old_norm)
                value = value - torch.einsum("hk,hkv->hv", stored, old_matrix) / weight[:, None]
            matrix = matrix + stored[:, :, None] * value[:, None, :]
            norm = norm + stored
        if options.truncated:
            matrix, norm = matrix.detach(), norm.detach()
        matrices.append(matrix)
        norms.append(norm)
    outputs, dots, mems = (torch.stack([torch.stack(head[i]) for head in rows]) for i in range(3))
    return NaiveDocument(outputs, dots, mems, matrices, norms)


@dataclass
class InfiniAttentionAdapterConfig(InfiniAttentionSettings, MemoryAdapterConfig):
    """Infini-attention beside LoRA (Munkhdalai et al. 2024, arXiv 2404.07143)."""


class InfiniAttentionConfig(InfiniAttentionSettings, CompositeConfig):
    """A base model with Infini-attention in it (Munkhdalai et al. 2024, arXiv 2404.07143)."""

    model_type = "infini_attention"


class InfiniAttentionModel(CompositeModel):
    """A base model with Infini-attention, without a head."""

    config_class = InfiniAttentionConfig


class InfiniAttentionForCausalLM(CompositeForCausalLM):
    """A base language model with Infini-attention."""

    config_class = InfiniAttentionConfig
    model_class = InfiniAttentionModel


register(
    MemoryMethod(
        adapter_config=InfiniAttentionAdapterConfig,
        causal_lm=InfiniAttentionForCausalLM,
        options=InfiniAttentionOptions,
        new_state=InfiniState,
        parts=InfiniParts,
        make_parts=make_parts,
        attend=attend_inputs,
        title="Infini-attention",
        paper="[Munkhdalai et al. 2024](https://arxiv.org/abs/2404.07143)",
        citation="""@article{munkhdalai2024infini,
  title = {Leave No Context Behind: Efficient Infinite Context Transformers with Infini-attention},
  author = {Munkhdalai, Tsendsuren and Faruqui, Manaal and Gopal, Siddharth},
  journal = {arXiv preprint arXiv:2404.07143},
  year = {2024}
}""",
        summary=(
            "Text is read in segments of {segment_tokens:,} tokens; earlier text is in a matrix of constant size "
            "per head, which each head mixes into its attention (Infini-attention, arXiv 2404.07143)."
        ),
        limits=(
            "Self-attention sees the open segment and what the local window keeps; the memory holds everything else.",
            "The memory does not grow: the more it has read, the less of each token is left in it.",
        ),
        choose_when="the state must never grow (at this size it has not beaten LoRA alone)",
        grows="nothing",
        starts_as="the base model, until a segment is stored",
        stores="matrix",
        rates={"beta": "beta"},
        statistics=lambda parts, memories: share_statistics(part.beta for part in parts),
    )
)
