"""Neurocache as model classes of transformers."""

from __future__ import annotations

from cacheformers.modeling.models.composite import CompositeForCausalLM, CompositeModel
from cacheformers.modeling.models.configuration_neurocache import NeurocacheConfig


class NeurocacheModel(CompositeModel):
    """A base model with Neurocache, without a head."""

    config_class = NeurocacheConfig


class NeurocacheForCausalLM(CompositeForCausalLM):
    """A base language model with Neurocache."""

    config_class = NeurocacheConfig
    model_class = NeurocacheModel
