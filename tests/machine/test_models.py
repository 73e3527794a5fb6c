"""Neurocache as model classes: what users of transformers expect of a model works."""

import copy
import importlib
import importlib.util
import pickle
from pathlib import Path

import pytest
import torch
from conftest import (
    BASES,
    METHODS,
    MORE_BASES,
    OTHERS,
    OWN_WINDOW,
    UNCHANGED,
    method_options,
    open_gates,
    other_cases,
    same_after_loading,
)
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    pipeline,
)

import cacheformers
from cacheformers import NeurocacheConfig, NeurocacheForCausalLM
from cacheformers.adapters.registration import register
from cacheformers.modeling.method import METHODS as REGISTERED

HEADS = ["granite", "gemma2", "gemma3", "cohere2", "phi3", "mixtral", "llama4"]  # of their own, or other weights
ALL = [*BASES, *MORE_BASES, *HEADS]
OPTIONS = method_options("neurocache")
CLASSES = {name: (method.config, method.model, method.causal_lm) for name, method in REGISTERED.items()}
CASES = [*((name, "neurocache") for name in ALL), *other_cases(("llama_gqa", "opt"))]


@pytest.fixture
def make(make_base):
    """Build a tiny base of the tables in conftest with an open memory on it."""

    def build(name="llama_gqa", dtype=torch.float32, base=None, method="neurocache", **options):
        made = CLASSES[method][2].from_base(make_base(name, dtype, **(base or {})), **method_options(method, **options))
        open_gates(made)
        return made

    return build


@pytest.fixture
def saved(make, tmp_path):
    """A model folder and the model that was saved there."""

    def build(name="llama_gqa", dtype=torch.float32, **options):
        model = make(name, dtype, **options)
        model.save_pretrained(tmp_path / "model")
        return tmp_path / "model", model

    return build


@torch.no_grad()
@pytest.mark.parametrize(("name", "method"), CASES)
def test_starts_as_the_base(make_base, ids, name, method):
    base = make_base(name)
    expected = base(ids[:, :16]).logits
    weights = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    head = next(key for key, module in base.named_modules() if module is base.get_output_embeddings())
    neutral = {"gate_bias": float("inf")} if method == "gated_attention" else {}
    model = CLASSES[method][2].from_base(base, **method_options(method, **neutral))
    difference = (model(ids[:, :16]).logits - expected).abs().max()
    assert difference < 1e-9 if method in OWN_WINDOW else difference == 0  # which computes it in another order
    ours = model.state_dict()
    for key, tensor in weights.items():
        if key.startswith(head):
            key = key.replace(head, "lm_head")
        else:
            key = key.removeprefix(f"{base.base_model_prefix}.").removeprefix("model.")  # Llama 4 has another prefix
            key = f"model.language_model.{key}"
        assert torch.equal(ours.pop(key), tensor)
    assert bool(ours) == (method not in UNCHANGED) and all(".memory." in key for key in ours)


@torch.no_grad()
def test_a_changed_base_is_taken_as_it_is(make_base, ids):
    base = make_base("llama_gqa", torch.float32)
    base.resize_token_embeddings(140)
    base.model.layers[0].mlp.down_proj = torch.nn.Linear(48, 32)
    expected = base(ids[:, :16]).logits
    assert torch.equal(NeurocacheForCausalLM.from_base(base, **OPTIONS)(ids[:, :16]).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize(("name", "method"), CASES)
def test_save_and_load(saved, ids, name, method):
    folder, model = saved(name, method=method)
    expected = model(ids).logits
    if method == "neurocache":
        forgetting = cacheformers.new_memory(model, 2, cache_size=0)
        assert not torch.allclose(model(ids, past_key_values=forgetting).logits, expected, atol=1e-3)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    _, model_class, causal_class = CLASSES[method]
    assert type(loaded) is causal_class
    assert same_after_loading(loaded(ids).logits, expected, method)
    headless = AutoModel.from_pretrained(folder)
    assert type(headless) is model_class
    assert same_after_loading(loaded.logits(headless(ids).last_hidden_state), expected, method)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_read_and_generate(make, ids, method):
    model = make(method=method)
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (2, 79)
    memory = cacheformers.read(model, ids, progress=False)
    assert memory.tokens_read == [75, 75]
    kept = copy.deepcopy(memory.state_dict())
    question = ids[:, :5]
    answers = [model.generate(question, past_key_values=memory.clone(), max_new_tokens=4) for _ in range(2)]
    assert torch.equal(*answers)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in memory.state_dict().items())
    logits = model(question, past_key_values=memory.clone()).logits
    assert torch.allclose(logits, model(question).logits, atol=1e-3) == (method in UNCHANGED)
    last = model(question, past_key_values=memory.clone(), logits_to_keep=1).logits
    assert last.shape[1] == 1
    assert torch.allclose(last, logits[:, -1:], atol=1e-6)


