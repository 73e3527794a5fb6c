"""A whole model trained from scratch: the same loop, checkpoints, evaluation and results as adapters have."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from recipe import make_text
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cacheformers import CacheFormerConfig, train_adapt
from cacheformers.common.documents import Documents
from cacheformers.evaluation.held_out import held_out, token_nats
from cacheformers.evaluation.readers import Forgetting, Remembering
from cacheformers.training.scratch import model_config
from cacheformers.training.tokenizer import BYTES, END, open_tokenizer

ROOT = Path(__file__).resolve().parents[2]

DECODER = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "llama": {**DECODER, "segment_tokens": 16},
    "neurocache": {
        "model_type": "neurocache",
        "text_config": DECODER,
        "segment_tokens": 16,
        "cache_size": 40,
        "topk": 4,
        "gate": "none",
    },
    "cacheformer": {
        "model_type": "cacheformer",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "segment_tokens": 16,
        "window_tokens": 4,
        "pool_tokens": 4,
        "pool_vectors": 2,
        "topk": 1,
    },
}
READERS = {
    "llama": {"llama": Forgetting()},
    "cacheformer": {"cacheformer": Forgetting()},
    "neurocache": {"cache off": Remembering(0), "cache 40": Remembering(40), "cache 80": Remembering(80)},
}


def arguments(folder, model, *more, output="model"):
    """A run over the documents of the fixture `folder`."""
    (folder / f"{model}.json").write_text(json.dumps(CONFIGS[model]))
    options = {
        **{"init": "scratch", "model_config": folder / f"{model}.json", "tokenizer": folder / "base", "rate": 1e-2},
        **{"train": folder / "train.jsonl", "output": folder / output, "steps": 5, "lanes": 2},
    }
    return [*(f"--{key}={value}" for key, value in options.items()), *more]


def weights_of(folder, output):
    return load_file(folder / output / "model.safetensors")


def result_of(folder, output="model"):
    return json.loads((folder / output / "train_result.json").read_text())


@pytest.mark.parametrize("model", list(CONFIGS))
def test_a_run(folder, model):
    """Train, save, load as any model: it scores what it scored, with every cache size."""
    train_adapt.main(arguments(folder, model, f"--valid={folder / 'valid.jsonl'}", "--steps=8"))
    result = result_of(folder)
    assert len(result["losses"]) == 8 and result["losses"][-1] < result["losses"][0]
    assert list(result["scores"]) == list(READERS[model])
    card = (folder / "model" / "README.md").read_text()
    assert "Trained from scratch" in card and f"{result['trained_parameters']:,} parameters" in card

    loaded = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    assert loaded.config.model_type == model and loaded.dtype == torch.float32
    assert sum(parameter.numel() for parameter in loaded.parameters()) == result["trained_parameters"]
    assert loaded.get_input_embeddings().weight.shape[0] == 128  # as the tokenizer has
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    valid = held_out(Documents([make_text(70, 70), make_text(50, 50)], tokenizer))
    for name, reader in READERS[model].items():
        nats = sum(float(losses.sum()) for losses in token_nats(loaded, valid, reader, 16))
        assert nats == pytest.approx(result["scores"][name]["nats"], rel=1e-6)


def test_autocast_keeps_weights_in_float32(folder):
    losses = {}
    for precision in ("bf16", "float32"):
        AcceleratorState._reset_state(reset_partial_state=True)
        train_adapt.main(arguments(folder, "neurocache", f"--precision={precision}", "--overwrite"))
        losses[precision] = result_of(folder)["losses"]
        assert AutoModelForCausalLM.from_pretrained(folder / "model").dtype == torch.float32
    assert losses["bf16"] != losses["float32"] and losses["bf16"] == pytest.approx(losses["float32"], rel=1e-2)


SETTINGS = ("--lanes=4", "--accumulation=2", "--steps=8", "--checkpoint_every=2", "--log_every=3", "--gate_factor=5")


@pytest.mark.parametrize(
    ("model", "optimizer"), [("neurocache", "adafactor"), ("llama", "adamw"), ("cacheformer", "adamw")]
)
def test_a_stopped_run_goes_on_bit_by_bit(documents, model, optimizer):
    settings = (*SETTINGS, f"--optimizer={optimizer}")
    train_adapt.main(arguments(documents, model, *settings, output="whole"))
    for _ in range(3):
        train_adapt.main(arguments(documents, model, *settings, "--stop_after=1e-9", "--resume"))
    checkpoint = documents / "model" / "checkpoints" / "step-00000003"
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.model_type == model
    assert not (documents / "model" / "config.json").exists()
    train_adapt.main(arguments(documents, model, *settings, "--resume"))
    torch.testing.assert_close(weights_of(documents, "model"), weights_of(documents, "whole"), rtol=0, atol=0)
    assert result_of(documents)["losses"] == result_of(documents, "whole")["losses"]


def test_checkpointing_and_the_start_are_as_they_should_be(documents):
    """Activation checkpointing changes nothing; another seed starts from other weights."""
    losses = []
    for more in ((), ("--activation_checkpointing",), ("--seed=1",)):
        train_adapt.main(arguments(documents, "neurocache", *more, "--overwrite"))
        losses.append(result_of(documents)["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2][0] != pytest.approx(losses[0][0], rel=1e-4)


def test_gates_learn_from_their_own_loss(folder, monkeypatch):
    """The weight of the mean gate pulls gates down, beside what the text teaches them."""
    gates = {}
    for weight in (0.0, 5.0):
        config = {"model_type": "gated_attention", "text_config": DECODER, "segment_tokens": 16, "window_tokens": 6}
        monkeypatch.setitem(CONFIGS, "gated_attention", {**config, "gate_bias": 0.0, "mean_weight": weight})
        more = ("--max_tokens=64", "--log_every=1", "--overwrite", "--steps=8")
        train_adapt.main(arguments(folder, "gated_attention", *more))
        gates[weight] = [entry["token_gate_mean"] for entry in result_of(folder)["log"] if "token_gate_mean" in entry]
    assert gates[0.0][0] == pytest.approx(gates[5.0][0], abs=0.01)
    assert gates[5.0][-1] < min(gates[5.0][0], gates[0.0][-1]) - 0.02


@pytest.mark.parametrize("model", list(CONFIGS))
def test_a_saved_configuration_is_taken(folder, model):
    """With what transformers adds to it: names, versions, ids."""
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[model]))
    made.save_pretrained(folder / "saved")
    path = folder / "saved" / "config.json"
    saved = json.loads(path.read_text())
    assert {"architectures", "transformers_version"} <= saved.keys()
    path.write_text(json.dumps({**saved, "_name_or_path": "elsewhere", "vocab_size": 128}))
    tokenizer = open_tokenizer(str(folder / "base"))
    if model in ("llama", "cacheformer"):
        assert model_config(path, tokenizer).segment_tokens == 16
    else:
        saved["text_config"].update(vocab_size=128, _name_or_path="elsewhere")
        path.write_text(json.dumps({**saved, "_name_or_path": "elsewhere"}))
        assert model_config(path, tokenizer).cache_size == 40


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--topk=4", "--segment_tokens=8"], "segment_tokens, topk: with --init scratch the memory's options stand in"),
        (["--base=nowhere", "--quantize=nf4"], "base, quantize: only with --init pretrained"),
        (["--distill=0.5", "--distill_all"], "distill, distill_all: only with --init pretrained"),
        (["--init=pretrained", "--base=x"], "model_config, rate, tokenizer: only with --init scratch"),
        (["--model_config={folder}/nowhere.json"], "nowhere.json"),
        (["--model_config={folder}/list.json"], "is no model configuration"),
        (["--model_config={folder}/text.json"], "is not valid JSON"),
        (["--model_config={folder}/typo.json"], "has no option 'segment_token': did you mean 'segment_tokens'?"),
        (["--model_config={folder}/type.json"], "'lama' is unknown to transformers and to this package"),
        (["--model_config={folder}/small.json"], "The tokenizer has 128 entries, the model 100"),
        (["--model_config={folder}/kind.json"], "expected int, got str"),
        (["--model_config={folder}/long.json"], "segment_tokens must be from 1 to max_position_embeddings 64, got 65"),
        (["--model_config={folder}/pool.json"], "pool_tokens 40 is more than two windows of 4"),
        (["--backprop_segments=2"], "backprop_segments is for memories"),
        (["--start_from={folder}/base", "--model_config={folder}/cacheformer.json"], "base is a llama model, not a"),
        (["--start_from={folder}/base", "--tokenizer=bytes"], "base was trained with another tokenizer"),
        (["--start_from={folder}/base"], "base alone has lm_head.weight; has in another shape model.layers.0"),
        (["--output={folder}/taken"], "already holds a model"),
        (["--valid={folder}/valid.jsonl", "--controls=longer_window"], "this model stores nothing"),
    ],
)
def test_bad_options(folder, refused, more, message):
    wrong = {
        "list": "[]",
        "text": "model_type: llama",
        "typo": json.dumps({"model_type": "neurocache", "segment_token": 16}),
        "type": json.dumps({"model_type": "lama"}),
        "small": json.dumps({**DECODER, "vocab_size": 100}),
        "kind": json.dumps({**DECODER, "hidden_size": "32"}),
        "long": json.dumps({**DECODER, "segment_tokens": 65}),
        "pool": json.dumps({**CONFIGS["cacheformer"], "pool_tokens": 40}),
        "cacheformer": json.dumps(CONFIGS["cacheformer"]),
    }
    for name, text in wrong.items():
        (folder / f"{name}.json").write_text(text)
    (folder / "taken").mkdir()
    (folder / "taken" / "config.json").write_text("{}")
    given = arguments(folder, "llama", *(word.format(folder=folder) for word in more))
    assert message in refused(train_adapt.main, given)
    assert not (folder / "model").exists()


# Starting from an earlier run


def test_the_cache_joins_a_model_that_was_trained_without(folder, monkeypatch, capsys, refused):
    """Weights are those of the first run, switches those of the second; other weights are refused."""
    whole = CONFIGS["cacheformer"]
    monkeypatch.setitem(CONFIGS, "cacheformer", {**whole, "cache": False})
    train_adapt.main(arguments(folder, "cacheformer", output="first"))
    monkeypatch.setitem(CONFIGS, "cacheformer", whole)
    more = (f"--start_from={folder / 'first'}", "--rate=0", "--steps=2")
    train_adapt.main(arguments(folder, "cacheformer", *more))
    assert "cache False -> True): " in capsys.readouterr().out
    torch.testing.assert_close(weights_of(folder, "model"), weights_of(folder, "first"), rtol=0, atol=0)
    assert AutoConfig.from_pretrained(folder / "model").cache
    for change, message in (
        ({"num_hidden_layers": 3}, "lacks model.layers.2.input_layernorm.bias"),
        ({"long": False, "overlap": False, "cache": False}, "alone has model.layers.0.self_attn.memory.global_norm"),
        ({"pool_vectors": 3}, "has in another shape model.layers.0.self_attn.memory.pool.weight"),
    ):
        monkeypatch.setitem(CONFIGS, "cacheformer", {**whole, **change})
        assert message in refused(train_adapt.main, arguments(folder, "cacheformer", *more, output="other"))


def test_the_papers_rule_is_trained_and_its_losses_are_told_apart(folder, monkeypatch, capsys):
    monkeypatch.setitem(CONFIGS, "cacheformer", {**CONFIGS["cacheformer"], "selection": "paper_block"})
    with pytest.warns(UserWarning, match="not what a decoder"):
        train_adapt.main(arguments(folder, "cacheformer", f"--valid={folder / 'valid.jsonl'}"))
    result = result_of(folder)
    assert "no decoder obtains this" in result["scores"]["cacheformer"]["note"]
    assert "no decoder obtains this" in capsys.readouterr().out


def test_scratch_takes_a_configuration_and_a_tokenizer(refused):
    for given, message in (([], "--base is needed"), (["--init=scratch"], "needs --model_config")):
        assert message in refused(train_adapt.main, [*given, "--train=a", "--output=a"])


# Tokenizers


def test_bytes():
    tokenizer = open_tokenizer("bytes")
    text = "naïve — “Loomings”\n\n  1851 \x00"
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode()) and len(tokenizer) == BYTES
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == tokenizer(END).input_ids[0] == 256
    without = open_tokenizer("bytes", 256)
    assert without(END).input_ids == list(END.encode()) and len(without) == 256 and without.eos_token is None


def test_a_model_over_256_bytes(folder):
    """The papers' vocabulary: nothing but bytes, with which the saved model is read again."""
    config = {**CONFIGS["cacheformer"], "vocab_size": 256}
    CacheFormerConfig(**config).save_pretrained(folder / "made")
    more = [f"--model_config={folder / 'made' / 'config.json'}", "--tokenizer=bytes"]
    train_adapt.main(arguments(folder, "cacheformer", *more, f"--valid={folder / 'valid.jsonl'}"))
    result = result_of(folder)
    scored = result["scores"]["cacheformer"]
    assert scored["characters"] == scored["tokens"] == len(make_text(70, 70)) + len(make_text(50, 50)) - 2
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert loaded.config.eos_token_id is None and loaded.get_input_embeddings().num_embeddings == 256
    assert AutoTokenizer.from_pretrained(folder / "model")("A\n").input_ids == [65, 10]


def test_a_tokenizer_is_learned_and_used(folder, monkeypatch, capsys, refused):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "recipes")])
    recipe = importlib.import_module("train_tokenizer")
    made = folder / "tokenizer"
    recipe.main([str(folder / "train.jsonl"), f"--output={made}", "--vocab=300"])
    assert "300 entries from" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(made)
    text = make_text(40) + " ünseen\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer(text).input_ids) < len(text.encode())
    train_adapt.main(arguments(folder, "neurocache", f"--tokenizer={made}", "--steps=2"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.get_input_embeddings().num_embeddings == len(tokenizer) == 300
    assert model.config.text_config.eos_token_id == tokenizer.eos_token_id

    (folder / "blank.jsonl").write_text(json.dumps({"text": ""}) + "\n")
    for name, vocabulary, message in (("train", 9, "at least 257"), ("blank", 300, "All documents are empty")):
        given = [str(folder / f"{name}.jsonl"), f"--output={made}", f"--vocab={vocabulary}"]
        assert message in refused(recipe.main, given)
