"""A local window as model classes of transformers."""

from __future__ import annotations

from cacheformers.modeling.memories.windowed import WindowedSettings
from cacheformers.modeling.models.composite import CompositeConfig, CompositeForCausalLM, CompositeModel


class WindowedConfig(WindowedSettings, CompositeConfig):
    """A base model that sees a local window alone, to compare memories with.

    Every field of `WindowedSettings` applies; `text_config` is the base model's configuration.
    """

    model_type = "windowed"


class WindowedModel(CompositeModel):
    """A base model with a local window, without a head."""

    config_class = WindowedConfig


class WindowedForCausalLM(CompositeForCausalLM):
    """A base language model with a local window."""

    config_class = WindowedConfig
    model_class = WindowedModel
