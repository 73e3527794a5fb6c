"""Recurrent Memory Transformer: memory tokens go from segment to segment (Bulatov et al. 2022, arXiv 2207.06881).

    [., X_s, M_{s+1}] = transformer([M_s, x_s, M_s])       M_s: m input embeddings; M_{s+1}: last hidden states of the m
                                                            memory tokens behind segment s (section 3, decoder)

With `associative`, the Associative Recurrent Memory Transformer (Rodkin et al. 2024, arXiv 2407.04841, section 3): no
memory token comes before a segment, those behind it are always the learned M_0, and each layer has a memory A, z:

    x' = x + A^T phi(W_q x) / (z . phi(W_q x) + e)                             every token, at the layer's input x
    A += sum_i beta_i phi(k_i) (v_i - A^T phi(k_i) / (z . phi(k_i) + e))^T     k = W_k h, v = W_v h, beta = sigmoid(w h)
    z += sum_i gamma_i phi(k_i)                 gamma_i = 1 - z . phi(k_i) / (|phi(k_i)|^2 + e), clipped to [0, 1]

h are the layer's outputs at the m memory tokens when a segment closes; phi is DPFP-3 (`dpfp`), e is `EPSILON`. As in
the authors' code, gamma has no gradient. A and z are float32 or better.

Memory tokens take positions like any token: M_s before the segment, and again behind it. They run through all layers
with the base's own attention, those behind a segment once, when it closes: nothing of a segment depends on them, so no
token sees its future, and the segment's logits do not wait for its end. Segments follow each other; there is no form
that trains them in parallel. `local_window="sliding"` and `sink_tokens`, which the papers do not have, show M_s
between what the window keeps and the segment.

Unlike the paper, nothing comes before the first segment (`first="bypass"`), so that an untrained adapter is the base
on one segment. From the second segment on, M_1 is what an untrained base makes of it. With `associative`, W_v starts at
0, and so A: an untrained adapter is the base within its window at any length.

M_1 and later have gradients within one forward: into the segment before and those before it (`backprop_segments`); the
memory tokens behind the last segment of a forward run at the beginning of the next one, with gradients of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.adapters.registration import register
from cacheformers.modeling.attention import project
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.composite import CompositeConfig, CompositeForCausalLM, CompositeModel
from cacheformers.modeling.memory import LocalWindow, MemoryState, Reading, SegmentCall
from cacheformers.modeling.method import (
    LocalWindowOptions,
    LocalWindowSettings,
    MemoryMethod,
    check_at_least,
    check_choices,
    setting,
)

EPSILON = 1e-5
SPREAD = 0.02  # of M_0 at first, as of token embeddings in transformers


@dataclass(repr=False)  # transformers prints a configuration
class RecurrentMemorySettings(LocalWindowSettings):
    """Fields of `RecurrentMemoryAdapterConfig` and `RecurrentMemoryConfig`."""

    memory_tokens: int = setting(16, "Memory tokens that are passed from segment to segment (m).")
    first: str = setting(
        "bypass",
        "Before the first segment: 'bypass', nothing, so that it is read as the base reads it; 'learned', the learned "
        "memory tokens (paper), which change a pretrained model.",
    )
    associative: bool = setting(
        False, "ARMT: memory tokens are written into a matrix of each layer, which every token reads."
    )
    key_size: int = setting(64, "With associative: numbers of a key before phi, which makes 6 times as many.")


@dataclass(kw_only=True)
class RecurrentMemoryOptions(RecurrentMemorySettings, LocalWindowOptions):
    """`RecurrentMemorySettings` resolved against a base model; ValueError if an option does not fit it."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "memory_tokens", "key_size")
        check_choices(self, first=("bypass", "learned"))
        if self.associative and self.first != "bypass":
            raise ValueError("With associative=True no memory token comes before a segment: leave first out.")
        super().__post_init__()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with trained parts: the lowest has M_0."""
        return tuple(range(self.base.layers if self.associative else 1))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers whose output the method changes: all of them."""
        return tuple(range(self.base.layers))

    @property
    def window(self) -> LocalWindow:
        """The tokens that self-attention sees besides the open segment: memory tokens too."""
        return replace(super().window, memory_tokens=self.memory_tokens * (1 if self.associative else 2))


