"""`train_adapt.py` with every memory method: options, runs, resuming, evaluation, what is refused."""

import dataclasses
import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from conftest import UNCHANGED
from peft import PeftConfig
from recipe import adapter_weights, largest_difference, make_text, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheformers import train_adapt
from cacheformers.common.documents import Documents
from cacheformers.evaluation.held_out import held_out, token_nats
from cacheformers.evaluation.readers import Forgetting, Remembering
from cacheformers.training.methods import chosen_options, head_map, options_of

METHODS = {
    "neurocache": ("--cache_size=40", "--topk=4", "--retrieval_map=1"),
    "toy": ("--cache_size=40",),
    "memorizing": ("--cache_size=40", "--topk=4", "--attention_layers=1"),
    "infini_attention": ("--layers", "1", "2"),
    "gated_deltanet": ("--layers", "1", "2", "--backprop_segments=2"),
    "recurrent_memory": ("--memory_tokens=4", "--backprop_segments=2"),
    "gated_attention": ("--layers", "1", "2", "--window_tokens=6", "--mean_weight=0.1", "--max_tokens=64"),
    "cacheformer_on_base": (
        *("--layers", "1", "2", "--window_tokens=8", "--pool_tokens=4", "--topk=2", "--max_tokens=64"),
    ),
    "retrieval_heads": ("--cache_size=40", "--heads=1:0"),
    "windowed": ("--local_window=sliding", "--window_tokens=10", "--sink_tokens=2"),
}
# What a card says of the rates; token gates and the scale of similarities have the memory's.
RATES = {
    "neurocache": "0.01 (LoRA), 0.01 (memory), 0.3 (gates)",
    "toy": "0.01 (LoRA), 0.3 (gates)",
    "memorizing": "0.01 (LoRA), 0.01 (memory), 0.3 (gates)",
    "infini_attention": "0.01 (LoRA), 0.01 (the memory's shares)",
    "gated_deltanet": "0.01 (LoRA), 0.01 (memory)",
    "recurrent_memory": "0.01 (LoRA), 0.01 (memory)",
    "gated_attention": "0.01 (LoRA), 0.01 (memory)",
    "cacheformer_on_base": "0.01 (LoRA), 0.01 (memory)",
    "retrieval_heads": "0.01 (LoRA)",
    "windowed": "0.01 (LoRA)",
}
OFF_AND_ON = {"off": Remembering(0), "memory": Remembering()}
READERS = {
    **dict.fromkeys(
        ("neurocache", "toy", "memorizing", "retrieval_heads"),
        {"cache off": Remembering(0), "cache 40": Remembering(40)},
    ),
    **dict.fromkeys(
        ("infini_attention", "gated_deltanet", "recurrent_memory", "gated_attention", "cacheformer_on_base"), OFF_AND_ON
    ),
    "windowed": {"windowed": Remembering()},
}


def arguments(folder, method, *more, output="adapter"):
    options = {
        **{"base": folder / "base", "train": folder / "train.jsonl", "output": folder / output, "method": method},
        **{"segment_tokens": 16, "r": 4, "steps": 6, "lanes": 2, "lora_rate": 1e-2, "memory_rate": 1e-2},
    }
    return [*(f"--{key}={value}" for key, value in options.items()), *METHODS.get(method, ()), *more]


def result_of(folder, output="adapter"):
    return json.loads((folder / output / "train_result.json").read_text())


def test_every_method_can_be_chosen():
    for method, kind in ((name, options_of(name)) for name in METHODS):
        parser = train_adapt.make_parser([f"--method={method}"])
        options = train_adapt.Options(*parser.parse(["--train=a", "--output=a", f"--method={method}"]))
        assert type(options.memory) is kind and kind.method == method
        own = {field.name for field in dataclasses.fields(kind)}
        assert {"r", "lora_alpha", "segment_tokens"} < own and "target_modules" not in own


