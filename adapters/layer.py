"""The tuner layer on an attention module: it has no base layer, and one flat container per trained part."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from cacheformers.modeling.method import MemoryMethod, MethodOnLayer

PREFIX = "lora_mem_"


class MemoryLayer(MethodOnLayer, nn.Module, BaseTunerLayer):
    """The memories of one attention module, by adapter.

    PEFT and transformers find parameters by names such as `memory.lora_mem_q.<adapter>.weight`.
    """

    other_param_names = ()

    def __init__(self, method: MemoryMethod, layer: int) -> None:
        super().__init__()
        self.method, self.layer = method, layer
        self.adapter_layer_names = tuple(PREFIX + part for part in method.parts._fields)
        self.adapter_options: dict[str, Any] = {}
        self.awaited: set[str] = set()  # adapters whose tensors are still to be loaded from a file
        self.beside: dict[str, list[tuple[str, nn.Module]]] = {}  # LoRA and saved modules, only on the lowest layer
        for name in self.adapter_layer_names:
            setattr(self, name, nn.ModuleDict())
        self._disable_adapters = False
        self._active_adapter: list[str] = []
        self.merged_adapters: list[str] = []

    def add_adapter(
        self,
        name: str,
        options: Any,
        base_weights: tuple[Tensor, ...] | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Create an adapter's parts on this layer.

        Args:
            base_weights: W_q, W_k, W_v, W_o to start from; None if the parts are loaded later.
            device, dtype: of the new parameters; on the meta device they are empty.
        """
        self.adapter_options[name] = options
        with torch.device("meta" if device.type == "meta" else "cpu"):
            parts = self.method.make_parts(options, self.layer, base_weights)
        for part, module in parts.items():
            empty = any(parameter.is_meta for parameter in module.parameters())  # PEFT fills them later
            getattr(self, PREFIX + part)[name] = module.to(dtype) if empty else module.to(device, dtype)

    @property
    def options(self) -> Any:
        """Options of the active adapter, None while adapters are disabled or it has no memory here."""
        if self.disable_adapters:
            return None
        active = [name for name in self.active_adapters if name in self.adapter_options]
        if len(active) > 1:
            raise ValueError(f"Only one memory can be active at a time, got {active}: use set_adapter() with one name.")
        return self.adapter_options[active[0]] if active else None

    def check_loaded(self) -> None:
        """Raise ValueError if tensors of an active adapter were not in its file (transformers and PEFT only log it)."""
        for name in self.active_adapters:
            if name in self.awaited:
                raise ValueError(incomplete(name, self._missing(name)))

    def _missing(self, name: str) -> list[str]:
        """Return the adapter's tensors, here and in `beside`, that transformers did not mark as loaded."""
        own = {f"layer {self.layer}: {key}": p for key, p in self.named_parameters() if f".{name}." in key}
        beside = {
            f"{path}.{key}": p
            for path, module in self.beside.get(name, [])
            for key, p in module.named_parameters()
            if key == name or not isinstance(module, nn.ParameterDict)  # which holds all adapters'
        }
        return [key for key, p in {**own, **beside}.items() if not getattr(p, "_is_hf_initialized", False)]

    def train(self, mode: bool = True) -> MemoryLayer:
        # transformers calls this after it has loaded an adapter, and marks loaded tensors.
        self.awaited = {name for name in self.awaited if self._missing(name)}
        super().train(mode)
        return self

    def parts(self, name: str) -> Any:
        """Return an adapter's trained parts on this layer."""
        held: dict[str, Any] = {part: self._modules[PREFIX + part] for part in self.method.parts._fields}
        return self.method.parts(**{part: modules[name] for part, modules in held.items() if name in modules})

    @property
    def active_parts(self) -> Any:
        return self.parts(next(name for name in self.active_adapters if name in self.adapter_options))

    def delete_adapter(self, adapter_name: str) -> None:
        self.adapter_options.pop(adapter_name, None)  # first, because PEFT activates one of the others
        super().delete_adapter(adapter_name)
        self.beside.pop(adapter_name, None)
        self.awaited.discard(adapter_name)

    def _all_available_adapter_names(self) -> list[str]:
        return sorted(self.adapter_options)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: Any = None) -> None:
        """Do nothing: there is no base layer, and `add_adapter` creates the parts on their device."""


def incomplete(adapter: str, missing: list[str]) -> str:
    """Write the message for an adapter that lacks tensors."""
    shown = ", ".join(sorted(missing)[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    return (
        f"Adapter {adapter!r} is incomplete: its file had no tensors for {shown}. The file is damaged, or belongs to "
        "another configuration or version; save the adapter again with save_pretrained(). (If there was no file and it "
        "is to start fresh: set inference_mode=False in its config.)"
    )
