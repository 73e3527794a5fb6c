"""Configuration of a Neurocache model: a base model's, and the memory's options."""

from __future__ import annotations

from typing import Any

from cacheformers.modeling.memories.neurocache_options import NeurocacheSettings, layer_numbers
from cacheformers.modeling.models.composite import CompositeConfig


class NeurocacheConfig(NeurocacheSettings, CompositeConfig):
    """A base model with Neurocache in it (Safaya & Yuret 2024, arXiv 2407.02486).

    Every field of `NeurocacheSettings` applies; `text_config` is the base model's configuration.
    """

    model_type = "neurocache"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.retrieval_map = layer_numbers(self.retrieval_map)
