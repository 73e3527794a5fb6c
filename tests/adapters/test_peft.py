"""The memory as a PEFT method: what users of LoRA expect works, and what cannot work says why."""

import copy
import json
import re
import shutil

import pytest
import torch
import transformers
from conftest import METHODS, OTHERS, every_method, same_after_loading, save_adapter
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, pipeline

import cacheformers

BASES = ["llama_gqa", "mistral", "opt", "stories260k"]


@pytest.fixture
def saved(make_base, tmp_path):
    """A base and an adapter on disk: (base folder, adapter folder, logits of `ids`)."""

    def build(name, ids, dtype=torch.float32, **options):
        make_base(name, dtype).save_pretrained(tmp_path / "base")
        model = save_adapter(tmp_path / "base", tmp_path / "adapter", **options)
        with torch.no_grad():
            return tmp_path / "base", tmp_path / "adapter", model(ids).logits

    return build


DOORS = {
    "PeftModel": lambda base, adapter: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter),
    "PeftModel low memory": lambda base, adapter: PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), adapter, low_cpu_mem_usage=True
    ),
    "PeftModel other name": lambda base, adapter: PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), adapter, adapter_name="other"
    ),
    "PeftModel trainable": lambda base, adapter: PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True
    ).eval(),
    "AutoPeft": lambda base, adapter: AutoPeftModelForCausalLM.from_pretrained(adapter),
    "AutoModel": lambda base, adapter: AutoModelForCausalLM.from_pretrained(adapter),
    "load_adapter": lambda base, adapter: loaded_into(AutoModelForCausalLM.from_pretrained(base), adapter),
}


def loaded_into(model, adapter):
    model.load_adapter(str(adapter))
    return model


NO_LORA = [
    pytest.param("llama_gqa", {"method": method, "target_modules": []}, id=f"{method} without LoRA")
    for method in ("neurocache", "memorizing")  # beside attention, and inside it
]
# The adapter stays in float32 through every door, so all compute the same.
HALF = pytest.param("llama_gqa", {"dtype": torch.bfloat16}, id="llama_gqa bfloat16")


@torch.no_grad()
@pytest.mark.parametrize(("base", "options"), [*every_method(BASES, ["llama_gqa"]), *NO_LORA, HALF])
def test_every_door_gives_the_same_logits(saved, ids, base, options):
    base_folder, adapter_folder, expected = saved(base, ids, **options)
    assert ("target_modules" in options) == (
        not any("lora_A" in name for name in load_file(adapter_folder / "adapter_model.safetensors"))
    )
    for door in DOORS if base == "llama_gqa" else ("PeftModel", "AutoModel"):
        if door == "PeftModel low memory" and "dtype" in options:
            continue  # there PEFT itself rounds LoRA to the base's dtype
        model = DOORS[door](base_folder, adapter_folder).eval()
        assert same_after_loading(model(ids).logits, expected, options.get("method", "neurocache")), door


def test_the_adapter_is_one_file_with_everything_trained(saved, ids):
    _, adapter_folder, _ = saved("llama_gqa", ids)
    assert sorted(path.name for path in adapter_folder.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    keys = load_file(adapter_folder / "adapter_model.safetensors").keys()
    parts = {key.split("lora_mem_")[1].split(".")[0] for key in keys if "lora_mem_" in key}
    assert parts == {"down", "norm", "q", "k", "v", "o", "gate"}
    assert any("mlp.down_proj.lora_A" in key for key in keys)
    assert not any("mlp" in key and ".0." in key for key in keys), "LoRA belongs to the augmented layers"


LOST = {
    **{part: 1 for part in ("lora_mem_down", "lora_mem_gate", "layers.2.self_attn.memory", "lora_A")},
    **{"lora_A|lora_B": None, "": None},  # all of LoRA, and everything
}


@pytest.mark.parametrize("door", ["PeftModel", "AutoModel", "load_adapter", "AutoPeft"])
def test_a_missing_tensor_is_an_error(saved, ids, door):
    base_folder, adapter_folder, _ = saved("llama_gqa", ids)
    file = adapter_folder / "adapter_model.safetensors"
    tensors = load_file(file)
    for lost, count in LOST.items():
        victims = [key for key in tensors if re.search(lost, key)][:count]
        kept = {key: tensor for key, tensor in tensors.items() if key not in victims}
        save_file(kept or {"foreign": torch.zeros(1)}, file)
        with pytest.raises(ValueError, match="incomplete|No tensor of the file fits"):
            DOORS[door](base_folder, adapter_folder)(ids)


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding_B"),
        ({"trainable_token_indices": [5, 6]}, "trainable_tokens_delta"),
    ],
)
def test_lost_modules_beside_the_memory_are_an_error(saved, ids, options, lost):
    base_folder, adapter_folder, _ = saved("llama_gqa", ids, **options)
    DOORS["AutoModel"](base_folder, adapter_folder)(ids)
    file = adapter_folder / "adapter_model.safetensors"
    whole = load_file(file)
    assert any(lost in key for key in whole)
    save_file({key: tensor for key, tensor in whole.items() if lost not in key}, file)
    with pytest.raises(ValueError, match="incomplete"):
        DOORS["AutoModel"](base_folder, adapter_folder)(ids)


