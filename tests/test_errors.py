"""Bad input gets a clear error before work starts, and nothing is lost."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model

import cacheformers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk": 41}, "topk 41 .* must not exceed cache_size 40"),
        ({"neighborhood_size": 42}, "must not exceed cache_size"),
        ({"neighborhood_size": 3}, "must be 1 or even, got 3"),
        ({"topk": 0}, "topk must be at least 1"),
        ({"retrieval_map": {7: 7}}, "Layers \\[7\\] do not exist: this base model has layers 0 to 2"),
        ({"retrieval_map": {2: 1}}, "the future leaks"),
        ({"retrieval_map": {2: 2}, "attention_layers": [1, 2]}, "nothing has been retrieved before layer 2"),
        ({"attention_layers": [1, 1]}, "names a layer twice"),
        ({"attention_layers": []}, "at least one layer"),
        ({"cache_dtype": "int8"}, "cache_dtype must be one of"),
        ({"similarity": "cosine"}, "similarity must be one of"),
        ({"gate": "sigmoid"}, "gate must be one of"),
        ({"local_window": "global"}, "local_window must be one of"),
        ({"compression_factor": 5}, "does not divide the hidden size"),
        ({"segment_tokens": 65}, "65 positions, but this base model has 64"),
        ({"local_window": "sliding", "window_tokens": 60}, "76 positions"),
        ({"search": "quick"}, "exact.*faiss"),
        ({"compatibility": "published"}, "compatibility must be one of"),
    ],
)
def test_options(make_base, config_factory, options, message):
    base = make_base("llama_gqa")
    before = [name for name, _ in base.named_parameters()]
    with pytest.raises(ValueError, match=message):
        get_peft_model(base, config_factory(**options))
    assert [name for name, _ in base.named_parameters()] == before, "a refused adapter must leave the base alone"


def test_learned_positions_cannot_slide(make_base, config_factory):
    with pytest.raises(ValueError, match="learned embeddings"):
        get_peft_model(make_base("opt"), config_factory(local_window="sliding"))


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), "empty"),
        ([[5, 6], []], r"Documents \[1\] are empty"),
        ([], "no document"),
        (torch.tensor([[5, 128]]), "vocabulary has 128 entries"),
        (torch.tensor([[5, -1]]), "vocabulary has 128 entries"),
        (torch.tensor([[5.0]]), "must be integers"),
        (torch.zeros(1, 1, 1, dtype=torch.long), "input_ids must be"),
    ],
)
def test_documents(make_model, documents, message):
    with pytest.raises(ValueError, match=message):
        cacheformers.read(make_model("llama_gqa"), documents, progress=False)


def test_masks(make_model, ids):
    model = make_model("llama_gqa")
    with pytest.raises(ValueError, match="differ in shape"):
        cacheformers.read(model, ids, torch.ones(2, 3), progress=False)
    with pytest.raises(ValueError, match="empty"):
        cacheformers.read(model, ids, torch.zeros_like(ids), progress=False)
    with pytest.raises(ValueError, match="attention_mask has shape"):
        model(ids, attention_mask=torch.ones(2, 30))
    with pytest.raises(ValueError, match="2D attention_mask"):
        model(ids, attention_mask=torch.ones(2, 1, 75, 75))
    with pytest.raises(ValueError, match="not inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 4, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="longer than a segment"):
        model(ids, output_hidden_states=True)
    with pytest.raises(ValueError, match="longer than a segment"):
        model(ids, output_attentions=True)


def test_memories_of_other_models_and_batches(make_model, make_base, ids):
    model = make_model("llama_gqa")
    memory = cacheformers.read(model, ids, progress=False)
    with pytest.raises(ValueError, match="another model or adapter configuration.*attention_layers"):
        make_model("llama_gqa", attention_layers=[2])(ids, past_key_values=memory.clone())
    with pytest.raises(ValueError, match="another model or adapter configuration.*base"):
        make_model("mistral")(ids, past_key_values=memory.clone())
    with pytest.raises(ValueError, match="2 documents, the batch has 3 rows"):
        model(ids[[0, 1, 1]], past_key_values=memory.clone())
    with pytest.raises(ValueError, match="2 documents, the batch has 1 rows"):
        model(ids[:1], past_key_values=memory.clone())
    with pytest.raises((ValueError, RuntimeError), match="memory adapter"):
        make_base("llama_gqa")(ids, past_key_values=memory.clone())
    with model.disable_adapter(), pytest.raises(ValueError, match="no memory adapter is active"):
        model(ids, past_key_values=memory.clone())
    with model.disable_adapter(), pytest.raises(ValueError, match="No memory adapter is active"):
        cacheformers.read(model, ids, progress=False)


def test_a_memory_begun_in_evaluation_cannot_train(make_model, ids):
    model = make_model("llama_gqa")
    memory = cacheformers.read(model, ids, progress=False)
    with pytest.raises(ValueError, match="begun in evaluation mode"):
        model.train()(ids, past_key_values=memory)


@torch.no_grad()
def test_nan_is_not_stored(make_model, ids):
    model = make_model("llama_gqa")
    memory = cacheformers.read(model, ids, progress=False)
    expected = model(ids[:, :9], past_key_values=memory.clone()).logits
    weight = model.base_model.model.model.layers[0].mlp.down_proj.weight
    saved = weight.clone()
    weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN or Inf"):
        cacheformers.read(model, ids, memory=memory.clone(), progress=False)
    weight.copy_(saved)
    assert torch.equal(model(ids[:, :9], past_key_values=memory).logits, expected)


def test_flash_attention_with_padding_names_sdpa(make_model, ids):
    model = make_model("llama_gqa")
    model.config._attn_implementation = "flash_attention_2"
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        model(ids, attention_mask=mask)
