"""Base models as rows of a table: how each turns keys, where LoRA goes, and what is refused with a reason."""

import runpy
from pathlib import Path

import pytest
import torch
from conftest import BASES, COMMON, CONFIGS, MORE_BASES, ONE_LINE, SPECIAL, adapter_config, open_gates
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3ForCausalLM

import cacheformers
from cacheformers.adapters.model import projection_weights
from cacheformers.modeling.architectures import ARCHITECTURES, attention_modules, base_shape, find_decoder
from cacheformers.modeling.cache import LocalCache
from cacheformers.modeling.rotary import layer_rotation, position_embeddings

ROOT = Path(__file__).resolve().parents[2]
ROTARY = [name for name in {**BASES, **MORE_BASES, **ONE_LINE, **SPECIAL} if name != "opt"]


def keys_at(decoder, layer, states, places):
    """Keys that a layer makes of states, and how it turned them."""
    attention, cache = attention_modules(decoder)[layer], LocalCache({}, 0, stage=True)
    embeddings = position_embeddings(decoder, layer, states, places)
    name = ARCHITECTURES[decoder.config.model_type].cache_argument
    attention(states, attention_mask=None, position_ids=places, position_embeddings=embeddings, **{name: cache})
    return cache.staged[layer][0], layer_rotation(attention, embeddings)


@torch.no_grad()
@pytest.mark.parametrize("base", ROTARY)
def test_undoing_the_rotation_leaves_no_position(make_base, base):
    """The same states at other places: other keys, but the same ones before their rotation; or no rotation at all."""
    decoder = find_decoder(make_base(base))
    states = torch.randn(1, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    turning = 0
    for layer in range(3):
        first, rotation = keys_at(decoder, layer, states, torch.arange(5)[None])
        later, later_rotation = keys_at(decoder, layer, states, torch.arange(7, 12)[None])
        if rotation is None:
            assert torch.equal(first, later)
            continue
        turning += 1
        assert float((later - first).abs().max()) > 0.01 * float(first.abs().max())
        plain, again = rotation.inverse.turn(first), later_rotation.inverse.turn(later)
        assert float((again - plain).abs().max()) < 1e-6 * float(plain.abs().max())
        assert float((rotation.turn(plain) - first).abs().max()) < 1e-6 * float(first.abs().max())
    assert turning == (2 if base in ("smollm3", "exaone4", "cohere2", "llama4") else 3)


@torch.no_grad()
@pytest.mark.parametrize("base", ["phi3", "gpt_neox"])
def test_parts_of_a_fused_matrix(make_base, base):
    """W_k and W_v make the keys, before their rotation, and the values that the layer makes."""
    model = make_base(base)
    decoder = find_decoder(model)
    attention, cache = attention_modules(decoder)[0], LocalCache({}, 0, stage=True)
    states = torch.randn(1, 5, 32, dtype=torch.float64)
    embeddings = position_embeddings(decoder, 0, states, torch.zeros(1, 5, dtype=torch.long))  # turns nothing
    for module in attention.modules():
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()
    name = ARCHITECTURES[decoder.config.model_type].cache_argument
    attention(states, attention_mask=None, position_embeddings=embeddings, **{name: cache})
    shape = base_shape(model.config)
    q, k, v, o = projection_weights(attention, model.config)
    assert q.shape == o.T.shape == (shape.heads * shape.head_dim, 32)
    for weight, found in zip((k, v), cache.staged[0], strict=True):
        made = (states @ weight.T).unflatten(-1, (shape.kv_heads, shape.head_dim)).transpose(1, 2)
        assert torch.allclose(made, found, atol=1e-6)


def test_experts_get_their_lora_in_attention(make_base):
    """Experts are no linear layers; where a shared expert is one, it gets it."""
    targets = {"mixtral": "v_proj", "qwen3_moe": "v_proj", "gpt_oss": "v_proj", "qwen2_moe": "shared_expert.up_proj"}
    for base, target in targets.items():
        model = get_peft_model(make_base(base), adapter_config())
        trained = {name.rpartition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name}
        assert any(name.endswith(target) for name in trained) and not any("experts" in name for name in trained)


def test_a_model_around_a_base_computes_experts_as_the_base_does(make_base):
    base = make_base("mixtral", torch.float32, experts_implementation="batched_mm")
    model = cacheformers.NeurocacheForCausalLM.from_base(base, segment_tokens=16)
    [experts, *_] = [module for module in model.modules() if type(module).__name__ == "MixtralExperts"]
    assert experts.config._experts_implementation == "batched_mm"


def tiny(model_type, **changes):
    config = AutoConfig.for_model(model_type, **{**COMMON, "num_key_value_heads": 2, **changes})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", ["stablelm", "nemotron"])
def test_layers_that_pass_no_keywords_on(ids, monkeypatch, family):
    """Known ones are refused before anything changes; one that somebody registers, at its first forward."""
    base = tiny(family)
    message = f"{family} cannot have a memory: its layers in transformers pass no keywords on.*docs/bases.md"
    with pytest.raises(ValueError, match=message):
        get_peft_model(base, adapter_config())
    with pytest.raises(ValueError, match=message):
        cacheformers.NeurocacheForCausalLM.from_base(base, segment_tokens=16)
    monkeypatch.setattr("cacheformers.modeling.architectures.UNSUPPORTED", {})
    monkeypatch.setattr("cacheformers.modeling.architectures.ARCHITECTURES", dict(ARCHITECTURES))
    cacheformers.register_architecture(family, feed_forward=("up_proj", "down_proj"))
    model = get_peft_model(base, adapter_config())
    with pytest.raises(ValueError, match=message):
        model(ids)


@torch.no_grad()
def test_models_that_see_images(ids):
    """The page says how to take the language model out of one, which then reads the same."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**COMMON, **CONFIGS["gemma3"]}
    full = tiny("gemma3", text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    with pytest.raises(ValueError, match=r"gemma3 also sees images.*docs/bases\.md"):
        get_peft_model(full, adapter_config())
    page = (ROOT / "docs" / "bases.md").read_text(encoding="utf-8")
    names = {"full": full}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    assert type(names["base"]) is Gemma3ForCausalLM and names["base"].config.model_type == "gemma3_text"
    assert torch.equal(names["base"](ids).logits, full(ids).logits)
    model = get_peft_model(names["base"], adapter_config()).eval()
    open_gates(model)
    assert bool(torch.isfinite(model(ids).logits).all())


@pytest.mark.parametrize("base", ["gemma2", "gpt_oss", "llama4"])
@pytest.mark.parametrize("method", ["gated_attention", "cacheformer_on_base"])
def test_methods_that_compute_scores_themselves(make_base, base, method):
    with pytest.raises(ValueError, match="those of .* are .*: choose another base, or a method that leaves"):
        get_peft_model(make_base(base), adapter_config(method))


def test_llama_4_reads_within_a_chunk(make_base):
    base = make_base("llama4")
    assert base_shape(base.config).max_positions == 40
    with pytest.raises(ValueError, match=r"41 positions, but this base model has 40"):
        get_peft_model(base, adapter_config(segment_tokens=41))


def test_every_family_is_in_the_table_and_in_the_tests():
    """`python scripts/tables.py --write` leaves docs/bases.md as it is."""
    page = (ROOT / "docs" / "bases.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(ROOT / "scripts" / "tables.py"))["bases_table"]() in page
    assert {config.get("model_type", name) for name, config in CONFIGS.items()} == {
        model_type for model_type, known in ARCHITECTURES.items() if known.title
    }