class MemoryTokens(nn.Module):
    """M_0, `[m, h]`."""

    def __init__(self, tokens: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tokens, size) * SPREAD)


class RecurrentParts(NamedTuple):
    """The trained parts of one layer.

    Attributes:
        initial: M_0, on the lowest layer.
        query, key: W_q and W_k, `[key_size, h]`; all from here on with `associative` only.
        value: W_v, `[h, h]`, 0 at first.
        strength: w, `[1, h]` with a bias; beta is 0.5 at first.
    """

    initial: MemoryTokens | None = None
    query: nn.Linear | None = None
    key: nn.Linear | None = None
    value: nn.Linear | None = None
    strength: nn.Linear | None = None


def make_parts(options: RecurrentMemoryOptions, layer: int, *_: Any) -> dict[str, nn.Module]:
    """Make the parts of one layer."""
    size = options.base.hidden_size
    parts: dict[str, nn.Module] = {}
    if layer == options.layers[0]:
        parts["initial"] = MemoryTokens(options.memory_tokens, size)
    if options.associative:
        parts["query"] = nn.Linear(size, options.key_size, bias=False)
        parts["key"] = nn.Linear(size, options.key_size, bias=False)
        parts["value"] = nn.Linear(size, size, bias=False)
        parts["strength"] = nn.Linear(size, 1)
        for parameter in (*parts["value"].parameters(), *parts["strength"].parameters()):
            nn.init.zeros_(parameter)
    return parts


def memory_tokens(options: RecurrentMemoryOptions, parts: RecurrentParts, memory: MemoryCache) -> Tensor:
    """Return M of every row, M_0 where nothing is stored, `[rows, m, h]`."""
    assert parts.initial is not None
    initial, state = parts.initial.weight, memory.state
    if options.associative or not state.memory_tokens:
        return initial.expand(memory.batch_size, -1, -1)
    held = state.tensors["memory"][0]
    stored = torch.tensor(memory.timeline.closed, device=held.device)[:, None, None] > 0
    return torch.where(stored, held, initial.to(held.dtype))


def keep_in_graph(
    options: Any, layer: int, parts: RecurrentParts, hidden: Tensor, call: Any, training: bool
) -> Tensor | None:
    """Return 0 in training: every process has the same graph, also where nothing is stored."""
    if not training:
        return None
    parameters = [parameter for part in parts if part is not None for parameter in part.parameters()]
    return torch.stack([parameter.sum() * 0 for parameter in parameters]).sum().to(hidden.dtype)


def dpfp(inputs: Tensor) -> Tensor:
    """Compute DPFP-3 features of `[..., size]`, `[..., 6 size]` (Schlag et al. 2021, arXiv 2102.11174, equation 37)."""
    sides = torch.cat([torch.relu(inputs), torch.relu(-inputs)], -1)
    return torch.cat([sides * sides.roll(shift, -1) for shift in (1, 2, 3)], -1)


def recall(features: Tensor, matrix: Tensor, norm: Tensor) -> Tensor:
    """Return what A and z hold for features `[rows, tokens, d]`, `[rows, tokens, h]`; 0 where nothing is stored."""
    return features @ matrix / (features @ norm[..., None] + EPSILON)


def enter(
    options: RecurrentMemoryOptions, layer: int, parts: RecurrentParts, hidden: Tensor, call: SegmentCall
) -> Tensor:
    """Add what the layer's A holds for each token to the layer's input `[rows, time, h]`, if it has one."""
    if parts.query is None:
        return hidden
    matrix, norm = call.reading.stores[layer]
    with torch.autocast(matrix.device.type, enabled=False):  # precision is that of A
        features = dpfp(project(parts.query, hidden.to(matrix.dtype)))
        return (hidden.to(matrix.dtype) + recall(features, matrix, norm)).to(hidden.dtype)


