"""The memory methods, a file or a folder each. Importing this module registers them."""

from cacheformers.methods.cacheformer import (
    CacheFormerAdapterConfig,
    CacheFormerConfig,
    CacheFormerForCausalLM,
    CacheFormerModel,
    CacheFormerOnBaseConfig,
    CacheFormerOnBaseForCausalLM,
    CacheFormerOnBaseModel,
)
from cacheformers.methods.gated_attention import (
    GatedAttentionAdapterConfig,
    GatedAttentionConfig,
    GatedAttentionForCausalLM,
    GatedAttentionModel,
)
from cacheformers.methods.gated_deltanet import (
    GatedDeltaNetAdapterConfig,
    GatedDeltaNetConfig,
    GatedDeltaNetForCausalLM,
    GatedDeltaNetModel,
)
from cacheformers.methods.infini_attention import (
    InfiniAttentionAdapterConfig,
    InfiniAttentionConfig,
    InfiniAttentionForCausalLM,
    InfiniAttentionModel,
)
from cacheformers.methods.memorizing import (
    MemorizingAdapterConfig,
    MemorizingConfig,
    MemorizingForCausalLM,
    MemorizingModel,
)
from cacheformers.methods.neurocache import (
    NeurocacheAdapterConfig,
    NeurocacheConfig,
    NeurocacheForCausalLM,
    NeurocacheModel,
)
from cacheformers.methods.recurrent_memory import (
    RecurrentMemoryAdapterConfig,
    RecurrentMemoryConfig,
    RecurrentMemoryForCausalLM,
    RecurrentMemoryModel,
)
from cacheformers.methods.retrieval_heads import (
    RetrievalHeadsAdapterConfig,
    RetrievalHeadsConfig,
    RetrievalHeadsForCausalLM,
    RetrievalHeadsModel,
)
from cacheformers.methods.windowed import WindowedAdapterConfig, WindowedConfig, WindowedForCausalLM, WindowedModel

DEFAULT = NeurocacheConfig.model_type  # of `train_adapt.py`

__all__ = [
    "CacheFormerAdapterConfig",
    "CacheFormerConfig",
    "CacheFormerForCausalLM",
    "CacheFormerModel",
    "CacheFormerOnBaseConfig",
    "CacheFormerOnBaseForCausalLM",
    "CacheFormerOnBaseModel",
    "GatedAttentionAdapterConfig",
    "GatedAttentionConfig",
    "GatedAttentionForCausalLM",
    "GatedAttentionModel",
    "GatedDeltaNetAdapterConfig",
    "GatedDeltaNetConfig",
    "GatedDeltaNetForCausalLM",
    "GatedDeltaNetModel",
    "InfiniAttentionAdapterConfig",
    "InfiniAttentionConfig",
    "InfiniAttentionForCausalLM",
    "InfiniAttentionModel",
    "MemorizingAdapterConfig",
    "MemorizingConfig",
    "MemorizingForCausalLM",
    "MemorizingModel",
    "NeurocacheAdapterConfig",
    "NeurocacheConfig",
    "NeurocacheForCausalLM",
    "NeurocacheModel",
    "RecurrentMemoryAdapterConfig",
    "RecurrentMemoryConfig",
    "RecurrentMemoryForCausalLM",
    "RecurrentMemoryModel",
    "RetrievalHeadsAdapterConfig",
    "RetrievalHeadsConfig",
    "RetrievalHeadsForCausalLM",
    "RetrievalHeadsModel",
    "WindowedAdapterConfig",
    "WindowedConfig",
    "WindowedForCausalLM",
    "WindowedModel",
]
