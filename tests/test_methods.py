"""What is particular to one method, seen through a whole model."""

from __future__ import annotations

import pytest
import torch

import cacheformers
from cacheformers.modeling.attach import attention_modules, find_decoder, unwrap
from cacheformers.modeling.memories import infini_attention
from cacheformers.training.optim import Rates, parameter_groups


def projections(model, layer, ids):
    """What W_q, W_k and W_v of a layer give, and what W_o is given, `[rows, heads, time, d_head]`."""
    attention = attention_modules(find_decoder(unwrap(model)))[layer]
    seen = {name: [] for name in "qkvo"}
    output = attention.out_proj if hasattr(attention, "out_proj") else attention.o_proj
    handles = [output.register_forward_pre_hook(lambda module, args: seen["o"].append(args[0]))]
    for name in "qkv":
        module = getattr(attention, f"{name}_proj")
        handles.append(module.register_forward_hook(lambda *call, name=name: seen[name].append(call[-1])))
    model(ids)
    for handle in handles:
        handle.remove()
    size = attention.head_dim
    return [torch.cat(seen[name], 1).unflatten(2, (-1, size)).transpose(1, 2) for name in "qkvo"]


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


@pytest.mark.parametrize("truncated", [False, True])
def test_gradients_reach_what_infini_attention_stored_in_the_same_step(make_model, ids, truncated):
    model = make_model("llama_gqa", method="infini_attention", truncated=truncated).train()
    embeddings = model.get_input_embeddings().weight.requires_grad_()
    text = ids.clamp(min=4)
    text[:, 5] = 3  # which stands nowhere else

    def gradient(*parts):
        embeddings.grad, memory = None, cacheformers.new_memory(model, 2)
        for part in parts:
            logits = model(part, past_key_values=memory).logits
        logits[:, -8:].square().sum().backward()
        return float(embeddings.grad[3].norm())

    assert (gradient(text[:, :48]) == 0) == truncated
    assert gradient(text[:, :32], text[:, 32:48]) == 0, "not from one step to the next"


def test_rates_of_parts(make_model):
    rates = Rates(lora=1.0, memory=2.0, gate=3.0, weight_decay=0.1)
    expected = {
        "neurocache": {("gate", 3.0, 0.0), ("memory", 2.0, 0.1), ("memory", 2.0, 0.0), ("lora", 1.0, 0.1)},
        "windowed": {("lora", 1.0, 0.1)},
        "memorizing": {("gate", 3.0, 0.0), ("memory", 2.0, 0.0), ("lora", 1.0, 0.1)},
        "infini_attention": {("beta", 0.01, 0.0), ("lora", 1.0, 0.1)},
    }
    for method, groups in expected.items():
        found = parameter_groups(make_model("llama_gqa", method=method), rates)
        assert {(group["name"], group["lr"], group["weight_decay"]) for group in found} == groups
