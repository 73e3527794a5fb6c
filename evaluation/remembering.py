"""Whether a model reads with a memory, for the commands that evaluate one."""

from __future__ import annotations

from typing import Any

from peft import PeftConfig
from transformers import PretrainedConfig

from cacheformers.adapters import METHODS as MEMORY_TYPES
from cacheformers.modeling.models.composite import CompositeConfig


def memory_config(base: PretrainedConfig, adapter: PeftConfig | None) -> Any:
    """The configuration that has the memory's options; None if there is no memory.

    Raises:
        ValueError: a model that the commands cannot read with.
    """
    if base.model_type == "cacheformer":
        raise ValueError("CacheFormer models cannot be evaluated by this command yet: see docs/cacheformer.md.")
    if adapter is not None and adapter.peft_type in MEMORY_TYPES:
        return adapter
    return base if isinstance(base, CompositeConfig) else None
