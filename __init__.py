"""Long-context memories for Hugging Face Transformers."""

from cacheformers.adapters import NeurocacheAdapterConfig, start_from_states
from cacheformers.modeling.attach import new_memory
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.models import NeurocacheConfig, NeurocacheForCausalLM, NeurocacheModel
from cacheformers.modeling.reading import read

__version__ = "0.1.0.dev0"
__all__ = [
    "MemoryCache",
    "NeurocacheAdapterConfig",
    "NeurocacheConfig",
    "NeurocacheForCausalLM",
    "NeurocacheModel",
    "new_memory",
    "read",
    "start_from_states",
]
