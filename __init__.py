"""Long-context memories for Hugging Face Transformers."""

from importlib.metadata import entry_points

from cacheformers import methods
from cacheformers.adapters.registration import register
from cacheformers.common.library import Library
from cacheformers.evaluation.showing import PassageConversation
from cacheformers.hub import push_to_hub
from cacheformers.methods import *  # noqa: F403  # their adapter configurations and model classes
from cacheformers.methods.neurocache.start import start_from_states
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
    "Conversation",
    "Library",
    "MemoryCache",
    "MemoryCallback",
    "MemoryFileError",
    "MemoryMethod",
    "PassageConversation",
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
__all__ += methods.__all__

# Methods of other packages register themselves when they are imported.
for _entry in entry_points(group="cacheformers.methods"):
    _entry.load()
