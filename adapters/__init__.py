"""The memories as PEFT methods. Importing this module makes their types known to PEFT."""

from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

from cacheformers.adapters.config import MemoryPeftType, NeurocacheAdapterConfig
from cacheformers.adapters.model import MemoryTuner
from cacheformers.adapters.start import start_from_states

METHODS = {MemoryPeftType.NEUROCACHE: NeurocacheAdapterConfig}

for _type, _config in METHODS.items():
    PEFT_TYPE_TO_CONFIG_MAPPING[_type] = _config  # type: ignore[index]
    PEFT_TYPE_TO_TUNER_MAPPING[_type] = MemoryTuner  # type: ignore[index]
    PEFT_TYPE_TO_PREFIX_MAPPING[_type] = "lora_"  # type: ignore[index]

__all__ = ["MemoryPeftType", "MemoryTuner", "NeurocacheAdapterConfig", "start_from_states"]
