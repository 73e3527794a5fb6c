"""What the commands must know of a model that may read with a memory."""

from __future__ import annotations

from typing import Any

from peft import PeftConfig
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from cacheformers.adapters import METHODS as MEMORY_TYPES
from cacheformers.modeling.attach import base_shape
from cacheformers.modeling.models.composite import CompositeConfig
from cacheformers.modeling.models.configuration_cacheformer import CacheFormerConfig


def memory_config(base: PretrainedConfig, adapter: PeftConfig | None) -> Any:
    """The configuration that has the memory's options; None if there is no memory.

    Raises:
        ValueError: a CacheFormer whose selection looks ahead: it cannot answer.
    """
    if isinstance(base, CacheFormerConfig):
        if not base.attention_options().causal:
            raise ValueError("A model with selection='paper_block' cannot generate: its tokens depend on later ones.")
        return base
    if adapter is not None and adapter.peft_type in MEMORY_TYPES:
        return adapter
    return base if isinstance(base, CompositeConfig) else None


def counted_positions(base: PretrainedConfig, memory: Any) -> int | None:
    """Return the positions of a base model that a text cannot exceed, although there is a memory.

    That is so where positions are learned embeddings and the method counts on from segment to segment. Elsewhere a text
    may have any length: None.

    Args:
        base, memory: the base model's configuration, and what `memory_config` gives for it.

    Raises:
        ValueError: the memory does not fit this base model.
    """
    if isinstance(base, CacheFormerConfig):
        return None
    options = base.options() if isinstance(base, CompositeConfig) else memory.resolve(base_shape(base))
    shape = options.base
    return None if shape.rotary or options.window.kept_tokens < shape.max_positions else shape.max_positions


def own_base(adapter: str) -> str:
    """The base model that an adapter was trained on."""
    return PeftConfig.from_pretrained(adapter).base_model_name_or_path or ""


def own_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of an adapter or a model, or, of an adapter that was saved without one, its base model's."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return AutoTokenizer.from_pretrained(own_base(name))