def leave(
    options: RecurrentMemoryOptions, layer: int, parts: RecurrentParts, hidden: Tensor, call: SegmentCall
) -> None:
    """Leave behind phi(k), v and beta of the memory tokens behind a segment, for `RecurrentState.write`."""
    key, value, strength = parts[2:]
    if key is None or value is None or strength is None or call.memory_tokens != "write":
        return
    dtype = call.reading.stores[layer][0].dtype
    with torch.autocast(hidden.device.type, enabled=False):
        hidden = hidden.to(dtype)
        features, beta = dpfp(project(key, hidden)), torch.sigmoid(project(strength, hidden))
        call.reading.new["written"][layer] = (features, project(value, hidden), beta)


class RecurrentState(MemoryState):
    """M of every row, or A and z of every row and layer. Nothing is written in place.

    `MemoryMethod.new_state` has the arguments. With cache_size 0 the memory stays empty.

    Attributes:
        tensors: `memory` `[rows, m, h]` on layer 0; with `associative` instead `matrix` (A) `[rows, 6 key_size, h]` and
            `norm` (z) `[rows, 6 key_size]` of each layer.
        written: of rows whose segments close now, by row and layer.
    """

    def __init__(
        self,
        options: RecurrentMemoryOptions,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool,
        cache_size: int | None,
    ) -> None:
        self.options, self.devices = options, devices
        self.memory_tokens = 0 if cache_size == 0 else options.memory_tokens
        self.written: dict[int, dict[int, tuple[Tensor, ...]]] = {}
        size = options.base.hidden_size
        if not options.associative:
            super().__init__("memory")
            self.tensors["memory"][0] = torch.zeros(rows, options.memory_tokens, size, dtype=dtype, device=devices[0])
            return
        super().__init__("matrix", "norm")
        dtype = torch.promote_types(dtype, torch.float32)
        for layer in options.layers:
            norm = torch.zeros(rows, 6 * options.key_size, dtype=dtype, device=devices[layer])
            self.tensors["norm"][layer] = norm
            self.tensors["matrix"][layer] = norm.new_zeros(*norm.shape, size)

    def reads_tokens(self, closed: int) -> bool:
        if self.options.associative:
            return False
        return self.options.first == "learned" or (closed > 0 and self.memory_tokens > 0)

    def begin(self) -> Reading:
        if not self.options.associative:
            return Reading({})
        matrices, norms = self.tensors["matrix"], self.tensors["norm"]
        return Reading({layer: (matrix, norms[layer]) for layer, matrix in matrices.items()})

    def end(self, reading: Any) -> None:
        """Do nothing: only memory tokens leave something behind (`write`)."""

    def write(self, rows: Sequence[int], hidden: Tensor, reading: Any) -> None:
        left = reading.new["written"] if self.options.associative else {0: (hidden,)}
        self.written = {
            row: {layer: tuple(tensor[row : row + 1] for tensor in found) for layer, found in left.items()}
            for row in rows
        }

    def check(self, row: int, columns: Tensor) -> None:
        for layer, found in self.written.get(row, {}).items():
            if not all(bool(torch.isfinite(tensor).all()) for tensor in found):
                raise ValueError(
                    f"The memory tokens behind the open segment of row {row} hold NaN or Inf in layer {layer}; nothing "
                    "was stored, and the memory is unchanged. Check the model's weights and dtype (float16 overflows "
                    f"in many models: use bfloat16), then go on from a clone() taken before, or reset([{row}])."
                )

    def commit(self, row: int, columns: Tensor) -> None:
        if not self.memory_tokens:
            return
        if row not in self.written:
            raise RuntimeError("Memory tokens run before a segment closes: use modeling.segments.close_segments().")
        for layer, found in self.written.pop(row).items():
            if not self.options.associative:
                self._put("memory", layer, row, found[0])
                continue
            features, values, strength = found
            matrix, norm = (self.tensors[name][layer][row : row + 1] for name in ("matrix", "norm"))
            with torch.autocast(matrix.device.type, enabled=False):
                changed = strength * (values - recall(features, matrix, norm))
                known = features @ norm[..., None] / (features.square().sum(-1, keepdim=True) + EPSILON)
                new = (1 - known).clamp(0, 1).detach()  # gamma
                self._put("matrix", layer, row, matrix + features.mT @ changed)
                self._put("norm", layer, row, norm + (new * features).sum(1))

    def _put(self, name: str, layer: int, row: int, new: Tensor) -> None:
        held = self.tensors[name][layer]
        index = torch.tensor([row], device=held.device)
        self.tensors[name][layer] = held.index_copy(0, index, new.to(held.device, held.dtype))

    def detach(self) -> None:
        """Cut the autograd graph, so that no gradient of the next step reaches what this one stored."""
        self.change(Tensor.detach)

    def kept(self, row: int, closed: int) -> int:
        return closed if self.memory_tokens else 0

    def reset(self, rows: Sequence[int]) -> None:
        self.change(lambda held: held.index_fill(0, torch.tensor(rows, dtype=torch.long, device=held.device), 0))

    def device(self, layer: int) -> torch.device:
        return self.devices[layer]


