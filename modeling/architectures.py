"""The supported base models, and where each keeps its decoder, attention modules and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from cacheformers.modeling.memory import BaseShape
from cacheformers.modeling.pretrained import SavedConfig


def always(attention: Any) -> bool:
    """Every layer has rotary positions."""
    return True


def max_positions(config: Any) -> int:
    """Return the number of positions that a base has learned."""
    positions: int = config.max_position_embeddings
    return positions


def positions_of_llama4(config: Any) -> int:
    """Return the positions within a chunk, before the temperature of scores rises with the columns of a batch.

    Padded rows need up to twice as many columns as tokens, and those of a new piece.
    """
    near = config.floor_scale // 3 if config.attn_temperature_tuning else config.attention_chunk_size
    return min(config.max_position_embeddings, config.attention_chunk_size, near)


def unchanged(config: Any, logits: Tensor) -> Tensor:
    """Return the logits of most bases."""
    return logits


def soft_capped(config: Any, logits: Tensor) -> Tensor:
    """Return logits between minus and plus the cap, if there is one."""
    cap = config.final_logit_softcapping
    return logits if cap is None else torch.tanh(logits / cap) * cap


@dataclass(frozen=True)
class Architecture:
    """The names that a model family uses, and how it turns keys.

    Attributes:
        decoder: path from the causal language model to the module that loops over the layers.
        attention: name of the self-attention in a layer.
        cache_argument: name of the cache among the arguments of that attention.
        projections: names of W_q, W_k, W_v, W_o; one fused name and W_o where q, k and v are one matrix.
        fused_by_head: rows of a fused matrix are q, k and v of one head after the other, not all of q, of k, and of v.
        feed_forward: linear layers of the feed-forward block; none where experts take its place.
        rotary: which channels of a key are turned together: "halves" (i with i + half of those that turn), "neighbors"
            (2i with 2i + 1), or None for learned positions, which cannot be moved.
        angles: how the base's cos and sin repeat each angle: "halves", "neighbors", or "once" where they do not.
        turns: whether a layer has rotary positions, given its attention module.
        masks_by_layer_type: the decoder takes one mask per layer type.
        rotary_by_layer_type: each layer type has its own rotary positions.
        positions: how many positions self-attention knows, given the configuration.
        logits: what the base makes of the logits that its head gives, given the configuration and these.
        scores: what attention does to its scores beside a softmax; methods that compute scores themselves refuse it.
        title: the family's name for people.
        note: what is special about it, for people.
    """

    title: str = field(default="", compare=False)
    decoder: str = "model"
    attention: str = "self_attn"
    cache_argument: str = "past_key_values"
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    fused_by_head: bool = False
    feed_forward: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    rotary: str | None = "halves"
    angles: str = "halves"
    turns: Callable[[Any], bool] = always
    masks_by_layer_type: bool = False
    rotary_by_layer_type: bool = False
    positions: Callable[[Any], int] = max_positions
    logits: Callable[[Any, Tensor], Tensor] = unchanged
    scores: str = ""
    note: str = field(default="", compare=False)

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The linear layers that get LoRA by default: the feed-forward block's, else attention's."""
        return self.feed_forward or self.projections


UP_DOWN = ("up_proj", "down_proj")
FC = ("fc1", "fc2")
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("Llama"),
    "mistral": Architecture("Mistral"),
    "opt": Architecture(
        "OPT",
        decoder="model.decoder",
        projections=("q_proj", "k_proj", "v_proj", "out_proj"),
        feed_forward=FC,
        rotary=None,
        note="learned positions",
    ),
    "qwen2": Architecture("Qwen2, Qwen2.5", masks_by_layer_type=True),
    "qwen3": Architecture("Qwen3", masks_by_layer_type=True),
    "gemma": Architecture("Gemma"),
    "gemma2": Architecture(
        "Gemma 2",
        masks_by_layer_type=True,
        logits=soft_capped,
        scores="soft-capped",
        note="eager attention, whose softmax is in float32",
    ),
    "gemma3_text": Architecture(
        "Gemma 3 (text)", masks_by_layer_type=True, rotary_by_layer_type=True, logits=soft_capped
    ),
    "phi": Architecture("Phi", projections=("q_proj", "k_proj", "v_proj", "dense"), feed_forward=FC),
    "phi3": Architecture(
        "Phi-3, Phi-4", projections=("qkv_proj", "o_proj"), feed_forward=("gate_up_proj", "down_proj")
    ),
    "olmo2": Architecture("OLMo 2"),
    "olmo3": Architecture("OLMo 3", masks_by_layer_type=True, rotary_by_layer_type=True),
    "granite": Architecture("Granite", logits=lambda config, logits: logits / config.logits_scaling),
    "ministral": Architecture("Ministral", masks_by_layer_type=True),
    "seed_oss": Architecture("Seed-OSS"),
    "hunyuan_v1_dense": Architecture("Hunyuan (dense)"),
    "starcoder2": Architecture("StarCoder2", feed_forward=("c_fc", "c_proj")),
    "arcee": Architecture("Arcee", feed_forward=UP_DOWN),
    "apertus": Architecture("Apertus", feed_forward=UP_DOWN),
    "smollm3": Architecture("SmolLM3", turns=lambda attention: bool(attention.use_rope)),
    "exaone4": Architecture(
        "EXAONE 4",
        masks_by_layer_type=True,
        turns=lambda attention: attention.sliding_window is None or attention.is_sliding,
    ),
    "cohere2": Architecture(
        "Cohere 2 (Command R7B, A)",
        masks_by_layer_type=True,
        rotary="neighbors",
        angles="neighbors",
        turns=lambda attention: attention.sliding_window is not None,
        logits=lambda config, logits: logits * config.logit_scale,
        note="keys turn in float32",
    ),
    "glm4": Architecture("GLM-4", rotary="neighbors", feed_forward=("gate_up_proj", "down_proj")),
    "helium": Architecture("Helium", rotary="neighbors"),
    "ernie4_5": Architecture("ERNIE 4.5", rotary="neighbors", note="keys turn in float32"),
    "mixtral": Architecture("Mixtral", feed_forward=(), note="experts"),
    "qwen2_moe": Architecture("Qwen2-MoE", masks_by_layer_type=True, note="experts"),
    "qwen3_moe": Architecture("Qwen3-MoE", feed_forward=(), note="experts"),
    "gpt_oss": Architecture(
        "GPT-OSS",
        masks_by_layer_type=True,
        angles="once",
        feed_forward=(),
        scores="normalized with learned sinks",
        note="experts; eager attention",
    ),
    "llama4_text": Architecture(
        "Llama 4 (text)",
        masks_by_layer_type=True,
        rotary="neighbors",
        turns=lambda attention: bool(attention.use_rope),
        positions=positions_of_llama4,
        scores="within chunks of the text, and scaled by position",
        note="experts; at most a chunk of positions",
    ),
    "gpt_neox": Architecture(
        "GPT-NeoX, Pythia",
        decoder="gpt_neox",
        attention="attention",
        cache_argument="layer_past",
        projections=("query_key_value", "dense"),
        fused_by_head=True,
        feed_forward=("dense_h_to_4h", "dense_4h_to_h"),
    ),
}

