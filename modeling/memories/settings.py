"""What a user sets of the local window, whatever the method."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from cacheformers.modeling.memories.base import BaseShape, LocalWindow
from cacheformers.modeling.memories.checks import check_at_least, check_choices, check_window


@dataclass(repr=False)  # transformers prints a configuration
class LocalWindowSettings:
    """Fields of the adapter configs and configurations of every method with a local window."""

    segment_tokens: int = field(default=1024, metadata={"help": "Tokens after which a segment enters the memory (n)."})
    local_window: str = field(
        default="segment",
        metadata={
            "help": "'segment': self-attention sees the open segment only (paper). 'sliding': also the last "
            "window_tokens tokens before it, with moved rotary positions; give a pretrained base sink_tokens with it."
        },
    )
    window_tokens: int | None = field(
        default=None, metadata={"help": "Tokens that a sliding window keeps (W). Default: segment_tokens."}
    )
    sink_tokens: int = field(
        default=0,
        metadata={
            "help": "First tokens of a document whose keys and values every segment keeps seeing. Pretrained models "
            "lean on them (attention sinks): a sliding window without any ruins one, with 4 it is well."
        },
    )

    def chosen(self, settings: type[LocalWindowSettings]) -> dict[str, Any]:
        """The fields of a method's settings by name, with the default of `window_tokens` filled in."""
        values = {field.name: getattr(self, field.name) for field in fields(settings)}
        if self.window_tokens is None:
            values["window_tokens"] = self.segment_tokens
        return values


@dataclass(frozen=True, kw_only=True)
class LocalWindowOptions:
    """The same options, resolved against a base model (see `LocalWindowSettings` for each one's meaning)."""

    base: BaseShape
    segment_tokens: int = 1024
    local_window: Literal["segment", "sliding"] = "segment"
    window_tokens: int = 0
    sink_tokens: int = 0

    def check_local_window(self) -> None:
        """Raise ValueError for an option that does not fit the base model."""
        check_at_least(1, self, "segment_tokens")
        check_at_least(0, self, "window_tokens", "sink_tokens")
        check_choices(self, local_window=("segment", "sliding"))
        check_window(self.local_window, self.window, self.base)

    @property
    def window(self) -> LocalWindow:
        """What self-attention sees."""
        kept = self.window_tokens if self.local_window == "sliding" else 0
        return LocalWindow(self.segment_tokens, kept, self.sink_tokens)

    @property
    def near_tokens(self) -> int | None:
        """How many tokens are read before the memory is: the first segment."""
        return self.segment_tokens


def chosen_layers(layers: list[int] | None, base: BaseShape) -> tuple[int, ...]:
    """Layers in their order; None for all of the base model's."""
    if layers is None:
        return tuple(range(base.layers))
    if not isinstance(layers, list | tuple) or any(type(layer) is not int for layer in layers):
        raise ValueError(f"layers must be a list of whole numbers such as [0, 1], got {layers!r}.")
    return tuple(sorted(layers))
