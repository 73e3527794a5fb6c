"""What a user sets of the local window, whatever the method."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
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
