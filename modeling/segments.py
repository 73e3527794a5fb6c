"""How a memory is put on a pretrained decoder, and the hooks that cut its input into segments.

A memory is a child named `memory` of an attention module. One pair of hooks on the decoder turns any forward into a
sequence of pieces in which no segment closes:

    before:  close full segments -> run all pieces but the last -> hand the last one's inputs to the decoder
    after:   store what the layers left behind -> join the hidden states of the pieces
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cacheformers.modeling.architectures import (
    NO_KEYWORDS,
    architecture,
    attention_modules,
    find_decoder,
    is_whole,
    unwrap,
)
from cacheformers.modeling.attention import former_attention, keep_inputs
from cacheformers.modeling.cache import MemoryCache, check_blank
from cacheformers.modeling.inputs import check_arguments, check_positions, real_tokens, watch_training
from cacheformers.modeling.memory import SegmentCall
from cacheformers.modeling.method import MethodOnLayer, active_memories, lowest_memory, required_options
from cacheformers.modeling.offloading import device_of, layer_devices
from cacheformers.modeling.origin import identify
from cacheformers.modeling.rotary import rotation


def new_memory(model: nn.Module, batch_size: int, cache_size: int | None = None) -> MemoryCache:
    """Create an empty memory for a batch of documents.

    Args:
        model: a model with an active memory adapter.
        cache_size: entries per row, instead of the configured number; 0 remembers nothing.

    Raises:
        ValueError: no memory adapter is active on the model, or a negative size.
    """
    if cache_size is not None and cache_size < 0:
        raise ValueError(f"cache_size must be at least 0, got {cache_size}.")
    decoder = find_decoder(unwrap(model))
    options = required_options(decoder)
    devices = layer_devices(decoder, options.layers)
    dtype = next(decoder.layers.parameters()).dtype  # type: ignore[union-attr]  # a list of modules
    dtype = dtype if dtype.is_floating_point else torch.float32
    state = options.new_state(batch_size, devices, dtype, decoder.training, cache_size)
    memory = MemoryCache(state, options.window, batch_size, options.signature)
    memory.options = options
    if not decoder.training:  # training changes the adapter while the memory is in use
        memory.fingerprint = active_memories(decoder)[0].fingerprint
    return memory


def identity(decoder: nn.Module) -> dict[str, str]:
    """Return hashes of the base model and its active adapter."""
    return identify(decoder, getattr(active_memories(decoder)[0], "active_adapters", ()))


def put_memory(layer: nn.Module, attention: nn.Module, memory: MethodOnLayer) -> None:
    """Put a memory on a layer's attention module, with the hooks that it needs (`memory.handles`)."""
    attention.memory = memory  # type: ignore[assignment]  # a protocol of modules
    memory.handles = []
    if memory.method.branch is not None:
        memory.handles.append(attention.register_forward_hook(add_branch, with_kwargs=True))
    if memory.method.attend is not None:
        memory.handles.append(attention.register_forward_pre_hook(keep_inputs, with_kwargs=True))
    if memory.method.enter is not None:
        memory.handles.append(layer.register_forward_pre_hook(partial(before_layer, memory), with_kwargs=True))
    if memory.method.leave is not None:
        memory.handles.append(layer.register_forward_hook(partial(after_layer, memory), with_kwargs=True))


def add_hooks(model: nn.Module) -> list[Any]:
    """Register the hooks that cut, stage and join, and return their handles."""
    decoder = find_decoder(model)
    handles = [
        decoder.register_forward_pre_hook(before_decoder, with_kwargs=True),
        decoder.register_forward_hook(after_decoder, with_kwargs=True),
    ]
    if model is not decoder:
        handles.append(model.register_forward_pre_hook(before_model, with_kwargs=True))
    config: Any = decoder.config
    cache_argument = architecture(config).cache_argument
    for attention in attention_modules(decoder):
        hook = partial(before_attention, cache_argument)
        handles.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
    return handles


