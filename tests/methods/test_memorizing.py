"""Memorizing Transformer against its naive specification; what holds for every memory is in machine/test_rules.py."""

from dataclasses import replace

import pytest
import torch
from memories import projections

import cacheformers
from cacheformers.methods.memorizing import default_layer, naive
from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap

ABLATIONS = {
    "default": {},
    "k1": {"topk": 1},
    "all": {"topk": 40},
    "small store": {"cache_size": 7},
    "store of a segment": {"cache_size": 16},
    "segment of 5": {"segment_tokens": 5},
    "two layers": {"attention_layers": [0, 2]},
    "sliding": {"local_window": "sliding", "window_tokens": 12, "sink_tokens": 3},
}


@pytest.fixture
def make_memorizing(make_model):
    """A tiny base with this memory in layer 1, its scales moved from their start."""

    def build(name, dtype=torch.float64, **options):
        model = make_model(name, dtype, method="memorizing", **{"attention_layers": [1], **options})
        for parameter_name, parameter in model.named_parameters():
            if "lora_mem_scale" in parameter_name:
                parameter.data += torch.randn_like(parameter)
        return model

    return build


def attention_of(model, layer):
    return attention_modules(find_decoder(unwrap(model)))[layer]


def observe(model, ids, layer):
    """Queries, keys and values as the projections give them, local attention and the mixture, each `[2, 75, ...]`."""
    memory, local = attention_of(model, layer).memory, []
    method = memory.method

    def watched(*arguments):
        local.append(arguments[-1].local)
        return method.attend(*arguments)

    memory.method = replace(method, attend=watched)
    q, k, v, mixed = (states.transpose(1, 2) for states in projections(model, layer, ids))
    memory.method = method
    return q, k, v, torch.cat(local, 1), mixed


def expected(model, layer, q, k, v, local):
    memory = attention_of(model, layer).memory
    rows = range(len(q))
    return torch.stack([naive(memory.options, memory.active_parts, q[r], k[r], v[r], local[r]) for r in rows])


@torch.no_grad()
@pytest.mark.parametrize(
    ("base", "ablation"), [*(("llama_gqa", name) for name in ABLATIONS), ("llama_mha", "default"), ("opt", "default")]
)
def test_equals_the_specification(make_memorizing, ids, base, ablation):
    model = make_memorizing(base, **ABLATIONS[ablation])
    for layer in ABLATIONS[ablation].get("attention_layers", [1]):
        *states, local, mixed = observe(model, ids, layer)
        assert float((mixed - expected(model, layer, *states, local)).abs().max()) < 1e-12
        first = ABLATIONS[ablation].get("segment_tokens", 16)
        assert torch.equal(mixed[:, :first], local[:, :first]), "nothing read: exactly self-attention"
        assert float((mixed[:, first:] - local[:, first:]).abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("base", "ablation"), [("llama_gqa", "default"), ("llama_gqa", "small store"), ("opt", "segment of 5")]
)
def test_gradients_equal_the_specifications(make_memorizing, ids, base, ablation):
    """Of b, s, and of the projections: W_q through both attentions, W_k and W_v through the local one alone."""
    model = make_memorizing(base, **ABLATIONS[ablation]).train().requires_grad_(True)
    attention = attention_of(model, 1)
    projections = [getattr(attention, f"{name}_proj").weight for name in "qkv"]
    weights = [*(part.weight for part in attention.memory.active_parts), *projections]
    direction = torch.randn(2, 75, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    *states, local, mixed = observe(model, ids, 1)
    slow = torch.autograd.grad((expected(model, 1, *states, local) * direction).sum(), weights, retain_graph=True)
    fast = torch.autograd.grad((mixed * direction).sum(), weights)
    for left, right in zip(fast, slow, strict=True):
        assert float(right.norm()) > 1e-3
        assert float((left - right).norm()) < 1e-10 * float(right.norm())


@pytest.mark.parametrize("base", ["llama_gqa", "opt"])
def test_half_precision_stores_single(make_memorizing, base):
    memory = cacheformers.new_memory(make_memorizing(base, torch.bfloat16), 2)
    assert memory.state.rings[1].keys.dtype == torch.float32


def test_the_papers_layer():
    assert [default_layer(layers) for layers in (1, 2, 12, 24)] == [0, 0, 8, 17]
