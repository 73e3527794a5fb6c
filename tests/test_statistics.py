"""What is logged of a memory: gates and retrieval, against plain counting."""

from __future__ import annotations

from statistics import median

import pytest
import torch

import cacheformers
from cacheformers.training.statistics import gate_statistics, retrieval_statistics


def test_gates_are_counted_by_size(make_model):
    model = make_model("llama_gqa")
    gates = [p for name, p in model.named_parameters() if "lora_mem_gate" in name]
    sizes = [abs(float(torch.tanh(value))) for gate in gates for value in gate.detach()]
    found = gate_statistics(model)
    assert found["gate_mean"] == pytest.approx(sum(sizes) / len(sizes), rel=1e-6)
    assert found["gate_max"] == pytest.approx(max(sizes), rel=1e-6)
    assert found["gate_histogram"] == [sum(i <= 10 * size < i + 1 for size in sizes) for i in range(10)]
    with model.disable_adapter():
        base = model.unload()
    assert gate_statistics(base) == {}


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
