"""What every method asks of its options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cacheformers.modeling.memories.base import BaseShape, LocalWindow


def check_layers(layers: Iterable[int], base: BaseShape) -> None:
    """Refuse layers that the base model does not have, a layer named twice, and none at all."""
    layers = list(layers)
    wrong = sorted({layer for layer in layers if not 0 <= layer < base.layers})
    if wrong:
        raise ValueError(f"Layers {wrong} do not exist: this base model has layers 0 to {base.layers - 1}.")
    if not layers or len(set(layers)) < len(layers):
        raise ValueError(f"layers must name at least one layer, and each once, got {layers}.")


def check_choices(options: Any, **allowed: tuple[Any, ...]) -> None:
    """Refuse a value that is not among those allowed for its option."""
    for name, values in allowed.items():
        if getattr(options, name) not in values:
            raise ValueError(f"{name} must be one of {values}, got {getattr(options, name)!r}.")


def check_at_least(least: int, options: Any, *names: str) -> None:
    """Refuse numbers that are too small."""
    for name in names:
        if getattr(options, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(options, name)}.")


def check_window(local_window: str, window: LocalWindow, base: BaseShape) -> None:
    """Refuse a local window that the base model's positions do not allow."""
    if local_window == "sliding" and not base.rotary:
        raise ValueError(
            f"local_window='sliding' moves keys to new positions, which {base.model_type} cannot do (its positions are "
            "learned embeddings): use local_window='segment'."
        )
    if window.positions > base.max_positions:
        raise ValueError(
            f"segment_tokens {window.segment_tokens} + window_tokens {window.kept_tokens} + sink_tokens "
            f"{window.sink_tokens} = {window.positions} positions, but this base model has {base.max_positions}. "
            "Choose a smaller segment_tokens."
        )