NO_KEYWORDS = (
    "{} cannot have a memory: its layers in transformers pass no keywords on to self-attention, through which a memory "
    "reaches it. Use a base of another family (docs/bases.md)."
)
UNSUPPORTED = {
    "stablelm": NO_KEYWORDS.format("stablelm"),
    "nemotron": NO_KEYWORDS.format("nemotron"),
    "gemma3": "gemma3 also sees images: take its language model out (docs/bases.md), and put the memory on that.",
    "llama4": "llama4 also sees images: load it by AutoModelForCausalLM, which takes its language model alone.",
}

WRAPPED_AS = ("_orig_mod", "module", "base_model", "model")  # by torch.compile, DDP, PeftModel, PEFT's tuners


class WholeConfig(SavedConfig):
    """The configuration of a model whose own attention is its memory, without a base model.

    Its attention modules are `layers[...].self_attn.memory`, each a `MethodOnLayer`, as on a base model.
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
            f"This {model_type} is a model of its own: its attention is its memory (docs/cacheformer.md), beside which "
            "no other is possible. Put this memory on a pretrained model."
        )
    if model_type in UNSUPPORTED:
        raise ValueError(UNSUPPORTED[model_type])
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"Model type {model_type!r} is not supported. Supported: {', '.join(sorted(ARCHITECTURES))}. Name the "
            "modules of a decoder with the same attention interface by cacheformers.register_architecture()."
        )
    return ARCHITECTURES[model_type]


def register_architecture(model_type: str, **names: Any) -> None:
    """Make a family of decoders known as base models, for all methods.

    Its attention must be transformers' own, to which its layers pass keywords on. Whether keys turn as `rotary`,
    `angles` and `turns` say is tried when they should be moved (`local_window="sliding"`, `far_distance`, `packed`). A
    base whose layers are of several kinds is refused without `masks_by_layer_type`.

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


def check_scores(model_type: str) -> None:
    """Raise ValueError if attention of a base is more than a softmax of scores, for methods that compute it."""
    known = ARCHITECTURES.get(model_type)
    if known is not None and known.scores:
        raise ValueError(
            f"This method computes attention itself, as a softmax of scores, but those of {model_type} are "
            f"{known.scores}: choose another base, or a method that leaves the base's attention as it is."
        )


def base_shape(config: PretrainedConfig) -> BaseShape:
    """Read the sizes of a base model; raise ValueError if its row does not say that kinds of layers differ in masks."""
    known = architecture(config)
    kinds = set(getattr(config, "layer_types", None) or ())
    if len(kinds) > 1 and not known.masks_by_layer_type:
        raise ValueError(
            f"Layers of this {config.model_type} base see different parts of a text ({', '.join(sorted(kinds))}), and "
            "so its decoder takes a mask for each kind, which the family's row does not say: call "
            f"cacheformers.register_architecture({config.model_type!r}, masks_by_layer_type=True)."
        )
    heads = config.num_attention_heads
    return BaseShape(
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        max_positions=known.positions(config),
        rotary=known.rotary is not None,
        sliding_window=getattr(config, "sliding_window", None) or None,  # Qwen2-MoE has 0 for none
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
    if is_whole(model):
        return model.base_model  # type: ignore[return-value]  # without its head
    model = getattr(model, "base_language_model", model)  # in this package's model classes
    path = architecture(model.config).decoder  # type: ignore[arg-type]  # a configuration
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
    name = "self_attn" if is_whole(decoder) else architecture(decoder.config).attention  # type: ignore[arg-type]  # as above
    return [getattr(layer, name) for layer in decoder.layers]  # type: ignore[union-attr]  # a list of modules


def split_projections(weights: list[Tensor], shape: BaseShape) -> tuple[Tensor, ...]:
    """Return W_q, W_k, W_v and W_o, given the weights that `Architecture.projections` names."""
    if len(weights) == 4:
        return tuple(weights)
    fused, output = weights
    if ARCHITECTURES[shape.model_type].fused_by_head:
        by_head = fused.view(shape.heads, 3, shape.head_dim, shape.hidden_size)
        return (*(by_head[:, i].flatten(0, 1) for i in range(3)), output)
    sizes = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
    return (*fused.split(sizes), output)
