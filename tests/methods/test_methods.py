"""What is particular to one method, seen through a whole model."""

import math

import pytest
import torch
from gated_cases import mean_gates
from memories import projections
from peft import PeftModel, get_peft_model

import cacheformers
from cacheformers.methods import infini_attention
from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap
from cacheformers.training.optim import Rates, parameter_groups


@torch.no_grad()
@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("base", ["llama_gqa", "mistral", "opt"])
def test_infini_attention_sees_queries_and_keys_as_they_were_projected(make_model, ids, base, rule):
    """Without rotation and scale: where beta is large, the output is the specification's A_mem."""
    model = make_model(base, method="infini_attention", rule=rule)
    for name, parameter in model.named_parameters():
        if "lora_mem_beta" in name:
            parameter.fill_(60.0)
    q, k, v, mixed = projections(model, 1, ids)
    options = attention_modules(find_decoder(unwrap(model)))[1].memory.options
    beta = torch.full((4,), 60.0, dtype=torch.float64)
    for row in range(2):
        expected = infini_attention.naive(options, beta, q[row], k[row], v[row], q[row], k[row], 1.0).mem
        assert float((mixed[row, :, 16:] - expected[:, 16:]).abs().max()) < 1e-5  # rotary angles are float32


def test_rates_of_parts(make_model):
    """Every trained parameter is in one group."""
    rates = Rates(weights=1.0, memory=2.0, gate=3.0, weight_decay=0.1)
    expected = {
        "neurocache": {("gate", 3.0, 0.0), ("memory", 2.0, 0.1), ("memory", 2.0, 0.0), ("weights", 1.0, 0.1)},
        "windowed": {("weights", 1.0, 0.1)},
        "retrieval_heads": {("weights", 1.0, 0.1)},
        "memorizing": {("gate", 3.0, 0.0), ("memory", 2.0, 0.0), ("weights", 1.0, 0.1)},
        "infini_attention": {("beta", 0.01, 0.0), ("weights", 1.0, 0.1)},
        "gated_deltanet": {("memory", 2.0, 0.1), ("memory", 2.0, 0.0), ("weights", 1.0, 0.1)},
        "recurrent_memory": {("memory", 2.0, 0.1), ("weights", 1.0, 0.1)},
        "gated_attention": {("memory", 2.0, 0.1), ("memory", 2.0, 0.0), ("weights", 1.0, 0.1)},
        "cacheformer_on_base": {("memory", 2.0, 0.1), ("weights", 1.0, 0.1)},
    }
    for method, groups in expected.items():
        model = make_model("llama_gqa", method=method)
        found = parameter_groups(model, rates)
        assert {(group["name"], group["lr"], group["weight_decay"]) for group in found} == groups
        held = [id(parameter) for group in found for parameter in group["params"]]
        assert sorted(held) == sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)


@torch.no_grad()
@pytest.mark.parametrize("base", ["llama_gqa", "mistral_full", "opt_long"])
def test_open_gates_are_the_base_over_many_segments(make_base, config_factory, ids, base):
    """In one pass and in pieces, with padding, at any length."""
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    plain = make_base(base)
    expected = plain(ids, attention_mask=mask).logits[mask.bool()]
    model = get_peft_model(plain, config_factory(method="gated_attention", gate_bias=math.inf)).eval()
    whole = model(ids, attention_mask=mask).logits[mask.bool()]
    assert float((whole - expected).abs().max()) < 1e-5  # rotary angles are float32, and begin elsewhere
    assert float((model(ids).logits - make_base(base)(ids).logits).abs().max()) < 1e-9


@torch.no_grad()
def test_keys_are_held_once(make_model, ids):
    """By the state in gated layers, by the local cache in the others."""
    model = make_model("llama_gqa", method="gated_attention", layers=[0, 2])
    memory = cacheformers.read(model, ids, progress=False)
    assert set(memory.local) == {1} and {layer for _, layer in memory.state.held} == {0, 2}
    assert memory.local[1][0].shape[2] == memory.state.held["far", 0].length == 75


def test_what_gates_add_to_the_loss(make_model, ids):
    """Over all segments of the forward, with its graph; nothing once it is over, and nothing without weights."""
    model = make_model("llama_gqa", method="gated_attention", mean_weight=0.5).train()
    memory = cacheformers.new_memory(model, 2)
    model(ids[:, :40], past_key_values=memory)
    means = torch.stack([mean.mean() for mean in mean_gates(memory).values()])
    assert float(memory.state.loss.detach()) == pytest.approx(0.5 * float(means.mean()), rel=1e-9)
    memory.state.loss.backward()
    gates = [p.grad for name, p in model.named_parameters() if "lora_mem_token_gate" in name]
    assert all(bool(gradient.any()) for gradient in gates)
    with torch.no_grad():
        model(ids[:, 40:50], past_key_values=memory)
    assert memory.state.loss is None
    model = make_model("llama_gqa", method="gated_attention").train()
    assert model(ids[:, :40]).past_key_values.state.loss is None


def test_fixed_heads_of_a_saved_adapter(make_base, config_factory, ids, tmp_path):
    config = config_factory(method="gated_attention", far_heads={1: [0], 2: []})
    model = get_peft_model(make_base("llama_gqa", torch.float32), config).eval()
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(make_base("llama_gqa", torch.float32), tmp_path).eval()
    with torch.no_grad():
        memories = [cacheformers.read(door, ids, progress=False) for door in (model, again)]
    assert memories[0].options.far_heads == memories[1].options.far_heads == ((1, (0,)), (2, ()))
    assert {key for key in memories[1].state.held} == {("far", 0), ("far", 1), ("near", 1), ("near", 2)}
    assert memories[1].state.held["near", 2].length < 30


@pytest.mark.parametrize(
    ("options", "closed", "open_left"),
    [
        ({}, 40, 51),
        ({"cache_size": 200}, 75, 75),
        ({"compatibility": "reference"}, 40, 40),
        ({"local_window": "sliding", "window_tokens": 43, "cache_size": 40}, 43, 54),
        ({"method": "memorizing"}, 40, 51),
        ({"method": "windowed"}, 0, 11),
        ({"method": "windowed", "local_window": "sliding", "window_tokens": 5, "sink_tokens": 2}, 5, 16),
        ({"method": "infini_attention"}, 75, 75),
        ({"method": "gated_deltanet"}, 75, 75),
        ({"method": "recurrent_memory"}, 75, 75),
        ({"method": "gated_attention"}, 75, 75),
        ({"method": "cacheformer_on_base"}, 75, 75),
    ],
)
def test_a_memory_tells_how_many_tokens_it_keeps(make_model, ids, options, closed, open_left):
    """Of 75 tokens in segments of 16, with the last one closed and with its 11 tokens left open."""
    model = make_model("llama_gqa", **options)
    for flush, kept in ((True, closed), (False, open_left)):
        memory = cacheformers.read(model, ids, flush=flush, progress=False)
        assert memory.tokens_read == [75, 75] and memory.tokens_kept == [kept, kept]
        assert f"tokens_kept=[{kept}, {kept}]" in repr(memory)
        memory.reset([0])
        assert memory.tokens_kept == [0, kept]
    short = cacheformers.read(model, ids[:1, :9], progress=False)
    assert short.tokens_kept == [0 if options == {"method": "windowed"} else min(9, closed)]
