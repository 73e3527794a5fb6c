"""What a user does first, with the installed wheel and nothing else: adapt, save, load, read, generate, export."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import cacheformers
from cacheformers.adapters.export import export

installed = Path(cacheformers.__file__).parent
assert "site-packages" in str(installed), installed
assert (installed / "py.typed").exists()
for adapter in ("answers_facts", "answers_heads"):  # for `cacheformers fetch`
    assert (installed / "model_cards" / adapter / "adapter_model.safetensors").exists()
assert not any((installed / folder).exists() for folder in ("tests", "benchmarks", "recipes"))

config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
)
ids = torch.randint(3, 64, (1, 150))
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(f"{folder}/base")
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
    model = get_peft_model(base, cacheformers.NeurocacheAdapterConfig(segment_tokens=32, cache_size=128, topk=4))
    model(ids, labels=ids).loss.backward()
    model.save_pretrained(f"{folder}/adapter")
    loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/adapter").eval()
    memory = cacheformers.read(loaded, ids, progress=False)
    memory.save(f"{folder}/memory")
    memory = cacheformers.load_memory(f"{folder}/memory", loaded)
    command = [Path(sys.executable).with_name("cacheformers"), "inspect", f"{folder}/memory"]
    assert "150 tokens" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
    version = subprocess.run([command[0], "--version"], check=True, capture_output=True, text=True).stdout
    assert version == f"cacheformers {cacheformers.__version__}\n"
    answer = loaded.generate(ids[:, :5], past_key_values=memory, max_new_tokens=5, do_sample=False)
    assert torch.allclose(loaded(ids).logits, model.eval()(ids).logits, atol=1e-5)
    exported = AutoModelForCausalLM.from_pretrained(export(f"{folder}/adapter", f"{folder}/model"))
    assert torch.allclose(exported(ids).logits, loaded(ids).logits, atol=1e-5)
print(f"cacheformers {cacheformers.__version__}: {memory} -> {answer[0, 5:].tolist()}")
