"""A family of decoders that another package makes known."""

import pytest
import torch
from conftest import COMMON, adapter_config, open_gates
from peft import PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import cacheformers
from cacheformers.modeling.architectures import ARCHITECTURES, Architecture


class OtherConfig(LlamaConfig):
    model_type = "other_family"


class OtherForCausalLM(LlamaForCausalLM):
    config_class = OtherConfig


@pytest.fixture
def other(monkeypatch):
    """An own family of Llama's form, in float32."""
    AutoConfig.register("other_family", OtherConfig, exist_ok=True)
    AutoModelForCausalLM.register(OtherConfig, OtherForCausalLM, exist_ok=True)
    monkeypatch.setattr("cacheformers.modeling.architectures.ARCHITECTURES", dict(ARCHITECTURES))
    torch.manual_seed(0)
    return OtherForCausalLM(OtherConfig(**COMMON, num_key_value_heads=2, tie_word_embeddings=False)).eval()


@torch.no_grad()
def test_a_family_from_outside(other, ids, tmp_path):
    """Refused before, with what to call; then every part works as on Llama."""
    with pytest.raises(ValueError, match=r"'other_family' is not supported.*cacheformers.register_architecture"):
        get_peft_model(other, adapter_config("neurocache"))
    cacheformers.register_architecture("other_family")
    model = get_peft_model(other, adapter_config("neurocache")).eval()
    open_gates(model)
    expected = model(ids).logits
    twin = LlamaForCausalLM(LlamaConfig(**COMMON, num_key_value_heads=2, tie_word_embeddings=False)).eval()
    twin.load_state_dict(plain(other))
    like = get_peft_model(twin, adapter_config("neurocache")).eval()
    like.load_state_dict(model.state_dict())
    assert torch.equal(like(ids).logits, expected)
    model.save_pretrained(tmp_path / "adapter")
    base = OtherForCausalLM(other.config).eval()
    base.load_state_dict(plain(other))
    assert torch.equal(PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(ids).logits, expected)


def plain(model):
    """The weights of the base, without what adapters added."""
    own = {name: tensor for name, tensor in model.state_dict().items() if "lora_" not in name}
    return {name.replace(".base_layer", ""): tensor for name, tensor in own.items()}


def test_what_is_refused(other):
    with pytest.raises(ValueError, match="'llama' is registered already, with other names"):
        cacheformers.register_architecture("llama", attention="attention")
    cacheformers.register_architecture("llama")
    with pytest.raises(TypeError, match="cache_arguments"):
        cacheformers.register_architecture("other_family", cache_arguments="cache")


def test_layers_of_several_kinds_need_their_masks(make_base, monkeypatch):
    """A row without them would give layers with a window the mask of the others, or theirs to these."""
    monkeypatch.setitem(ARCHITECTURES, "exaone4", Architecture())
    message = r"\(full_attention, sliding_attention\).*register_architecture\('exaone4', masks_by_layer_type=True\)"
    with pytest.raises(ValueError, match=message):
        get_peft_model(make_base("exaone4"), adapter_config())
    with pytest.raises(ValueError, match=message):
        cacheformers.NeurocacheForCausalLM.from_base(make_base("exaone4"), segment_tokens=16)
