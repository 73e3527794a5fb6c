"""A whole model trained from scratch: the same loop, checkpoints, evaluation and results as adapters have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from recipe import make_text
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheformers import train_adapt
from cacheformers.evaluation.perplexity import held_out, token_nats
from cacheformers.evaluation.readers import Forgetting, Reader, Remembering
from cacheformers.training.documents import Documents

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
}
READERS: dict[str, dict[str, Reader]] = {
    "llama": {"llama": Forgetting()},
    "neurocache": {"cache off": Remembering(0), "cache 40": Remembering(40), "cache 80": Remembering(80)},
}


def arguments(folder: Path, model: str, *more: str, output: str = "model") -> list[str]:
    """A run over the documents of the fixture `folder`."""
    (folder / f"{model}.json").write_text(json.dumps(CONFIGS[model]))
    options = {
        "init": "scratch",
        "model_config": folder / f"{model}.json",
        "tokenizer": folder / "base",
        "train": folder / "train.jsonl",
        "output": folder / output,
        "rate": 1e-2,
        "steps": 5,
        "lanes": 2,
    }
    return [*(f"--{key}={value}" for key, value in options.items()), *more]


@pytest.mark.parametrize("model", list(CONFIGS))
def test_a_run(folder, model):
    """Train, save, load as any model: it scores what it scored, with every cache size."""
    train_adapt.main(arguments(folder, model, f"--valid={folder / 'valid.jsonl'}", "--steps=8"))
    result = json.loads((folder / "model" / "train_result.json").read_text())
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


@pytest.mark.parametrize("model", list(CONFIGS))
def test_autocast_keeps_weights_in_float32(folder, model):
    AcceleratorState._reset_state(reset_partial_state=True)
    train_adapt.main(arguments(folder, model, "--precision=bf16"))
    half = json.loads((folder / "model" / "train_result.json").read_text())["losses"]
    assert AutoModelForCausalLM.from_pretrained(folder / "model").dtype == torch.float32
    AcceleratorState._reset_state(reset_partial_state=True)
    train_adapt.main(arguments(folder, model, "--overwrite"))
    whole = json.loads((folder / "model" / "train_result.json").read_text())["losses"]
    assert half != whole and half == pytest.approx(whole, rel=1e-2)
