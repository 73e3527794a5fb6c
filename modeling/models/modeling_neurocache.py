"""Neurocache as model classes of transformers."""

from __future__ import annotations

from torch import Tensor

from cacheformers.modeling.memories.base import SegmentCall
from cacheformers.modeling.memories.neurocache import NeurocacheParts, branch, make_parts
from cacheformers.modeling.memories.neurocache_options import NeurocacheOptions
from cacheformers.modeling.models.composite import (
    CompositeForCausalLM,
    CompositeMemory,
    CompositeModel,
    CompositePreTrainedModel,
)
from cacheformers.modeling.models.configuration_neurocache import NeurocacheConfig


class NeurocacheMemory(CompositeMemory):
    """The memory of one attention module.

    Args:
        base_weights: the layer's own W_q, W_k, W_v, W_o to start from; None starts at random.
    """

    options: NeurocacheOptions

    def __init__(self, options: NeurocacheOptions, layer: int, base_weights: tuple[Tensor, ...] | None = None) -> None:
        super().__init__(options, layer, make_parts(options, layer, base_weights))

    @property
    def parts(self) -> NeurocacheParts:
        """What is trained here."""
        return NeurocacheParts(**self._modules)  # type: ignore[arg-type]

    @property
    def fingerprint(self) -> tuple[float, ...]:
        """A few trained numbers by which two models differ."""
        return self.parts.fingerprint

    def branch(self, hidden: Tensor, call: SegmentCall) -> Tensor | None:
        """What the memory adds to the self-attention output, `[rows, time, h]`."""
        return branch(self.options, self.layer, self.parts, hidden, call, self.training)


class NeurocachePreTrainedModel(CompositePreTrainedModel):
    """What both Neurocache models share."""

    config_class = NeurocacheConfig
    memory_class = NeurocacheMemory


class NeurocacheModel(NeurocachePreTrainedModel, CompositeModel):
    """A base model with Neurocache, without a head."""


class NeurocacheForCausalLM(NeurocachePreTrainedModel, CompositeForCausalLM):
    """A base language model with Neurocache."""

    model_class = NeurocacheModel
