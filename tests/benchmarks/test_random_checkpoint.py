"""A folder of random weights in 4 bits is what bitsandbytes itself saves, and loads to the same numbers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from cacheformers.common.base_model import ModelOptions, quantization

functional = pytest.importorskip("bitsandbytes.functional")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def written(monkeypatch, tmp_path):
    """The script, and a folder in bfloat16 and one in 4 bits of the same layout, in several files."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import random_checkpoint

    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_hidden_layers": 3}
    config = LlamaConfig(vocab_size=128, dtype=torch.bfloat16, **sizes)
    random_checkpoint.write_checkpoint(config, tmp_path / "plain", 100_000)
    config.quantization_config = quantization(ModelOptions("", quantize="nf4"), config)
    random_checkpoint.write_checkpoint(config, tmp_path / "nf4", 100_000)
    return random_checkpoint, tmp_path / "plain", tmp_path / "nf4"


def test_4_bits_are_what_bitsandbytes_saves(written, tmp_path):
    script, plain, nf4 = written
    assert len(list(nf4.glob("*.safetensors"))) > 1
    chosen = quantization(ModelOptions("", dtype="bfloat16", quantize="nf4"), LlamaConfig())
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=chosen).save_pretrained(tmp_path / "saved")
    assert facts(nf4) == facts(tmp_path / "saved")

    model = AutoModelForCausalLM.from_pretrained(nf4)
    for weight in (model.model.layers[2].self_attn.q_proj.weight, model.model.layers[0].mlp.up_proj.weight):
        expected = script.quantized_matrix(weight.quant_state.shape, 0.02)
        assert torch.equal(weight.data, expected[""])
        assert 0.01 < functional.dequantize_4bit(weight.data, weight.quant_state).float().std() < 0.03


def tensors(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def facts(folder):
    """Types and shapes by name; how long a state is in text depends on its numbers."""
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors(folder).items()}
    return {name: fact[:1] if ".quant_state." in name else fact for name, fact in found.items()}
