"""Neurocache (Safaya & Yuret). Read `neurocache.py` first: the equations and a segment's forward.

`naive.py` is the specification, `options.py` has the settings, and `start.py` an initialization from the base's states.
`reference.py` computes what the published package computes, and `convert.py` converts its checkpoints.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.adapters.registration import register
from cacheformers.methods.neurocache.neurocache import NeurocacheParts, NeurocacheState, make_parts, training_statistics
from cacheformers.methods.neurocache.neurocache import branch as neurocache_branch
from cacheformers.methods.neurocache.options import NeurocacheOptions, NeurocacheSettings
from cacheformers.methods.neurocache.reference import ReferenceState, reference_branch
from cacheformers.methods.neurocache.start import start_from_states
from cacheformers.modeling.composite import CompositeConfig, CompositeForCausalLM, CompositeModel
from cacheformers.modeling.memory import MemoryState, SegmentCall
from cacheformers.modeling.method import MemoryMethod


@dataclass
class NeurocacheAdapterConfig(NeurocacheSettings, MemoryAdapterConfig):
    """Neurocache beside LoRA, in one adapter (Safaya & Yuret 2024, arXiv 2407.02486)."""


class NeurocacheConfig(NeurocacheSettings, CompositeConfig):
    """A base model with Neurocache in it (Safaya & Yuret 2024, arXiv 2407.02486)."""

    model_type = "neurocache"


class NeurocacheModel(CompositeModel):
    """A base model with Neurocache, without a head."""

    config_class = NeurocacheConfig


class NeurocacheForCausalLM(CompositeForCausalLM):
    """A base language model with Neurocache."""

    config_class = NeurocacheConfig
    model_class = NeurocacheModel


def new_state(
    options: NeurocacheOptions,
    rows: int,
    devices: dict[int, torch.device],
    dtype: torch.dtype,
    keep_values: bool,
    cache_size: int | None,
) -> MemoryState:
    """Make an empty memory, see `MemoryMethod.new_state`; `keep_values` keeps x beside each entry."""
    if options.compatibility is not None:
        if cache_size is not None:
            raise ValueError("compatibility modes have the cache_size of their configuration.")
        return ReferenceState(options, rows, devices, dtype, keep_values)
    return NeurocacheState(options, rows, devices, dtype, keep_values, cache_size)


def branch(
    options: NeurocacheOptions, layer: int, parts: NeurocacheParts, hidden: Tensor, call: SegmentCall, training: bool
) -> Tensor | None:
    """Compute `neurocache.branch`, or with `compatibility` what the published package computes."""
    computed = neurocache_branch if options.compatibility is None else reference_branch
    return computed(options, layer, parts, hidden, call, training)


register(
    MemoryMethod(
        adapter_config=NeurocacheAdapterConfig,
        causal_lm=NeurocacheForCausalLM,
        options=NeurocacheOptions,
        new_state=new_state,
        parts=NeurocacheParts,
        make_parts=make_parts,
        branch=branch,
        title="Neurocache",
        paper="[Safaya & Yuret 2024](https://arxiv.org/abs/2407.02486)",
        citation="""@inproceedings{safaya2024neurocache,
  title = {Neurocache: Efficient Vector Retrieval for Long-range Language Modeling},
  author = {Safaya, Ali and Yuret, Deniz},
  booktitle = {NAACL},
  year = {2024}
}""",
        summary=(
            "Text is read in segments of {segment_tokens:,} tokens; of earlier text, up to {cache_size:,} "
            "compressed states are kept, and every token retrieves the {topk} nearest (Neurocache, arXiv 2407.02486)."
        ),
        limits=(
            "Self-attention sees the open segment and what the local window keeps; the memory holds everything else.",
            "Text beyond the memory's capacity is forgotten.",
            "The paper reports text retrieval ahead of this method on questions about several documents.",
        ),
        choose_when="a pretrained model is to read far beyond its positions in bounded memory: start here",
        grows="a ring of at most `cache_size` entries a layer",
        starts_as="the base model (zero gates)",
        stores="entries",
        retrieves="the {topk} nearest entries",
        rates={"gate": "gate", "scores": "gate"},
        statistics=training_statistics,
        starts={"states": start_from_states},
        test_settings={"cache_size": 40, "topk": 4, "retrieval_map": {1: 1}, "search": "exact"},
    )
)
