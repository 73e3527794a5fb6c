"""What is logged of a memory: gates and retrieval, against plain counting."""

from statistics import median

import pytest
import torch

import cacheformers
from cacheformers.training.statistics import memory_statistics, retrieval_statistics


def test_gates_are_counted_by_size(make_model):
    model = make_model("llama_gqa")
    gates = [p for name, p in model.named_parameters() if "lora_mem_gate" in name]
    sizes = [abs(float(torch.tanh(value))) for gate in gates for value in gate.detach()]
    found = memory_statistics(model, [])
    assert found["gate_mean"] == pytest.approx(sum(sizes) / len(sizes), rel=1e-6)
    assert found["gate_max"] == pytest.approx(max(sizes), rel=1e-6)
    assert found["gate_histogram"] == [sum(i <= 10 * size < i + 1 for size in sizes) for i in range(10)]
    assert all(name.startswith("gate_") for name in found)
    with model.disable_adapter():
        base = model.unload()
    assert memory_statistics(base, []) == {}


@pytest.mark.parametrize(("method", "part"), [("infini_attention", "beta"), ("memorizing", "gate")])
def test_shares_are_counted_by_size(make_model, method, part):
    model = make_model("llama_gqa", method=method)
    betas = [p for name, p in model.named_parameters() if f"lora_mem_{part}" in name]
    shares = [float(torch.sigmoid(value)) for beta in betas for value in beta.detach()]
    found = memory_statistics(model, [])
    assert shares and found["share_mean"] == pytest.approx(sum(shares) / len(shares), rel=1e-6)
    assert [found["share_min"], found["share_max"]] == pytest.approx([min(shares), max(shares)], rel=1e-6)
    assert found["share_histogram"] == [sum(i <= 10 * share < i + 1 for share in shares) for i in range(10)]
    assert all(name.startswith("share_") for name in found)


@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_token_gates_of_the_last_step(make_model, ids, threshold):
    """Over tokens with something far, of all lanes; not of steps before."""
    model = make_model("llama_gqa", method="gated_attention", layers=[0, 2], threshold=threshold).train()
    memories = [cacheformers.new_memory(model, 1) for _ in range(2)]
    assert memory_statistics(model, memories) == {}
    for row, memory in enumerate(memories):
        model(ids[row : row + 1, :4], past_key_values=memory)
    assert memory_statistics(model, memories) == {}
    for row, memory in enumerate(memories):
        model(ids[row : row + 1, 4:20], past_key_values=memory)
    found = memory_statistics(model, memories)
    layers = [torch.cat([memory.state.last.gates[layer][0, :, 2:] for memory in memories]) for layer in (0, 2)]
    assert layers[0].shape == (2, 14)
    assert found["token_gate_layers"] == pytest.approx([float(layer.mean()) for layer in layers], rel=1e-6)
    assert found["token_gate_mean"] == pytest.approx(sum(found["token_gate_layers"]) / 2, rel=1e-6)
    gates = [float(gate) for layer in layers for gate in layer.flatten()]
    assert found["token_gate_closed"] == pytest.approx(sum(gate < (threshold or 0.5) for gate in gates) / 56)
    assert memory_statistics(model, []) == {}


def test_ages_and_empty_places(make_model, ids):
    """Three segments of 16 in a store of 40 entries; then row 1 begins anew and row 0 goes on."""
    model = make_model("llama_gqa").train()
    memory = cacheformers.new_memory(model, 2)
    model(ids[:, :16], past_key_values=memory)
    assert retrieval_statistics([memory]) == {"retrieved_none": 1.0}
    model(ids[:, 16:48], past_key_values=memory)
    memory.reset([1])
    model(ids[:, 48:64], past_key_values=memory)
    found = retrieval_statistics([memory, memory])

    hits = memory.state.hits[1]  # [rows, 16, k]: row 0 has 40 of its 48 entries, of tokens 8 to 47
    ages = [48 + token - (8 + int(hit)) for token in range(16) for hit in hits[0, token]]
    assert bool((hits[1] == -1).all()) and found["retrieved_none"] == 0.5
    ages = sorted(2 * ages)
    assert found["retrieved_age"] == ages[len(ages) // 2] and abs(found["retrieved_age"] - median(ages)) <= 1
    assert found["retrieved_age_90"] == ages[int(0.9 * (len(ages) - 1))]
    assert min(ages) >= 1 and max(ages) <= 48 + 15 - 8


def test_ages_in_a_memorizing_transformer(make_model, ids):
    """Every query head searches by itself; row 1 begins anew, row 0 goes on and ends with a padded column."""
    model = make_model("llama_gqa", method="memorizing").train()
    memory = cacheformers.new_memory(model, 2)
    assert retrieval_statistics([memory]) == {}
    model(ids[:, :16], past_key_values=memory)
    assert retrieval_statistics([memory]) == {"retrieved_none": 1.0}
    model(ids[:, 16:48], past_key_values=memory)
    memory.reset([1])
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, -1] = 0
    model(ids[:, 48:64], past_key_values=memory, attention_mask=mask)
    found = retrieval_statistics([memory])

    last = memory.state.last[1].unflatten(2, (4, 4))  # [rows, 16, heads, k]: row 0 has the tokens 8 to 47
    assert bool((last[1] == -1).all()) and bool((last[0, -1] == -1).all())
    ages = sorted(48 + token - (8 + int(hit)) for token in range(15) for hit in last[0, token].flatten())
    assert len(ages) == 15 * 16 and found["retrieved_none"] == 16 / 31
    assert found["retrieved_age"] == ages[len(ages) // 2] and min(ages) >= 1
    assert found["retrieved_age_90"] == ages[int(0.9 * (len(ages) - 1))]


def test_methods_that_retrieve_nothing_have_no_ages(make_model, ids):
    for method in ("infini_attention", "windowed", "gated_attention"):
        memory = make_model("mistral_full", method=method)(ids).past_key_values
        assert not memory.state.retrieves and retrieval_statistics([memory]) == {}