@pytest.mark.parametrize("door", ["PeftModel", "AutoModel"])
@pytest.mark.parametrize("method", OTHERS)
def test_a_missing_tensor_of_another_method_is_an_error(saved, ids, door, method):
    base_folder, adapter_folder, _ = saved("llama_gqa", ids, method=method)
    file = adapter_folder / "adapter_model.safetensors"
    whole = load_file(file)
    for lost in {key.partition("lora_")[2].partition(".")[0] for key in whole}:  # one tensor of each kind
        victim = next(key for key in whole if f"lora_{lost}." in key)
        save_file({key: tensor for key, tensor in whole.items() if key != victim}, file)
        with pytest.raises(ValueError, match="incomplete"):
            DOORS[door](base_folder, adapter_folder)(ids)


@pytest.mark.parametrize("door", ["PeftModel", "AutoModel"])
def test_truncated_and_misshapen_files_are_errors(saved, ids, door):
    base_folder, adapter_folder, _ = saved("llama_gqa", ids)
    file = adapter_folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Exception, match="(?i)incomplete|deserializ|header|not fully covered"):
        DOORS[door](base_folder, adapter_folder)
    file.write_bytes(whole)
    tensors = load_file(file)
    key = next(key for key in tensors if "lora_mem_q" in key)
    save_file({**tensors, key: tensors[key][:-1].contiguous()}, file)
    with pytest.raises(RuntimeError, match="(?i)size mismatch|mismatch"):
        DOORS[door](base_folder, adapter_folder)


@torch.no_grad()
def test_several_adapters(make_base, config_factory, opener, ids):
    model = get_peft_model(make_base("llama_gqa"), config_factory()).eval()
    opener(model)
    first = model(ids).logits
    model.add_adapter("second", config_factory(retrieval_map={2: 2}, topk=2))
    opener(model, "second")
    assert torch.equal(model(ids).logits, first), "adding an adapter must not change the active one"
    model.set_adapter("second")
    second = model(ids).logits
    assert not torch.allclose(first, second)
    model.set_adapter("default")
    assert torch.equal(model(ids).logits, first)
    model.delete_adapter("second")
    assert torch.equal(model(ids).logits, first)
    assert not any(".second" in name for name in model.state_dict())


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Adapter default was active which is now deleted")
@pytest.mark.parametrize("remaining", [{}, {"retrieval_map": {2: 2}}], ids=["same layers", "other layers"])
def test_deleting_the_active_adapter_switches_to_another(make_base, config_factory, opener, ids, remaining):
    model = get_peft_model(make_base("llama_gqa"), config_factory()).eval()
    model.add_adapter("second", config_factory(**remaining))
    opener(model, "second")
    model.set_adapter("second")
    expected = model(ids).logits
    model.set_adapter("default")
    model.delete_adapter("default")
    assert model.active_adapter == "second"
    assert torch.equal(model(ids).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_transformers_own_adapter_methods(make_base, config_factory, opener, ids, tmp_path, method):
    plain = make_base("llama_gqa")
    expected = plain(ids[:, :60]).logits
    model = make_base("llama_gqa")
    model.add_adapter(config_factory(method=method), adapter_name="books")
    opener(model, "books")
    with_memory = model(ids[:, :60]).logits
    assert not torch.allclose(with_memory, expected)
    model.disable_adapters()
    assert torch.equal(model(ids[:, :60]).logits, expected)
    model.enable_adapters()
    assert torch.equal(model(ids[:, :60]).logits, with_memory)
    model.save_pretrained(tmp_path)
    again = make_base("llama_gqa")
    again.load_adapter(str(tmp_path), adapter_name="books")
    assert torch.allclose(again(ids[:, :60]).logits, with_memory, atol=1e-5)
    model.delete_adapter("books")
    assert torch.equal(model(ids[:, :60]).logits, expected)


def test_what_cannot_work_says_why(make_base, make_model, config_factory, ids):
    model = make_model("llama_gqa")
    with pytest.raises(ValueError, match="cannot be merged.*cacheformers export ADAPTER OUT"):
        model.merge_and_unload()
    model.add_adapter("second", config_factory())
    with pytest.raises(ValueError, match="cannot be combined"):
        model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "third")
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match="one memory can be active"):
        model(ids)
    with pytest.raises(ValueError, match="cannot be merged"):
        model.merge_adapter()
    with pytest.raises(ValueError, match="cannot be merged"):
        model.unmerge_adapter()
    model.set_adapter("default")
    with pytest.raises(ValueError, match="cannot mix memories"):
        model(ids, adapter_names=["default", "second"])
    with pytest.raises(ValueError, match="DoRA"):
        config_factory(use_dora=True)


