"""Weights that accelerate offloads to the CPU or to disk: reading and generating are as in memory, to the last bit."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from conftest import METHODS
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import cacheformers
from cacheformers.adapters.export import export


def to_disk(names):
    """A map that leaves the first layer and what is beside the layers in memory."""
    return {name: "disk" if name.startswith(("model.layers.1", "model.layers.2")) else "cpu" for name in names}


BLOCKS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "model.rotary_emb")
PLACES = to_disk([*BLOCKS, "lm_head"])


def offload(model, how, folder):
    if how == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    elif how == "disk":
        disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    else:
        names = {f"base_model.model.{name}": place for name, place in PLACES.items()}
        dispatch_model(model, names, main_device="cpu", offload_dir=str(folder), force_hooks=True)
    return model


def is_offloaded(model):
    parameters = dict(model.named_parameters())
    base = [name for name in parameters if ".layers.2." in name and "lora_" not in name and ".memory." not in name]
    return base and all(parameters[name].is_meta for name in base)


@torch.no_grad()
def answers(model, ids):
    """Logits over the segments of a batch, a memory that is read, and what is generated from it."""
    memory = cacheformers.read(model, ids[:, :60], progress=False)
    asked = {"input_ids": ids[:, 60:70], "attention_mask": torch.ones_like(ids[:, 60:70]), "pad_token_id": 0}
    tokens = model.generate(**asked, past_key_values=memory.clone(), max_new_tokens=8, do_sample=False)
    alone = model.generate(input_ids=ids[:1, :20], max_new_tokens=8, do_sample=False, pad_token_id=0)
    return model(ids).logits, tokens, alone, memory


def check_same(found, expected):
    for own, other in zip(found[:3], expected[:3], strict=True):
        assert torch.equal(own, other)
    assert found[3].origin.identity == expected[3].origin.identity


@pytest.mark.parametrize(
    ("method", "base", "how"),
    [
        *((method, "llama_gqa", "disk") for method in METHODS),
        *((method, "llama_gqa", how) for method in ("neurocache", "memorizing") for how in ("cpu", "disk by block")),
        *((method, "opt", "disk") for method in ("neurocache", "memorizing")),
    ],
)
def test_an_adapter_and_its_base(make_model, ids, tmp_path, method, base, how):
    model = make_model(base, torch.float32, method=method)
    expected = answers(model, ids)
    offload(model, how, tmp_path)
    check_same(answers(model, ids), expected)
    assert is_offloaded(model)


@pytest.mark.parametrize(
    ("method", "places"),
    [
        *((method, "by name") for method in ("neurocache", "memorizing", "recurrent_memory", "infini_attention")),
        *((method, "auto") for method in ("neurocache", "memorizing")),
    ],
)
def test_an_exported_model_that_is_loaded_offloaded(make_model, make_base, ids, tmp_path, method, places):
    """As one loads a base that does not fit: by a map, or by `device_map="auto"` and what may be in memory."""
    make_base("llama_gqa", torch.float32).save_pretrained(tmp_path / "base")
    model = make_model("llama_gqa", torch.float32, method=method)
    model.save_pretrained(tmp_path / "adapter")
    export(tmp_path / "adapter", tmp_path / "model", base=tmp_path / "base")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    if places == "auto":
        spread = {"device_map": "auto", "max_memory": {"cpu": whole.get_memory_footprint() // 2}}
    else:
        names = [name.replace("model.", "model.language_model.", 1) for name in PLACES]
        spread = {"device_map": {name: PLACES[name.replace("language_model.", "")] for name in names}}
    spread["offload_folder"] = tmp_path / "offloaded"
    offloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **spread)
    assert set(offloaded.hf_device_map.values()) == {"cpu", "disk"} and is_offloaded(offloaded)
    check_same(answers(offloaded, ids), answers(whole, ids))
    assert is_offloaded(offloaded)


@torch.no_grad()
def test_a_memory_file_goes_between_them(make_model, ids, tmp_path):
    model = make_model("llama_gqa", torch.float32)
    cacheformers.read(model, ids, progress=False).save(tmp_path / "whole")
    question = ids[:, :9]
    expected = model(question, past_key_values=cacheformers.load_memory(tmp_path / "whole", model)).logits
    offload(model, "disk", tmp_path / "offloaded")
    cacheformers.read(model, ids, progress=False).save(tmp_path / "own")
    for name in ("whole", "own"):
        memory = cacheformers.load_memory(tmp_path / name, model)
        assert torch.equal(model(question, past_key_values=memory).logits, expected)
    other = make_model("llama_gqa", torch.float32, base={"hidden_act": "relu"})
    with pytest.raises(ValueError, match="another"):
        other(question, past_key_values=cacheformers.load_memory(tmp_path / "own", other))


@pytest.mark.parametrize("door", ["PeftModel", "load_adapter", "AutoModel", "get_peft_model"])
def test_an_adapter_on_an_offloaded_base_says_what_to_do(make_model, make_base, ids, tmp_path, door):
    """Instead of weights that nobody loads, and before PEFT writes over the base's files."""
    make_base("llama_gqa", torch.float32).save_pretrained(tmp_path / "base")
    before = (tmp_path / "base" / "model.safetensors").read_bytes()
    model = make_model("llama_gqa", torch.float32)
    model.base_model.model.name_or_path = model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    offloaded = {"device_map": PLACES, "offload_folder": tmp_path / "offloaded"}
    with pytest.raises(ValueError, match="Put it on first .*cacheformers export"):
        if door == "AutoModel":
            AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", **offloaded)
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **offloaded)
        if door == "PeftModel":
            PeftModel.from_pretrained(base, tmp_path / "adapter", offload_folder=str(tmp_path / "offloaded"))
        elif door == "load_adapter":
            base.load_adapter(str(tmp_path / "adapter"))
        else:
            get_peft_model(base, model.peft_config["default"])
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == before


def test_weights_that_only_attention_sees_say_so(make_model, ids):
    """With `preload_module_classes` a memory's weights are away when it works, after attention's forward."""
    model = make_model("llama_gqa", torch.float32)
    cpu_offload(model, execution_device=torch.device("cpu"), preload_module_classes=["LlamaAttention"])
    with pytest.raises(ValueError, match="preload_module_classes"):
        model(ids[:, :20])
