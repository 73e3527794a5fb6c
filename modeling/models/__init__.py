"""The memories as model classes. Importing this module makes them known to transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from cacheformers.modeling.models.composite import CompositeConfig, CompositeForCausalLM, CompositeModel
from cacheformers.modeling.models.configuration_neurocache import NeurocacheConfig
from cacheformers.modeling.models.modeling_memorizing import MemorizingConfig, MemorizingForCausalLM, MemorizingModel
from cacheformers.modeling.models.modeling_neurocache import NeurocacheForCausalLM, NeurocacheModel
from cacheformers.modeling.models.modeling_windowed import WindowedConfig, WindowedForCausalLM, WindowedModel

METHODS: list[tuple[type[CompositeConfig], type[CompositeModel], type[CompositeForCausalLM]]] = [
    (NeurocacheConfig, NeurocacheModel, NeurocacheForCausalLM),
    (WindowedConfig, WindowedModel, WindowedForCausalLM),
    (MemorizingConfig, MemorizingModel, MemorizingForCausalLM),
]

for _config, _model, _causal in METHODS:
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal, exist_ok=True)

__all__ = [
    "MemorizingConfig",
    "MemorizingForCausalLM",
    "MemorizingModel",
    "NeurocacheConfig",
    "NeurocacheForCausalLM",
    "NeurocacheModel",
    "WindowedConfig",
    "WindowedForCausalLM",
    "WindowedModel",
]
