"""How transformers finds this package's classes from a saved model, with `trust_remote_code` and without an import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

SHIM = "modeling_cacheformers"
SHIM_TEXT = '''"""This model's classes are in the package cacheformers; this file only names them."""

from cacheformers import {config}, {model}, {causal}

__all__ = ["{config}", "{model}", "{causal}"]
'''


class ShimConfig(PretrainedConfig):
    """A configuration that is saved with a small file which names its model's classes."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]  # transformers leaves it without types
        config, model, causal = self.class_names()
        self.auto_map = {"AutoConfig": config, "AutoModel": model, "AutoModelForCausalLM": causal}
        self.auto_map = {auto: f"{SHIM}.{name}" for auto, name in self.auto_map.items()}

    def class_names(self) -> tuple[str, str, str]:
        """Of the configuration, the model without and with a head."""
        name = type(self).__name__
        return name, name.replace("Config", "Model"), name.replace("Config", "ForCausalLM")

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write `config.json`, and the file through which transformers finds the classes without importing us."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        config, model, causal = self.class_names()
        (folder / f"{SHIM}.py").write_text(SHIM_TEXT.format(config=config, model=model, causal=causal))
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing to do: transformers would copy this package's files beside every saved model."""
