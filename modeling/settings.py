"""The settings that methods share, their checks, and settings resolved against a base model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from cacheformers.modeling.memory import BaseShape, LocalWindow, MemoryState
from cacheformers.modeling.method import METHODS, MemoryMethod, method_of
from cacheformers.modeling.search.store import Ring

STORE_DTYPES = (None, "float32", "float64", "bfloat16", "float16")


def setting(default: Any, help: str, free: bool = False) -> Any:
    """Declare a field of a settings class, with its help text.

    Args:
        free: models that exchange a memory may differ in it.
    """
    return field(default=default, metadata={"help": help, "free": free})


class MethodSettings:
    """Base of the settings classes, which become part of a method's adapter config and configuration."""

    def resolve(self, base: BaseShape) -> Any:
        """Resolve the settings against one base model; raise ValueError if they do not fit it or each other."""
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
    """Settings of a method with a local window."""

    segment_tokens: int = setting(1024, "Tokens after which a segment enters the memory (n).")
    local_window: str = setting(
        "segment",
        "'segment': self-attention sees only the open segment (paper). 'sliding': also the last "
        "window_tokens tokens before it, with moved rotary positions; use sink_tokens with it on a pretrained base.",
    )
    window_tokens: int | None = setting(None, "Tokens that a sliding window keeps (W). Default: segment_tokens.")
    sink_tokens: int = setting(
        0,
        "First tokens of a document, whose keys and values every segment sees. Pretrained models "
        "rely on them (attention sinks): without any, a sliding window ruins such a model; 4 are enough.",
    )


@dataclass(repr=False)
class StoreSettings:
    """Settings of a method that stores entries."""

    cache_dtype: str | None = setting(
        None, "Precision of what is stored. Default: float32 on the CPU, bfloat16 on a GPU.", free=True
    )


@dataclass(repr=False)
class SearchSettings(StoreSettings):
    """Settings of a method that searches what it stores."""

    search: str = setting("auto", "'auto', 'exact', 'faiss', or 'faiss:' and a faiss index factory string.", free=True)


class StoreOptions:
    """Options of a method that stores entries."""

    cache_dtype: str | None

    def new_ring(
        self,
        rows: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        width: int,
        value_width: int | None = None,
    ) -> Ring:
        """Create an empty store of one layer, see `Ring`; `dtype` is that of the activations."""
        return Ring(rows, capacity, width, value_width, self.store_dtype(device, dtype), device)

    def store_dtype(self, device: torch.device, dtype: torch.dtype) -> torch.dtype:
        """Return `cache_dtype`; by default float64 for a float64 model, bfloat16 on a GPU, float32 on the CPU."""
        if self.cache_dtype is not None:
            return getattr(torch, self.cache_dtype)
        if dtype == torch.float64:
            return dtype
        return torch.float32 if device.type == "cpu" else torch.bfloat16


