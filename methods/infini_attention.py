"""Infini-attention: a memory of constant size beside local attention (Munkhdalai et al. 2024, arXiv 2404.07143).

    A_mem = s(Q) M / (s(Q) z)                                    what closed segments hold; s(x) = ELU(x) + 1
    A     = sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot      one beta a query head; 1 is all memory
    M    += s(K)^T V,  z += sum of s(K)                          when a segment closes; the rule "delta" stores V minus
                                                                 what M returned for K before

The memory takes Q and K without rotary position and scale. A_dot is the base's own attention within its local window.
M and z are float32 or better, because sums in half precision stall after a few hundred tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.adapters.registration import register
from cacheformers.modeling.attention import AttentionInputs, by_head, by_kv_head
from cacheformers.modeling.composite import CompositeConfig, CompositeForCausalLM, CompositeModel
from cacheformers.modeling.memory import BaseShape, ColumnState, Reading, joined, part
from cacheformers.modeling.method import (
    LocalWindowOptions,
    LocalWindowSettings,
    MemoryMethod,
    Share,
    check_choices,
    chosen_layers,
    setting,
    share_statistics,
)
from cacheformers.modeling.search.store import stacked


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
        check_choices(self, rule=("linear", "delta"), empty=("bypass", "literal"))
        self.check_local_window()


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
        matrix: M `[rows, kv_heads, d_k, d_v]`.
        norm: z `[rows, kv_heads, d_k]`.
        known: whether anything is stored, `[rows]`. It is not read off z, so no epsilon is needed.
    """

    matrix: Tensor
    norm: Tensor
    known: Tensor

    def recall(self, features: Tensor) -> Tensor:
        """Return A_mem for s(Q) or s(K) `[rows, kv_heads, tokens, d_k]`; exactly 0 where nothing is known."""
        weights = features @ self.norm[..., None]
        return features @ self.matrix / torch.where(self.known[:, None, None, None], weights, 1)

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


def empty_memory(rows: int, base: BaseShape, dtype: torch.dtype, device: torch.device) -> Compressed:
    """Make an empty memory; `dtype` is that of the activations."""
    dtype = torch.promote_types(dtype, torch.float32)
    norm = torch.zeros(rows, base.kv_heads, base.head_dim, dtype=dtype, device=device)
    matrix = norm.new_zeros(rows, base.kv_heads, base.head_dim, base.head_dim)
    return Compressed(matrix, norm, torch.zeros(rows, dtype=torch.bool, device=device))


def attend(options: InfiniAttentionOptions, layer: int, parts: InfiniParts, inputs: AttentionInputs) -> Tensor:
    """Compute Infini-attention of new columns in which no segment closes, `[rows, time, heads, d_v]`."""
    near, queries, reading = inputs.local, inputs.plain_query, inputs.call.reading
    reading.new["keys"][layer], reading.new["values"][layer] = inputs.plain_key, inputs.new_value
    held: Compressed = reading.stores[layer]
    far = by_head(held.recall(feature(by_kv_head(queries, options.base.kv_heads))), queries.shape[2])
    shares = parts.beta.shares()[:, None, None]
    if options.empty == "bypass":
        shares = shares * held.known[:, None, None, None]
    return (shares * far + (1 - shares) * near.transpose(1, 2).to(far.dtype)).to(near.dtype).transpose(1, 2)


class InfiniState(ColumnState):
    """M and z of every layer, and the keys and values of open segments. Nothing is written in place.

    `MemoryMethod.new_state` has the arguments. With cache_size 0 the memory stays empty.

    Attributes:
        held: memories by layer.
        tensors: `keys` and `values` of open segments, without rotary positions, `[rows, kv_heads, columns, d_head]`.
    """

    columns_dim = 2

    def __init__(
        self,
        options: InfiniAttentionOptions,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool,
        cache_size: int | None,
    ) -> None:
        super().__init__()
        self.rule, self.truncated = options.rule, options.truncated
        self.held = {layer: empty_memory(rows, options.base, dtype, devices[layer]) for layer in options.layers}

    def begin(self) -> Reading:
        return Reading(dict(self.held))

    def commit(self, row: int, columns: Tensor) -> None:
        if self.off:
            return
        for layer, held in self.held.items():
            index = torch.tensor([row], device=held.norm.device)
            chosen = columns.to(index.device)
            keys, values = (self.tensors[side][layer][row : row + 1, :, chosen] for side in ("keys", "values"))
            new = held.each(lambda tensor: tensor[row : row + 1]).update(self.rule, keys, values)
            new = new.each(Tensor.detach) if self.truncated else new
            pairs = zip(held, new, strict=True)
            self.held[layer] = Compressed(*(old.index_copy(0, index, changed) for old, changed in pairs))

    def detach(self) -> None:
        """Cut the autograd graph, so that no gradient of the next step reaches what this one stored."""
        if torch.is_grad_enabled():  # otherwise there is none
            self.change(Tensor.detach)

    def kept(self, row: int, closed: int) -> int:
        return 0 if self.off else closed

    def reset(self, rows: Sequence[int]) -> None:
        for layer, held in self.held.items():
            index = torch.tensor(rows, dtype=torch.long, device=held.norm.device)
            self.held[layer] = held.each(methodcaller("index_fill", 0, index, 0))

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        super().change(function)
        self.held = {layer: held.each(function) for layer, held in self.held.items()}

    def join(self, others: Sequence[InfiniState]) -> None:
        super().join(others)
        for layer, held in self.held.items():
            together = zip(held, *(other.held[layer] for other in others), strict=True)
            self.held[layer] = Compressed(*map(stacked, together))

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(tensor.nbytes for held in self.held.values() for tensor in held)

    def state_dict(self) -> dict[str, Tensor]:
        held = joined(**{str(layer): held._asdict() for layer, held in self.held.items()})
        return joined(held=held, **self.tensors)

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        super().load_state_dict(tensors)
        for layer in self.held:
            saved = part(tensors, f"held.{layer}")
            self.held[layer] = Compressed(**saved).each(methodcaller("to", self.device(layer)))

    def device(self, layer: int) -> torch.device:
        return self.held[layer].norm.device


class NaiveDocument(NamedTuple):
    """The result of `naive` for one document.

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

    Args:
        beta: `[heads]`.
        queries, keys: without rotary positions and scale, `[(kv_)heads, time, d_k]`.
        values: `[kv_heads, time, d_v]`.
        local_queries, local_keys, scaling: as local attention takes them.
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
        attend=attend,
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
