"""Adapters, memory files, models and checkpoints that an earlier release wrote still load, and compute the same.

`fixtures/former/` was written at commit 3718dc2, before methods moved into `methods/`: a tiny base with its tokenizer,
for each method an adapter, the memory of a text and the exported model, a CacheFormer from scratch, and a checkpoint of
step 2 of a run of 4 steps with the weights with which that run ended.
"""

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import cacheformers
from cacheformers import train_adapt

FORMER = Path(__file__).resolve().parents[1] / "fixtures" / "former"
METHODS = ["neurocache", "memorizing", "infini_attention", "gated_attention", "cacheformer", "windowed"]
TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}  # float32 on another processor


@pytest.fixture
def expected():
    return load_file(FORMER / "expected.safetensors")


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("door", ["PeftModel", "AutoModel", "model folder"])
def test_adapters_memory_files_and_models(expected, monkeypatch, method, door):
    monkeypatch.chdir(FORMER)  # adapters name their base by a relative path
    if door == "PeftModel":
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), f"{method}/adapter").eval()
    else:
        folder = {"AutoModel": "adapter", "model folder": "model"}[door]
        model = AutoModelForCausalLM.from_pretrained(f"{method}/{folder}").eval()
    memory = cacheformers.read(model, expected["ids"], progress=False)
    logits = model(expected["question"], past_key_values=memory).logits
    torch.testing.assert_close(logits, expected[method], **TOLERANCE)
    if door != "model folder":  # a memory file belongs to the adapter that read it
        memory = cacheformers.load_memory(f"{method}/memory", model)
        torch.testing.assert_close(
            model(expected["question"], past_key_values=memory).logits, expected[method], **TOLERANCE
        )


@torch.no_grad()
def test_a_cacheformer_from_scratch(expected):
    model = AutoModelForCausalLM.from_pretrained(FORMER / "scratch").eval()
    torch.testing.assert_close(model(expected["ids"]).logits, expected["scratch"], **TOLERANCE)


def test_a_checkpoint(tmp_path, monkeypatch):
    for name in ("base", "train.jsonl"):
        source = FORMER / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    shutil.copytree(FORMER / "checkpoint" / "step-00000002", tmp_path / "run" / "checkpoints" / "step-00000002")
    monkeypatch.chdir(tmp_path)
    train_adapt.main(
        ["--base=base", "--train=train.jsonl", "--output=run", "--method=neurocache", "--segment_tokens=8"]
        + ["--cache_size=24", "--topk=3", "--retrieval_map", "1", "--search=exact", "--r=2", "--steps=4"]
        + ["--checkpoint_every=2", "--keep_checkpoints=5", "--lora_rate=0.01", "--memory_rate=0.01", "--resume"]
    )
    found, final = load_file("run/adapter_model.safetensors"), load_file(FORMER / "checkpoint" / "final.safetensors")
    assert found.keys() == final.keys()
    for name, tensor in final.items():
        torch.testing.assert_close(found[name], tensor, **TOLERANCE)
