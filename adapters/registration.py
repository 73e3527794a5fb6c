"""`register` makes a memory method known to this package, to PEFT and to transformers' Auto classes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from cacheformers.adapters.config import MemoryPeftType
from cacheformers.adapters.model import MemoryTuner
from cacheformers.modeling.method import METHODS, MemoryMethod


def register(method: MemoryMethod) -> None:
    """Register a memory method, or replace the method of the same name.

    Then `get_peft_model` accepts its adapter config, `AutoModelForCausalLM` loads its adapters and models, and
    `train_adapt.py --method NAME` trains it.
    """
    METHODS[method.name] = method
    method.adapter_config.kind = MemoryPeftType(method.name.upper())
    for name in (method.name, *method.former_names):
        kind: Any = MemoryPeftType(name.upper())
        PEFT_TYPE_TO_CONFIG_MAPPING[kind] = method.adapter_config
        PEFT_TYPE_TO_TUNER_MAPPING[kind] = MemoryTuner
        PEFT_TYPE_TO_PREFIX_MAPPING[kind] = "lora_"
    register_model(method.config, method.model, method.causal_lm)
    for documented in (method.adapter_config, method.config):
        if "Settings of the method:" in documented.__doc__:  # registered before
            continue
        documented.__doc__ = f"{documented.__doc__}\n\n    Settings of the method:\n{described(method.adapter_config)}"


def register_model(config: Any, model: Any, causal_lm: Any) -> None:
    """Register model classes with transformers' Auto classes."""
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, model, exist_ok=True)
    AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)


def described(config: Any) -> str:
    """Write one line of help per setting, for the docstrings of a method's configs."""
    return "\n".join(
        f"        {entry.name}: {entry.metadata['help']}" for entry in fields(config) if "free" in entry.metadata
    )
