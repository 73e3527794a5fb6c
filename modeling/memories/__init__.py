"""The methods, one file each."""

from cacheformers.modeling.memories import (
    cacheformer,
    cacheformer_memory,
    gated_attention,
    infini_attention,
    memorizing,
    neurocache,
    windowed,
)
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
    "infini_attention": Method(
        infini_attention.InfiniAttentionOptions,
        infini_attention.InfiniParts,
        infini_attention.make_parts,
        attend=infini_attention.attend_inputs,
    ),
    "gated_attention": Method(
        gated_attention.GatedAttentionOptions,
        gated_attention.GatedParts,
        gated_attention.make_parts,
        attend=gated_attention.attend_inputs,
    ),
    "cacheformer": Method(
        cacheformer_memory.CacheFormerOnBaseOptions,
        cacheformer.CacheFormerParts,
        cacheformer_memory.make_layer_parts,
        attend=cacheformer_memory.attend_inputs,
    ),
}
