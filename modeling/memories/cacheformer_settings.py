"""What a user sets of CacheFormer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from cacheformers.modeling.memories.cacheformer import CacheFormerOptions


@dataclass(repr=False)  # transformers prints a configuration
class CacheFormerSettings:
    """Fields that every configuration with CacheFormer's attention has; `CacheFormerOptions` says more of each."""

    window_tokens: int = field(
        default=128,
        metadata={"help": "Window w: a token sees its own window up to itself, and the whole previous one."},
    )
    pool_tokens: int = field(default=16, metadata={"help": "Tokens of a segment (s), compressed together."})
    pool_vectors: int = field(default=4, metadata={"help": "Vectors that a segment is compressed to (r_s)."})
    topk: int = field(default=7, metadata={"help": "Segments that the cache retrieves uncompressed (k)."})
    neighbors: int = field(
        default=1, metadata={"help": "Segments that each of them brings along, itself included (u)."}
    )
    select_rows: int | None = field(
        default=None,
        metadata={"help": "Rows that choose segments together (p). Default: window_tokens; 1 for 'token'."},
    )
    selection: str = field(
        default="previous_block",
        metadata={
            "help": "Who chooses for a block of rows: the block before it ('previous_block'), each row for itself "
            "('token'), the block's rows so far ('prefix'), or, to study what that leaks, the whole block as published "
            "('paper_block', which cannot generate)."
        },
    )
    magnitude: str = field(
        default="rows", metadata={"help": "'rows': mean of the rows' magnitudes. 'mean': magnitude of their mean."}
    )
    aggregation: str = field(
        default="joint",
        metadata={"help": "'joint': one softmax over all branches. 'separate': their mean. 'gated': their gated mean."},
    )
    long: bool = field(default=True, metadata={"help": "Attend to compressed segments."})
    overlap: bool = field(default=True, metadata={"help": "Attend to compressed segments shifted by half of one, too."})
    cache: bool = field(default=True, metadata={"help": "Attend to the tokens of retrieved segments."})
    exclude_window: bool = field(default=False, metadata={"help": "Retrieve only segments before the window."})
    sink: bool = field(default=False, metadata={"help": "Always retrieve the first segment."})
    shared_projection: bool = field(
        default=True, metadata={"help": "Overlapping segments are compressed by the same projection."}
    )
    wide_blocks: bool = field(
        default=False, metadata={"help": "Allow select_rows > window_tokens with 'previous_block'."}
    )

    def attention_of(self, heads: int, kv_heads: int, head_dim: int, **others: Any) -> CacheFormerOptions:
        """The options of layers of one shape.

        Args:
            others: options that are no settings.

        Raises:
            ValueError: options that contradict each other.
        """
        settings = {field.name: getattr(self, field.name) for field in fields(CacheFormerSettings)}
        return CacheFormerOptions(heads, kv_heads, head_dim, **settings, **others)