@torch.no_grad()
def test_tuples_and_hidden_states(make, ids):
    model = make()
    output = model(ids[:, :10], labels=ids[:, :10], output_hidden_states=True)
    assert len(output.hidden_states) == 4
    loss, logits = model(ids[:, :10], labels=ids[:, :10], return_dict=False)[:2]
    assert torch.equal(loss, output.loss)
    assert torch.equal(logits, output.logits)


# Weights that are drawn anew, such as W_P, which must tell a segment's vectors apart: how far they spread at least.
DRAWN = {"cacheformer_on_base": 0.1, "neurocache": 0.05, "recurrent_memory": 0.01}


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_from_scratch(make_base, ids, method):
    """At once, and on the meta device first: `to_empty` leaves garbage, here NaN, and what was loaded stays."""
    config = CLASSES[method][0](text_config=make_base("llama_gqa").config, **method_options(method))
    made = AutoModelForCausalLM.from_config(config)
    with torch.device("meta"):
        filled = AutoModelForCausalLM.from_config(config)
    filled.to_empty(device="cpu")
    for tensor in [*filled.parameters(), *filled.buffers()]:
        tensor.fill_(float("nan"))
    loaded = [*filled.lm_head.parameters(), *(part for memory in filled.memories() for part in memory.parameters())][-1]
    loaded.fill_(0.25)
    loaded._is_hf_initialized = True
    filled.init_weights()
    assert bool((loaded == 0.25).all()), "what was loaded stays"
    for model in (made.eval(), filled.eval()):
        assert type(model) is CLASSES[method][2]
        assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
        assert bool(torch.isfinite(model(ids).logits).all())
        fresh = [part for memory in model.memories() for part in memory.children()]
        expected = [p for m in made.memories() for p in m.method.make_parts(m.options, m.layer, None).values()]
        assert len(fresh) == len(expected)
        for part, start in zip(fresh, expected, strict=True):
            for name, value in start.named_parameters():
                ours = part.get_parameter(name)
                if ours is not loaded and method in DRAWN and value.dim() > 1:
                    assert float(ours.std()) > DRAWN[method]
                elif ours is not loaded:
                    assert torch.equal(ours, value.to(ours))
        if method == "cacheformer_on_base":
            assert all(float(p.abs().max()) <= 12**-0.5 for part in fresh for p in part.parameters() if p is not loaded)
        if method == "neurocache":
            assert float(model.memories()[0].down.weight.std()) == pytest.approx(32**-0.5, rel=0.2)


LOST = ["memory.down.weight", "memory.gate.weight", "2.self_attn.memory.q", "layers.0.mlp", "lm_head", "memory.norm"]


@pytest.mark.parametrize(
    ("method", "door"),
    [
        *(("neurocache", door) for door in (AutoModelForCausalLM, NeurocacheForCausalLM)),
        *((method, AutoModelForCausalLM) for method in OTHERS if method not in UNCHANGED),
    ],
)
def test_a_missing_tensor_is_an_error(saved, method, door):
    """Some of every kind, and of the other methods each of the memory's."""
    folder, _ = saved(method=method)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    lost = LOST if method == "neurocache" else [key for key in tensors if ".memory." in key]
    for victim in (next(key for key in tensors if part in key) for part in lost):
        save_file({key: tensor for key, tensor in tensors.items() if key != victim}, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"has no tensors for .*{victim}"):
            door.from_pretrained(folder)


