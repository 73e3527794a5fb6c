"""Long-context memories for Hugging Face Transformers."""

from importlib.metadata import entry_points

from cacheformers.adapters.registration import register
from cacheformers.common.library import Library
from cacheformers.hub import push_to_hub
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
from cacheformers.methods.neurocache.start import start_from_states
from cacheformers.methods.recurrent_memory import (
    RecurrentMemoryAdapterConfig,
    RecurrentMemoryConfig,
    RecurrentMemoryForCausalLM,
    RecurrentMemoryModel,
)
from cacheformers.methods.windowed import WindowedAdapterConfig, WindowedConfig, WindowedForCausalLM, WindowedModel
from cacheformers.modeling.architectures import register_architecture
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.conversation import Answer, Conversation
from cacheformers.modeling.files.index import MemoryFileError
from cacheformers.modeling.files.load import load_memory
from cacheformers.modeling.method import MemoryMethod
from cacheformers.modeling.reading import read, read_text
from cacheformers.modeling.recall import recall
from cacheformers.modeling.segments import new_memory
from cacheformers.training.trainer import MemoryCallback, parameter_groups

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "CacheFormerAdapterConfig",
    "CacheFormerConfig",
    "CacheFormerForCausalLM",
    "CacheFormerModel",
    "CacheFormerOnBaseConfig",
    "CacheFormerOnBaseForCausalLM",
    "CacheFormerOnBaseModel",
    "Conversation",
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
    "Library",
    "MemorizingAdapterConfig",
    "MemorizingConfig",
    "MemorizingForCausalLM",
    "MemorizingModel",
    "MemoryCache",
    "MemoryCallback",
    "MemoryFileError",
    "MemoryMethod",
    "NeurocacheAdapterConfig",
    "NeurocacheConfig",
    "NeurocacheForCausalLM",
    "NeurocacheModel",
    "RecurrentMemoryAdapterConfig",
    "RecurrentMemoryConfig",
    "RecurrentMemoryForCausalLM",
    "RecurrentMemoryModel",
    "WindowedAdapterConfig",
    "WindowedConfig",
    "WindowedForCausalLM",
    "WindowedModel",
    "load_memory",
    "new_memory",
    "parameter_groups",
    "push_to_hub",
    "read",
    "read_text",
    "recall",
    "register",
    "register_architecture",
    "start_from_states",
]

# Methods of other packages register themselves when they are imported.
for _entry in entry_points(group="cacheformers.methods"):
    _entry.load()
