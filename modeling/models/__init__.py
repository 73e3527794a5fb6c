"""The memories as model classes. Importing this module makes them known to transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from cacheformers.modeling.models.configuration_cacheformer import CacheFormerConfig
from cacheformers.modeling.models.configuration_neurocache import NeurocacheConfig
from cacheformers.modeling.models.modeling_cacheformer import CacheFormerForCausalLM, CacheFormerModel
from cacheformers.modeling.models.modeling_cacheformer_on_base import (
    CacheFormerOnBaseConfig,
    CacheFormerOnBaseForCausalLM,
    CacheFormerOnBaseModel,
)
from cacheformers.modeling.models.modeling_gated_attention import (
    GatedAttentionConfig,
    GatedAttentionForCausalLM,
    GatedAttentionModel,
)
from cacheformers.modeling.models.modeling_infini_attention import (
    InfiniAttentionConfig,
    InfiniAttentionForCausalLM,
    InfiniAttentionModel,
)
from cacheformers.modeling.models.modeling_memorizing import MemorizingConfig, MemorizingForCausalLM, MemorizingModel
from cacheformers.modeling.models.modeling_neurocache import NeurocacheForCausalLM, NeurocacheModel
from cacheformers.modeling.models.modeling_windowed import WindowedConfig, WindowedForCausalLM, WindowedModel
from cacheformers.modeling.models.shim import ShimConfig

METHODS: list[tuple[type[ShimConfig], type[PreTrainedModel], type[PreTrainedModel]]] = [
    (CacheFormerConfig, CacheFormerModel, CacheFormerForCausalLM),
    (NeurocacheConfig, NeurocacheModel, NeurocacheForCausalLM),
    (WindowedConfig, WindowedModel, WindowedForCausalLM),
    (MemorizingConfig, MemorizingModel, MemorizingForCausalLM),
    (InfiniAttentionConfig, InfiniAttentionModel, InfiniAttentionForCausalLM),
    (GatedAttentionConfig, GatedAttentionModel, GatedAttentionForCausalLM),
    (CacheFormerOnBaseConfig, CacheFormerOnBaseModel, CacheFormerOnBaseForCausalLM),
]

for _config, _model, _causal in METHODS:
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal, exist_ok=True)

__all__ = [
    "GatedAttentionConfig",
    "GatedAttentionForCausalLM",
    "GatedAttentionModel",
    "InfiniAttentionConfig",
    "InfiniAttentionForCausalLM",
    "InfiniAttentionModel",
    "MemorizingConfig",
    "MemorizingForCausalLM",
    "MemorizingModel",
    "NeurocacheConfig",
    "NeurocacheForCausalLM",
    "NeurocacheModel",
    "WindowedConfig",
    "WindowedForCausalLM",
    "WindowedModel",
    "CacheFormerConfig",
    "CacheFormerForCausalLM",
    "CacheFormerModel",
    "CacheFormerOnBaseConfig",
    "CacheFormerOnBaseForCausalLM",
    "CacheFormerOnBaseModel",
]
