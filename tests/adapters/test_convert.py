"""Checkpoint folders of the published package become adapters that give its logits; what cannot is refused."""

import json
from pathlib import Path

import pytest
import torch
from golden import publish
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from cacheformers.methods.neurocache import convert as converter
from cacheformers.methods.neurocache.convert import convert, main

BASE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
SETTINGS = {
    "retrieval_map": {"2": 2},
    "attention_layers": [2, 3],
    "cache_size": 64,
    "compression_factor": 4,
    "topk": 4,
    "neighborhood_size": 2,
    "context_size": 2,
    "similarity_fn": "l2",
    "cache_dtype": "float32",
    "cache_type": "FIFO",
    "global_cache": False,
}


def random_weights(hidden=32, width=8, layers=2, rank=0):
    """A checkpoint's tensors for the base model above, with LoRA on its feed-forward blocks where a rank is given."""
    torch.manual_seed(3)
    weights = {}
    if width < hidden:
        weights = {"h_proj.weight": torch.randn(width, hidden) / hidden**0.5}
        weights |= {"h_norm.weight": 1 + torch.randn(width) / 10, "h_norm.bias": torch.randn(width) / 10}
    for number in range(layers):
        for part, shape in {"q": (32, hidden), "k": (16, width), "v": (16, width), "o": (hidden, 32)}.items():
            weights[f"cache_attns.{number}.{part}_proj.weight"] = torch.randn(shape) / shape[1] ** 0.5
    for layer in (2, 3) if rank else ():
        for module, (outputs, inputs) in {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}.items():
            name = f"model.layers.{layer}.mlp.{module}.lora_"
            weights[name + "A.weight"] = torch.randn(rank, inputs) / 6
            weights[name + "B.weight"] = torch.randn(outputs, rank) / 3
    return weights


@pytest.fixture(scope="module")
def base(tmp_path_factory, make_base):
    folder = tmp_path_factory.mktemp("base")
    make_base("llama_gqa", torch.float32, **BASE, head_dim=8).save_pretrained(folder)
    return folder


@torch.no_grad()
@pytest.mark.parametrize("prefix", ["", "base_model.model."], ids=["injected", "wrapped by PEFT"])
def test_lora_weights_come_along(tmp_path, base, prefix):
    """As much as the same checkpoint without LoRA, on a base into which LoRA was merged by hand."""
    weights, rank, alpha = random_weights(rank=4), 4, 8
    named = {(prefix if "lora" in name else "") + name: weight for name, weight in weights.items()}
    publish(tmp_path / "with", SETTINGS, named)
    publish(tmp_path / "without", SETTINGS, {name: w for name, w in weights.items() if "lora" not in name})
    convert(tmp_path / "with", tmp_path / "lora", base, lora_alpha=alpha)
    convert(tmp_path / "without", tmp_path / "plain", base)
    merged = AutoModelForCausalLM.from_pretrained(base)
    for name, matrix in weights.items():
        if name.endswith("lora_A.weight"):
            module = merged.get_submodule(name.removesuffix(".lora_A.weight"))
            module.weight += alpha / rank * weights[name.replace("lora_A", "lora_B")] @ matrix
    ids = torch.randint(32, (2, 16))
    results = []
    for model in (
        PeftModel.from_pretrained(merged, tmp_path / "plain"),
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "lora"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "lora"),
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "plain"),
    ):
        memory = model(ids[:, :8], use_cache=False).past_key_values
        results.append(model(ids[:, 8:], past_key_values=memory, use_cache=False).logits)
    by_hand, peft, auto, without = results
    assert torch.allclose(by_hand, peft, atol=1e-4)
    assert torch.equal(peft, auto)
    assert not torch.allclose(peft, without, atol=1e-2)


def test_default_layers_without_compression(tmp_path, base):
    settings = {**SETTINGS, "retrieval_map": None, "attention_layers": None, "compression_factor": 1}
    publish(tmp_path / "published", settings, random_weights(width=32, layers=1), "safetensors")
    out = convert(tmp_path / "published", tmp_path / "new" / "adapter", base)
    tensors = load_file(out / "adapter_model.safetensors")
    assert {name.rpartition(".layers.")[2] for name in tensors} == {
        f"3.self_attn.memory.lora_mem_{part}.weight" for part in "qkvo"
    }
    written = ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == written
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)


def without(weights, name):
    return {key: tensor for key, tensor in weights.items() if key != name}