@pytest.mark.parametrize("method", METHODS)
def test_a_run(folder, method):
    """Train, save, load as any adapter: it scores what it scored; another run of the same steps has its weights."""
    given = arguments(folder, method, f"--valid={folder / 'valid.jsonl'}", "--log_every=1")
    train_adapt.main(given)
    result = result_of(folder)
    assert result["command"] == ["train_adapt.py", *given] and result["environment"]["torch"] == torch.__version__
    assert result["trained_parameters"] == sum(map(torch.numel, adapter_weights(folder / "adapter").values()))
    assert len(result["losses"]) == 6 and all(map(math.isfinite, result["losses"]))
    assert list(result["scores"]) == ["base", *READERS[method]]
    card = (folder / "adapter" / "README.md").read_text()
    assert f"- {method}" in card and "library_name: peft" in card
    assert all(f"| {name} | {run['perplexity']:.3f} |" in card for name, run in result["scores"].items())
    assert ("other_document" in card) == ("cache 40" in READERS[method])
    shown = "PassageConversation" if method == "retrieval_heads" else "read"
    assert f", rates {RATES[method]}. Every" in card and f"cacheformers.{shown}(" in card
    assert {f"rate_{name}" for name in result["rates"]} == {name for name in result["log"][0] if "rate_" in name}

    model = AutoModelForCausalLM.from_pretrained(folder / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "adapter")
    most = 64 if method in ("gated_attention", "cacheformer_on_base") else None
    valid = held_out(Documents([make_text(70, 70), make_text(50, 50)], tokenizer, max_tokens=most))
    nats = {}
    for name, reader in READERS[method].items():
        nats[name] = sum(float(losses.sum()) for losses in token_nats(model, valid, reader, 16))
        assert nats[name] == pytest.approx(result["scores"][name]["nats"], rel=1e-6)
    different = 1 if method in UNCHANGED else len(nats)
    assert len({*nats.values(), result["scores"]["base"]["nats"]}) == different + 1
    config = PeftConfig.from_pretrained(str(folder / "adapter"))
    assert config.layers_to_transform == {
        "memorizing": [1],
        "toy": [1],
        "retrieval_heads": [0, 1, 2],
        "windowed": [0, 1, 2],
        "recurrent_memory": [0, 1, 2],
    }.get(method, [1, 2])
    layers = {int(name.partition("layers.")[2].partition(".")[0]) for name in adapter_weights(folder / "adapter")}
    assert layers == set(config.layers_to_transform)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("infini_attention", ()),
        ("gated_deltanet", ()),
        ("recurrent_memory", ()),
        ("gated_attention", ()),
        ("gated_attention", ("--far_heads", "1:1")),
        ("cacheformer_on_base", ()),
    ],
)
def test_a_stopped_run_goes_on(documents, method, more):
    settings = ("--lanes=4", "--accumulation=2", "--steps=8", "--checkpoint_every=2", "--log_every=3", *more)
    train_adapt.main(arguments(documents, method, *settings, output="whole"))
    for _ in range(3):
        train_adapt.main(arguments(documents, method, *settings, "--stop_after=1e-9", "--resume"))
    assert not (documents / "adapter" / "adapter_config.json").exists()
    train_adapt.main(arguments(documents, method, *settings, "--resume"))
    assert largest_difference(documents / "adapter", documents / "whole") <= 1e-6
    assert result_of(documents)["losses"] == pytest.approx(result_of(documents, "whole")["losses"], rel=1e-6)
    trained = AutoModelForCausalLM.from_pretrained(documents / "whole").eval()
    assert torch.isfinite(trained(torch.arange(3, 23)[None]).logits).all()


def test_a_checkpoint_knows_the_methods_options(folder, refused):
    train_adapt.main(arguments(folder, "infini_attention"))
    said = refused(train_adapt.main, arguments(folder, "infini_attention", "--rule=delta", "--resume"))
    assert "rule ('linear' in the checkpoint, 'delta' here)" in said


