"""Infini-attention: a memory of constant size beside local attention (Munkhdalai et al. 2024, arXiv 2404.07143).

    A_mem = s(Q) M / (s(Q) z)                                    what closed segments hold; s(x) = ELU(x) + 1
    A     = sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot      one beta a query head; 1 is all memory
    M    += s(K)^T V,  z += sum of s(K)                          when a segment closes; "delta" stores V minus what
                                                                 M returned for K before
Q and K of the memory carry no rotary position and no scale; A_dot is the base's own attention within its local window.
M and z are float32 or better: sums in half precision stall after a few hundred tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.adapters.registration import register
from cacheformers.modeling.attention import AttentionInputs, by_head, by_kv_head
from cacheformers.modeling.composite import CompositeConfig, CompositeForCausalLM, CompositeModel
from cacheformers.modeling.memory import (
    MemoryState,
    SegmentCall,
    joined,
    keep_columns,
    part,
)
from cacheformers.modeling.method import MemoryMethod, Share, first_numbers, share_statistics
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
        "linear", "'linear' stores values; 'delta' what they differ by from what the memory returned for their keys."
    )
    empty: str = setting(
        "bypass",
        "While nothing has been stored, 'bypass' leaves attention as it is; 'literal' multiplies it by "
        "1 - sigmoid(beta): the formula read literally, which changes a pretrained model.",
        free=True,
    )
    truncated: bool = setting(
        False, "No gradient through what was stored, for study: the model cannot learn what to store.", free=True
    )


@dataclass(kw_only=True)
class InfiniAttentionOptions(InfiniAttentionSettings, LocalWindowOptions):
    """`InfiniAttentionSettings` resolved against a base model.

    Raises:
        ValueError: an option that does not fit the base model.
    """

    layers: tuple[int, ...]  # type: ignore[assignment]  # resolved

    def __post_init__(self) -> None:
        self.layers = chosen_layers(self.layers, self.base)
        check_layers(self.layers, self.base)
        check_choices(self, rule=("linear", "delta"), empty=("bypass", "literal"))
        self.check_local_window()

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers whose output the method changes."""
        return self.layers


class Beta(Share):
    """The memory's share of each head, a half at first. It wants a high rate and no decay."""


class InfiniParts(NamedTuple):
    """The trained parts that one layer holds. Shapes: `beta` `[heads]`."""

    beta: Beta

    @property
    def fingerprint(self) -> tuple[float, ...]:
        return first_numbers(self.beta.weight)


def make_parts(options: InfiniAttentionOptions, *_: Any) -> dict[str, nn.Module]:
    """The parts that a layer trains; at 0 each head takes half of its output from the memory."""
    return {"beta": Beta(options.base.heads)}


def feature(inputs: Tensor) -> Tensor:
    """s(x) = ELU(x) + 1 in float32 or better; by exp, which does not round to 0 where ELU rounds to -1."""
    exact = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    return torch.exp(exact.clamp(max=0)) + torch.relu(exact)


class Compressed(NamedTuple):
    """What one layer has stored.

    Attributes:
        matrix: M `[rows, kv_heads, ..., d_k, d_v]`.
        norm: z `[rows, kv_heads, ..., d_k]`.
        known: whether anything has been stored, `[rows, ...]`. Not read off z, so that no epsilon is needed.
    """

    matrix: Tensor
    norm: Tensor
    known: Tensor

    def recall(self, features: Tensor) -> Tensor:
        """A_mem for s(Q) or s(K) `[rows, kv_heads, ..., tokens, d_k]`; exactly 0 where nothing is known."""
        weights = features @ self.norm[..., None]
        return features @ self.matrix / torch.where(self.known[:, None, ..., None, None], weights, 1)

    def update(self, rule: str, keys: Tensor, values: Tensor) -> Compressed:
        """The memory after one more segment, `keys` `[rows, kv_heads, tokens, d_k]`, all of them tokens."""
        features = feature(keys)
        values = values.to(features.dtype)
        if rule == "delta":
            values = values - self.recall(features)
        return Compressed(self.matrix + features.mT @ values, self.norm + features.sum(-2), torch.ones_like(self.known))

    def detach(self) -> Compressed:
        return Compressed(self.matrix.detach(), self.norm.detach(), self.known)


def empty_memory(rows: int, kv_heads: int, sizes: tuple[int, int], dtype: torch.dtype, device: Any) -> Compressed:
    """Nothing stored. `sizes` are d_k and d_v; `dtype` that of activations."""
    dtype = torch.promote_types(dtype, torch.float32)
    return Compressed(
        torch.zeros(rows, kv_heads, *sizes, dtype=dtype, device=device),
        torch.zeros(rows, kv_heads, sizes[0], dtype=dtype, device=device),
        torch.zeros(rows, dtype=torch.bool, device=device),
    )


