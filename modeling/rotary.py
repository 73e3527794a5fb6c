"""Rotary positions of keys: how kept keys are turned to new positions, and which base models allow it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cacheformers.modeling.architectures import architecture, attention_modules, find_decoder
from cacheformers.modeling.attention import turn
from cacheformers.modeling.cache import LocalCache, Rotate

SHIFT = 5  # positions by which the check turns keys
TOLERANCE = 0.05  # of the largest number of a key: above bfloat16's rounding, far below any other way of turning


def rotation(decoder: nn.Module) -> Rotate | None:
    """Return a function that turns rotary keys by a number of positions; None for models without rotary positions."""
    rotary: Any = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        return None

    def rotate(keys: Tensor, shift: Tensor) -> Tensor:
        exact = keys.to(torch.promote_types(keys.dtype, torch.float32))
        cos, sin = rotary(exact, shift.to(keys.device))
        scaling = getattr(rotary, "attention_scaling", 1.0)
        return turn(exact, cos / scaling, sin / scaling).to(keys.dtype)

    return rotate


def check_rotation(model: nn.Module, options: Any) -> None:
    """Check, where keys are moved, that `rotation` turns the keys of every layer as the base model itself does.

    Each layer makes keys of the same states at two ranges of positions; the first keys, turned, must equal the second.
    A base on the meta device cannot be tried, and passes.

    Raises:
        ValueError: names the layers whose keys cannot be moved; `far_distance` on a rotation that depends on the length
            of the text.
    """
    if getattr(options, "local_window", None) == "sliding":
        moving, remedy = "local_window='sliding'", "local_window='segment'"
    elif getattr(options, "far_distance", 0):
        moving, remedy = f"far_distance={options.far_distance}", "far_distance=0"
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
        first, second, turned = keys_at_two_places(decoder, attention)
        if not float((turned - second).abs().max()) <= TOLERANCE * float(first.abs().max()):
            differing.append(layer)
    if differing:
        raise ValueError(
            f"{moving} moves keys to new positions, but in layers {differing} of this "
            f"{config.model_type} base keys do not turn with their positions as this package turns them (layers "
            f"without rotary positions, or channels that are paired in another way): use {remedy}."
        )


@torch.no_grad()
def keys_at_two_places(decoder: nn.Module, attention: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys that a layer makes of random states, those it makes `SHIFT` positions later, and the first turned.

    Returns:
        `[1, kv_heads, tokens, d_head]` each, float32.
    """
    config: Any = decoder.config
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
        position_embeddings=decoder.rotary_emb(hidden, places),  # type: ignore[operator]
        **{architecture(config).cache_argument: cache},
    )
    attention.train(training)
    ((keys, _),) = cache.staged.values()
    rotate = rotation(decoder)
    assert rotate is not None
    turned = rotate(keys[:1], torch.full_like(places[:1], SHIFT))
    return keys[:1].float(), keys[1:].float(), turned.float()