LORA = random_weights(rank=4)
PLAIN = without(random_weights(), "")
REFUSED = {
    "an LRU cache": ({"cache_type": "LRU"}, PLAIN, "least-recently-used"),
    "a global cache": ({"global_cache": True}, PLAIN, "documents never mix"),
    "a repeated layer": ({"attention_layers": [2, 3, 3]}, random_weights(layers=3), "names a layer twice"),
    "k above the store": ({"topk": 65}, PLAIN, "topk 65 .* must not exceed cache_size 64"),
    "release 0.0.1": ({"cache_layers": [2]}, PLAIN, "0.0.1"),
    "another kind": ({"neurocache_type": "REMOTE"}, PLAIN, "REMOTE"),
    "a wrong type": ({"topk": "4"}, PLAIN, "topk is '4'"),
    "an impossible option": ({"neighborhood_size": 3}, PLAIN, "must be 1 or even"),
    "a missing tensor": ({}, without(PLAIN, "h_norm.bias"), r"Missing: \[.*lora_mem_norm.bias"),
    "a missing layer": ({"attention_layers": [1, 2, 3], "retrieval_map": {"1": 1}}, PLAIN, "Missing: .*layers.3"),
    "a layer too many": ({"attention_layers": [2]}, PLAIN, "cache attention number 1"),
    "half a LoRA": ({}, without(LORA, "model.layers.3.mlp.up_proj.lora_A.weight"), "Missing: .*3.mlp.up_proj.lora_A"),
    "an unknown tensor": ({}, {**PLAIN, "h_gate.weight": torch.ones(2)}, "unknown meaning: h_gate.weight"),
    "another base's shapes": ({"compression_factor": 2}, PLAIN, "has shape"),
    "another hidden size": ({}, random_weights(hidden=64), "has shape .*another base model"),
    "more than tensors": ({}, {"h_proj.weight": "text"}, "does not hold a dictionary of tensors"),
    "code in a pickle": ({}, {"h_proj.weight": Path("x")}, "holds more than tensors"),
}


def assert_refused(reason, published, out, base, *options):
    """The command ends with a reason and leaves nothing behind."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(SystemExit, match=f"(?s)Nothing was written: .*{reason}"):
        main([str(published), str(out), "--base", str(base), *options])
    assert sorted(out.parent.iterdir()) == before


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, base, case):
    changes, weights, reason = REFUSED[case]
    publish(tmp_path / "published", {**SETTINGS, **changes}, weights)
    options = ["--lora-alpha", "8"] if "LoRA" in case else []
    assert_refused(reason, tmp_path / "published", tmp_path / "out", base, *options)


def test_alpha_is_asked_for(tmp_path, base):
    publish(tmp_path / "lora", SETTINGS, LORA)
    publish(tmp_path / "plain", SETTINGS, PLAIN)
    assert_refused("rank 4.*pass --lora-alpha", tmp_path / "lora", tmp_path / "out", base)
    assert_refused("holds no LoRA", tmp_path / "plain", tmp_path / "out", base, "--lora-alpha", "8")


def test_wrong_bases_are_refused(tmp_path):
    publish(tmp_path / "published", SETTINGS, PLAIN)
    LlamaConfig(**{**BASE, "num_hidden_layers": 3}).save_pretrained(tmp_path / "shallow")  # more is not read
    GPT2Config(n_layer=1, n_embd=32, n_head=4).save_pretrained(tmp_path / "unknown")
    for base, reason in (
        ("shallow", "this base model has layers 0 to 2"),
        ("unknown", "'gpt2' is not supported"),
        ("nowhere", "nowhere"),
    ):
        assert_refused(reason, tmp_path / "published", tmp_path / "out", tmp_path / base)


def test_damaged_folders_are_refused(tmp_path, base):
    published, out = publish(tmp_path / "published", SETTINGS, PLAIN, "safetensors"), tmp_path / "out"
    weights, config = published / "neurocache_model.safetensors", published / "neurocache_config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert_refused("is damaged", published, out, base)
    weights.unlink()
    assert_refused("has no weights", published, out, base)
    (published / "neurocache_model.bin").write_bytes(b"PK\x03\x04 and nothing else")
    assert_refused("is damaged", published, out, base)
    config.write_text(json.dumps(without(SETTINGS, "topk")))
    assert_refused("lacks topk", published, out, base)
    config.write_text("{")
    assert_refused("is damaged", published, out, base)
    config.unlink()
    assert_refused("is not a checkpoint folder", published, out, base)


def test_nothing_is_left_when_writing_fails(tmp_path, base, monkeypatch):
    publish(tmp_path / "published", SETTINGS, PLAIN)

    def full(*args, **kwargs):
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(converter, "save_file", full)
        assert_refused("no space left", tmp_path / "published", tmp_path / "out", base)
    out = convert(tmp_path / "published", tmp_path / "out", base)
    assert json.loads((out / "adapter_config.json").read_text())["compatibility"] == "reference"
    assert_refused("exists already", tmp_path / "published", out, base)
