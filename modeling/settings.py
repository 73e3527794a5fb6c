"""Settings that methods share, the checks of settings, and settings resolved against a base model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from cacheformers.modeling.memory import BaseShape, LocalWindow, MemoryState
from cacheformers.modeling.method import METHODS, MemoryMethod, method_of


def setting(default: Any, help: str, free: bool = False) -> Any:
    """A field of a settings class, with its help text.

    Args:
        free: two models that exchange a memory may differ in it.
    """
    return field(default=default, metadata={"help": help, "free": free})


class MethodSettings:
    """Base of every settings class, which becomes part of a method's adapter config and configuration."""

    def resolve(self, base: BaseShape) -> Any:
        """The method's options for one base model.

        Raises:
            ValueError: a setting that does not fit the base model or another setting.
        """
        registered = METHODS.values()
        method = next((known for known in registered if isinstance(self, (known.adapter_config, known.config))), None)
        if method is None:
            raise ValueError(
                f"{type(self).__name__} is not of a registered method: call cacheformers.register(MemoryMethod(...)) "
                "with it first."
            )
        chosen = {entry.name: getattr(self, entry.name) for entry in fields(self) if "free" in entry.metadata}  # type: ignore[arg-type]
        return method.options(base=base, **chosen)


@dataclass(repr=False)  # transformers prints a configuration
class LocalWindowSettings(MethodSettings):
    """Fields of the adapter configs and configurations of every method with a local window."""

    segment_tokens: int = setting(1024, "Tokens after which a segment enters the memory (n).")
    local_window: str = setting(
        "segment",
        "'segment': self-attention sees the open segment only (paper). 'sliding': also the last "
        "window_tokens tokens before it, with moved rotary positions; give a pretrained base sink_tokens with it.",
    )
    window_tokens: int | None = setting(None, "Tokens that a sliding window keeps (W). Default: segment_tokens.")
    sink_tokens: int = setting(
        0,
        "First tokens of a document whose keys and values every segment keeps seeing. Pretrained models "
        "lean on them (attention sinks): a sliding window without any ruins one, with 4 it is well.",
    )


@dataclass(kw_only=True)
class MethodOptions:
    """Settings resolved against one base model: a method's options class has its settings and this as bases.

    Attributes:
        base: what the method knows of the base model.
    """

    base: BaseShape

    @property
    def method(self) -> MemoryMethod:
        """The method that these are options of."""
        return method_of(self)

    @property
    def signature(self) -> dict[str, Any]:
        """What two models must share to exchange a memory."""
        return self.method.signature(self)

    def new_state(
        self,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool = False,
        cache_size: int | None = None,
    ) -> MemoryState:
        """An empty memory, see `MemoryMethod.new_state`."""
        return self.method.new_state(self, rows, devices, dtype, keep_values, cache_size)


@dataclass(kw_only=True)
class LocalWindowOptions(MethodOptions, LocalWindowSettings):
    """The local window, resolved against a base model."""

    def __post_init__(self) -> None:
        check_layers(self.layers, self.base)  # type: ignore[attr-defined]  # a field in some methods
        self.check_local_window()

    def check_local_window(self) -> None:
        """Fill in the default of `window_tokens`; raise ValueError for an option that does not fit the base model."""
        if self.window_tokens is None:
            self.window_tokens = self.segment_tokens
        check_at_least(1, self, "segment_tokens")
        check_at_least(0, self, "window_tokens", "sink_tokens")
        check_choices(self, local_window=("segment", "sliding"))
        check_window(self.local_window, self.window, self.base)

    @property
    def window(self) -> LocalWindow:
        """What self-attention sees."""
        kept = self.window_tokens if self.local_window == "sliding" else 0
        return LocalWindow(self.segment_tokens, kept or 0, self.sink_tokens)

    @property
    def near_tokens(self) -> int | None:
        """How many tokens are read before the memory is: the first segment."""
        return self.segment_tokens


def chosen_layers(layers: Sequence[int] | None, base: BaseShape) -> tuple[int, ...]:
    """Layers in their order; None for all of the base model's."""
    if layers is None:
        return tuple(range(base.layers))
    if not isinstance(layers, list | tuple) or any(type(layer) is not int for layer in layers):
        raise ValueError(f"layers must be a list of whole numbers such as [0, 1], got {layers!r}.")
    return tuple(sorted(layers))


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
