"""Long-context memories for Hugging Face Transformers."""

from cacheformers.adapters import (
    CacheFormerAdapterConfig,
    GatedAttentionAdapterConfig,
    InfiniAttentionAdapterConfig,
    MemorizingAdapterConfig,
    NeurocacheAdapterConfig,
    WindowedAdapterConfig,
    start_from_states,
)
from cacheformers.hub import push_to_hub
from cacheformers.modeling.attach import new_memory
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.files.index import MemoryFileError
from cacheformers.modeling.files.load import load_memory
from cacheformers.modeling.models import (
    CacheFormerConfig,
    CacheFormerForCausalLM,
    CacheFormerModel,
    CacheFormerOnBaseConfig,
    CacheFormerOnBaseForCausalLM,
    CacheFormerOnBaseModel,
    GatedAttentionConfig,
    GatedAttentionForCausalLM,
    GatedAttentionModel,
    InfiniAttentionConfig,
    InfiniAttentionForCausalLM,
    InfiniAttentionModel,
    MemorizingConfig,
    MemorizingForCausalLM,
    MemorizingModel,
    NeurocacheConfig,
    NeurocacheForCausalLM,
    NeurocacheModel,
    WindowedConfig,
    WindowedForCausalLM,
    WindowedModel,
)
from cacheformers.modeling.reading import read, read_text

__version__ = "0.1.0.dev0"
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
    "InfiniAttentionAdapterConfig",
    "InfiniAttentionConfig",
    "InfiniAttentionForCausalLM",
    "InfiniAttentionModel",
    "MemorizingAdapterConfig",
    "MemorizingConfig",
    "MemorizingForCausalLM",
    "MemorizingModel",
    "MemoryCache",
    "MemoryFileError",
    "NeurocacheAdapterConfig",
    "NeurocacheConfig",
    "NeurocacheForCausalLM",
    "NeurocacheModel",
    "WindowedAdapterConfig",
    "WindowedConfig",
    "WindowedForCausalLM",
    "WindowedModel",
    "load_memory",
    "new_memory",
    "push_to_hub",
    "read",
    "read_text",
    "start_from_states",
]
