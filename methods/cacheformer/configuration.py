"""The configuration of a CacheFormer model from scratch, with the paper's sizes and ablation."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any, Self

from cacheformers.methods.cacheformer.cacheformer import CacheFormerSettings
from cacheformers.methods.cacheformer.memory import CacheFormerModelOptions
from cacheformers.modeling.architectures import WholeConfig
from cacheformers.modeling.memory import BaseShape

# The paper's models, of 122,523,460, 23,377,152 and 34,934,016 parameters (it reports 34.88 M for the last).
SIZES: dict[str, dict[str, Any]] = {
    "122m": {"vocab_size": 28996, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    "23m": {"vocab_size": 256, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8},
    "35m": {"vocab_size": 256, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8},
}

# The paper's ablation: which branches are on, and how much the cache retrieves. All have the same parameters.
VARIANTS: dict[str, dict[str, Any]] = {
    "transformer_ls": {"overlap": False, "cache": False},
    "overlap": {"overlap": True, "cache": False},
    "cache_k3u1": {"overlap": False, "cache": True, "topk": 3, "neighbors": 1},
    "cache_k5u1": {"overlap": False, "cache": True, "topk": 5, "neighbors": 1},
    "cache_k7u1": {"overlap": False, "cache": True, "topk": 7, "neighbors": 1},
    "cache_k5u3": {"overlap": False, "cache": True, "topk": 5, "neighbors": 3},
    "overlap_cache_k7u1": {"overlap": True, "cache": True, "topk": 7, "neighbors": 1},
}


class CacheFormerConfig(CacheFormerSettings, WholeConfig):
    """A transformer whose every layer has CacheFormer's attention (Singh & Mahmood 2025, arXiv 2504.13981).

    Every field of `CacheFormerSettings` applies. Without `overlap` and `cache` it is Transformer-LS (Zhu et al. 2021),
    without `long` too a transformer with a segment-wise sliding window.

    Attributes:
        num_key_value_heads: default: num_attention_heads. Query heads that share keys retrieve the same segments.
        head_dim: default: hidden_size / num_attention_heads.
        intermediate_size: of the feed-forward blocks; default: 4 * hidden_size.
        rope_theta: base of the rotary positions, which turn all channels in neighboring pairs.
        tied: rotated keys are also values, as published.
        local_norm, global_norm: LayerNorm on the keys and values of tokens, and on compressed ones.
        tie_word_embeddings: the head is the embedding (with its own bias).
        segment_tokens: tokens of a row in training from scratch and in evaluation by rows (the paper's n). The model
            reads texts of any length.
    """

    model_type = "cacheformer"

    vocab_size: int = 256
    hidden_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    rope_theta: float = 10000.0
    tied: bool = True
    local_norm: bool = True
    global_norm: bool = True
    tie_word_embeddings: bool = False
    segment_tokens: int = 1024
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"num_attention_heads {self.num_attention_heads} does not divide hidden_size {self.hidden_size}: "
                    "choose one that does, or give head_dim."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model warns
            self.attention_options()

    @classmethod
    def preset(cls, size: str, variant: str = "overlap_cache_k7u1", **changes: Any) -> Self:
        """Make the configuration of a model of the paper.

        Args:
            size: a key of `SIZES`: "122m" (WikiText-103 in WordPieces), "23m" or "35m" (enwik8 in bytes).
            variant: a key of `VARIANTS`.
            changes: other values of fields.

        Raises:
            ValueError: unknown size, variant or field.
        """
        for name, value, known in (("size", size, SIZES), ("variant", variant, VARIANTS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}.")
        unknown = sorted(changes.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"A {cls.__name__} has no field {', '.join(unknown)}.")
        return cls(**{**SIZES[size], **VARIANTS[variant], **changes})

    @property
    def causal(self) -> bool:
        return self.attention_options().causal

    def base_shape(self) -> BaseShape:
        return self.attention_options().base

    def attention_options(self) -> CacheFormerModelOptions:
        """Return the options of every layer; raise ValueError if they contradict each other."""
        assert self.num_key_value_heads is not None and self.head_dim is not None
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "segment_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
        if self.head_dim % 2:
            raise ValueError(f"Rotary positions turn pairs of channels: head_dim must be even, got {self.head_dim}.")
        settings = {field.name: getattr(self, field.name) for field in fields(CacheFormerSettings)}
        base = BaseShape(
            model_type=self.model_type,
            hidden_size=self.hidden_size,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            layers=self.num_hidden_layers,
            vocab_size=self.vocab_size,
            max_positions=self.segment_tokens,
            rotary=True,
        )
        return CacheFormerModelOptions(
            base=base,
            segment_tokens=self.segment_tokens,
            rope_theta=self.rope_theta,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            tied=self.tied,
            local_norm=self.local_norm,
            global_norm=self.global_norm,
            **settings,
        )
