"""The Memorizing Transformer as model classes of transformers."""

from __future__ import annotations

from cacheformers.modeling.memories.memorizing import MemorizingSettings
from cacheformers.modeling.models.composite import CompositeConfig, CompositeForCausalLM, CompositeModel


class MemorizingConfig(MemorizingSettings, CompositeConfig):
    """A base model as a Memorizing Transformer (Wu et al. 2022, arXiv 2203.08913).

    Every field of `MemorizingSettings` applies; `text_config` is the base model's configuration.
    """

    model_type = "memorizing"


class MemorizingModel(CompositeModel):
    """A base model with a memory of keys and values, without a head."""

    config_class = MemorizingConfig


class MemorizingForCausalLM(CompositeForCausalLM):
    """A base language model with a memory of keys and values."""

    config_class = MemorizingConfig
    model_class = MemorizingModel
