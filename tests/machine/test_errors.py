"""Bad input gets a clear error before work starts, and nothing is lost."""

import pytest
import torch
from peft import get_peft_model

import cacheformers
from cacheformers.modeling.architectures import attention_modules, base_shape, find_decoder, unwrap
from cacheformers.modeling.method import METHODS, LocalWindowSettings

INFINI, GATED, FORMER = ({"method": name} for name in ("infini_attention", "gated_attention", "cacheformer_on_base"))
MEMORIZING = {"method": "memorizing"}


@pytest.mark.parametrize(
    ("base", "options", "message"),
    [
        ("llama_gqa", {"topk": 41}, "topk 41 .* must not exceed cache_size 40"),
        ("llama_gqa", {"neighborhood_size": 3}, "must be 1 or even, got 3"),
        ("llama_gqa", {"topk": 0}, "topk must be at least 1"),
        ("llama_gqa", {"retrieval_map": {7: 7}}, "Layers \\[7\\] do not exist: this base model has layers 0 to 2"),
        ("llama_gqa", {"retrieval_map": {2: 1}}, "the future leaks"),
        ("llama_gqa", {"retrieval_map": "1"}, r"retrieval_map must be a map from layers to.*\{22: 22\}.*got '1'"),
        ("llama_gqa", {"retrieval_map": {1: 1.5}}, r"retrieval_map must be a map .*got \{1: 1.5\}"),
        ("llama_gqa", {"retrieval_map": {2: 2}, "attention_layers": [1, 2]}, "nothing .* retrieved before layer 2"),
        ("llama_gqa", {"attention_layers": [1, 1]}, "names a layer twice"),
        ("llama_gqa", {"attention_layers": []}, "at least one layer"),
        ("llama_gqa", {"cache_dtype": "int4"}, "cache_dtype must be one of"),
        ("llama_gqa", {"local_window": "global"}, "local_window must be one of"),
        ("llama_gqa", {"compression_factor": 5}, "does not divide the hidden size"),
        ("llama_gqa", {"compression_factor": 1, "retrieval_weight": 1.0}, "compression_factor of 1"),
        ("llama_gqa", {"segment_tokens": 65}, "65 positions, but this base model has 64"),
        ("llama_gqa", {"local_window": "sliding", "window_tokens": 60}, "76 positions"),
        ("llama_gqa", {"window_tokens": -5}, "window_tokens must be at least 0"),
        ("llama_gqa", {"sink_tokens": -1}, "sink_tokens must be at least 0"),
        ("llama_gqa", {"search": "quick"}, "exact.*faiss"),
        ("llama_gqa", {"search": "in turn"}, "unknown search"),  # of the estimate, which names none
        ("llama_gqa", {"compatibility": "published"}, "compatibility must be one of"),
        ("opt", {"local_window": "sliding"}, "learned embeddings"),
        ("llama_gqa", {**MEMORIZING, "attention_layers": [3]}, "layers 0 to 2"),
        ("llama_gqa", {**MEMORIZING, "attention_layers": [1, 1]}, "each once"),
        ("llama_gqa", {**MEMORIZING, "cache_dtype": "int8"}, "cache_dtype must be one of"),
        ("llama_gqa", {**MEMORIZING, "topk": 50}, "must not exceed cache_size 40"),
        ("llama_gqa", {**MEMORIZING, "gate_start": float("nan")}, "finite"),
        ("llama_gqa", {**MEMORIZING, "search": "magic"}, "unknown search"),
        ("llama_gqa", {**INFINI, "layers": 1}, r"layers must be a list of whole numbers such as \[0, 1\]"),
        ("llama_gqa", {**INFINI, "layers": "0:1"}, r"layers must be a list of whole numbers such as \[0, 1\]"),
        ("llama_gqa", {**INFINI, "layers": [True]}, r"layers must be a list of whole numbers such as \[0, 1\]"),
        ("llama_gqa", {**INFINI, "layers": [1, 1]}, "each once"),
        ("llama_gqa", {**INFINI, "segment_tokens": 0}, "segment_tokens must be at least 1"),
        ("llama_gqa", {**INFINI, "rule": "cubic"}, "rule must be one of"),
        ("llama_gqa", {**INFINI, "empty": "zero"}, "empty must be one of"),
        ("opt", {**INFINI, "local_window": "sliding"}, "learned embeddings"),
        ("mistral", GATED, "see only 9 tokens back.*sliding_window=None"),
        ("llama_gqa", {**GATED, "window_tokens": 0}, "window_tokens must be at least 1"),
        ("llama_gqa", {**GATED, "gate_hidden": 0}, "leave it out for a linear gate"),
        ("llama_gqa", {**GATED, "gate_per": "token"}, "gate_per must be one of"),
        ("llama_gqa", {**GATED, "gate_choice": "hard"}, "gate_choice must be one of"),
        ("llama_gqa", {**GATED, "gate_temperature": 0.0}, "gate_temperature must be positive"),
        ("llama_gqa", {**GATED, "sparsity_sign": "-"}, "sparsity_sign must be one of"),
        ("llama_gqa", {**GATED, "mean_weight": -1.0}, "mean_weight must be at least 0"),
        ("llama_gqa", {**GATED, "threshold": 0.6}, "between 0 and 0.5"),
        ("llama_gqa", {**GATED, "far_distance": -1}, "far_distance must be at least 0"),
        ("llama_gqa", {**GATED, "far_distance": 5, "window_tokens": 6}, "at least window_tokens 6"),
        ("llama_gqa", {**GATED, "far_distance": 64}, "fit the base's 64 positions: at most 63"),
        ("opt_long", {**GATED, "far_distance": 16}, "cannot do .its positions are learned embeddings.: leave it out"),
        ("llama_gqa", {**GATED, "far_heads": {0: [2]}}, "2 kv heads"),
        ("llama_gqa", {**GATED, "layers": [0], "far_heads": {1: [0]}}, "method's layers are"),
        ("mistral", {**FORMER, "window_tokens": 12}, "more than the 9 tokens that this base's layers see"),
        ("llama_gqa", {**FORMER, "pool_tokens": 6}, "must divide window_tokens"),
        ("llama_gqa", {**FORMER, "layers": [3]}, "Layers .3. do not exist"),
        ("llama_gqa", {**FORMER, "segment_tokens": 0}, "segment_tokens must be at least 1"),
        ("llama_gqa", {**FORMER, "select_rows": 9}, "select_rows 9 is more than window_tokens 8"),
    ],
)
def test_options(make_base, config_factory, base, options, message):
    plain = make_base(base)
    before = [name for name, _ in plain.named_parameters()]
    with pytest.raises(ValueError, match=message):
        get_peft_model(plain, config_factory(**options))
    assert [name for name, _ in plain.named_parameters()] == before, "a refused adapter must leave the base alone"


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
        ([torch.ones(1, 3, dtype=torch.long)], "must be a list or tensor of ids"),
        ("a text", "pass tokenizer"),
        (["a text"], "pass tokenizer"),
        ({"input_ids": [[5]]}, "pass tokenizer"),
    ],
)
def test_documents(make_model, documents, message):
    with pytest.raises(ValueError, match=message):
        cacheformers.read(make_model("llama_gqa"), documents, progress=False)