def mix(options: InfiniAttentionOptions, shares: Tensor, near: Tensor, far: Tensor, known: Tensor) -> Tensor:
    """sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot, in the dtype of `near`.

    Args:
        shares: of the memory, `[heads]`.
        near, far: `[rows, heads, ..., tokens, d_v]`.
        known: `[rows, ...]`.
    """
    known = known[:, None, ..., None, None]
    shares = shares.view(1, -1, *[1] * (near.dim() - 2))
    if options.empty == "bypass":
        shares = shares * known
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
    """Infini-attention over new columns in which no segment closes.

    Args:
        near: A_dot, what local attention returned, `[rows, time, heads, d_v]`.
        queries, keys: without rotary positions and scale, of the new columns, `[rows, (kv_)heads, time, d_k]`.
        values: of the new columns, `[rows, kv_heads, time, d_v]`.

    Returns:
        A, `[rows, time, heads, d_v]`.
    """
    reading: InfiniReading = call.reading
    reading.new_keys[layer], reading.new_values[layer] = keys, values
    held = reading.held[layer]
    far = by_head(held.recall(feature(by_kv_head(queries, options.base.kv_heads))), queries.shape[2])
    return mix(options, parts.beta.shares(), near.transpose(1, 2), far, held.known).transpose(1, 2)


def attend_inputs(options: InfiniAttentionOptions, layer: int, parts: InfiniParts, inputs: AttentionInputs) -> Tensor:
    """`attend`, given what the attention module computes."""
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
    """Infini-attention over a whole text whose rows are at the beginning of a segment, many segments at once.

    With the linear rule M and z before each segment are prefix sums, taken over `segments_at_once` segments so that
    memory does not grow with their number. The delta rule goes from segment to segment.

    Args:
        queries, keys: without rotary positions and scale, `[rows, (kv_)heads, time, d_k]`.
        values: `[rows, kv_heads, time, d_v]`.
        local_queries, local_keys: as local attention takes them.
        scaling: of local attention's scores.
        real: which columns are tokens, `[rows, time]`; None for all. Boundaries count from each row's first token.
        held: what earlier segments left; None for nothing.

    Returns:
        A `[rows, heads, time, d_v]`, and the memory with all complete segments in it.

    Raises:
        ValueError: the local window keeps tokens of closed segments.
    """
    if options.window.kept_tokens or options.window.sink_tokens:
        raise ValueError("Local windows that keep earlier tokens are read one segment at a time.")
    rows, kv_heads, time, _ = keys.shape
    inputs: tuple[Tensor, ...] = (queries, keys, values, local_queries, local_keys)
    order = None
    if real is not None and not bool(real.all()):
        order = torch.argsort((~real).long(), dim=1, stable=True).to(keys.device)  # tokens first
        inputs = tuple(keep_columns(tensor, order, 2) for tensor in inputs)
        counts = real.sum(1).to(keys.device)
    else:
        counts = torch.full((rows,), time, device=keys.device)
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
    """The memory before each segment, and after the last.

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
        every = Compressed(matrix, norm, known)
    else:
        steps = [held]
        for segment in range(keys.shape[2]):
            old, keep = steps[-1], stored[:, :, segment]
            new_one = old.update("delta", keys[:, :, segment], values[:, :, segment])
            step = Compressed(
                torch.where(keep, new_one.matrix, old.matrix),
                torch.where(keep[..., 0], new_one.norm, old.norm),
                known[:, segment + 1],
            )
            steps.append(step.detach() if options.truncated else step)
        every = Compressed(
            torch.stack([step.matrix for step in steps], 2), torch.stack([step.norm for step in steps], 2), known
        )
    before = Compressed(every.matrix[:, :, :-1], every.norm[:, :, :-1], known[:, :-1])
    return before, Compressed(every.matrix[:, :, -1], every.norm[:, :, -1], known[:, -1])


def local_attention(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Causal attention within each of many segments, `[rows, heads, segments, tokens, d_v]`."""
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
    """M and z of every layer, and keys and values of open segments. Nothing is written in place."""

    def __init__(
        self,
        options: InfiniAttentionOptions,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        stays_empty: bool = False,
    ) -> None:
        self.rule, self.truncated, self.stays_empty = options.rule, options.truncated, stays_empty
        sizes = (options.base.head_dim, options.base.head_dim)
        self.held = {
            layer: empty_memory(rows, options.base.kv_heads, sizes, dtype, devices[layer]) for layer in options.layers
        }
        self.keys: dict[int, Tensor] = {}  # layer -> [rows, kv_heads, columns, d_head], without rotary positions
        self.values: dict[int, Tensor] = {}  # layer -> [rows, kv_heads, columns, d_head]

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
                        "what was read before is as it was. Check the model's weights and dtype (float16 overflows in "
                        f"many models: use bfloat16), then go on from a clone() taken before, or reset([{row}])."
                    )

    def commit(self, row: int, columns: Tensor) -> None:
        if self.stays_empty:
            return
        for layer, held in self.held.items():
            chosen = columns.to(held.norm.device)
            mine = Compressed(*(tensor[row : row + 1] for tensor in held))
            new = mine.update(
                self.rule, self.keys[layer][row : row + 1, :, chosen], self.values[layer][row : row + 1, :, chosen]
            )
            index = torch.tensor([row], device=held.norm.device)
            self.held[layer] = Compressed(
                *(
                    old.index_copy(0, index, change)
                    for old, change in zip(held, new.detach() if self.truncated else new, strict=True)
                )
            )

    def detach(self) -> None:
        """Cut the autograd graph: the next step's gradient does not reach what this one stored."""
        self.held = {layer: held.detach() for layer, held in self.held.items()}
        for waiting in (self.keys, self.values):
            waiting.update({layer: tensor.detach() for layer, tensor in waiting.items()})

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
        def chosen(tensor: Tensor) -> Tensor:
            return tensor[torch.tensor(rows, dtype=torch.long, device=tensor.device)]

        self._change(chosen)

    def clone(self) -> InfiniState:
        twin = copy.copy(self)
        twin.held, twin.keys, twin.values = dict(self.held), dict(self.keys), dict(self.values)
        return twin

    def to(self, device: torch.device | str) -> None:
        self._change(lambda tensor: tensor.to(device))

    def _change(self, change: Any) -> None:
        self.held = {layer: Compressed(*map(change, held)) for layer, held in self.held.items()}
        for waiting in (self.keys, self.values):
            waiting.update({layer: change(tensor) for layer, tensor in waiting.items()})

    def state_dict(self) -> dict[str, Tensor]:
        held = {
            f"{layer}.{name}": tensor for layer, held in self.held.items() for name, tensor in held._asdict().items()
        }
        return joined(held=held, keys=self.keys, values=self.values)

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        for layer, old in self.held.items():
            saved = part(tensors, f"held.{layer}")
            self.held[layer] = Compressed(**{name: saved[name].to(old.norm.device) for name in Compressed._fields})
        self.keys, self.values = (
            {int(layer): held.to(self.held[int(layer)].norm.device) for layer, held in part(tensors, name).items()}
            for name in ("keys", "values")
        )

    @property
    def nbytes(self) -> int:
        waiting = sum(tensor.nbytes for held in (self.keys, self.values) for tensor in held.values())
        return waiting + sum(tensor.nbytes for held in self.held.values() for tensor in held)