def reader(decoder: nn.Module, memory: MemoryCache, left: int = 0) -> nn.Module:
    """Return what must run so that the next segment of a text enters the memory: often the lower layers alone.

    Layers above the highest one that stores leave behind nothing but keys and values of the local window. Where closed
    segments leave no window, or the text's end sees nothing of this one, the decoder returned ends below them: a copy
    with the same modules and hooks, so that another thread can use the whole model meanwhile.

    Args:
        left: tokens that every row will read from here on before anything else looks at the memory, whose last segment
            may stay open. 0: what is read is closed before.
    """
    top, layers = memory.state.top_layer, decoder.layers
    if top is None:
        return decoder
    above = len(layers) - 1 - top  # type: ignore[arg-type]  # a list of modules
    if not (out_of_sight(memory, above, left) if left else memory.window.empties and not memory.columns):
        return decoder
    lower = copy.copy(decoder)
    lower._modules = {**decoder._modules, "layers": layers[: top + 1]}  # type: ignore[index, dict-item]  # a list of modules
    return lower


def out_of_sight(memory: MemoryCache, above: int, left: int) -> bool:
    """Whether nothing of the next segment in `above` layers reaches what is visible after `left` more tokens.

    Each of these layers looks back as many whole segments as the local window holds parts of; the last one's keys and
    values must be right where the end of the text sees them. Sinks are of the first segment, which all layers read.
    """
    window, columns = memory.window, memory.timeline.open.sum(1)
    if not (above and memory.columns and bool(((columns == 0) | (columns == window.segment_tokens)).all())):
        return False
    back = -(-window.kept_tokens // window.segment_tokens)
    return left >= window.kept_tokens + window.segment_tokens * (2 + (above - 1) * back)


def before_model(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Pre-hook of the whole model: tell the decoder how many of the last hidden states to keep."""
    keep = kwargs.get("logits_to_keep")
    if isinstance(keep, int) and keep > 0 and active_memories(find_decoder(model)):
        return args, {**kwargs, "memory_keep": keep}
    return None


def before_decoder(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Pre-hook of the decoder: check the arguments, run every piece but the last, and prepare the last."""
    given = kwargs.get("memory_state")
    if isinstance(given, SegmentCall):
        return None
    if args:
        kwargs = {**dict(zip(inspect.signature(decoder.forward).parameters, args, strict=False)), **kwargs}
    keep = kwargs.pop("memory_keep", None)
    cache = kwargs.get("past_key_values")
    lowest = lowest_memory(decoder)
    if lowest is None:
        if given is not None or isinstance(cache, MemoryCache):
            raise ValueError("A memory was passed, but no memory adapter is active on this model.")
        return None
    options = lowest.options
    check_arguments(decoder, options, kwargs, keep)
    ids = kwargs["input_ids"]
    passed = given if given is not None else cache
    if isinstance(passed, MemoryCache):
        memory = passed
    else:
        check_blank(passed)
        memory = new_memory(decoder, ids.shape[0])
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
        watch_training(lowest, options, real, carried=memory is passed)
    pieces = memory.timeline.pieces(real)
    if len(pieces) > 1 and any(wanted(decoder, kwargs, name) for name in ("output_hidden_states", "output_attentions")):
        raise ValueError(
            f"hidden_states and attentions are not available for inputs longer than a segment ({len(pieces)} pieces "
            "here): pass at most segment_tokens tokens at a time."
        )
    if lowest.method.attend is not None and wanted(decoder, kwargs, "output_attentions"):
        raise ValueError(
            f"{lowest.method.title} computes attention without a matrix of weights: leave output_attentions out, or "
            "ask the base alone (model.disable_adapter())."
        )
    earlier: list[Tensor] = []
    for start, end in pieces[:-1]:
        output = decoder(**begin_piece(decoder, memory, kwargs, real, start, end))
        if keep is None or keep > ids.shape[1] - end:
            earlier.append(output.last_hidden_state)
    inputs = begin_piece(decoder, memory, kwargs, real, *pieces[-1])
    call: SegmentCall = inputs["memory_state"]
    call.earlier, call.keep = earlier, keep
    call.returned = memory is passed or kwargs.get("use_cache") is not False
    call.forgets = memory.state.forward_is_segment and kwargs.get("use_cache") is False
    return (), inputs


def begin_piece(
    decoder: nn.Module, memory: MemoryCache, kwargs: dict[str, Any], real: Tensor, start: int, end: int
) -> dict[str, Any]:
    """Close full segments, and return the decoder's arguments for the columns `start` to `end`."""
    full = memory.timeline.full_rows()
    if full:
        close_segments(decoder, memory, full)
    begin_segments(decoder, memory, real[:, start:end])
    ids = kwargs["input_ids"][:, start:end]
    call = memory.begin(real[:, start:end], ids)
    call.start = start
    return {**kwargs, "input_ids": ids, **piece_arguments(decoder, call, ids.device)}


def piece_arguments(decoder: nn.Module, call: SegmentCall, device: torch.device) -> dict[str, Any]:
    """Return the decoder's arguments for new columns beside their ids or embeddings."""
    call.rotate = rotation(decoder)
    config: Any = decoder.config
    most = config.max_position_embeddings
    if architecture(config).rotary is None and int(call.positions.max()) >= most:
        raise ValueError(
            f"This base model has {most} positions, and this method does not restart them: the text is too long."
        )
    checkpointing = decoder.training and getattr(decoder, "gradient_checkpointing", False)
    drops_cache = checkpointing and call.local.columns == 0
    return {
        "attention_mask": local_mask(decoder, call, device),
        "position_ids": call.positions[:, -call.real.shape[1] :].to(device),
        "past_key_values": None if drops_cache else call.local,
        "use_cache": not drops_cache,
        "memory_state": call,
    }


def close_segments(decoder: nn.Module, memory: MemoryCache, rows: Iterable[int]) -> None:
    """Move the open segments of rows into the memory, after memory tokens have run behind them if the method has any.

    Their gradients go as far as those of the segment's keys and values: through the forward that they are a part of.
    """
    rows = [row for row in rows if bool(memory.timeline.open[row].any())]
    if rows and memory.state.memory_tokens:
        call, hidden = run_memory_tokens(decoder, memory, rows, "write")
        memory.state.write(rows, hidden, call.reading)
    memory.close(rows, rotation(decoder))


def begin_segments(decoder: nn.Module, memory: MemoryCache, real: Tensor) -> None:
    """Run the memory tokens of the segments that begin in new columns, before those; their keys and values stay.

    Args:
        real: which of the columns are tokens, `[rows, time]`.
    """
    if not memory.window.memory_tokens:
        return
    timeline = memory.timeline
    begin = real.any(1) & ~timeline.open.any(1) & ~timeline.memory.any(1)
    rows = [row for row in begin.nonzero()[:, 0].tolist() if memory.state.reads_tokens(timeline.closed[row])]
    if rows:
        run_memory_tokens(decoder, memory, rows, "read")


def run_memory_tokens(decoder: nn.Module, memory: MemoryCache, rows: list[int], use: str) -> tuple[SegmentCall, Tensor]:
    """Run memory tokens through all layers, behind what self-attention sees in the given rows.

    Args:
        use: "read" or "write", see `SegmentCall.memory_tokens`.

    Returns:
        The forward, and its last hidden states `[all rows, tokens, h]`, which mean nothing in other rows.
    """
    lowest = active_memories(decoder)[0]
    embeddings: Tensor = lowest.method.memory_tokens(lowest.options, lowest.active_parts, memory)  # type: ignore[misc]  # it has some
    table: Any = decoder.get_input_embeddings()  # type: ignore[operator]  # a decoder's
    weight: Tensor = table.weight
    if isinstance(weight, DTensor) or weight.shape[1] != embeddings.shape[2]:
        raise ValueError(
            f"Memory tokens have {embeddings.shape[2]} numbers and run whenever a row's segment closes. They need a "
            f"base whose token embeddings are as wide (here {weight.shape[1]}), and weights that are not sharded over "
            "processes, which close segments at different times: choose another base or method, or train without FSDP."
        )
    real = torch.zeros(memory.batch_size, embeddings.shape[1], dtype=torch.bool)
    real[rows] = True
    call = memory.begin(real)
    call.memory_tokens = use
    call.local.stage = use == "read"
    device = device_of(table)
    inputs = embeddings.to(device, weight.dtype)
    output = decoder(inputs_embeds=inputs, **piece_arguments(decoder, call, device))
    return call, output.last_hidden_state


def local_mask(decoder: nn.Module, call: SegmentCall, device: torch.device) -> Tensor | dict[str, Tensor] | None:
    """Mask self-attention, `[rows, 1, time, columns + time]`; None where causality over all columns is right."""
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
    itself = place == place[-time:, None]  # padding sees itself, so that no row of the mask is empty
    full = (causal & visible[:, None]) | itself
    near = positions[:, -time:, None] - positions[:, None] < (getattr(config, "sliding_window", None) or 2**62)

    def finish(mask: Tensor) -> Tensor:
        mask = mask[:, None]
        if implementation == "sdpa":
            return mask
        dtype = next(decoder.parameters()).dtype
        return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, torch.finfo(dtype).min)

    if architecture(config).masks_by_layer_type:
        masks = {"sliding_attention": full & near | itself}  # other layers see the whole local window
        return {kind: finish(masks.get(kind, full)) for kind in set(config.layer_types)}
    return finish(full & near | itself)


def before_attention(
    cache_argument: str, attention: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Pre-hook of self-attention: pass it the local cache, which activation checkpointing hides from the layers."""
    call = kwargs.get("memory_state")
    if not isinstance(call, SegmentCall):
        return None
    call.reached = True
    return args, {**kwargs, cache_argument: call.local}


def add_branch(attention: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Hook of self-attention: add the memory's branch to its output."""
    memory: Any = attention.memory
    call = kwargs.get("memory_state")
    if memory.options is None or not isinstance(call, SegmentCall):
        return output
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    added = memory.method.branch(memory.options, memory.layer, memory.active_parts, hidden, call, memory.training)
    if added is None:
        return output
    return (output[0] + added.to(output[0].dtype), *output[1:])


def before_layer(memory: Any, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Pre-hook of a decoder layer: let the memory change its input."""
    call = kwargs.get("memory_state")
    if memory.options is None or not isinstance(call, SegmentCall):
        return None
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    changed = memory.method.enter(memory.options, memory.layer, memory.active_parts, hidden, call)
    return args[1:], {**kwargs, "hidden_states": changed}


def after_layer(memory: Any, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Hook of a decoder layer: show the memory its output."""
    call = kwargs.get("memory_state")
    if memory.options is not None and isinstance(call, SegmentCall):
        hidden = output[0] if isinstance(output, tuple) else output
        memory.method.leave(memory.options, memory.layer, memory.active_parts, hidden, call)


def after_decoder(decoder: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Hook of the decoder: store what the layers left behind; after the last piece, join all pieces."""
    call = kwargs.get("memory_state")
    if not isinstance(call, SegmentCall):
        return output
    if not call.reached:
        raise ValueError(NO_KEYWORDS.format(decoder.config.model_type))  # type: ignore[union-attr]  # its configuration
    memory: MemoryCache = call.memory
    memory.end(call)
    output.past_key_values = memory
    if call.earlier is None:
        return output
    if not memory.keeps_graph:
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


def wanted(decoder: nn.Module, kwargs: dict[str, Any], name: str) -> bool:
    """Whether an output is requested, by argument or by the model's configuration."""
    value = kwargs.get(name)
    return bool(getattr(decoder.config, name, False) if value is None else value)


def match_rows(decoder: nn.Module, memory: MemoryCache, rows: int, options: Any) -> None:
    """Raise ValueError unless a memory fits model and batch; expand it if its rows divide the batch (beams)."""
    if memory.options is not options:
        check_signature(options.signature, memory.signature)
    if memory.fingerprint and not decoder.training and memory.fingerprint != active_memories(decoder)[0].fingerprint:
        if is_whole(decoder):
            raise ValueError("This memory was made with other weights of this model: read the text again.")
        raise ValueError(
            "This memory was made with another adapter, or with this one in another precision: read the text again."
        )
    check_origin(decoder, memory)
    memory.match_rows(rows)


def check_signature(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raise ValueError unless a model's options (`MethodOptions.signature`) are those of a memory."""
    if ours != theirs:
        differing = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
        raise ValueError(
            "This memory was made with another model or adapter configuration; they differ in: "
            + "; ".join(f"{key} ({theirs.get(key)} in the memory, {ours.get(key)} here)" for key in differing)
        )


def check_origin(decoder: nn.Module, memory: MemoryCache) -> None:
    """Check once that a memory from a file was read with this model; raise ValueError otherwise."""
    if memory.origin.checked:
        return
    if memory.origin.identity:
        here = identity(decoder)
        kind = "model" if is_whole(decoder) else "base model"
        names = {"config": f"{kind}'s configuration", "base": f"{kind}'s weights", "adapter": "adapter"}
        differing = [names[kind] for kind, value in memory.origin.identity.items() if here.get(kind) != value]
        if differing:
            raise ValueError(
                f"This memory was made with another model; it differs in the {' and the '.join(differing)}. Load the "
                "model that it was read with, base and adapter, or read the text again."
            )
    memory.origin.checked = True