@pytest.mark.parametrize("method", ["gated_attention", "cacheformer_on_base"])
def test_more_tokens_than_positions(make_model, ids, method):
    """Where positions count on, the reader is told, and learned ones end; the tiny bases have 64."""
    model = make_model("llama_gqa", method=method)
    memory = cacheformers.read(model, ids[:1, :60], progress=False)
    with pytest.warns(UserWarning, match="the model has 64.* up to 75"):
        cacheformers.read(model, ids[:1, 60:], memory=memory, progress=False)
    with pytest.raises(ValueError, match="64 positions.*too long"):
        make_model("opt", method=method)(ids)


def read(model, ids, mask):
    return cacheformers.read(model, ids, mask, progress=False)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda model, ids: read(model, ids, torch.ones(2, 3)), "differ in shape"),
        (lambda model, ids: read(model, ids, torch.zeros_like(ids)), "empty"),
        (lambda model, ids: read(model, ids.tolist(), torch.ones_like(ids)), "needs no attention_mask"),
        (lambda model, ids: model(ids, attention_mask=torch.ones(2, 30)), "attention_mask has shape"),
        (lambda model, ids: model(ids, attention_mask=torch.ones(2, 1, 75, 75)), "2D attention_mask"),
        (lambda model, ids: model(inputs_embeds=torch.zeros(1, 4, 32, dtype=torch.float64)), "not inputs_embeds"),
        (lambda model, ids: model(ids, output_hidden_states=True), "longer than a segment"),
        (lambda model, ids: model(ids, output_attentions=True), "longer than a segment"),
        (lambda model, ids: model(ids, position_ids=(torch.arange(75) % 25)[None]), "do not pack"),
        (lambda model, ids: model(ids, position_ids=2 * torch.arange(75)[None]), "leave positions out"),
        (lambda model, ids: model.base_model.model.model(ids, return_dict=False), "return_dict"),
    ],
)
def test_forwards_that_cannot_be(make_model, ids, forward, message):
    with pytest.raises(ValueError, match=message):
        forward(make_model("llama_gqa"), ids)


def test_hidden_states_by_the_configuration(make_model, ids):
    model = make_model("llama_gqa")
    model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="longer than a segment"):
        model(ids)


@pytest.mark.parametrize("method", ["cacheformer_on_base", "gated_attention", "infini_attention"])
def test_what_attention_with_a_memory_cannot_do(make_model, make_base, ids, method):
    """It has no matrix of weights, and where it replaces the base's it drops none."""
    model = make_model("llama_gqa", method=method)
    with pytest.raises(ValueError, match="without a matrix of weights"):
        model(ids[:, :9], output_attentions=True)
    for layer in attention_modules(find_decoder(unwrap(model))):
        layer.attention_dropout = 0.5
    model.train()
    if method == "infini_attention":
        assert not torch.equal(model(ids[:, :9]).logits, model(ids[:, :9]).logits)
        return
    with pytest.raises(ValueError, match="load it with attention_dropout=0 to train"):
        model(ids[:, :9])