class NaiveDocument(NamedTuple):
    """The result of `naive` for one document.

    Attributes:
        output: last hidden states, `[time, h]`.
        memories: M after each segment, including a partial last one, `[m, h]`.
        associations: A and z of each layer after each segment, with `associative`.
    """

    output: Tensor
    memories: list[Tensor]
    associations: list[list[tuple[Tensor, Tensor]]]


def naive(
    options: RecurrentMemoryOptions,
    parts: Sequence[Mapping[str, Tensor]],
    layers: Sequence[Callable[[Tensor], Tensor]],
    finish: Callable[[Tensor], Tensor],
    embeddings: Tensor,
) -> NaiveDocument:
    """Specify the method: one document, segment by segment with its memory tokens as one sequence, in the plainest way.

    Args:
        parts: of each layer, weights by name: `initial` of the lowest, and with `associative` `query`, `key`, `value`,
            `strength` and `bias` (of strength).
        layers: the base's decoder layers, each a causal function of `[tokens, h]` whose positions begin at 0.
        finish: the base's last norm.
        embeddings: of the document, `[time, h]`.
    """
    length, count, size = options.segment_tokens, options.memory_tokens, embeddings.shape[1]
    memory, none = parts[0]["initial"], embeddings[:0]
    width = 6 * options.key_size
    held = [(embeddings.new_zeros(width, size), embeddings.new_zeros(width)) for _ in layers]
    output, memories, associations = [], [], []
    for start in range(0, len(embeddings), length):
        segment = embeddings[start : start + length]
        before = none if options.associative or (start == 0 and options.first == "bypass") else memory
        states = torch.cat([before, segment, memory])
        written = []
        for number, layer in enumerate(layers):
            if options.associative:
                matrix, norm = held[number]
                read = []
                for state in states:
                    asked = phi(parts[number]["query"] @ state)
                    read.append(state + asked @ matrix / (asked @ norm + EPSILON))
                states = torch.stack(read)
            states = layer(states)
            written.append(states[-count:])
        hidden = finish(states)
        output.append(hidden[len(before) : len(before) + len(segment)])
        if options.associative:
            for number, of_layer in enumerate(parts):
                matrix, norm = old_matrix, old_norm = held[number]
                for state in written[number]:
                    key, value = phi(of_layer["key"] @ state), of_layer["value"] @ state
                    beta = 1 / (1 + torch.exp(-(of_layer["strength"] @ state + of_layer["bias"])))
                    weight = key @ old_norm
                    gamma = (1 - weight / (key @ key + EPSILON)).detach().clamp(0, 1)
                    matrix = matrix + beta * torch.outer(key, value - key @ old_matrix / (weight + EPSILON))
                    norm = norm + gamma * key
                held[number] = matrix, norm
        else:
            memory = hidden[-count:]
        memories.append(memory)
        associations.append(list(held))
    return NaiveDocument(torch.cat(output), memories, associations)


