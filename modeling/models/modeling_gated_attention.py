"""Gated attention as model classes of transformers."""

from __future__ import annotations

from cacheformers.modeling.memories.gated_attention import GatedAttentionSettings
from cacheformers.modeling.models.composite import CompositeConfig, CompositeForCausalLM, CompositeModel


class GatedAttentionConfig(GatedAttentionSettings, CompositeConfig):
    """A base model with gated attention (Liao & Chang, MIT 6.7960 course report).

    Every field of `GatedAttentionSettings` applies; `text_config` is the base model's configuration.
    """

    model_type = "gated_attention"


class GatedAttentionModel(CompositeModel):
    """A base model with gated attention, without a head."""

    config_class = GatedAttentionConfig


class GatedAttentionForCausalLM(CompositeForCausalLM):
    """A base language model with gated attention."""

    config_class = GatedAttentionConfig
    model_class = GatedAttentionModel
