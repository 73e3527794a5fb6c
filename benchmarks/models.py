"""The models whose costs are measured: random weights, which make no difference to time or memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

import cacheformers
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.segments import new_memory

BASE_CONFIGS = Path(__file__).resolve().parents[1] / "recipes" / "base_configs"


@dataclass(frozen=True)
class Shape:
    """A base model and its first layer with cache attention, which retrieves and stores; all above have it too."""

    config: PretrainedConfig
    first: int

    @property
    def layers(self) -> list[int]:
        """Layers with cache attention."""
        return list(range(self.first, self.config.num_hidden_layers))


def shapes() -> dict[str, Shape]:
    """Return the shapes by name: a 12-layer Llama with 3 layers of cache attention, and two others with 8."""
    small = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=4096,
    )
    return {
        "llama-12x768": Shape(small, 9),
        "smollm2-135m": Shape(AutoConfig.from_pretrained(BASE_CONFIGS / "smollm2-135m"), 22),
        "llama-2-7b": Shape(AutoConfig.from_pretrained(BASE_CONFIGS / "llama-2-7b"), 24),
    }


def base_model(shape: Shape, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """Build the base alone, for evaluation."""
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shape.config, dtype=dtype)
    return model.eval()


def lora_model(shape: Shape, dtype: torch.dtype, device: str = "cpu") -> nn.Module:
    """Build the base with the LoRA that the memory's layers have."""
    targets = ["gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(
        r=16, lora_alpha=32, target_modules=targets, layers_to_transform=shape.layers, task_type="CAUSAL_LM"
    )
    return get_peft_model(base_model(shape, dtype, device), config).eval()


def memory_model(
    shape: Shape, dtype: torch.dtype, device: str = "cpu", lora: bool = True, **options: object
) -> nn.Module:
    """Build the base with a Neurocache, open gates, and LoRA (or not); options are the adapter configuration's."""
    chosen: dict[str, object] = {"segment_tokens": 1024, "retrieval_map": {shape.first: shape.first}, **options}
    if not lora:
        chosen["target_modules"] = []
    config = cacheformers.NeurocacheAdapterConfig(**chosen, task_type="CAUSAL_LM")  # type: ignore[arg-type]  # options by name
    return open_gates(get_peft_model(base_model(shape, dtype, device), config), 0.1)


def open_gates(model: nn.Module, value: float) -> nn.Module:
    """Set all gates of a memory adapter to a value, so that what the memory adds is used, and switch to evaluation."""
    for name, parameter in model.named_parameters():
        if "lora_mem_gate" in name:
            nn.init.constant_(parameter, value)
    return model.eval()


def full_memory(model: nn.Module, read: int | None = None) -> MemoryCache:
    """Return a memory as after a text of `read` tokens; by default after one that more than fills its ring."""
    memory = new_memory(model, 1)
    for ring in memory.state.rings.values():
        read = ring.capacity + 1 if read is None else read
        for start in range(0, read, 16384):
            count = min(16384, read - start)
            values = None if ring.values is None else torch.randn(count, ring.values.shape[2])
            ring.append(0, torch.nn.functional.normalize(torch.randn(count, ring.width)), values)
    memory.timeline.tokens_read = [read or 0]
    return memory
