"""Long-context memories for Hugging Face Transformers."""

from cacheformers.adapters import NeurocacheAdapterConfig
from cacheformers.hub import push_to_hub
from cacheformers.modeling.attach import new_memory
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.reading import read

__version__ = "0.1.0.dev0"
__all__ = ["MemoryCache", "NeurocacheAdapterConfig", "new_memory", "push_to_hub", "read"]
