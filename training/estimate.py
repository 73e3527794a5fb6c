"""How much memory a training step takes, before anything is loaded.

Parameters are counted on the real model with the real adapter, on the meta device. The rest is arithmetic: the terms
are in `training/activations.py` (what autograd keeps) and here (everything else). Not counted: what the process takes
before it builds a model, a GPU's own context, and fragmentation. docs/results/estimate.md compares with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.methods.neurocache import NeurocacheAdapterConfig
from cacheformers.methods.neurocache.options import NeurocacheOptions
from cacheformers.modeling.attach import base_shape, find_decoder
from cacheformers.modeling.memory import BaseShape
from cacheformers.training.activations import (
    FLOAT32,
    Forward,
    LayerBytes,
    hidden_bytes,
    layer_bytes,
    norm_bytes,
    retrieved_bytes,
    rotary_bytes,
)

MIB = 2**20
SEARCH_BYTES = 64 * MIB  # what the exact search may take besides (modeling/search/exact.py)
# What resident memory grows by when a CPU trains for the first time: pages of libraries and their scratch, measured as
# 42 to 46 MiB with a model of one MiB.
LIBRARY_BYTES = 44 * MIB
# nf4 with double quantization: half a byte, a byte for the scale of 64 weights, a float32 for 256 scales.
NF4_BYTES = 1 / 2 + 1 / 64 + FLOAT32 / (64 * 256)

Quantize = Literal["nf4", "int8"]
Sharding = Literal["fsdp2", "zero2"]


@dataclass(frozen=True)
class Weights:
    """A model's parameters in numbers and bytes.

    Attributes:
        parameters: of the base.
        trained: of the adapter.
        frozen_bytes: of the base, quantized where it is.
        adapter_bytes: of the adapter; its gradients take the same.
        layer_bytes: of each decoder layer, frozen and trained.
        layer_adapter_bytes: of each decoder layer's trained part.
        largest_adapter_bytes: of the largest trained tensor.
        largest_matrix: numbers in the largest quantized matrix; 0 without quantization.
        factored_bytes: of Adafactor's row and column sums.
    """

    parameters: int
    trained: int
    frozen_bytes: int
    adapter_bytes: int
    layer_bytes: tuple[int, ...]
    layer_adapter_bytes: tuple[int, ...]
    largest_adapter_bytes: int
    largest_matrix: int
    factored_bytes: int


@dataclass(frozen=True)
class Estimate:
    """Bytes that one process needs at each moment of a training step.

    Attributes:
        parameters, trained: numbers in the base and in the adapter.
        moments: what is held, by moment and part: `memory` (the last segment enters the rings, or a search), `loss`
            (its gradient), `backward` (the worst layer) and `update` (the optimizer's step).
        activations: kept for the backward without activation checkpointing, and with it.
        peaks: the largest total without activation checkpointing, and with it.
    """

    parameters: int
    trained: int
    moments: dict[str, dict[str, int]]
    activations: tuple[int, int]
    peaks: tuple[int, int]

    @property
    def totals(self) -> dict[str, int]:
        """Bytes at each moment."""
        return {moment: sum(parts.values()) for moment, parts in self.moments.items()}

    @property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return max(self.totals.values())

    def table(self) -> str:
        """The estimate for people, in GiB."""
        parts = dict.fromkeys(part for held in self.moments.values() for part in held)
        lines = [
            f"{self.parameters:,} parameters in the base, {self.trained:,} to train",
            f"\n{'GiB in each process':<24}" + "".join(f"{moment:>10}" for moment in self.moments),
        ]
        for part in parts:
            lines.append(f"{part:<24}" + "".join(f"{gib(held.get(part, 0)):>10}" for held in self.moments.values()))
        lines.append(f"{'total':<24}" + "".join(f"{gib(total):>10}" for total in self.totals.values()))
        worst = max(self.totals, key=self.totals.__getitem__)
        lines.append(f"\nPeak: {gib(self.peak)} GiB ({worst}).")
        for title, kept, peak in zip(("Without", "With"), self.activations, self.peaks, strict=True):
            lines.append(f"{title} activation checkpointing: activations {gib(kept)}, peak {gib(peak)} GiB.")
        return "\n".join(lines)


def gib(size: int) -> str:
    """Bytes as GiB with two decimals."""
    return f"{size / 2**30:.2f}"


def estimate(
    base: PretrainedConfig,
    adapter: LoraConfig,
    *,
    lanes: int,
    segment_tokens: int,
    accumulation: int = 1,
    backprop_segments: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    quantize: Quantize | None = None,
    optimizer: str = "adamw",
    activation_checkpointing: bool = False,
    processes: int = 1,
    sharding: Sharding | None = None,
    device_type: str = "cuda",
) -> Estimate:
    """Estimate the memory of a training step. Loads no weights; takes seconds.

    Args:
        base: configuration of the base model.
        adapter: what is trained: a memory with LoRA, or LoRA alone.
        lanes: documents that this process reads side by side.
        accumulation: micro-batches a step; each reads `lanes / accumulation` rows.
        backprop_segments: segments that a forward reads before the backward.
        dtype: of the base's weights and of activations.
        quantize: the base's linear layers as bitsandbytes stores them.
        optimizer: "adamw" (two moments) or "adafactor" (sums of rows and columns).
        sharding: what several processes divide: "zero2" gradients and optimizer, "fsdp2" weights too, None nothing.

    Raises:
        ValueError: lanes that do not divide into the micro-batches, an adapter that does not fit the base, or another
            memory than Neurocache's.
    """
    if isinstance(adapter, MemoryAdapterConfig) and not isinstance(adapter, NeurocacheAdapterConfig):
        raise ValueError(
            f"The estimate counts Neurocache's memory and LoRA, not yet that of {adapter.kind.lower()}: leave "
            "--estimate out, and try --steps 2."
        )
    if lanes % accumulation:
        raise ValueError(
            f"{lanes} lanes do not divide into {accumulation} micro-batches: choose lanes so that they do."
        )
    shape = base_shape(base)
    options = adapter.resolve(shape) if isinstance(adapter, NeurocacheAdapterConfig) else None
    model = meta_model(base, adapter, dtype)
    weights = count(model, dtype, quantize)
    step = Forward(
        lanes // accumulation, segment_tokens, backprop_segments, dtype.itemsize, quantize == "int8", device_type
    )
    layers, norm = decoder_bytes(model, base, shape, options, step)

    logits = step.tokens * shape.vocab_size
    retained = {"logits": logits * step.element}  # the output lives until the next one
    always = held_always(weights, optimizer, processes, sharding)
    always["store"] = store_bytes(options, lanes, step) if options is not None else 0
    if device_type == "cpu":
        always["libraries"] = LIBRARY_BYTES
    gradients = weights.adapter_bytes // (processes if sharding else 1)
    buckets = weights.adapter_bytes if processes > 1 and sharding is None else 0  # DDP's, for all gradients
    earlier = gradients if accumulation > 1 else 0  # of the micro-batches before

    def moments(checkpointing: bool) -> tuple[int, dict[str, dict[str, int]]]:
        kept = kept_bytes(layers, shape, options, step, checkpointing)
        loss = {
            **always,
            "gradients": earlier + buckets,
            "activations": sum(kept) + norm,
            # log-softmax, its gradient and the loss's, all in float32
            "logits": logits * (step.element + 3 * FLOAT32),
        }
        backward = max(
            (
                {
                    **always,
                    "gradients": max(earlier, sum(weights.layer_adapter_bytes[i:]) * gradients // weights.adapter_bytes)
                    + buckets
                    + (weights.layer_adapter_bytes[i] if sharding else 0),
                    "activations": sum(kept[: i + 1]) + (layers[i].kept if checkpointing else 0) // step.segments,
                    **retained,
                    "working copies": work + weights.largest_matrix * step.element,
                }
                for i in range(len(layers))
                for work in layer_work(layers, i, options, step)
                if layers[i].graph
            ),
            key=lambda parts: sum(parts.values()),
        )
        update = {
            **always,
            "gradients": gradients + buckets,
            **retained,
            "working copies": update_bytes(weights, optimizer, device_type) // (processes if sharding else 1),
        }
        memory = {**always, "gradients": earlier + buckets, **retained}
        if options is not None:
            memory["working copies"] = max(ring_bytes(options, step.rows, step)[1], SEARCH_BYTES)
        return sum(kept) + norm, {"memory": memory, "loss": loss, "backward": backward, "update": update}

    kept, without = moments(False)
    checkpointed, with_checkpointing = moments(True)
    return Estimate(
        weights.parameters,
        weights.trained,
        with_checkpointing if activation_checkpointing else without,
        (kept, checkpointed),
        (worst(without), worst(with_checkpointing)),
    )


def worst(moments: dict[str, dict[str, int]]) -> int:
    return max(sum(parts.values()) for parts in moments.values())


def meta_model(base: PretrainedConfig, adapter: LoraConfig, dtype: torch.dtype) -> PeftModel:
    """The real model with the real adapter, without memory for its tensors."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(base, dtype=dtype)
        return get_peft_model(model, adapter).train()


def count(model: PeftModel, dtype: torch.dtype, quantize: Quantize | None) -> Weights:
    """Count a model's parameters and their bytes."""
    layers: list[nn.Module] = list(find_decoder(model.get_base_model()).layers)  # type: ignore[arg-type]
    matrices = {
        id(module.weight)
        for layer in layers
        for module in layer.modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad and quantize is not None
    }

    def size(parameter: nn.Parameter) -> int:
        if id(parameter) not in matrices:
            return parameter.nbytes
        if quantize == "nf4":
            return int(parameter.numel() * NF4_BYTES)
        return parameter.numel() + len(parameter) * FLOAT32

    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    return Weights(
        parameters=sum(parameter.numel() for parameter in frozen),
        trained=sum(parameter.numel() for parameter in trained),
        frozen_bytes=sum(map(size, frozen)),
        adapter_bytes=sum(parameter.nbytes for parameter in trained),
        layer_bytes=tuple(sum(map(size, layer.parameters())) for layer in layers),
        layer_adapter_bytes=tuple(
            sum(parameter.nbytes for parameter in layer.parameters() if parameter.requires_grad) for layer in layers
        ),
        largest_adapter_bytes=max(parameter.nbytes for parameter in trained),
        largest_matrix=max((parameter.numel() for parameter in parameters if id(parameter) in matrices), default=0),
        factored_bytes=sum(
            FLOAT32 * (sum(parameter.shape) if parameter.dim() > 1 else parameter.numel()) for parameter in trained
        ),
    )


def decoder_bytes(
    model: PeftModel, base: PretrainedConfig, shape: BaseShape, options: NeurocacheOptions | None, step: Forward
) -> tuple[list[LayerBytes], int]:
    """What each layer keeps, and what is kept once: rotary positions and the last norm."""
    layers: list[nn.Module] = list(find_decoder(model.get_base_model()).layers)  # type: ignore[arg-type]
    width = getattr(base, "intermediate_size", None) or base.ffn_dim
    found: list[LayerBytes] = []
    for index, layer in enumerate(layers):
        graph = bool(found) and found[-1].graph
        found.append(layer_bytes(layer, index, shape, width, options, step, graph))
    norm = norm_bytes(layers[0], shape.hidden_size, step) * step.tokens
    return found, norm + rotary_bytes(shape, step)


def kept_bytes(
    layers: list[LayerBytes], shape: BaseShape, options: NeurocacheOptions | None, step: Forward, checkpointing: bool
) -> list[int]:
    """What is kept of each layer until its backward.

    With activation checkpointing that is its input. The call that all layers share also keeps the retrieved states
    and, of several segments, the ring as each of them read it.
    """
    if not checkpointing:
        return [layer.kept for layer in layers]
    kept = [hidden_bytes(shape, step) if layer.graph else 0 for layer in layers]
    if options is not None:
        for retrieval, _ in options.retrieval_map:
            kept[retrieval] += retrieved_bytes(options, step)
            kept[retrieval] += (step.segments - 1) * sum(ring_bytes(options, step.rows, step))
    return kept


def layer_work(
    layers: list[LayerBytes], index: int, options: NeurocacheOptions | None, step: Forward
) -> tuple[int, int]:
    """What a layer's backward needs besides, in its feed-forward block and then in attention.

    The gradient of the retrieved states grows from the top layer to the retrieval layer. When attention's turn comes,
    what the feed-forward block kept is gone.
    """
    layer = layers[index]
    above = any(other.attention_work for other in layers[index + 1 :])
    states = retrieved_bytes(options, step) // step.segments if options is not None and above else 0
    return states + layer.feed_forward_work, layer.attention_work - layer.feed_forward // step.segments


def held_always(weights: Weights, optimizer: str, processes: int, sharding: Sharding | None) -> dict[str, int]:
    """Bytes of weights, adapter and optimizer in one process.

    FSDP2 gathers the layer at work and, meanwhile, the next one; what is outside of the layers stays gathered.
    """
    moments = {"adamw": 2 * weights.adapter_bytes, "adafactor": weights.factored_bytes}[optimizer]
    whole = weights.frozen_bytes + weights.adapter_bytes
    if sharding == "fsdp2":
        outside = whole - sum(weights.layer_bytes)
        return {
            "weights": weights.frozen_bytes // processes,
            "adapter": weights.adapter_bytes // processes,
            "gathered layers": 2 * max(weights.layer_bytes) + outside,
            "optimizer": moments // processes,
        }
    return {
        "weights": weights.frozen_bytes,
        "adapter": weights.adapter_bytes,
        "optimizer": moments // (processes if sharding == "zero2" else 1),
    }


def update_bytes(weights: Weights, optimizer: str, device_type: str) -> int:
    """What the optimizer's step needs besides: AdamW on a GPU updates all tensors at once, else it is one by one."""
    if optimizer == "adafactor":
        return weights.largest_adapter_bytes
    return weights.adapter_bytes if device_type == "cuda" else 2 * weights.largest_adapter_bytes


def ring_bytes(options: NeurocacheOptions, rows: int, step: Forward) -> tuple[int, int]:
    """Bytes of one ring's entries and of the full states that training keeps beside them."""
    number = entry_size(options, step)
    values = options.base.hidden_size if options.compression_factor > 1 else 0
    return rows * options.cache_size * options.width * number, rows * options.cache_size * values * number


def entry_size(options: NeurocacheOptions, step: Forward) -> int:
    """Bytes of a number in the rings."""
    dtype = torch.float32 if step.element == FLOAT32 else torch.bfloat16
    return options.store_dtype(torch.device(step.device_type), dtype).itemsize


def store_bytes(options: NeurocacheOptions, lanes: int, step: Forward) -> int:
    """The rings of every lane when they are full, and what waits of open segments: entries, states, hits, queries."""
    rings = len({storing for _, storing in options.retrieval_map})
    values = options.base.hidden_size if options.compression_factor > 1 else 0
    waiting = step.segment_tokens * (options.width + values) * entry_size(options, step)
    hits = len(options.retrieval_map) * step.segment_tokens * options.topk * 8
    if options.hit_scores:
        hits += len(options.retrieval_map) * step.segment_tokens * options.width * FLOAT32
    kept = options.window.positions - options.segment_tokens
    local = 2 * options.base.layers * options.base.kv_heads * options.base.head_dim * kept * step.element
    return rings * (sum(ring_bytes(options, lanes, step)) + lanes * waiting) + lanes * (hits + local)
