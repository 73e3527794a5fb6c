"""Rotary positions: how layers turn queries and keys, and how kept keys are turned to new positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cacheformers.modeling.architectures import architecture, attention_modules, find_decoder
from cacheformers.modeling.cache import LocalCache, Rotate

SHIFT = 5  # positions by which the check turns keys
TOLERANCE = 0.05  # of the largest number of a key: above bfloat16's rounding, far below any other way of turning


class Rotation(NamedTuple):
    """How tokens' queries and keys are turned, in pairs of channels.

    Attributes:
        cos, sin: of each pair's angle, `[rows, time, pairs]`; some bases scale both. Channels beyond the pairs stay.
        neighbors: channels 2i and 2i + 1 are a pair; otherwise channels i and i + pairs.
    """

    cos: Tensor
    sin: Tensor
    neighbors: bool = False

    def turn(self, states: Tensor) -> Tensor:
        """Turn `[rows, heads, time, d_head]`."""
        cos, sin = self.cos[:, None], self.sin[:, None]
        size = 2 * cos.shape[-1]
        whole = size == states.shape[-1]
        turning = states if whole else states[..., :size]
        if self.neighbors:
            first, second = turning[..., ::2], turning[..., 1::2]
        else:
            first, second = turning.chunk(2, dim=-1)
        pair = first * cos - second * sin, second * cos + first * sin
        turned = torch.stack(pair, -1).flatten(-2) if self.neighbors else torch.cat(pair, -1)
        turned = turned.to(states.dtype)
        return turned if whole else torch.cat([turned, states[..., size:]], -1)

    @property
    def inverse(self) -> Rotation:
        """The rotation that undoes this one, whatever cos and sin are scaled by."""
        square = self.cos.square() + self.sin.square()
        return Rotation(self.cos / square, -self.sin / square, self.neighbors)

    @property
    def unscaled(self) -> Rotation:
        """The rotation without the factor by which cos and sin are scaled."""
        factor = (self.cos.square() + self.sin.square()).sqrt()
        return Rotation(self.cos / factor, self.sin / factor, self.neighbors)

    def exact(self, dtype: torch.dtype) -> Rotation:
        """The rotation in a given precision."""
        if self.cos.dtype == dtype:
            return self
        return Rotation(self.cos.to(dtype), self.sin.to(dtype), self.neighbors)


def layer_rotation(attention: nn.Module, position_embeddings: Any) -> Rotation | None:
    """Return how an attention module turns tokens; None if it does not.

    Args:
        position_embeddings: what the decoder passes it: cos and sin `[rows, time, ...]`, complex numbers, or None.
    """
    known = architecture(attention.config)  # type: ignore[arg-type]  # of a transformers model
    if position_embeddings is None or known.rotary is None or not known.turns(attention):
        return None
    neighbors = known.rotary == "neighbors"
    if isinstance(position_embeddings, Tensor):
        return Rotation(position_embeddings.real, position_embeddings.imag, neighbors)
    cos, sin = position_embeddings
    if known.angles == "once":
        return Rotation(cos, sin, neighbors)
    if known.angles == "neighbors":
        return Rotation(cos[..., ::2], sin[..., ::2], neighbors)
    pairs = cos.shape[-1] // 2
    return Rotation(cos[..., :pairs], sin[..., :pairs], neighbors)


def position_embeddings(decoder: nn.Module, layer: int, states: Tensor, positions: Tensor) -> Any:
    """Return what the decoder passes to a layer's attention for the positions `[rows, time]` of states."""
    config: Any = decoder.config
    kind = [config.layer_types[layer]] if architecture(config).rotary_by_layer_type else []
    return decoder.rotary_emb(states, positions, *kind)  # type: ignore[operator]  # a module


