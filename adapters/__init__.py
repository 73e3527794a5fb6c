"""The memories as PEFT methods. Importing this module makes their types known to PEFT."""

from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

from cacheformers.adapters.config import (
    CacheFormerAdapterConfig,
    GatedAttentionAdapterConfig,
    InfiniAttentionAdapterConfig,
    MemorizingAdapterConfig,
    MemoryAdapterConfig,
    MemoryPeftType,
    NeurocacheAdapterConfig,
    WindowedAdapterConfig,
)
from cacheformers.adapters.model import MemoryTuner
from cacheformers.adapters.start import start_from_states

METHODS: dict[MemoryPeftType, type[MemoryAdapterConfig]] = {
    config.kind: config
    for config in (
        NeurocacheAdapterConfig,
        WindowedAdapterConfig,
        MemorizingAdapterConfig,
        InfiniAttentionAdapterConfig,
        GatedAttentionAdapterConfig,
        CacheFormerAdapterConfig,
    )
}

for _type, _config in METHODS.items():
    PEFT_TYPE_TO_CONFIG_MAPPING[_type] = _config  # type: ignore[index]
    PEFT_TYPE_TO_TUNER_MAPPING[_type] = MemoryTuner  # type: ignore[index]
    PEFT_TYPE_TO_PREFIX_MAPPING[_type] = "lora_"  # type: ignore[index]

__all__ = [
    "CacheFormerAdapterConfig",
    "GatedAttentionAdapterConfig",
    "InfiniAttentionAdapterConfig",
    "MemorizingAdapterConfig",
    "MemoryPeftType",
    "MemoryTuner",
    "NeurocacheAdapterConfig",
    "WindowedAdapterConfig",
    "start_from_states",
]
