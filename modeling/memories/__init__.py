"""The methods, one file each."""

from typing import Any

from cacheformers.modeling.memories.neurocache_options import NeurocacheOptions

# Name of a method, as in its signature -> class of its options.
OPTIONS: dict[str, Any] = {"neurocache": NeurocacheOptions}
