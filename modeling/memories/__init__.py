"""The methods, one file each."""

from cacheformers.modeling.memories import memorizing, neurocache, windowed
from cacheformers.modeling.memories.method import Method
from cacheformers.modeling.memories.neurocache_options import NeurocacheOptions

# By the name that is also a method's model type and, in capitals, its PEFT type.
METHODS: dict[str, Method] = {
    "neurocache": Method(
        NeurocacheOptions, neurocache.NeurocacheParts, neurocache.make_parts, branch=neurocache.branch
    ),
    "windowed": Method(windowed.WindowedOptions, windowed.WindowedParts, windowed.make_parts),
    "memorizing": Method(
        memorizing.MemorizingOptions, memorizing.MemorizingParts, memorizing.make_parts, attend=memorizing.mix
    ),
}