def test_shares_and_gates_move_at_their_own_rates(folder):
    """Shares at 0.01 whatever the other rates, without decay; token gates at the memory's; both are logged."""
    still = ("--lora_rate=0", "--memory_rate=0", "--weight_decay=0.5", "--log_every=1", "--warmup=0")
    train_adapt.main(arguments(folder, "infini_attention", *still))
    weights = adapter_weights(folder / "adapter")
    moved = {name for name, tensor in weights.items() if "lora_B" not in name and "lora_A" not in name and tensor.any()}
    assert moved and all("lora_mem_beta" in name for name in moved)
    assert not any(tensor.any() for name, tensor in weights.items() if "lora_B" in name)
    log = result_of(folder)["log"]
    assert log[0]["rate_beta"] == 0.01 and log[0]["rate_weights"] == 0
    assert sum(log[-1]["share_histogram"]) == 8 and log[-1]["share_min"] < 0.5 < log[-1]["share_max"]

    train_adapt.main(arguments(folder, "gated_attention", "--memory_rate=0.1", "--log_every=1", output="gated"))
    log = [entry for entry in result_of(folder, "gated")["log"] if "token_gate_mean" in entry]
    assert log[-1]["token_gate_mean"] < log[0]["token_gate_mean"]
    assert len(log[-1]["token_gate_layers"]) == 2 and 0 <= log[-1]["token_gate_closed"] <= 1
    assert log[-1]["rate_memory"] <= 0.1 and "rate_gate" not in log[-1]


