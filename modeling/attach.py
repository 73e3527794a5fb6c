"""How a memory sits on a pretrained decoder: which models, which layers, and the hooks that cut text into segments.

No class is patched. A memory is a child named `memory` of an attention module, with a forward hook beside it. One pair
of hooks on the decoder turns any forward into a sequence of pieces in which no segment closes:

    before:  close full segments -> run all pieces but the last -> hand the last one's inputs to the decoder
    after:   take up what the layers left behind -> join the pieces' hidden states
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate.utils import has_offloaded_params
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from cacheformers.modeling.attention import former_attention, keep_inputs
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.inputs import (
    check_arguments,
    check_causal,
    check_checkpointing,
    check_positions,
    real_tokens,
    watch_training,
)
from cacheformers.modeling.memories.base import BaseShape, SegmentCall
from cacheformers.modeling.memories.method import MethodOnLayer
from cacheformers.modeling.origin import identify
from cacheformers.modeling.rotary import check_rotation, rotation


@dataclass(frozen=True)
class Architecture:
    """Where a model family keeps what a memory needs.

    Attributes:
        decoder: path from the causal language model to the module that loops over the layers.
        attention: name of the self-attention in a layer.
        cache_argument: what that attention calls its cache.
        projections: names of W_q, W_k, W_v, W_o; a single fused name and W_o where q, k and v are one matrix.
        feed_forward: linear layers of the feed-forward block (the default LoRA targets).
        rotary: keys carry rotary positions (which can be moved).
        masks_by_layer_type: the decoder takes one mask a layer type.
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


class MemoryOptions(Protocol):
    """A method's options, resolved against a base model."""

    @property
    def window(self) -> Any: ...

    @property
    def signature(self) -> dict[str, Any]: ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with a memory."""

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers whose output the method changes: LoRA's, unless others are named."""

    @property
    def near_tokens(self) -> int | None:
        """How many tokens a text may have before the memory is read; None if there is nothing to train for that."""

    def new_state(
        self, rows: int, devices: dict[int, torch.device], dtype: torch.dtype, keep_values: bool, cache_size: int | None
    ) -> Any: ...


class LayerMemory(Protocol):
    """What sits on an attention module under the name `memory`."""

    unread_forwards: int

    @property
    def options(self) -> MemoryOptions | None:
        """Options of the active memory; None while none is active here."""

    @property
    def fingerprint(self) -> tuple[float, ...]:
        """A few trained numbers by which two adapters differ."""

    def check_loaded(self) -> None:
        """Raise if the active adapter lacks tensors."""


def architecture(config: PretrainedConfig) -> Architecture:
    """The architecture of a base model.

    Raises:
        ValueError: a model type without an entry in the table; names the supported ones.
    """
    model_type = getattr(config, "model_type", None)
    if model_type == "cacheformer":
        raise ValueError(
            "This CacheFormer is a model of its own: its memory is what its forward and generate() return as "
            "past_key_values (docs/cacheformer.md). Memories of this kind are for pretrained models."
        )
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"Model type {model_type!r} is not supported. Supported: {', '.join(sorted(ARCHITECTURES))}. A decoder "
            "with the same attention interface needs one line in modeling/attach.py (CONTRIBUTING.md says how)."
        )
    return ARCHITECTURES[model_type]


def base_shape(config: PretrainedConfig) -> BaseShape:
    """What a memory must know of the base model."""
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


def find_decoder(model: nn.Module) -> nn.Module:
    """The module that loops over the layers, in a causal language model or a model without a head.

    Raises:
        ValueError: the model's type is not supported.
    """
    model = getattr(model, "base_language_model", model)  # in this package's own classes
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
    """The self-attention of every layer."""
    name = architecture(decoder.config).attention  # type: ignore[arg-type]
    return [getattr(layer, name) for layer in decoder.layers]  # type: ignore[union-attr]


def active_options(decoder: nn.Module) -> MemoryOptions | None:
    """Options of the active memory adapter, None where there is none.

    Raises:
        ValueError: the adapter was loaded from an incomplete file.
    """
    memories = active_memories(decoder)
    for memory in memories:
        memory.check_loaded()
    return memories[0].options if memories else None


def active_memories(decoder: nn.Module) -> list[LayerMemory]:
    """The memories of the active adapter, lowest layer first."""
    memories = [getattr(attention, "memory", None) for attention in attention_modules(decoder)]
    return [memory for memory in memories if memory is not None and memory.options is not None]