def phi(vector: Tensor) -> Tensor:
    """Specify DPFP-3 of one vector, number by number."""
    sides = [*(number.clamp(min=0) for number in vector), *((-number).clamp(min=0) for number in vector)]
    return torch.stack([number * sides[place - shift] for shift in (1, 2, 3) for place, number in enumerate(sides)])


@dataclass
class RecurrentMemoryAdapterConfig(RecurrentMemorySettings, MemoryAdapterConfig):
    """Memory tokens from segment to segment, beside LoRA (Bulatov et al. 2022, arXiv 2207.06881)."""


class RecurrentMemoryConfig(RecurrentMemorySettings, CompositeConfig):
    """A base model with memory tokens from segment to segment (Bulatov et al. 2022, arXiv 2207.06881)."""

    model_type = "recurrent_memory"


class RecurrentMemoryModel(CompositeModel):
    """A base model with memory tokens from segment to segment, without a head."""

    config_class = RecurrentMemoryConfig


class RecurrentMemoryForCausalLM(CompositeForCausalLM):
    """A base language model with memory tokens from segment to segment."""

    config_class = RecurrentMemoryConfig
    model_class = RecurrentMemoryModel


register(
    MemoryMethod(
        adapter_config=RecurrentMemoryAdapterConfig,
        causal_lm=RecurrentMemoryForCausalLM,
        options=RecurrentMemoryOptions,
        new_state=RecurrentState,
        parts=RecurrentParts,
        make_parts=make_parts,
        branch=keep_in_graph,
        memory_tokens=memory_tokens,
        enter=enter,
        leave=leave,
        title="Recurrent Memory Transformer",
        paper="[Bulatov et al. 2022](https://arxiv.org/abs/2207.06881), [Rodkin et al. 2024](https://arxiv.org/abs/2407.04841)",
        citation="""@inproceedings{bulatov2022recurrent,
  title = {Recurrent Memory Transformer},
  author = {Bulatov, Aydar and Kuratov, Yuri and Burtsev, Mikhail},
  booktitle = {NeurIPS},
  year = {2022}
}
@article{rodkin2024associative,
  title = {Associative Recurrent Memory Transformer},
  author = {Rodkin, Ivan and Kuratov, Yuri and Bulatov, Aydar and Burtsev, Mikhail},
  journal = {arXiv preprint arXiv:2407.04841},
  year = {2024}
}""",
        summary=(
            "Text is read in segments of {segment_tokens:,} tokens; {memory_tokens} memory tokens behind each segment "
            "carry what is known to the next, as tokens before it or through a matrix of each layer (associative: "
            "{associative}; Recurrent Memory Transformer, arXiv 2207.06881, 2407.04841)."
        ),
        limits=(
            "Self-attention sees the open segment, memory tokens and what the local window keeps; nothing else is left "
            "of earlier text.",
            "The memory does not grow: newer text replaces older text in it.",
            "What to store is learned only where a training step holds two segments or more.",
            "Memory tokens take positions, and run through all layers whenever a segment closes.",
            "Weights cannot be sharded over processes in training (FSDP).",
        ),
        choose_when="you compare with recurrent memory tokens (RMT), or with ARMT's associative memory in each layer",
        grows="nothing",
        starts_as="the base model, until a segment is stored (`associative`: the base model within its window)",
        stores="matrix",
        test_settings={"memory_tokens": 4},
    )
)