@dataclass(kw_only=True)
class MethodOptions:
    """Settings resolved against one base model. A method's options class inherits from its settings and this.

    It also has, as fields or properties:
        window: the local window.
        layers: layers with a memory.
        entry_numbers: the numbers that one token's entries take in all layers that store, in a method with entries.
        near_tokens: the longest text that does not read the memory, in tokens; None where training needs no reading.
    """

    base: BaseShape

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers whose output the method changes, and which get LoRA by default."""
        layers: tuple[int, ...] = self.layers  # type: ignore[attr-defined]  # a field in some methods
        return layers

    @property
    def method(self) -> MemoryMethod:
        """The method that these options belong to."""
        return method_of(self)

    @property
    def retrieves(self) -> str:
        """What a token retrieves in each layer, in words; empty if nothing."""
        return self.method.retrieves.format(**vars(self))

    @property
    def positions(self) -> int:
        """Positions that the base model must have to read a text of any length."""
        window: LocalWindow = self.window  # type: ignore[attr-defined]  # of each method
        return window.positions

    @property
    def signature(self) -> dict[str, Any]:
        """The options that two models must share to exchange a memory: all that are not marked as free to differ."""
        values = asdict(self)
        shared = {option.name: values[option.name] for option in fields(self) if not option.metadata.get("free")}
        return {"method": self.method.name, **shared}

    def new_state(
        self,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool = False,
        cache_size: int | None = None,
    ) -> MemoryState:
        """Create an empty memory, see `MemoryMethod.new_state`; only one of entries can be given a size."""
        if cache_size and self.method.stores != "entries":
            raise ValueError(
                f"{self.method.title} stores no entries to count: leave cache_size out, or give 0 for no memory."
            )
        return self.method.new_state(self, rows, devices, dtype, keep_values, cache_size)


@dataclass(kw_only=True)
class LocalWindowOptions(MethodOptions, LocalWindowSettings):
    """The local window, resolved against a base model."""

    def __post_init__(self) -> None:
        check_layers(self.layers, self.base)  # type: ignore[attr-defined]  # a field in some methods
        self.check_local_window()

    def check_local_window(self) -> None:
        """Fill in the default of `window_tokens`; raise ValueError if an option does not fit the base model."""
        if self.window_tokens is None:
            self.window_tokens = self.segment_tokens
        check_at_least(1, self, "segment_tokens")
        check_at_least(0, self, "window_tokens", "sink_tokens")
        check_choices(self, local_window=("segment", "sliding"))
        window, base = self.window, self.base
        if self.local_window == "sliding" and not base.rotary:
            raise ValueError(
                f"local_window='sliding' moves keys to new positions, which {base.model_type} cannot do (its positions "
                "are learned embeddings): use local_window='segment'."
            )
        if window.positions > base.max_positions:
            raise ValueError(
                f"segment_tokens {window.segment_tokens} + window_tokens {window.kept_tokens} + sink_tokens "
                f"{window.sink_tokens}{f' + memory tokens {window.memory_tokens}' if window.memory_tokens else ''} = "
                f"{window.positions} positions, but this base model has {base.max_positions}. "
                "Choose a smaller segment_tokens."
            )

    @property
    def window(self) -> LocalWindow:
        """The tokens that self-attention sees besides the open segment."""
        kept = self.window_tokens if self.local_window == "sliding" else 0
        return LocalWindow(self.segment_tokens, kept or 0, self.sink_tokens)

    @property
    def near_tokens(self) -> int | None:
        """The longest text that does not read the memory, in tokens: the first segment."""
        return self.segment_tokens


def chosen_layers(layers: Sequence[int] | None, base: BaseShape) -> tuple[int, ...]:
    """Sort and check layers; None means all layers of the base model."""
    if layers is None:
        return tuple(range(base.layers))
    if not isinstance(layers, list | tuple) or any(type(layer) is not int for layer in layers):
        raise ValueError(f"layers must be a list of whole numbers such as [0, 1], got {layers!r}.")
    check_layers(layers, base)
    return tuple(sorted(layers))


def check_layers(layers: Iterable[int], base: BaseShape) -> None:
    """Raise ValueError unless layers names at least one layer of the base model, and none twice."""
    layers = list(layers)
    wrong = sorted({layer for layer in layers if not 0 <= layer < base.layers})
    if wrong:
        raise ValueError(f"Layers {wrong} do not exist: this base model has layers 0 to {base.layers - 1}.")
    if not layers or len(set(layers)) < len(layers):
        raise ValueError(f"layers must name at least one layer, and each once, got {layers}.")


def check_choices(options: Any, **allowed: tuple[Any, ...]) -> None:
    """Raise ValueError if an option is not among the values allowed for it."""
    for name, values in allowed.items():
        if getattr(options, name) not in values:
            raise ValueError(f"{name} must be one of {values}, got {getattr(options, name)!r}.")


def check_at_least(least: int, options: Any, *names: str) -> None:
    """Raise ValueError if one of the named options is less than `least`."""
    for name in names:
        if getattr(options, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(options, name)}.")
