"""The supported base models, and where each keeps its decoder, attention modules and weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import has_offloaded_params
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from cacheformers.modeling.memory import BaseShape
from cacheformers.modeling.pretrained import SavedConfig


@dataclass(frozen=True)
class Architecture:
    """The names that a model family uses.

    Attributes:
        decoder: path from the causal language model to the module that loops over the layers.
        attention: name of the self-attention in a layer.
        cache_argument: name of the cache among the arguments of that attention.
        projections: names of W_q, W_k, W_v, W_o; one fused name and W_o where q, k and v are one matrix.
        feed_forward: linear layers of the feed-forward block (the default LoRA targets).
        rotary: keys carry rotary positions (which can be moved).
        masks_by_layer_type: the decoder takes one mask per layer type.
    """

    decoder: str = "model"
    attention: str = "self_attn"
    cache_argument: str = "past_key_values"
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    feed_forward: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    rotary: bool = True
    masks_by_layer_type: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "opt": Architecture(
        decoder="model.decoder",
        projections=("q_proj", "k_proj", "v_proj", "out_proj"),
        feed_forward=("fc1", "fc2"),
        rotary=False,
    ),
    "qwen2": Architecture(masks_by_layer_type=True),
    "qwen3": Architecture(masks_by_layer_type=True),
    "gemma": Architecture(),
    "phi": Architecture(projections=("q_proj", "k_proj", "v_proj", "dense"), feed_forward=("fc1", "fc2")),
    "olmo2": Architecture(),
    "granite": Architecture(),
    "ministral": Architecture(masks_by_layer_type=True),
    "seed_oss": Architecture(),
    "hunyuan_v1_dense": Architecture(),
    "starcoder2": Architecture(feed_forward=("c_fc", "c_proj")),
    "arcee": Architecture(feed_forward=("up_proj", "down_proj")),
    "apertus": Architecture(feed_forward=("up_proj", "down_proj")),
    "gpt_neox": Architecture(
        decoder="gpt_neox",
        attention="attention",
        cache_argument="layer_past",
        projections=("query_key_value", "dense"),
        feed_forward=("dense_h_to_4h", "dense_4h_to_h"),
    ),
}

OFFLOADED = (
    "A memory cannot be kept for weights that are offloaded to CPU or disk. Load the model whole (quantized if it is "
    "too large), or spread it over several GPUs with a device_map without offloading."
)
WRAPPED_AS = ("_orig_mod", "module", "base_model", "model")  # by torch.compile, DDP, PeftModel, PEFT's tuners


class WholeConfig(SavedConfig):
    """The configuration of a model whose own attention is its memory, without a base model.

    The model's class without a head has `new_cache(rows)`, which returns an empty cache for documents.
    """

    segment_tokens: int  # of a row when it is trained from scratch and evaluated in rows

    @property
    def causal(self) -> bool:
        """Whether no token depends on later ones; otherwise the model is for study and cannot generate."""
        raise NotImplementedError

    def base_shape(self) -> BaseShape:
        """Describe the model as a decoder that sees one row at a time; raise ValueError for contradicting options."""
        raise NotImplementedError


def is_whole(model: nn.Module) -> bool:
    """Whether a model's own attention is its memory."""
    return isinstance(model.config, WholeConfig)


def architecture(config: PretrainedConfig) -> Architecture:
    """Look up the architecture of a base model; raise ValueError if its model type is not in the table."""
    model_type = getattr(config, "model_type", None)
    if isinstance(config, WholeConfig):
        raise ValueError(
            f"This {model_type} is a model of its own: its memory is what its forward and generate() return as "
            "past_key_values (docs/cacheformer.md). Memories of this kind are for pretrained models."
        )
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"Model type {model_type!r} is not supported. Supported: {', '.join(sorted(ARCHITECTURES))}. Name the "
            "modules of a decoder with the same attention interface by cacheformers.register_architecture()."
        )
    return ARCHITECTURES[model_type]


def register_architecture(model_type: str, **names: Any) -> None:
    """Make a family of decoders known as base models, for all methods.

    Its attention must be transformers' own, which passes keywords on. To move keys (`local_window="sliding"`,
    `far_distance`) its rotary positions must turn halves of a head in every layer, which is tried when they should be.

    Args:
        model_type: of the family's configuration.
        names: fields of `Architecture` that differ from Llama's.

    Raises:
        TypeError: there is no such field.
        ValueError: the family is known with other names.
    """
    known, new = ARCHITECTURES.get(model_type), Architecture(**names)
    if known not in (None, new):
        raise ValueError(f"Model type {model_type!r} is registered already, with other names: {known}.")
    ARCHITECTURES[model_type] = new


def base_shape(config: PretrainedConfig) -> BaseShape:
    """Read the sizes of a base model from its configuration."""
    heads = config.num_attention_heads
    return BaseShape(
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        rotary=architecture(config).rotary,
        sliding_window=getattr(config, "sliding_window", None),
    )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the transformers model inside compile, DDP and PEFT wrappers; raise TypeError if there is none."""
    while not isinstance(model, PreTrainedModel):
        inner = next((model._modules[name] for name in WRAPPED_AS if name in model._modules), None)
        if inner is None:
            raise TypeError(f"{type(model).__name__} is neither a transformers model nor a wrapper around one.")
        model = inner
    return model


def find_decoder(model: nn.Module) -> nn.Module:
    """Find the module that loops over the layers; raise ValueError if the model is not supported."""
    model = getattr(model, "base_language_model", model)  # in this package's model classes
    path = architecture(model.config).decoder  # type: ignore[arg-type]
    for prefix in (path, path.partition(".")[2], ""):
        try:
            decoder = model.get_submodule(prefix)
        except AttributeError:
            continue
        if hasattr(decoder, "layers"):
            return decoder
    raise ValueError(f"{type(model).__name__} has no decoder at {path!r}: pass a causal language model.")


def attention_modules(decoder: nn.Module) -> list[nn.Module]:
    """Return the self-attention of every layer."""
    name = architecture(decoder.config).attention  # type: ignore[arg-type]
    return [getattr(layer, name) for layer in decoder.layers]  # type: ignore[union-attr]


def split_projections(weights: list[Tensor], shape: BaseShape) -> tuple[Tensor, ...]:
    """Return W_q, W_k, W_v and W_o, given the weights that `Architecture.projections` names."""
    if len(weights) == 4:
        return tuple(weights)
    fused = weights[0].view(shape.heads, 3, shape.head_dim, shape.hidden_size)  # q, k, v by head
    return (*(fused[:, i].flatten(0, 1) for i in range(3)), weights[1])


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes; raise ValueError if accelerate offloads its weights."""
    device = next(module.parameters()).device
    if device.type == "meta":
        raise ValueError(OFFLOADED)
    return device


def layer_devices(decoder: nn.Module, layers: Iterable[int]) -> dict[int, torch.device]:
    """Return the device on which the attention of each given layer computes."""
    attentions = attention_modules(decoder)
    return {layer: device_of(attentions[layer]) for layer in layers}


def check_offloading(model: nn.Module, layers: Iterable[int]) -> None:
    """Raise ValueError if accelerate offloads the weights of a layer.

    A base whose weights are still to be loaded is on the meta device too, and passes.
    """
    decoder: Any = find_decoder(model)
    spread = hasattr(model, "hf_device_map")  # PEFT removes the hooks of such a model before it adds adapters
    for layer in layers:
        on_meta = any(parameter.is_meta for parameter in decoder.layers[layer].parameters())
        if spread and on_meta or any(has_offloaded_params(part) for part in decoder.layers[layer].modules()):
            raise ValueError(OFFLOADED)
