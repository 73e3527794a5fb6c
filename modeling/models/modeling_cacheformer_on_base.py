"""CacheFormer's attention on a base model, as model classes of transformers. (`modeling_cacheformer.py` is the paper's
own transformer.)"""

from __future__ import annotations

from cacheformers.modeling.memories.cacheformer_memory import CacheFormerOnBaseSettings
from cacheformers.modeling.models.composite import CompositeConfig, CompositeForCausalLM, CompositeModel


class CacheFormerOnBaseConfig(CacheFormerOnBaseSettings, CompositeConfig):
    """A base model whose layers attend as CacheFormer does (Singh & Mahmood 2025, arXiv 2504.13981).

    Every field of `CacheFormerOnBaseSettings` applies; `text_config` is the base model's configuration.
    """

    model_type = "cacheformer_on_base"
    memory_method = "cacheformer"


class CacheFormerOnBaseModel(CompositeModel):
    """A base model with CacheFormer's attention, without a head."""

    config_class = CacheFormerOnBaseConfig


class CacheFormerOnBaseForCausalLM(CompositeForCausalLM):
    """A base language model with CacheFormer's attention."""

    config_class = CacheFormerOnBaseConfig
    model_class = CacheFormerOnBaseModel
