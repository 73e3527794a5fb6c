"""What is logged of a memory: gates and retrieval, against plain counting."""

from statistics import median

import pytest
import torch

import cacheformers
from cacheformers.modeling.memory import Gold, all_numbers
from cacheformers.training.statistics import memory_statistics, retrieval_statistics


@pytest.mark.parametrize(
    ("method", "part", "prefix"),
    [
        ("neurocache", "gate", "gate"),
        ("infini_attention", "beta", "share"),
        ("memorizing", "gate", "share"),
    ],
)
def test_gates_and_shares_are_counted_by_size(make_model, method, part, prefix):
    model = make_model("llama_gqa", method=method)
    values = torch.cat([p.detach().flatten() for name, p in model.named_parameters() if f"lora_mem_{part}" in name])
    sizes = (torch.tanh(values).abs() if prefix == "gate" else torch.sigmoid(values)).tolist()
    found = memory_statistics(model, [])
    expected = {"mean": sum(sizes) / len(sizes), "max": max(sizes), **({} if prefix == "gate" else {"min": min(sizes)})}
    for name, value in expected.items():
        assert found[f"{prefix}_{name}"] == pytest.approx(value, rel=1e-6)
    assert found[f"{prefix}_histogram"] == [sum(i <= 10 * size < i + 1 for size in sizes) for i in range(10)]
    assert all(name.startswith(f"{prefix}_") for name in found)
    assert memory_statistics(model.unload(), []) == {}


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


@pytest.mark.parametrize("method", ["neurocache", "memorizing"])
def test_ages_and_empty_places(make_model, ids, method):
    """Three segments of 16 in a store of 40 entries; then row 1 begins anew, row 0 goes on and ends with a padded
    column. In a Memorizing Transformer every query head searches by itself."""
    model = make_model("llama_gqa", method=method).train()
    memory = cacheformers.new_memory(model, 2)
    assert retrieval_statistics([memory]) == {}
    model(ids[:, :16], past_key_values=memory)
    assert retrieval_statistics([memory]) == {"retrieved_none": 1.0}
    model(ids[:, 16:48], past_key_values=memory)
    memory.reset([1])
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, -1] = 0
    model(ids[:, 48:64], past_key_values=memory, attention_mask=mask)
    found = retrieval_statistics([memory, memory])

    # [rows, 16, k or heads * k]: row 0 has 40 of its 48 entries, of tokens 8 to 47
    hits = memory.state.hits[1] if method == "neurocache" else memory.state.last[1]
    assert bool((hits[1] == -1).all()) and (method == "neurocache" or bool((hits[0, -1] == -1).all()))
    ages = sorted(2 * [48 + token - (8 + int(hit)) for token in range(15) for hit in hits[0, token]])
    assert len(ages) == 2 * 15 * hits.shape[2] and found["retrieved_none"] == 16 / 31
    assert found["retrieved_age"] == ages[len(ages) // 2] and abs(found["retrieved_age"] - median(ages)) <= 1
    assert found["retrieved_age_90"] == ages[int(0.9 * (len(ages) - 1))]
    assert min(ages) >= 1 and max(ages) <= 48 + 15 - 8


def test_methods_that_retrieve_nothing_have_no_ages(make_model, ids):
    for method in ("infini_attention", "windowed", "gated_attention"):
        memory = make_model("mistral_full", method=method)(ids).past_key_values
        assert not memory.state.retrieves and retrieval_statistics([memory]) == {}


@pytest.mark.parametrize("method", ["neurocache", "memorizing", "cacheformer_on_base", "retrieval_heads"])
def test_gold_hits_are_counted_token_by_token(make_model, ids, method):
    """A forward of two pieces asks with tokens here and there; what is known afterwards is of the second one."""
    model = make_model("llama_gqa", method=method).train()
    memory = cacheformers.read(model, ids[:, :48], progress=False)
    asking = torch.rand(2, 24, generator=torch.Generator().manual_seed(0)) < 0.6
    gold = [[range(9, 12), range(30, 32)], [range(40, 42)]]
    memory.state.gold = Gold(asking, gold)
    model(ids[:, 48:72], past_key_values=memory)
    together, hits = memory.state.retrieved_tokens, []
    for layer in memory.state.retrieved().values():
        columns = layer.shape[1]
        assert 8 <= columns < 24
        for row, token in asking[:, -columns:].nonzero().tolist():
            firsts = [number for number in layer[row, token].tolist() if number >= 0]
            found = {number + more for number in firsts for more in range(together)}
            hits.append(any(found & set(passage) for passage in gold[row]))
    assert 0 < sum(hits) < len(hits)
    assert retrieval_statistics([memory])["gold_hits"] == pytest.approx(sum(hits) / len(hits))


def test_tokens_that_are_looked_up_together():
    """Nothing found stays nothing."""
    assert all_numbers(torch.tensor([[-1, 4], [7, -1]]), 3).tolist() == [[-1, -1, -1, 4, 5, 6], [7, 8, 9, -1, -1, -1]]
