"""Infini-attention as model classes of transformers."""

from __future__ import annotations

from cacheformers.modeling.memories.infini_attention import InfiniAttentionSettings
from cacheformers.modeling.models.composite import CompositeConfig, CompositeForCausalLM, CompositeModel


class InfiniAttentionConfig(InfiniAttentionSettings, CompositeConfig):
    """A base model with Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143).

    Every field of `InfiniAttentionSettings` applies; `text_config` is the base model's configuration.
    """

    model_type = "infini_attention"


class InfiniAttentionModel(CompositeModel):
    """A base model with Infini-attention, without a head."""

    config_class = InfiniAttentionConfig


class InfiniAttentionForCausalLM(CompositeForCausalLM):
    """A base language model with Infini-attention."""

    config_class = InfiniAttentionConfig
    model_class = InfiniAttentionModel
