"""Base models whose weights accelerate keeps on the CPU or on disk and brings to a device for each forward.

Reading and generating work with its hooks on every module of the base and on LoRA. The memory's own weights are small
and work outside of the forwards that these hooks surround: they are taken out of its care, and stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook, remove_hook_from_module
from accelerate.utils import named_module_tensors, set_module_tensor_to_device
from torch import Tensor, nn

from cacheformers.modeling.architectures import attention_modules, find_decoder

WITHOUT_WEIGHTS = (
    "This model's weights are neither in memory nor offloaded by accelerate's usual hooks, so it cannot read: load it "
    "again. (With preload_module_classes they are: leave it out.)"
)
PUT_ON_OFFLOADED = (
    "An adapter cannot be put on a base model whose weights are offloaded to CPU or disk: PEFT would leave the adapter "
    "without weights or write over the base's files. Put it on first and offload both (accelerate.cpu_offload, "
    "disk_offload), or export it (cacheformers export ADAPTER OUT) and load OUT with a device_map and offload_folder."
)


def offload_hook(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook that brings a module's own weights to a device for its forward, if there is one."""
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return next((hook for hook in hooks if isinstance(hook, AlignDevicesHook) and hook.offload), None)


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes; raise ValueError if its weights are nowhere."""
    for part in module.modules():
        hook = offload_hook(part)
        if hook is not None and hook.execution_device is not None:
            return torch.device(hook.execution_device)
        for parameter in part.parameters(recurse=False):
            if parameter.is_meta:
                raise ValueError(WITHOUT_WEIGHTS)
            return parameter.device
    raise ValueError(WITHOUT_WEIGHTS)


def layer_devices(decoder: nn.Module, layers: Iterable[int]) -> dict[int, torch.device]:
    """Return the device on which the attention of each given layer computes."""
    attentions = attention_modules(decoder)
    return {layer: device_of(attentions[layer]) for layer in layers}


def stored(model: nn.Module, name: str) -> Tensor:
    """Return the values of a parameter, wherever they are; as it is, on the meta device, if they are nowhere."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    hook = offload_hook(module)
    value: Tensor = getattr(module, own) if hook is None else hook.weights_map[own]
    return value


def keep_in_memory(memory: nn.Module) -> None:
    """Bring a memory's own weights back from where accelerate has offloaded them, for good.

    Raises:
        ValueError: they are elsewhere.
    """
    first = next(memory.parameters(), None)
    if first is None or not first.is_meta:
        return  # as at every forward but the first: all of a memory is offloaded, or nothing
    for module in memory.modules():
        hook = offload_hook(module)
        if hook is not None:
            names = [name for name, _ in named_module_tensors(module)]
            values = {name: hook.weights_map[name] for name in names}
            remove_hook_from_module(module)
            for name, value in values.items():
                set_module_tensor_to_device(module, name, hook.execution_device, value=value)
    if any(parameter.is_meta for parameter in memory.parameters()):
        raise ValueError(WITHOUT_WEIGHTS)


def check_offloading(model: nn.Module, layers: Iterable[int]) -> None:
    """Raise ValueError if accelerate offloads the weights of a layer that is to get an adapter.

    PEFT creates LoRA's weights where the base's are: on the meta device. Where a `device_map` names the disk,
    transformers does not load them later, and PEFT's own loading renames tensors in the base's files. A base whose
    weights are still to be loaded is on the meta device too, and passes.
    """
    decoder: Any = find_decoder(model)
    spread = hasattr(model, "hf_device_map")  # PEFT removes the hooks of such a model before it adds adapters
    for layer in layers:
        on_meta = any(parameter.is_meta for parameter in decoder.layers[layer].parameters())
        if spread and on_meta or any(offload_hook(part) for part in decoder.layers[layer].modules()):
            raise ValueError(PUT_ON_OFFLOADED)