def test_starts_from_the_layers_own_weights(make_base, config_factory):
    base = make_base("llama_gqa")
    attention = base.model.layers[2].self_attn
    expected = {name: getattr(attention, f"{name}_proj").weight.clone() for name in "qkvo"}
    model = get_peft_model(base, config_factory())
    memory = model.base_model.model.model.layers[2].self_attn.memory
    for name in "qkvo":
        weight = getattr(memory, f"lora_mem_{name}")["default"].weight
        assert torch.equal(weight, expected[name][:, : weight.shape[1]])


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_deepcopy(make_model, ids, method):
    model = make_model("llama_gqa", method=method)
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("method", ["neurocache", "memorizing"])  # beside attention, and inside it
def test_compile(make_model, ids, method):
    model = make_model("llama_gqa", method=method)
    expected = model(ids).logits
    assert torch.allclose(torch.compile(model, backend="eager")(ids).logits, expected, atol=1e-12)


@pytest.mark.filterwarnings("error:The memory is not being trained")
@pytest.mark.parametrize(("base", "options"), every_method(["llama_gqa", "opt"]))
def test_a_training_step_moves_every_part(make_base, config_factory, ids, base, options):
    """Steps of a segment, and one of two segments: some methods learn what to store only there."""
    model = get_peft_model(make_base(base, torch.float32), config_factory(**options)).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    memory = None
    for part in ids[:, :64].split([16, 16, 32], 1):
        output = model(part, labels=part, past_key_values=memory)
        memory = output.past_key_values
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    still = [name for name, p in model.named_parameters() if p.requires_grad and torch.equal(p, before[name])]
    assert not still


def test_a_second_peft_model_around_one_base_is_refused(make_base, config_factory):
    base = make_base("llama_gqa")
    get_peft_model(base, config_factory("infini_attention"))
    with pytest.raises(ValueError, match="Two methods cannot share one base model .*infini_attention"):
        get_peft_model(base, config_factory("neurocache"))


@torch.no_grad()
def test_models_may_share_their_configuration(make_base, config_factory, ids):
    """A method inside attention changes the configuration, which a method beside attention does not mind."""
    base = make_base("llama_gqa")
    twin = type(base)._from_config(base.config, dtype=torch.float64)
    twin.load_state_dict(base.state_dict())
    alone = get_peft_model(make_base("llama_gqa"), config_factory("neurocache")).eval()
    get_peft_model(base, config_factory("infini_attention"))
    both = get_peft_model(twin, config_factory("neurocache")).eval()
    both.load_state_dict(alone.state_dict())
    assert torch.allclose(both(ids).logits, alone(ids).logits)


def test_two_methods_on_one_base_are_refused(make_model, config_factory):
    model = make_model("llama_gqa")
    with pytest.raises(ValueError, match="(?i)peft type|method"):
        model.add_adapter("lora", LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="(?i)peft type|method"):
        model.add_adapter("other", config_factory(method="memorizing"))


@torch.no_grad()
@pytest.mark.parametrize("method", ["neurocache", "memorizing"])
def test_a_memory_and_a_lora_adapter_load_in_either_order(make_base, config_factory, opener, ids, tmp_path, method):
    """transformers puts any two adapters on one model; either alone, and both, must compute the same."""
    make_base("llama_gqa", torch.float32).save_pretrained(tmp_path / "base")
    lora = LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    alone = {}
    for name, config in {"memory": config_factory(method=method), "lora": lora}.items():
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config).eval()
        opener(model)
        model.save_pretrained(tmp_path / name)
        alone[name] = model(ids[:, :60]).logits
    together = []
    for order in (["memory", "lora"], ["lora", "memory"]):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        for name in order:
            model.load_adapter(str(tmp_path / name), adapter_name=name)
        for name in order:
            model.set_adapter(name)
            assert torch.equal(model(ids[:, :60]).logits, alone[name]), (order, name)
        model.set_adapter(["memory", "lora"])
        together.append(model(ids[:, :60]).logits)
    assert torch.allclose(together[0], together[1], atol=1e-5)
    assert not torch.allclose(together[0], alone["memory"], atol=1e-3)