def rotation(decoder: nn.Module) -> Rotate | None:
    """Return a function that turns a layer's keys by a number of positions; None for models without rotary positions.

    Layers without rotary positions, and layers above those of a `reader`, keep their keys as they are.
    """
    if architecture(decoder.config).rotary is None:  # type: ignore[arg-type]  # of a transformers model
        return None
    attentions = attention_modules(decoder)

    def rotate(keys: Tensor, shift: Tensor, layer: int) -> Tensor:
        if layer >= len(attentions):
            return keys
        exact = keys.to(torch.promote_types(keys.dtype, torch.float32))
        turning = layer_rotation(attentions[layer], position_embeddings(decoder, layer, exact, shift.to(keys.device)))
        return keys if turning is None else turning.exact(exact.dtype).unscaled.turn(exact).to(keys.dtype)

    return rotate


def turned_back(states: Tensor, inverse: Rotation | None) -> Tensor:
    """Rotate states back to position 0, and keep the factor by which the model scales its rotation."""
    if inverse is None:
        return states
    exact = states.to(torch.promote_types(states.dtype, torch.float32))
    return inverse.unscaled.turn(exact).to(states.dtype)


def check_rotation(model: nn.Module, options: Any) -> None:
    """Check, where keys are moved, that `rotation` turns the keys of every layer as the base model itself does.

    Each layer makes keys of the same states at two ranges of positions; the first keys, turned, must equal the second.
    A base on the meta device cannot be tried, and passes.

    Raises:
        ValueError: names the layers whose keys cannot be moved; `far_distance` or `packed` on a rotation that depends
            on the length of the text.
    """
    if getattr(options, "local_window", None) == "sliding":
        moving, remedy = "local_window='sliding'", "local_window='segment'"
    elif getattr(options, "far_distance", 0) or getattr(options, "packed", False):
        name = "far_distance" if options.far_distance else "packed"
        moving, remedy = f"{name}={getattr(options, name)}", f"{name}={type(getattr(options, name))()}"
        rope: Any = getattr(find_decoder(model).config, "rope_parameters", None) or {}
        kind = rope.get("rope_type")
        if kind in ("dynamic", "longrope"):
            raise ValueError(
                f"{moving} reads texts beyond the base's positions, where this base's rotation ({kind}) changes with "
                f"the length of the text: use {remedy}."
            )
    else:
        return
    decoder = find_decoder(model)
    config: Any = decoder.config
    differing = []
    for layer, attention in enumerate(attention_modules(decoder)):
        if any(parameter.is_meta for parameter in attention.parameters()):
            return
        first, second, turned = keys_at_two_places(decoder, layer)
        if not float((turned - second).abs().max()) <= TOLERANCE * float(first.abs().max()):
            differing.append(layer)
    if differing:
        raise ValueError(
            f"{moving} moves keys to new positions, but in layers {differing} of this {config.model_type} base keys do "
            "not turn with their positions as its row in ARCHITECTURES says (`rotary`, `angles` and `turns`: which "
            f"channels are paired, and which layers have rotary positions): correct the row, or use {remedy}."
        )


@torch.no_grad()
def keys_at_two_places(decoder: nn.Module, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys that a layer makes of random states, those it makes `SHIFT` positions later, and the first turned.

    Returns:
        `[1, kv_heads, tokens, d_head]` each, float32.
    """
    config: Any = decoder.config
    attention = attention_modules(decoder)[layer]
    weight = next(attention.parameters())
    dtype = next(parameter.dtype for parameter in decoder.parameters() if parameter.is_floating_point())
    states = torch.randn(1, 3, config.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden = states.to(weight.device, dtype).expand(2, -1, -1)
    places = torch.arange(3, device=weight.device) + torch.tensor([[0], [SHIFT]], device=weight.device)
    cache, training = LocalCache({}, 0, stage=True), attention.training
    attention.eval()  # without dropout in the LoRA of another adapter
    attention.forward(  # without the hooks of memories
        hidden_states=hidden,
        attention_mask=None,
        position_ids=places,
        position_embeddings=position_embeddings(decoder, layer, hidden, places),
        **{architecture(config).cache_argument: cache},
    )
    attention.train(training)
    ((keys, _),) = cache.staged.values()
    rotate = rotation(decoder)
    assert rotate is not None
    turned = rotate(keys[:1], torch.full_like(places[:1], SHIFT), layer)
    return keys[:1].float(), keys[1:].float(), turned.float()