def test_misshapen_tensors_and_undescribed_memories_are_errors(saved):
    folder, model = saved()
    file = folder / "model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if "memory.q" in key)
    save_file({**tensors, key: tensors[key][:-1].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="(?i)mismatch"):
        AutoModelForCausalLM.from_pretrained(folder)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="does not describe.*layers.1.self_attn.memory"):
        AutoModelForCausalLM.from_pretrained(folder, attention_layers=[2])


def test_what_cannot_work_says_why(make_base, make, make_model, tmp_path):
    with pytest.raises(ValueError, match="memory already"):
        NeurocacheForCausalLM.from_base(make())
    with pytest.raises(ValueError, match="memory already|not a causal"):
        NeurocacheForCausalLM.from_base(make_model("llama_gqa"))
    with pytest.raises(ValueError, match="LlamaModel is not a causal language model"):
        NeurocacheForCausalLM.from_base(make_base("llama_gqa").model)
    with pytest.raises(ValueError, match="Layers .9. do not exist"):
        NeurocacheForCausalLM.from_base(make_base("llama_gqa"), retrieval_map={9: 9})
    with pytest.raises(ValueError, match="'gpt2' is not supported. Supported: .*llama"):
        NeurocacheForCausalLM(NeurocacheConfig(text_config={"model_type": "gpt2"}))
    make_base("llama_gqa", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'llama' model, not of a 'neurocache' one.*NeurocacheForCausalLM.from_base"):
        NeurocacheForCausalLM.from_pretrained(tmp_path)


def test_config_round_trip(make, tmp_path):
    config = make("opt", attention_layers=[1, 2], cache_dtype="int8").config
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is NeurocacheConfig
    assert type(again.text_config).model_type == "opt"
    again.name_or_path = config.name_or_path
    assert again.to_dict() == config.to_dict()
    assert again.retrieval_map == {1: 1}
    assert again.options() == config.options()


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights(make, tmp_path, ids, tied):
    model = make(base={"tie_word_embeddings": tied})
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tied)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (again.lm_head.weight is again.get_input_embeddings().weight) == tied
    assert torch.equal(again(ids).logits, model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama_gqa", "opt", "gpt_neox"])
def test_resize_token_embeddings(make, tmp_path, ids, name):
    model = make(name)
    before = model(ids).logits
    model.resize_token_embeddings(150)
    assert model.get_input_embeddings().weight.shape[0] == model.lm_head.weight.shape[0] == 150
    assert torch.allclose(model(ids).logits[..., :128], before, atol=1e-5)
    memory = cacheformers.read(model, torch.full((1, 20), 149), progress=False)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.text_config.vocab_size == 150
    assert torch.equal(again(ids).logits, model(ids).logits)
    again(ids[:1, :4], past_key_values=memory.clone())  # a memory of the resized model belongs to the loaded one


@torch.no_grad()
def test_half_precision(saved, ids):
    """The memory's weights stay in float32, as the adapters'."""
    folder, model = saved()
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    kinds = {name: parameter.dtype for name, parameter in half.named_parameters()}
    assert {kind for name, kind in kinds.items() if ".memory." in name} == {torch.float32}
    assert {kind for name, kind in kinds.items() if ".memory." not in name} == {torch.bfloat16}
    assert half.dtype == half(ids).logits.dtype == torch.bfloat16
    half.save_pretrained(folder / "half")
    again = AutoModelForCausalLM.from_pretrained(folder / "half", dtype="auto")
    assert {name: parameter.dtype for name, parameter in again.named_parameters()} == kinds
    assert torch.equal(again(ids).logits, half(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_attention_implementation(saved, ids, method):
    folder, model = saved(method=method)
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    routed = "cacheformers_" if eager.config.method.attend else ""
    assert eager.model.language_model.config._attn_implementation == f"{routed}eager"
    assert model.model.language_model.config._attn_implementation == f"{routed}sdpa"
    assert "cacheformers_" not in (folder / "config.json").read_text()
    assert torch.allclose(eager(ids).logits, model(ids).logits, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_copies(make, ids, method):
    model = make(method=method)
    expected = model(ids).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        open_gates(twin)
        assert torch.equal(twin(ids).logits, expected)
        for parameter in twin.parameters():
            parameter.data.zero_()
    assert torch.equal(model(ids).logits, expected)


def test_pipeline(saved, tokenizer):
    folder, model = saved()
    tokenizer.save_pretrained(folder)
    text = " ".join(f"w{i}" for i in range(40))
    (answer,) = pipeline("text-generation", model=str(folder))(text, max_new_tokens=4, do_sample=False)
    tokens = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert answer["generated_text"] == text + tokenizer.decode(tokens[0, 40:], skip_special_tokens=True)


SEGMENTS = [torch.arange(16) % 8 + 3 + number % 2 for number in range(8)]


@pytest.mark.parametrize(("method", "checkpointing"), [("neurocache", False), ("memorizing", True)])
def test_trainer(make, tmp_path, method, checkpointing):
    model = make(method=method)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=10,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=10,
        report_to=[],
        use_cpu=True,
        gradient_checkpointing=checkpointing,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids} for ids in SEGMENTS])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] / 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-10")
    ids = SEGMENTS[0][None]
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("options", [{}, {"compression_factor": 1}, {"compression_factor": 1, "hit_scores": True}])
def test_activation_checkpointing_gives_the_same_gradients(make, ids, options):
    def gradients(checkpointing):
        model = make(dtype=torch.float64, **options).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        memory, loss = None, 0
        for start in range(0, 64, 16):
            part = ids[:, start : start + 16]
            output = model(part, labels=part, memory_state=memory, past_key_values=None if checkpointing else memory)
            memory, loss = output.past_key_values, loss + output.loss
        loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    plain, checkpointed = gradients(False), gradients(True)
    assert all(torch.allclose(plain[name], checkpointed[name], atol=1e-12) for name in plain)


