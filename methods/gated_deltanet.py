"""Gated DeltaNet: a matrix of constant size beside local attention (Yang et al. 2024, arXiv 2412.06464).

    S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T      token by token, when a segment closes
    alpha_t = sigmoid(a x_t + a_0),  beta_t = sigmoid(b x_t + b_0)       what stays, what is written; one per kv head
    A_t = A_dot + g_t S q_t,  g_t = tanh(c x_t + c_0)                    one gate per query head, 0 at first

To fold what attention no longer sees is from Artificial Hippocampus Networks (Fang et al. 2025, arXiv 2510.07318). k
and q have length 1 and no rotary position, so that S k = v for a key just written with beta 1. A_dot is the base's own
attention within its local window. S holds closed segments alone: 4 * d_v * d_k bytes for each layer and kv head in
float32 (float64 for a float64 model), however much was read, beside the columns of the open segment.

Gates start at 0, so an untrained adapter is exactly the base in its window, at any length. Their gradient there is
x_t (S q_t . dL/dA_t), which is not 0; alpha and beta have one once gates have left 0. Both act on later segments only,
so they learn where a step holds two segments or more.

Unlike Artificial Hippocampus Networks, tokens are folded when their segment closes and not one by one, a sliding window
still sees tokens that S holds too, and what is read goes through the base's W_o. Of Gated DeltaNet's layer, only the
rule is here: no short convolution, no output norm, no further scale in alpha.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.adapters.registration import register
from cacheformers.modeling.attention import AttentionInputs, by_head, by_kv_head, project
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.composite import CompositeConfig, CompositeForCausalLM, CompositeModel
from cacheformers.modeling.memory import ColumnState, Reading, joined, part
from cacheformers.modeling.method import LocalWindowOptions, LocalWindowSettings, MemoryMethod, chosen_layers, setting
from cacheformers.modeling.search.store import stacked

CHUNK = 64  # tokens that `fold` solves at once
FIRST_ALPHA = 0.9999  # what decays alone is halved in 7,000 tokens


@dataclass(repr=False)  # transformers prints a configuration
class GatedDeltaNetSettings(LocalWindowSettings):
    """Fields of `GatedDeltaNetAdapterConfig` and `GatedDeltaNetConfig`. Layers count from 0."""

    layers: list[int] | None = setting(None, "Layers with a memory. Default: all (paper).")


@dataclass(kw_only=True)
class GatedDeltaNetOptions(GatedDeltaNetSettings, LocalWindowOptions):
    """`GatedDeltaNetSettings` resolved against a base model; ValueError if an option does not fit it."""

    layers: tuple[int, ...]  # type: ignore[assignment]  # resolved

    def __post_init__(self) -> None:
        self.layers = chosen_layers(self.layers, self.base)
        self.check_local_window()


class DeltaParts(NamedTuple):
    """The trained parts of one layer: `alpha` and `beta` `[kv_heads, h]`, `gate` `[heads, h]`, each with a bias."""

    alpha: nn.Linear
    beta: nn.Linear
    gate: nn.Linear


def make_parts(options: GatedDeltaNetOptions, *_: Any) -> dict[str, nn.Module]:
    """Make the parts of one layer: at first alpha is `FIRST_ALPHA`, beta 0.5 and the gate 0 for every token."""
    base = options.base
    parts = {
        name: nn.Linear(base.hidden_size, heads)
        for name, heads in (("alpha", base.kv_heads), ("beta", base.kv_heads), ("gate", base.heads))
    }
    for linear in parts.values():
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    nn.init.constant_(parts["alpha"].bias, math.log(FIRST_ALPHA / (1 - FIRST_ALPHA)))
    return dict(parts)


def fold(
    state: Tensor, keys: Tensor, values: Tensor, log_alpha: Tensor, beta: Tensor, chunk_tokens: int = CHUNK
) -> Tensor:
    """Return S after more tokens, chunk by chunk.

    Within a chunk, with G_t = alpha_1 ... alpha_t, S_t = G_t S + sum over i <= t of G_t/G_i u_i k_i^T. The rule says
    u_t + beta_t sum over i < t of G_t/G_i (k_t . k_i) u_i = beta_t (v_t - G_t S k_t), a unit lower triangular system.
    It is solved for all chunks at once, for v and for S apart. Quotients of G are exp of differences of logarithms.

    Args:
        state: S `[rows, kv_heads, d_v, d_k]`.
        keys, values: keys of length 1, `[rows, kv_heads, tokens, d]`.
        log_alpha, beta: `[rows, kv_heads, tokens]`; 0 and 0 leave the state as it is.
    """
    rest, width = -keys.shape[2] % chunk_tokens, values.shape[-1]
    keys, values = (F.pad(side, (0, 0, 0, rest)).unflatten(2, (-1, chunk_tokens)) for side in (keys, values))
    log_alpha, beta = (F.pad(side, (0, rest)).unflatten(2, (-1, chunk_tokens)) for side in (log_alpha, beta))
    left = log_alpha.cumsum(-1)  # log G, [rows, kv_heads, chunks, tokens]
    # The mask comes before exp, which would overflow above the diagonal.
    between = (left[..., :, None] - left[..., None, :]).tril(-1).exp()
    system = beta[..., None] * between * (keys @ keys.mT)  # only what is below the diagonal is read
    sides = beta[..., None] * torch.cat([values, left.exp()[..., None] * keys], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    of_values, of_state = solved[..., :width], solved[..., width:]
    until_end = (left[..., -1:] - left).exp()[..., None]
    for chunk in range(left.shape[2]):
        added = of_values[:, :, chunk] - of_state[:, :, chunk] @ state.mT  # u, [rows, kv_heads, tokens, d_v]
        stays = left[:, :, chunk, -1].exp()[..., None, None]
        state = stays * state + (added * until_end[:, :, chunk]).mT @ keys[:, :, chunk]
    return state


def attend(options: GatedDeltaNetOptions, layer: int, parts: DeltaParts, inputs: AttentionInputs) -> Tensor:
    """Add what S returns for new columns in which no segment closes to local attention, `[rows, time, heads, d_v]`."""
    near, reading = inputs.local, inputs.call.reading
    state: Tensor = reading.stores[layer]
    with torch.autocast(state.device.type, enabled=False):  # precision is that of the state
        hidden = inputs.hidden.to(state.dtype)
        queries, keys = (F.normalize(side.to(state.dtype), dim=-1) for side in (inputs.plain_query, inputs.plain_key))
        gates = torch.tanh(project(parts.gate, hidden).transpose(1, 2))
        columns = {
            "keys": keys,
            "values": inputs.new_value,
            "log_alpha": F.logsigmoid(project(parts.alpha, hidden).transpose(1, 2)),
            "beta": torch.sigmoid(project(parts.beta, hidden).transpose(1, 2)),
            "gates": gates.detach(),
        }
        for name, column in columns.items():
            reading.new[name][layer] = column
        far = by_head(by_kv_head(queries, options.base.kv_heads) @ state.mT, queries.shape[2])
        for parameter in (*parts.alpha.parameters(), *parts.beta.parameters()):
            far = far + parameter.sum() * 0  # every process has the same graph, also where nothing is stored
        return (near.to(far.dtype) + (gates[..., None] * far).transpose(1, 2)).to(near.dtype)


class DeltaState(ColumnState):
    """S of every layer, and the columns of open segments. Nothing is written in place.

    `MemoryMethod.new_state` has the arguments. With cache_size 0 the memory stays empty.

    Attributes:
        held: S by layer, `[rows, kv_heads, d_v, d_k]`.
        tensors: of open segments, `keys` (of length 1, without rotary positions) and `values`
            `[rows, kv_heads, columns, d_head]`, `log_alpha` and `beta` `[rows, kv_heads, columns]`.
        gates: of the last forward by layer, `[rows, heads, columns]`.
    """

    columns_dim = 2

    def __init__(
        self,
        options: GatedDeltaNetOptions,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool,
        cache_size: int | None,
    ) -> None:
        super().__init__("log_alpha", "beta")
        shape = (rows, options.base.kv_heads, options.base.head_dim, options.base.head_dim)
        dtype = torch.promote_types(dtype, torch.float32)
        self.held = {layer: torch.zeros(shape, dtype=dtype, device=devices[layer]) for layer in options.layers}
        self.gates: dict[int, Tensor] = {}

    @property
    def top_layer(self) -> int | None:
        return max(self.held)

    def begin(self) -> Reading:
        return Reading(dict(self.held))

    def end(self, reading: Reading) -> None:
        super().end(reading)
        self.gates = dict(reading.new["gates"])

    def commit(self, row: int, columns: Tensor) -> None:
        if self.off:
            return
        for layer, old in self.held.items():
            chosen = columns.to(old.device)
            columns_of = (self.tensors[name][layer] for name in ("keys", "values", "log_alpha", "beta"))
            keys, values, log_alpha, beta = (side[row : row + 1, :, chosen].to(old.dtype) for side in columns_of)
            with torch.autocast(old.device.type, enabled=False):
                new = fold(old[row : row + 1], keys, values, log_alpha, beta)
            self.held[layer] = old.index_copy(0, torch.tensor([row], device=old.device), new)

    def detach(self) -> None:
        """Cut the autograd graph, so that no gradient of the next step reaches what this one stored."""
        if torch.is_grad_enabled():  # otherwise there is none
            self.change(Tensor.detach)

    def kept(self, row: int, closed: int) -> int:
        return 0 if self.off else closed

    def reset(self, rows: Sequence[int]) -> None:
        for layer, held in self.held.items():
            self.held[layer] = held.index_fill(0, torch.tensor(rows, dtype=torch.long, device=held.device), 0)

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        super().change(function)
        self.held = {layer: function(held) for layer, held in self.held.items()}

    def join(self, others: Sequence[DeltaState]) -> None:
        super().join(others)
        self.held = {
            layer: stacked([held, *(other.held[layer] for other in others)]) for layer, held in self.held.items()
        }

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(held.nbytes for held in self.held.values())

    def state_dict(self) -> dict[str, Tensor]:
        return joined(held=self.held, **self.tensors)

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        super().load_state_dict(tensors)
        saved = part(tensors, "held")
        self.held = {layer: saved[str(layer)].to(self.device(layer)) for layer in self.held}

    def device(self, layer: int) -> torch.device:
        return self.held[layer].device


def statistics(parts: Sequence[Any], memories: Sequence[MemoryCache]) -> dict[str, Any]:
    """Summarize the tokens of each lane's last forward, in the lanes of this process.

    Returns:
        `gate_mean` and `gate_max` of |g|; `alpha_mean` and `beta_mean`. Empty before the first forward.
    """
    found: dict[str, list[Tensor]] = {"gate": [], "alpha": [], "beta": []}
    for memory in memories:
        state = memory.state
        for layer, gates in state.gates.items() if isinstance(state, DeltaState) else ():
            time = gates.shape[2]
            real = memory.timeline.open[:, -time:].to(gates.device)
            of_last = (gates.abs(), state.tensors["log_alpha"][layer].exp(), state.tensors["beta"][layer])
            for name, numbers in zip(found, of_last, strict=True):
                found[name].append(numbers[:, :, -time:].transpose(1, 2)[real].float().flatten().cpu())
    sizes = {name: torch.cat(numbers) for name, numbers in found.items() if numbers}
    if not sizes or not len(sizes["gate"]):
        return {}
    means = {f"{name}_mean": float(numbers.mean()) for name, numbers in sizes.items()}
    return {**means, "gate_max": float(sizes["gate"].max())}


class NaiveDocument(NamedTuple):
    """The result of `naive` for one document.

    Attributes:
        output: A, `[heads, time, d_v]`.
        states: S after each token of closed segments, `[kv_heads, d_v, d_k]`.
    """

    output: Tensor
    states: list[Tensor]


def naive(
    options: GatedDeltaNetOptions,
    gates: Tensor,
    alpha: Tensor,
    beta: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    local: Tensor,
) -> NaiveDocument:
    """Specify the memory: one document, token by token, in the plainest way.

    Args:
        gates: `[heads, time]`.
        alpha, beta: `[kv_heads, time]`.
        queries, keys: without rotary positions and of any length, `[(kv_)heads, time, d_k]`.
        values: `[kv_heads, time, d_v]`.
        local: A_dot, `[heads, time, d_v]`.
    """
    heads, time, size = queries.shape
    kv_heads, length = len(keys), options.segment_tokens
    held = [keys.new_zeros(values.shape[-1], size) for _ in range(kv_heads)]
    output, states = [], []
    for t in range(time):
        if t % length == 0 and t > 0:
            for i in range(t - length, t):
                for head in range(kv_heads):
                    key, value = keys[head, i] / keys[head, i].norm(), values[head, i]
                    forgotten = torch.eye(size, dtype=key.dtype) - beta[head, i] * torch.outer(key, key)
                    held[head] = alpha[head, i] * held[head] @ forgotten + beta[head, i] * torch.outer(value, key)
                states.append(torch.stack(held))
        for head in range(heads):
            query = queries[head, t] / queries[head, t].norm()
            output.append(local[head, t] + gates[head, t] * (held[head // (heads // kv_heads)] @ query))
    return NaiveDocument(torch.stack(output).view(time, heads, -1).transpose(0, 1), states)


@dataclass
class GatedDeltaNetAdapterConfig(GatedDeltaNetSettings, MemoryAdapterConfig):
    """Gated DeltaNet beside LoRA (Yang et al. 2024, arXiv 2412.06464, as in arXiv 2510.07318)."""


class GatedDeltaNetConfig(GatedDeltaNetSettings, CompositeConfig):
    """A base model with Gated DeltaNet in it (Yang et al. 2024, arXiv 2412.06464, as in arXiv 2510.07318)."""

    model_type = "gated_deltanet"


class GatedDeltaNetModel(CompositeModel):
    """A base model with Gated DeltaNet beside its attention, without a head."""

    config_class = GatedDeltaNetConfig


class GatedDeltaNetForCausalLM(CompositeForCausalLM):
    """A base language model with Gated DeltaNet beside its attention."""

    config_class = GatedDeltaNetConfig
    model_class = GatedDeltaNetModel


register(
    MemoryMethod(
        adapter_config=GatedDeltaNetAdapterConfig,
        causal_lm=GatedDeltaNetForCausalLM,
        options=GatedDeltaNetOptions,
        new_state=DeltaState,
        parts=DeltaParts,
        make_parts=make_parts,
        attend=attend,
        title="Gated DeltaNet",
        paper="[Yang et al. 2024](https://arxiv.org/abs/2412.06464), [Fang et al. 2025](https://arxiv.org/abs/2510.07318)",
        citation="""@article{yang2024gated,
  title = {Gated Delta Networks: Improving Mamba2 with Delta Rule},
  author = {Yang, Songlin and Kautz, Jan and Hatamizadeh, Ali},
  journal = {arXiv preprint arXiv:2412.06464},
  year = {2024}
}
@article{fang2025artificial,
  title = {Artificial Hippocampus Networks for Efficient Long-Context Modeling},
  author = {Fang, Yunhao and Yu, Weihao and Zhong, Shu and Ye, Qinghao and Xiong, Xuehan and Wei, Lai},
  journal = {arXiv preprint arXiv:2510.07318},
  year = {2025}
}""",
        summary=(
            "Text is read in segments of {segment_tokens:,} tokens; the gated delta rule folds earlier text into "
            "a matrix of constant size per head, and gates add what it returns to attention (Gated DeltaNet, arXiv "
            "2412.06464, as in arXiv 2510.07318)."
        ),
        limits=(
            "Self-attention sees the open segment and what the local window keeps; the memory holds everything else.",
            "The memory does not grow: newer text replaces older text in it.",
            "What to store is learned only where a training step holds two segments or more.",
        ),
        choose_when="you compare with a recurrent state: of constant size, with writing and forgetting learned",
        grows="nothing",
        starts_as="the base model within its window (zero gates)",
        stores="matrix",
        statistics=statistics,
    )
)
