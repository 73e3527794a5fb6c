"""What a token costs each memory that retrieves: searches, and numbers stored (the comparison of Neurocache's table 1).

Memorizing Transformer searches once a head and stores keys and values, 2h numbers a token. Neurocache searches once and
stores h / compression_factor numbers.
"""

import json
import resource
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import cacheformers
from cacheformers.modeling.search import ExactSearch

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "model_configs"
HIDDEN, HEADS, SEGMENT = 32, 4, 8


def small(model_type, **options):
    base = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 64,
    }
    chosen = {"segment_tokens": SEGMENT, **options}
    if model_type != "infini_attention":
        chosen = {"cache_size": 64, "topk": 4, "search": "exact", **chosen}
    config = AutoConfig.for_model(model_type, text_config=base, **chosen)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("model_type", "options", "searches", "numbers"),
    [
        ("memorizing", {}, HEADS, 2 * HIDDEN),
        ("neurocache", {}, 1, HIDDEN // 4),
        ("neurocache", {"compression_factor": 2}, 1, HIDDEN // 2),
        ("neurocache", {"retrieval_map": {1: 1, 3: 3}}, 2, 2 * HIDDEN // 4),
    ],
)
@torch.no_grad()
def test_searches_and_entry_size(monkeypatch, model_type, options, searches, numbers):
    model = small(model_type, **options)
    asked, find = 0, ExactSearch.find

    def counted(self, queries, *arguments):
        nonlocal asked
        asked += len(queries)
        return find(self, queries, *arguments)

    monkeypatch.setattr(ExactSearch, "find", counted)
    segments = 4  # the store grows in powers of two
    memory = cacheformers.read(model, torch.randint(3, 64, (1, segments * SEGMENT)), progress=False)
    assert asked == (segments - 1) * SEGMENT * searches  # nothing is stored yet when the first segment is read
    stored = memory.state.nbytes / torch.tensor(0.0).element_size()
    assert stored == segments * SEGMENT * numbers


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("model_type", ["neurocache", "infini_attention"])
@torch.no_grad()
def test_process_memory_is_flat_and_all_is_finite(model_type):
    """While 2,000 segments are read and 600 tokens are decoded one by one, after the first fifth of each."""
    model = small(model_type)
    memory = cacheformers.new_memory(model, 1)
    for count, length in ((2000, SEGMENT), (600, 1)):
        held = []
        for _ in range(count):
            logits = model(torch.randint(3, 64, (1, length)), past_key_values=memory).logits
            assert bool(torch.isfinite(logits).all())
            held.append(int(Path("/proc/self/statm").read_text().split()[1]))  # resident pages
        assert (max(held) - held[count // 5]) * resource.getpagesize() < 8 * 2**20
    assert memory.tokens_read == [2000 * SEGMENT + 600]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in memory.state.state_dict().values())


def parameters(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIGS / f"{name}.json"))
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameters_of_the_recipes_configurations():
    """Feed-forward blocks are narrower by what a memory takes, so that models compared are of one size."""
    counts = {name: parameters(f"books_{name}") for name in ("segment", "sliding", "memorizing", "neurocache")}
    assert counts["segment"] == counts["sliding"] == 5_795_072
    assert counts["memorizing"] == counts["segment"] + 2 * 4  # a gate and a scale a head, in one layer
    assert abs(counts["neurocache"] / counts["segment"] - 1) < 0.003
    for name in counts:
        assert round(parameters(f"{name}_184m") / 1e6) == 184
    paper = json.loads((CONFIGS / "neurocache_184m.json").read_text())
    assert paper["text_config"]["num_hidden_layers"] == 12 and paper["segment_tokens"] == 1024