OTHER_BASES = {
    "width": ("llama_gqa", {"hidden_size": 64}, "llama, 3 layers of 64"),
    "depth": ("llama_gqa", {"num_hidden_layers": 1}, "llama, 1 layers of 32"),
    "family": ("mistral", {}, "mistral, 3 layers of 32"),
}


@pytest.mark.parametrize("other", OTHER_BASES)
def test_another_base_is_refused(saved, make_base, ids, other):
    """By what the base is, and not by the names of tensors that do not fit."""
    name, changes, described = OTHER_BASES[other]
    base_folder, adapter_folder, _ = saved("llama_gqa", ids)
    message = rf"made for {base_folder} \(llama, 3 layers of 32\), and this base is .*\({described}\)"
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(make_base(name, torch.float32, **changes), adapter_folder)
    plain = make_base(name, torch.float32, **changes)
    with pytest.raises(ValueError, match=message):
        plain.load_adapter(str(adapter_folder))
    assert not any("lora_" in key for key in plain.state_dict())
    shutil.rmtree(base_folder)
    make_base(name, torch.float32, **changes).save_pretrained(base_folder)  # another model has taken its place
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(adapter_folder)


def test_an_adapter_that_does_not_say_what_it_was_made_for(saved, make_base, ids):
    """As adapters were saved before: what does not fit says so."""
    _, adapter_folder, expected = saved("llama_gqa", ids)
    file = adapter_folder / "adapter_config.json"
    config = json.loads(file.read_text())
    del config["made_for"]
    file.write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="size mismatch"):
        PeftModel.from_pretrained(make_base("llama_gqa", torch.float32, hidden_size=64), adapter_folder)
    with pytest.raises(ValueError, match="Layers .* do not exist"):
        PeftModel.from_pretrained(make_base("llama_gqa", torch.float32, num_hidden_layers=1), adapter_folder)
    model = PeftModel.from_pretrained(make_base("llama_gqa", torch.float32), adapter_folder).eval()
    assert torch.equal(model(ids).logits, expected)


def test_a_loaded_config_can_start_on_another_base(saved, make_base, ids):
    _, adapter_folder, _ = saved("llama_gqa", ids)
    config = cacheformers.NeurocacheAdapterConfig.from_pretrained(adapter_folder)
    with pytest.raises(ValueError, match="A new adapter from its config needs inference_mode=False"):
        get_peft_model(make_base("mistral", torch.float32), config)
    config.inference_mode = False
    model = get_peft_model(make_base("mistral", torch.float32), config)
    assert bool(torch.isfinite(model(ids).logits).all())
    assert model.peft_config["default"].made_for == "mistral, 3 layers of 32"


def test_attention_that_was_changed_after_the_memory_was_put_in(make_model, ids):
    model = make_model("llama_gqa", method="memorizing")
    expected = model(ids).logits
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="took the memory out of attention: name 'cacheformers_sdpa'"):
        model(ids)
    model.set_attn_implementation("cacheformers_eager")
    assert torch.allclose(model(ids).logits, expected, atol=1e-5)


def test_attention_that_cannot_take_a_memory(make_base, config_factory):
    base = make_base("llama_gqa")
    base.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="load the model with attn_implementation='sdpa'"):
        get_peft_model(base, config_factory(method="memorizing"))


def test_a_pipeline_takes_an_adapter_without_a_warning(make_base, config_factory, tokenizer, ids, caplog):
    """It names every class that it knows where a model's class is not among them."""
    model = get_peft_model(make_base("llama_gqa", torch.float32), config_factory()).eval()
    with caplog.at_level("WARNING", logger="transformers"):
        transformers.logging.enable_propagation()
        asked = pipeline("text-generation", model=model, tokenizer=tokenizer)
        transformers.logging.disable_propagation()
    assert not [record.message for record in caplog.records if "not supported" in record.message]
    assert asked("w1 w2 w3", max_new_tokens=3)[0]["generated_text"].startswith("w1 w2 w3")


@torch.no_grad()
@pytest.mark.parametrize("base", ["llama_gqa", "opt"])
def test_a_base_without_a_head(make_base, config_factory, opener, ids, base):
    whole = make_base(base)
    expected = get_peft_model(whole, config_factory()).eval()
    opener(expected)
    headless = get_peft_model(make_base(base).base_model, config_factory()).eval()
    states = {key.split("layers.", 1)[1]: value for key, value in expected.state_dict().items() if "lora_" in key}
    for key, value in headless.state_dict().items():
        if "lora_" in key:
            value.copy_(states[key.split("layers.", 1)[1]])
    logits = whole.lm_head(headless(input_ids=ids).last_hidden_state)
    assert torch.allclose(logits, expected(ids).logits, atol=1e-9)
