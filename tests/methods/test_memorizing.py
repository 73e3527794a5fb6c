"""Memorizing Transformer against its naive specification; what holds for every memory is in machine/test_rules.py."""

from dataclasses import replace

import pytest
import torch
from conftest import adapter_config
from peft import get_peft_model
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import cacheformers
from cacheformers.methods.memorizing import default_layer, naive
from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap
from cacheformers.modeling.attention import unrotated

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
    attention = attention_of(model, layer)
    memory, pieces, seen = attention.memory, [], {name: [] for name in "qkv"}
    method = memory.method

    def watched(*arguments):
        *_, inputs = arguments
        mixed = method.attend(*arguments)
        pieces.append((inputs.local, mixed))
        return mixed

    memory.method = replace(method, attend=watched)
    handles = [
        getattr(attention, f"{name}_proj").register_forward_hook(lambda *call, name=name: seen[name].append(call[-1]))
        for name in "qkv"
    ]
    model(ids)
    memory.method = method
    for handle in handles:
        handle.remove()
    projected = [torch.cat(seen[name], 1).unflatten(2, (-1, memory.options.base.head_dim)) for name in "qkv"]
    return *projected, torch.cat([local for local, _ in pieces], 1), torch.cat([mixed for _, mixed in pieces], 1)


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


@torch.no_grad()
@pytest.mark.parametrize("base", ["llama_gqa", "opt"])
def test_bfloat16_loses_little(make_memorizing, ids, base):
    model = make_memorizing(base, torch.bfloat16)
    assert cacheformers.new_memory(model, 2).state.rings[1].keys.dtype == torch.float32
    whole = cross_entropy(model(ids).logits.float().flatten(0, 1), ids.flatten())
    for size in (1, 7, 17):
        memory, logits = None, []
        for part in ids.split(size, 1):
            output = model(part, past_key_values=memory)
            memory = output.past_key_values
            logits.append(output.logits)
        assert logits[0].dtype == torch.bfloat16
        loss = cross_entropy(torch.cat(logits, 1).float().flatten(0, 1), ids.flatten())
        assert abs(float(loss - whole)) < 1e-2 * float(whole)


@torch.no_grad()
def test_documents_of_one_segment_are_as_without(make_memorizing, make_base, ids):
    model = make_memorizing("llama_gqa", target_modules=[])
    assert torch.equal(model(ids[:, :16]).logits, make_base("llama_gqa")(ids[:, :16]).logits)


@torch.no_grad()
@pytest.mark.parametrize("search", ["faiss", "auto", "faiss:Flat"])
def test_search_back_ends_agree(make_memorizing, ids, search):
    exact = make_memorizing("llama_gqa", torch.float32)(ids).logits
    found = make_memorizing("llama_gqa", torch.float32, search=search)(ids).logits
    assert float((found - exact).abs().max() / exact.abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_layers": [3]}, "layers 0 to 2"),
        ({"attention_layers": [1, 1]}, "each once"),
        ({"topk": 50}, "must not exceed cache_size 40"),
        ({"gate_start": float("nan")}, "finite"),
        ({"search": "magic"}, "unknown search"),
    ],
)
def test_options_that_make_no_sense(make_base, options, message):
    with pytest.raises(ValueError, match=message):
        get_peft_model(make_base("llama_gqa"), adapter_config("memorizing", **options))


def test_the_papers_layer():
    assert [default_layer(layers) for layers in (1, 2, 12, 24)] == [0, 0, 8, 17]


@pytest.mark.parametrize("scaling", [1.0, 1.3])
def test_unrotating_undoes_the_rotation(scaling):
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=32, num_attention_heads=4))
    states = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    cos, sin = (scaling * table.double() for table in rotary(states, torch.arange(9).expand(2, -1)))
    rotated = apply_rotary_pos_emb(states, states, cos, sin)[0]
    assert float((unrotated(rotated, cos, sin) - states).abs().max()) < 1e-6 * scaling
    partly = torch.cat([rotated, states], -1)
    assert torch.equal(unrotated(partly, cos, sin)[..., 8:], states)
