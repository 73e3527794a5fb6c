"""The memory methods, a file or a folder each. Importing this module registers them."""

from cacheformers.methods import (
    cacheformer,
    gated_attention,
    gated_deltanet,
    infini_attention,
    memorizing,
    neurocache,
    recurrent_memory,
    windowed,
)

DEFAULT = neurocache.NeurocacheConfig.model_type  # of `train_adapt.py`

__all__ = [
    "DEFAULT",
    "cacheformer",
    "gated_attention",
    "gated_deltanet",
    "infini_attention",
    "memorizing",
    "neurocache",
    "recurrent_memory",
    "windowed",
]
