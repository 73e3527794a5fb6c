"""The adapter that a recipe asks for, and what it starts from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from accelerate.utils import broadcast
from peft import LoraConfig, PeftModel
from transformers import PretrainedConfig

from cacheformers.adapters.config import NeurocacheAdapterConfig
from cacheformers.adapters.start import start_from_states
from cacheformers.modeling.attach import architecture, base_shape
from cacheformers.modeling.memories.neurocache_options import NeurocacheOptions
from cacheformers.training.documents import DocumentRow
from cacheformers.training.lanes import Lanes
from cacheformers.training.optim import trained_parameters
from cacheformers.training.options import layer_map
from cacheformers.training.settings import TrainOptions

START_DOCUMENTS = 4  # whose beginnings are read for memory_start "states"


def adapter_config(
    base: PretrainedConfig, options: TrainOptions, memory_options: Any
) -> tuple[LoraConfig, NeurocacheOptions]:
    """The adapter of the chosen method, and the memory's options on this base.

    LoRA alone has the targets, layers and segments that it has beside the memory.

    Args:
        memory_options: the fields that `NeurocacheAdapterConfig` defines itself.

    Raises:
        ValueError: options that do not fit the base or each other.
    """
    chosen = asdict(memory_options)
    if chosen["retrieval_map"] is not None:
        chosen["retrieval_map"] = layer_map(chosen["retrieval_map"])
    targets = options.lora_targets or list(architecture(base).feed_forward)
    without_lora = targets == ["none"]
    config = NeurocacheAdapterConfig(
        **chosen,
        target_modules=[] if without_lora else targets,
        lora_dropout=options.lora_dropout,
        task_type="CAUSAL_LM",
    )
    memory = config.resolve(base_shape(base))
    if not without_lora:
        config.layers_to_transform = list(memory.attention_layers)
    if options.method == "neurocache":
        return config, memory
    if without_lora:
        raise ValueError("--method lora with --lora_targets none leaves nothing to train.")
    lora = LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        layers_to_transform=config.layers_to_transform,
        task_type="CAUSAL_LM",
    )
    return lora, memory


def start_memory(model: PeftModel, documents: DocumentRow, segment_tokens: int, options: TrainOptions) -> None:
    """Set the memory's projections from what the base makes of the run's first documents. Every process must call this.

    Raises:
        ValueError: the segments are too few (see `start_from_states`).
    """
    rows = min(START_DOCUMENTS, options.start_segments)
    lanes = Lanes(documents, rows, segment_tokens, options.seed)
    segments: list[torch.Tensor] = []
    while len(segments) < options.start_segments:
        step = lanes.step()
        segments += [ids[mask.bool()] for ids, mask in zip(step.input_ids, step.attention_mask, strict=True)]
    start_from_states(model, segments[: options.start_segments])
    # Machines of different kinds may find directions of different sign.
    broadcast([parameter.data for parameter in trained_parameters(model)])