class NaiveDocument(NamedTuple):
    """What `naive` returns.

    Attributes:
        output, dot, mem: A, A_dot and A_mem, `[heads, time, d_v]`.
        matrices, norms: M and z after each segment, a partial last one included.
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
    """The specification: Infini-attention over one document, token by token, in the plainest way.

    Args:
        beta: `[heads]`.
        queries, keys: without rotary positions and scale, `[(kv_)heads, time, d_k]`.
        values: `[kv_heads, time, d_v]`.
        local_queries, local_keys: as local attention takes them.
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


def new_state(
    options: InfiniAttentionOptions,
    rows: int,
    devices: dict[int, torch.device],
    dtype: torch.dtype,
    keep_values: bool = False,
    cache_size: int | None = None,
) -> InfiniState:
    """An empty memory.

    Args:
        devices: of each augmented layer.
        dtype: of the model's activations.
        keep_values: nothing is encoded anew in training, so this changes nothing.
        cache_size: 0 for a memory that stays empty.

    Raises:
        ValueError: another cache_size was asked for.
    """
    if cache_size:
        raise ValueError("Infini-attention has a memory of one size: leave cache_size out, or 0 for none.")
    return InfiniState(options, rows, devices, dtype, stays_empty=cache_size == 0)


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
        new_state=new_state,
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
            "Text is read in segments of {segment_tokens:,} tokens; what was read before is in a matrix of constant "
            "size a head, which each head mixes into its attention (Infini-attention, arXiv 2404.07143)."
        ),
        limits=(
            "Self-attention sees the open segment, and what the local window keeps; all else comes through the memory.",
            "The memory does not grow: the more it has read, the less of each token is left in it.",
        ),
        grows="nothing",
        starts_as="the base model, until a segment is stored",
        stores="matrix",
        rates={"beta": "beta"},
        statistics=lambda parts, memories: share_statistics(part.beta for part in parts),
    )
)