@pytest.mark.parametrize("method", ["infini_attention", "gated_attention"])
def test_lora_beside_another_method(folder, monkeypatch, capsys, method):
    """A recipe's method stays the one whose layers and segments LoRA has. It scores what it scored, and is compared."""
    lines = [f"method: {method}", "layers: [1, 2]", "segment_tokens: 16", "r: 4", "steps: 3", "max_tokens: 64"]
    lines += [f"base: {folder / 'base'}", f"train: [{folder / 'train.jsonl'}]", f"valid: [{folder / 'valid.jsonl'}]"]
    (folder / "recipe.yaml").write_text("\n".join(lines))
    train_adapt.main([str(folder / "recipe.yaml"), "--method=lora", f"--output={folder / 'adapter'}"])
    config = PeftConfig.from_pretrained(str(folder / "adapter"))
    assert config.peft_type == "LORA" and config.layers_to_transform == [1, 2]
    scores = result_of(folder)["scores"]
    assert list(scores) == ["base", "lora"] and "- neurocache" not in (folder / "adapter" / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(folder / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "adapter")
    valid = held_out(Documents([make_text(70, 70), make_text(50, 50)], tokenizer, max_tokens=64))
    shown = 64 if method == "gated_attention" else 0  # which sees all of a document
    losses = token_nats(model, valid, Forgetting(shown), 16)
    assert sum(float(each.sum()) for each in losses) == pytest.approx(scores["lora"]["nats"], rel=1e-6)
    script = Path(__file__).resolve().parents[2] / "recipes" / "compare_runs.py"
    monkeypatch.setattr(sys, "argv", [str(script), *[str(folder / "adapter")] * 2, "--against=base"])
    runpy.run_path(str(script), run_name="__main__")
    assert "lora (adapter)" in capsys.readouterr().out


def test_which_memory_is_meant(tmp_path):
    assert chosen_options([]).method == chosen_options(["--method", "lora"]).method == "neurocache"
    assert chosen_options(["--method", "nonsense"]).method == "neurocache"
    assert chosen_options([str(tmp_path / "nowhere.yaml"), "--method=windowed"]).method == "windowed"
    assert chosen_options(["--method=lora", "--rule", "delta"]).method == "infini_attention"
    assert chosen_options(["--method=lora", "--layers", "1", "--mean_weight=1"]).method == "gated_attention"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("method: gated_attention\nwindow_tokens: 6\n")
    assert chosen_options([str(recipe)]).method == "gated_attention"
    assert chosen_options([str(recipe), "--method", "lora"]).method == "gated_attention"
    assert chosen_options([str(recipe), "--method=infini_attention"]).method == "infini_attention"


@pytest.mark.parametrize(
    ("method", "more", "message"),
    [
        (
            "infini_attention",
            ["--cache_size=4"],
            "an option of --method memorizing and neurocache and retrieval_heads and toy, and",
        ),
        ("gated_attention", ["--rule", "delta"], "rule is an option of --method infini_attention, and the memory here"),
        ("neurocache", ["--far-heads", "1:0"], "far_heads is an option of --method gated_attention"),
        ("windowed", ["--recipe"], "topk is an option of"),
        ("infini_attention", ["--memory_start=states"], "memory_start 'states' is for neurocache"),
        ("infini_attention", ["--valid={folder}/valid.jsonl", "--controls=shuffled"], "this memory has none to count"),
        ("gated_attention", ["--valid={folder}/valid.jsonl", "--cache_sizes", "0", "4"], "It is evaluated off and on"),
        ("windowed", ["--valid={folder}/valid.jsonl", "--controls=shuffled"], "this model stores nothing"),
        ("windowed", ["--lora_targets=none"], "--method windowed with --lora_targets none leaves nothing to train"),
        ("gated_attention", ["--max_tokens=65"], "give --max_tokens 64 or less"),
        ("gated_attention", ["--far_heads", "1"], "'1' is not a layer and its heads"),
        ("cacheformer_on_base", ["--selection=paper_block"], "chooses with tokens that do not exist while decoding"),
    ],
)
def test_what_is_refused(folder, refused, method, more, message):
    given = arguments(folder, method, *(word.format(folder=folder) for word in more))
    if more == ["--recipe"]:
        (folder / "recipe.yaml").write_text("topk: 4\n")
        given = [str(folder / "recipe.yaml"), *given[:-1]]
    assert message in refused(train_adapt.main, given)
    assert not (folder / "adapter").exists()


def test_nothing_to_train(folder, refused):
    more = ("--far_heads", "1:1", "2:", "--lora_targets=none")
    assert "no parameter to train" in refused(train_adapt.main, arguments(folder, "gated_attention", *more))


@pytest.mark.parametrize(
    ("method", "own", "others"),
    [
        ("infini_attention", "fields of InfiniAttentionAdapterConfig", ["--topk", "--gate_per", "--retrieval_map"]),
        ("gated_attention", "22:0,2 for 'heads 0 and 2 of layer 22'", ["--topk", "--rule", "--retrieval_map"]),
        ("memorizing", "Pairs that each head of each token retrieves", ["--rule", "--gate_per", "--retrieval_map"]),
    ],
)
def test_help_is_about_the_chosen_method(capsys, method, own, others):
    with pytest.raises(SystemExit) as stop:
        train_adapt.main(["--method", method, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and own in shown and "None" not in shown
    assert not any(name in shown for name in others)


def test_head_maps():
    assert head_map("far_heads", ["22:0,2", "23:"]) == {22: [0, 2], 23: []}
    options = train_adapt.make_parser(["--method=gated_attention"]).parse(
        ["--train=a", "--output=a", "--method=gated_attention", "--far_heads", "1:0", "2:"]
    )[-1]
    assert options.values()["far_heads"] == {1: [0], 2: []}


@pytest.mark.slow
# Processes of their own do not know the toy method; Neurocache is in test_processes.py.
@pytest.mark.parametrize(
    ("method", "sharding"),
    [
        *((name, "none") for name in METHODS if name not in ("neurocache", "toy")),
        ("memorizing", "fsdp2"),
        ("fixed heads", "fsdp2"),
    ],
)
def test_two_processes_equal_one_with_twice_the_lanes(documents, method, sharding):
    fixed = ("--far_heads", "1:0", "2:") if method == "fixed heads" else ()
    method = "gated_attention" if fixed else method
    train_adapt.main(arguments(documents, method, "--lanes=4", *fixed, output="alone"))
    two = arguments(documents, method, "--lanes=4", f"--sharding={sharding}", *fixed)
    run(two, documents / "two.log", processes=2)
    assert largest_difference(documents / "adapter", documents / "alone") <= 1e-5