def new_memory(model: nn.Module, batch_size: int, cache_size: int | None = None) -> MemoryCache:
    """An empty memory for a batch of documents.

    Args:
        model: a model with an active memory adapter.
        cache_size: another number of entries a row than the configured one; 0 remembers nothing.

    Raises:
        ValueError: no memory adapter is active on the model.
    """
    decoder = find_decoder(unwrap(model))
    options = active_options(decoder)
    if options is None:
        raise ValueError("No memory adapter is active on this model: enable it, or set it with set_adapter().")
    devices = layer_devices(decoder, options)
    dtype = next(decoder.layers.parameters()).dtype  # type: ignore[union-attr]
    dtype = dtype if dtype.is_floating_point else torch.float32
    state = options.new_state(batch_size, devices, dtype, decoder.training, cache_size)
    memory = MemoryCache(state, options.window, batch_size, options.signature)
    memory.options = options
    if not decoder.training:  # in training the adapter changes under the memory
        memory.fingerprint = active_memories(decoder)[0].fingerprint
    return memory


def layer_devices(decoder: nn.Module, options: MemoryOptions) -> dict[int, torch.device]:
    """Where each layer that takes part computes."""
    attentions = attention_modules(decoder)
    return {layer: device_of(attentions[layer]) for layer in options.layers}


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes.

    Raises:
        ValueError: its weights are not there between calls, because accelerate offloads them.
    """
    device = next(module.parameters()).device
    if device.type == "meta":
        raise ValueError(OFFLOADED)
    return device


def check_whole(model: nn.Module, layers: Iterable[int]) -> None:
    """Refuse layers whose weights accelerate offloads. (A base that is still to be filled is on the meta device, too.)

    Raises:
        ValueError: names what to do instead.
    """
    decoder: Any = find_decoder(model)
    spread = hasattr(model, "hf_device_map")  # PEFT takes the hooks of such a model off before it puts adapters on
    for layer in layers:
        on_meta = any(parameter.is_meta for parameter in decoder.layers[layer].parameters())
        if spread and on_meta or any(has_offloaded_params(part) for part in decoder.layers[layer].modules()):
            raise ValueError(OFFLOADED)


def check_window(model: nn.Module, options: MemoryOptions) -> None:
    """Refuse a sliding window on a base whose keys cannot be moved.

    Raises:
        ValueError: names the layers that stand in the way.
    """
    if getattr(options, "local_window", None) == "sliding":
        decoder = find_decoder(model)
        entry = architecture(decoder.config)  # type: ignore[arg-type]
        check_rotation(decoder, attention_modules(decoder), entry.cache_argument)


def identity(decoder: nn.Module) -> dict[str, str]:
    """Hashes of the base model and its active adapter."""
    return identify(decoder, getattr(active_memories(decoder)[0], "active_adapters", ()))


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside compile, DDP and PEFT wrappers.

    Raises:
        TypeError: there is none.
    """
    while not isinstance(model, PreTrainedModel):
        inner = next((model._modules[name] for name in WRAPPED_AS if name in model._modules), None)
        if inner is None:
            raise TypeError(f"{type(model).__name__} is neither a transformers model nor a wrapper around one.")
        model = inner
    return model


def split_projections(weights: list[Tensor], shape: BaseShape) -> tuple[Tensor, ...]:
    """W_q, W_k, W_v and W_o from the weights of `Architecture.projections`."""
    if len(weights) == 4:
        return tuple(weights)
    fused = weights[0].view(shape.heads, 3, shape.head_dim, shape.hidden_size)  # q, k, v by head
    return (*(fused[:, i].flatten(0, 1) for i in range(3)), weights[1])


def add_hooks(model: nn.Module) -> list[Any]:
    """Register the hooks that cut, stage and join. Returns their handles."""
    decoder = find_decoder(model)
    handles = [
        decoder.register_forward_pre_hook(before_decoder, with_kwargs=True),
        decoder.register_forward_hook(after_decoder, with_kwargs=True),
    ]
    if model is not decoder:
        handles.append(model.register_forward_pre_hook(before_model, with_kwargs=True))
    for attention in attention_modules(decoder):
        handles.append(attention.register_forward_pre_hook(before_attention, with_kwargs=True))
    return handles


