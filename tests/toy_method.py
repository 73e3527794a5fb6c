"""A memory method as another package would add one: every token sees the mean of what was read before its segment.

branch_t = tanh(g) mean(x_1 ... x_s)    x is the input of the layer's self-attention, s the tokens of closed segments
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from cacheformers import MemoryMethod, register
from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.modeling import method
from cacheformers.modeling.composite import CompositeConfig, CompositeForCausalLM, CompositeModel
from cacheformers.modeling.memory import RingState


class ToyParts(NamedTuple):
    gate: method.PerHead


@dataclass(repr=False)
class ToySettings(method.StoreSettings, method.LocalWindowSettings):
    layer: int = method.setting(1, "Layer with the memory.")
    cache_size: int = method.setting(64, "States that are averaged; the oldest go first.", free=True)


@dataclass(kw_only=True)
class ToyOptions(method.StoreOptions, ToySettings, method.LocalWindowOptions):
    layers = attention_layers = property(lambda self: (self.layer,))
    entry_numbers = property(lambda self: self.base.hidden_size)


def new_state(options, rows, devices, dtype, keep_values, cache_size):
    size = options.cache_size if cache_size is None else cache_size
    ring = options.new_ring(rows, size, devices[options.layer], dtype, options.base.hidden_size)
    return RingState({options.layer: ring})


def branch(options, layer, parts, hidden, call, training):
    store = call.reading.stores[layer]
    call.reading.new["keys"][layer] = hidden.detach().to(store.keys.dtype)
    stored = [torch.cat(store.entries(row).spans) for row in range(store.rows)]
    means = torch.stack([states.sum(0) / max(len(states), 1) for states in stored])
    return torch.tanh(parts.gate.weight.mean()).to(hidden.dtype) * means[:, None].to(hidden)


@dataclass
class ToyAdapterConfig(ToySettings, MemoryAdapterConfig): ...


class ToyConfig(ToySettings, CompositeConfig):
    model_type = "toy"


class ToyModel(CompositeModel):
    config_class = ToyConfig


class ToyForCausalLM(CompositeForCausalLM):
    config_class, model_class = ToyConfig, ToyModel


register(
    MemoryMethod(
        adapter_config=ToyAdapterConfig,
        causal_lm=ToyForCausalLM,
        options=ToyOptions,
        new_state=new_state,
        parts=ToyParts,
        make_parts=lambda options, *_: {"gate": method.PerHead(options.base.heads)},
        branch=branch,
        stores="entries",
        rates={"gate": "gate"},
        title="Toy",
        summary="Every token sees the mean of up to {cache_size:,} states.",
        test_settings={"cache_size": 40},
    )
)