def test_a_negative_size(make_model):
    with pytest.raises(ValueError, match="cache_size must be at least 0, got -5"):
        cacheformers.new_memory(make_model("llama_gqa"), 1, cache_size=-5)


def test_an_adapter_that_fails_leaves_the_base_as_it_was(make_base):
    base = make_base("llama_gqa")
    config = cacheformers.GatedAttentionAdapterConfig(target_modules=["nope"])
    with pytest.raises(ValueError, match="nope"):
        get_peft_model(base, config)
    assert base.config._attn_implementation == "sdpa"


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


@pytest.mark.parametrize("method", [name for name, known in METHODS.items() if known.stores != "entries"])
def test_a_memory_without_entries_has_no_size(make_model, method):
    with pytest.raises(ValueError, match="leave cache_size out"):
        cacheformers.new_memory(make_model("llama_gqa", method=method), 1, cache_size=4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama_gqa", {}),
        ("llama_gqa", {"method": "cacheformer_on_base"}),
        ("llama_gqa", {"method": "gated_attention"}),
        ("cacheformer", {}),
    ],
    ids=["neurocache", "cacheformer_on_base", "gated_attention", "cacheformer"],
)
def test_nan_is_not_stored(make_model, ids, name, options):
    """Nothing of the batch is stored, and after the reset of the bad row the others go on."""
    model = make_model(name, **options)
    memory = cacheformers.read(model, ids[:, :32], progress=False)
    expected = model(ids[:, :9], past_key_values=memory.clone()).logits
    embedding = model.get_input_embeddings().weight
    saved = embedding[3].clone()
    bad = ids[:, 32:48].clone()
    bad[1, 4], bad[0] = 3, bad[0].clamp(min=4)
    embedding[3] = float("nan")
    with pytest.raises(ValueError, match=r"row.*\b1\b.* NaN or Inf.*(nothing was|are not) stored"):
        cacheformers.read(model, bad, memory=memory, progress=False)
    embedding[3] = saved
    if options or name == "cacheformer":  # they store at the end of a forward, the others when a segment closes
        assert torch.equal(model(ids[:, :9], past_key_values=memory.clone()).logits, expected)
    stored = [ring.written for ring in getattr(memory.state, "rings", {}).values()] or [memory.tokens_read]
    assert all(written == [32, 32] for written in stored)
    memory.reset([1])
    assert bool(torch.isfinite(model(ids[:, :9], past_key_values=memory).logits).all())
    fresh = cacheformers.read(model, ids[:, :32], progress=False)
    assert torch.equal(model(ids[:, :9], past_key_values=fresh).logits, expected)


def test_another_adapters_memory(make_model, config_factory, opener, ids):
    model = make_model("llama_gqa")
    memory = cacheformers.read(model, ids, progress=False)
    model.add_adapter("second", config_factory())
    model.set_adapter("second")
    with pytest.raises(ValueError, match="made with another adapter"):
        model.eval()(ids, past_key_values=memory)


def test_reentrant_checkpointing_is_refused(make_model, ids):
    model = make_model("llama_gqa").train()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant=False"):
        model(ids[:, :16])


@torch.no_grad()
def test_forwards_that_would_confuse_a_memory(make_model, ids):
    model = make_model("llama_gqa")
    memory = cacheformers.read(model, ids, progress=False)
    with pytest.raises(ValueError, match="use_cache=False with a memory"):
        model.generate(ids[:, :9], past_key_values=memory, use_cache=False, max_new_tokens=3)
    with pytest.raises(ValueError, match="cache_size is for an empty memory"):
        cacheformers.read(model, ids, memory=memory, cache_size=5, progress=False)
    unflushed = cacheformers.read(model, ids, flush=False, progress=False)
    other = make_model("llama_gqa", topk=2)
    for parameter, value in zip(other.parameters(), model.parameters(), strict=True):
        parameter.copy_(value)
    with pytest.raises(ValueError, match="read with topk=4, not 2"):
        other(ids[:, :5], past_key_values=unflushed)


def test_a_training_step_cannot_be_cropped(make_model, ids):
    memory = make_model("llama_gqa")(ids[:, :16]).past_key_values
    with pytest.raises(ValueError, match="cannot be cropped"):
        memory.crop(-3)


def test_reading_in_inference_mode(make_model, ids):
    model = make_model("llama_gqa")
    with torch.inference_mode():
        memory = cacheformers.read(model, ids, progress=False)
    with torch.no_grad():
        assert bool(torch.isfinite(model(ids, past_key_values=memory).logits).all())


def test_flash_attention_with_padding_names_sdpa(make_model, ids):
    model = make_model("llama_gqa")
    model.config._attn_implementation = "flash_attention_2"
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        model(ids, attention_mask=mask)


def test_settings_of_a_method_that_was_not_registered(make_base):
    class Unregistered(LocalWindowSettings):
        pass

    with pytest.raises(ValueError, match="Unregistered is not of a registered method: call cacheformers.register"):
        Unregistered().resolve(base_shape(make_base("llama_gqa").config))