def before_model(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Tell the decoder how many of the last hidden states are wanted, so that the others are not kept."""
    keep = kwargs.get("logits_to_keep")
    if isinstance(keep, int) and keep > 0 and active_options(find_decoder(model)) is not None:
        return args, {**kwargs, "memory_keep": keep}
    return None


def before_decoder(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Run every piece but the last, and prepare the last."""
    given = kwargs.get("memory_state")
    if isinstance(given, SegmentCall):
        return None
    if args:
        kwargs = {**dict(zip(inspect.signature(decoder.forward).parameters, args, strict=False)), **kwargs}
    keep = kwargs.pop("memory_keep", None)
    cache = kwargs.get("past_key_values")
    options = active_options(decoder)
    if options is None:
        if given is not None or isinstance(cache, MemoryCache):
            raise ValueError("A memory was passed, but no memory adapter is active on this model.")
        return None
    check_arguments(kwargs)
    check_causal(options, kwargs, keep)
    check_checkpointing(decoder)
    ids = kwargs["input_ids"]
    passed = given if given is not None else cache
    memory = passed if isinstance(passed, MemoryCache) else as_memory(decoder, passed, ids.shape[0])
    match_rows(decoder, memory, ids.shape[0], options)
    real = real_tokens(kwargs.get("attention_mask"), ids, memory.visible)
    check_positions(kwargs.get("position_ids"), real)
    if memory is passed and kwargs.get("use_cache") is False:
        if memory.state.forward_is_segment:
            memory.forget_columns()
        elif not decoder.training:
            raise ValueError(
                "use_cache=False with a memory: generate() would read the same ids into it again at every step. Leave "
                "use_cache out."
            )

    if decoder.training and torch.is_grad_enabled():
        watch_training(active_memories(decoder)[0], options, real, carried=memory is passed)
    pieces = memory.timeline.pieces(real)
    if len(pieces) > 1 and any(wanted(decoder, kwargs, name) for name in ("output_hidden_states", "output_attentions")):
        raise ValueError(
            f"hidden_states and attentions are not available for inputs longer than a segment ({len(pieces)} pieces "
            "here): pass at most segment_tokens tokens at a time."
        )
    earlier: list[Tensor] = []
    for start, end in pieces[:-1]:
        call = prepare(decoder, memory, real[:, start:end], ids[:, start:end])
        output = decoder(**piece_inputs(decoder, call, kwargs, start, end))
        remaining = ids.shape[1] - end
        if keep is None or keep > remaining:
            earlier.append(output.last_hidden_state)
    last = pieces[-1][0]
    call = prepare(decoder, memory, real[:, last:], ids[:, last:])
    call.earlier, call.keep = earlier, keep
    call.returned = memory is passed or kwargs.get("use_cache") is not False
    call.forgets = memory.state.forward_is_segment and kwargs.get("use_cache") is False
    return (), piece_inputs(decoder, call, kwargs, *pieces[-1])


def after_decoder(decoder: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Take up what the layers left behind; after the last piece, join the pieces."""
    call = kwargs.get("memory_state")
    if not isinstance(call, SegmentCall):
        return output
    memory: MemoryCache = call.memory
    memory.end(call)
    output.past_key_values = memory
    if call.earlier is None:
        return output
    memory.detach()
    if call.forgets:
        memory.forget_columns()
    if not call.returned:
        output.past_key_values = None
    if call.earlier:
        output.last_hidden_state = torch.cat([*call.earlier, output.last_hidden_state], 1)
    if call.keep is not None:
        output.last_hidden_state = output.last_hidden_state[:, -call.keep :]
    return output


def before_attention(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Give self-attention its local cache, which activation checkpointing takes away from the layers."""
    call = kwargs.get("memory_state")
    if not isinstance(call, SegmentCall):
        return None
    name = architecture(attention.config).cache_argument  # type: ignore[arg-type]
    return args, {**kwargs, name: call.local}


def wanted(decoder: nn.Module, kwargs: dict[str, Any], name: str) -> bool:
    """Whether an output is asked for, by argument or by the model's configuration."""
    value = kwargs.get(name)
    return bool(getattr(decoder.config, name, False) if value is None else value)


def as_memory(decoder: nn.Module, cache: Cache | None, rows: int) -> MemoryCache:
    """A fresh memory in place of the empty cache that `generate` passes."""
    if cache is not None and (type(cache) is not DynamicCache or getattr(cache, "offloading", False)):
        raise ValueError(
            f"{type(cache).__name__} (static, quantised, offloaded or assisted) cannot carry a memory: leave "
            "past_key_values and cache_implementation out, or pass a MemoryCache."
        )
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            "A plain cache that already holds tokens was passed to a model with a memory: their states are not in the "
            "memory. Start without past_key_values, or from cacheformers.read()."
        )
    return new_memory(decoder, rows)


def match_rows(decoder: nn.Module, memory: MemoryCache, rows: int, options: MemoryOptions) -> None:
    """Check that a memory belongs to this model and batch; expand it when its rows divide the batch (beams)."""
    if memory.signature != options.signature:
        ours, theirs = options.signature, memory.signature
        differing = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
        raise ValueError(
            "This memory was made with another model or adapter configuration; they differ in: "
            + "; ".join(f"{key} ({theirs.get(key)} in the memory, {ours.get(key)} here)" for key in differing)
        )
    if memory.fingerprint and not decoder.training and memory.fingerprint != active_memories(decoder)[0].fingerprint:
        raise ValueError(
            "This memory was made with another adapter, or with this one in another precision: read the text again."
        )
    check_origin(decoder, memory)
    if rows == memory.batch_size:
        return
    if rows % memory.batch_size:
        raise ValueError(
            f"The memory holds {memory.batch_size} documents, the batch has {rows} rows, which it neither equals "
            "nor is a multiple of. Use memory.select(rows) or memory.expand(n)."
        )
    memory.expand(rows // memory.batch_size)


def check_origin(decoder: nn.Module, memory: MemoryCache) -> None:
    """Once for a memory from a file: check that this very model has read it."""
    if memory.origin.checked:
        return
    if memory.origin.identity:
        here = identity(decoder)
        names = {"config": "base model's configuration", "base": "base model's weights", "adapter": "adapter"}
        differing = [names[kind] for kind, value in memory.origin.identity.items() if here.get(kind) != value]
        if differing:
            raise ValueError(
                f"This memory was made with another model; it differs in the {' and the '.join(differing)}. Load the "
                "base model and the adapter that it was read with, or read the text again."
            )
    memory.origin.checked = True


def prepare(decoder: nn.Module, memory: MemoryCache, real: Tensor, ids: Tensor) -> SegmentCall:
    """Close what is full, and begin a piece.

    Raises:
        ValueError: a token would have a position that the base model does not have.
    """
    rotate = rotation(decoder)
    memory.close(memory.timeline.full_rows(), rotate)
    call = memory.begin(real, ids)
    call.rotate = rotate
    config: Any = decoder.config
    most = config.max_position_embeddings
    if not architecture(config).rotary and int(call.positions.max()) >= most:
        raise ValueError(
            f"This base model has {most} positions, and the method counts on: the text is too long for it."
        )
    return call


def piece_inputs(decoder: nn.Module, call: SegmentCall, kwargs: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """The decoder's arguments for the columns start to end."""
    ids = kwargs["input_ids"][:, start:end]
    checkpointing = decoder.training and getattr(decoder, "gradient_checkpointing", False)
    drops_cache = checkpointing and call.local.columns == 0
    return {
        **kwargs,
        "input_ids": ids,
        "attention_mask": local_mask(decoder, call, ids.device),
        "position_ids": call.positions[:, -ids.shape[1] :].to(ids.device),
        "past_key_values": None if drops_cache else call.local,
        "use_cache": not drops_cache,
        "memory_state": call,
    }


def local_mask(decoder: nn.Module, call: SegmentCall, device: torch.device) -> Tensor | dict[str, Tensor] | None:
    """What self-attention may see: None where plain causality over the visible columns is right, else 4D masks."""
    if not call.padded:
        return None
    config: Any = decoder.config
    implementation = former_attention(config._attn_implementation)
    if implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"attn_implementation={implementation!r} cannot mask padding inside segments: load the model with "
            "attn_implementation='sdpa', or pass documents without padding."
        )
    visible, positions = call.visible.to(device), call.positions.to(device)  # [rows, columns + time]
    time = call.real.shape[1]
    place = torch.arange(visible.shape[1], device=device)
    causal = place <= place[-time:, None]  # [time, columns + time]
    itself = place == place[-time:, None]  # padding sees itself: no row of the mask is empty
    full = (causal & visible[:, None]) | itself
    near = positions[:, -time:, None] - positions[:, None] < (getattr(config, "sliding_window", None) or 2**62)

    def finish(mask: Tensor) -> Tensor:
        mask = mask[:, None]
        if implementation == "sdpa":
            return mask
        dtype = next(decoder.parameters()).dtype
        return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, torch.finfo(dtype).min)

    if architecture(config).masks_by_layer_type:
        return {"full_attention": finish(full), "sliding_attention": finish(full & near | itself)}
    return finish(full & near | itself)


def put_memory(attention: nn.Module, memory: MethodOnLayer) -> None:
    """Put a memory on an attention module, with the hooks through which it takes part (`memory.handles`)."""
    attention.memory = memory  # type: ignore[assignment]
    memory.handles = []
    if memory.method.branch is not None:
        memory.handles.append(attention.register_forward_hook(branch_hook, with_kwargs=True))
    if memory.method.attend is not None:
        memory.handles.append(attention.register_forward_pre_hook(keep_inputs, with_kwargs=True))


def branch_hook(attention: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of an augmented attention module: add the memory's branch to its output."""
    memory: Any = attention.memory
    call = kwargs.get("memory_state")
    if memory.options is None or not isinstance(call, SegmentCall):
        return output
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    added = memory.branch(hidden, call)
    if added is None:
        return output
    return (output[0] + added.to(output[0].dtype), *output[1:])
