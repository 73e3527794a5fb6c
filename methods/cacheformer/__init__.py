"""CacheFormer (Singh & Mahmood). Read `cacheformer.py` first: branches, settings, trained parts, pooling.

`naive.py` is the specification. `selection.py` chooses segments, `tiles.py` computes attention and its gradient,
`attention.py` uses it on whole documents and `state.py` while decoding. Two kinds of models share them: the paper's
own transformer (`configuration.py`, `modeling.py`), and a base model's layers (`memory.py`), where questions can learn
to choose (`supervision.py`).
"""

from dataclasses import dataclass

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.adapters.registration import register, register_model
from cacheformers.methods.cacheformer.cacheformer import CacheFormerParts
from cacheformers.methods.cacheformer.configuration import CacheFormerConfig
from cacheformers.methods.cacheformer.memory import (
    CacheFormerMemory,
    CacheFormerModelOptions,
    CacheFormerOnBaseOptions,
    CacheFormerOnBaseSettings,
    attend_inputs,
    make_layer_parts,
)
from cacheformers.methods.cacheformer.modeling import CacheFormerForCausalLM, CacheFormerModel
from cacheformers.modeling.composite import CompositeConfig, CompositeForCausalLM, CompositeModel
from cacheformers.modeling.method import MemoryMethod


@dataclass
class CacheFormerAdapterConfig(CacheFormerOnBaseSettings, MemoryAdapterConfig):
    """CacheFormer's attention in place of a base's own, beside LoRA (Singh & Mahmood 2025, arXiv 2504.13981)."""


class CacheFormerOnBaseConfig(CacheFormerOnBaseSettings, CompositeConfig):
    """A base model whose layers attend as CacheFormer does (Singh & Mahmood 2025, arXiv 2504.13981)."""

    model_type = "cacheformer_on_base"


class CacheFormerOnBaseModel(CompositeModel):
    """A base model with CacheFormer's attention, without a head."""

    config_class = CacheFormerOnBaseConfig


class CacheFormerOnBaseForCausalLM(CompositeForCausalLM):
    """A base language model with CacheFormer's attention."""

    config_class = CacheFormerOnBaseConfig
    model_class = CacheFormerOnBaseModel


register_model(CacheFormerConfig, CacheFormerModel, CacheFormerForCausalLM)
register(
    MemoryMethod(
        adapter_config=CacheFormerAdapterConfig,
        causal_lm=CacheFormerOnBaseForCausalLM,
        options=CacheFormerOnBaseOptions,
        new_state=CacheFormerMemory,
        parts=CacheFormerParts,
        make_parts=make_layer_parts,
        attend=attend_inputs,
        title="CacheFormer",
        paper="[Singh & Mahmood 2025](https://arxiv.org/abs/2504.13981)",
        citation="""@article{singh2025cacheformer,
  title = {CacheFormer: High-Attention-Based Segment Caching},
  author = {Singh, Sushant and Mahmood, Ausif},
  journal = {AI},
  volume = {6},
  number = {4},
  pages = {85},
  year = {2025}
}""",
        summary=(
            "A token sees its own and the previous window of {window_tokens:,} tokens, and older text as "
            "{pool_vectors} vectors for every {pool_tokens} tokens; the options below say what else it sees "
            "(CacheFormer, arXiv 2504.13981; without cache and overlap it is Transformer-LS)."
        ),
        limits=(
            "The keys of every token are kept, and each step reads compressed vectors that grow with the text.",
            "The paper's rule for choosing segments looks into the future; its results with the cache are unverified.",
        ),
        choose_when="you train from scratch; on a base, where the text fits its positions and reading should cost less",
        grows="keys of all tokens; read at each step: `pool_vectors` for every `pool_tokens` of them",
        starts_as="the base model on texts of two windows",
        stores="everything",
        retrieves="for each key-value head {topk} segments of {pool_tokens} tokens, uncompressed, u = {neighbors}",
        former_names=("cacheformer",),
        whole=CacheFormerModelOptions,
        test_settings={"window_tokens": 8, "pool_tokens": 4, "pool_vectors": 2, "topk": 2, "neighbors": 2},
    )
)

__all__ = [
    "CacheFormerAdapterConfig",
    "CacheFormerConfig",
    "CacheFormerForCausalLM",
    "CacheFormerModel",
    "CacheFormerOnBaseConfig",
    "CacheFormerOnBaseForCausalLM",
    "CacheFormerOnBaseModel",
]