@torch.no_grad()
def test_lora_on_top(saved, ids, tmp_path):
    folder, _ = saved()
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = model(ids).logits
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)).eval()
    changed = adapted(ids).logits
    assert not torch.allclose(changed, expected, atol=1e-3)
    assert cacheformers.read(adapted, ids, progress=False).tokens_read == [75, 75]
    with adapted.disable_adapter():
        assert torch.equal(adapted(ids).logits, expected)
    adapted.save_pretrained(tmp_path / "lora")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "lora").eval()
    assert torch.equal(again(ids).logits, changed)
    assert torch.allclose(adapted.merge_and_unload()(ids).logits, changed, atol=1e-4)


def test_training_the_memory_beside_lora(make, ids):
    config = LoraConfig(target_modules=["down_proj"], modules_to_save=["memory"])
    model = get_peft_model(make(), config).train()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("memory.modules_to_save.default.gate" in name for name in trained)
    model(ids, labels=ids).loss.backward()
    gates = [p for name, p in model.named_parameters() if "modules_to_save.default.gate" in name]
    assert all(bool(gate.grad.any()) for gate in gates)


def test_what_peft_cannot_do_on_top_says_why(make, config_factory, ids):
    with pytest.raises(ValueError, match="LoRA was put on the memory .*modules_to_save"):
        get_peft_model(make(), LoraConfig(target_modules="all-linear"))(ids)
    with pytest.raises(ValueError, match="memory"):
        get_peft_model(make(), config_factory())


def test_registered_once_more():
    register(REGISTERED["windowed"])
    root = Path(cacheformers.__file__)
    spec = importlib.util.spec_from_file_location("clone_under_another_name", root)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.NeurocacheForCausalLM is NeurocacheForCausalLM
    assert type(AutoConfig.for_model("neurocache")) is NeurocacheConfig


def test_other_models_are_as_before(make_base, tmp_path):
    make_base("llama_gqa", torch.float32).save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is LlamaForCausalLM
