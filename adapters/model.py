"""The tuner: PEFT's LoRA and a memory on attention modules, in one adapter."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from peft import LoraModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.adapters.layer import MemoryLayer, incomplete
from cacheformers.modeling.architectures import (
    architecture,
    attention_modules,
    base_shape,
    find_decoder,
    split_projections,
)
from cacheformers.modeling.attention import restore_attention, route_attention
from cacheformers.modeling.inputs import GenerationChecks
from cacheformers.modeling.method import method_named
from cacheformers.modeling.offloading import check_offloading
from cacheformers.modeling.origin import place
from cacheformers.modeling.rotary import check_rotation
from cacheformers.modeling.segments import add_hooks, put_memory

CANNOT_MERGE = (
    "A memory cannot be merged into the base weights: it is computation, not a weight update. Keep the adapter, "
    "unload() it, or save it and write it and its base as one model folder, with LoRA merged and the memory live: "
    "cacheformers export ADAPTER OUT."
)


def trained_beside(model: nn.Module, adapter_name: str) -> list[tuple[str, nn.Module]]:
    """Return the modules that an adapter trains besides its memory, with their paths.

    LoRA of embeddings and trained tokens are in a ParameterDict of all adapters.
    """
    kinds = ("lora_A", "lora_B", "modules_to_save")
    names = tuple(f".{kind}.{adapter_name}" for kind in kinds)
    return [
        (path, module)
        for path, module in model.named_modules()
        if path.endswith(names) or (isinstance(module, nn.ParameterDict) and adapter_name in module)
    ]


class MemoryTuner(LoraModel):
    """The tuner of every memory method: LoRA first, then the memory beside self-attention or inside it."""

    # PEFT only asks whether a module is a tuner layer: LoRA's and ours both are.
    tuner_layer_cls = BaseTunerLayer  # type: ignore[assignment]  # PEFT infers LoraLayer

    def _prepare_adapter_config(self, peft_config: Any, model_config: Any) -> Any:
        if peft_config.target_modules is None:
            names = architecture(self.model.config).lora_targets
            peft_config.target_modules = set(names)
            if peft_config.layers_to_transform is None:
                layers = peft_config.resolve(base_shape(self.model.config)).attention_layers
                within = rf"layers\.({'|'.join(map(str, layers))})\."
                peft_config.target_modules = rf"(.*\.)?{within}(.*\.)?({'|'.join(names)})"
        return super()._prepare_adapter_config(peft_config, model_config)  # type: ignore[no-untyped-call]  # PEFT's

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, torch.Tensor] | None = None,
    ) -> None:
        config: Any = copy.copy(self.peft_config[adapter_name])  # the user may put the same config on another base
        self.peft_config[adapter_name] = config
        self._check_alone(adapter_name)
        base = base_shape(model.config)  # type: ignore[arg-type]  # a transformers model, which PEFT types as a module
        config.check_base(model, base)  # all checks come before the first change
        options = config.resolve(base)
        check_offloading(model, options.layers)
        check_rotation(model, options)
        method = method_named(config.peft_type)
        implementation = model.config._attn_implementation  # type: ignore[union-attr]  # as above
        if method.attend is not None:
            route_attention(model)  # type: ignore[arg-type]  # as above
        try:
            super().inject_adapter(model, adapter_name, autocast_adapter_dtype, low_cpu_mem_usage, state_dict)
        except Exception:  # nothing has been put in (target_modules that name none, for one)
            model.set_attn_implementation(implementation)  # type: ignore[operator]  # as above
            raise
        # PeftModel does this, but transformers' loading does not, and both must compute the same.
        self._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        decoder: Any = find_decoder(model)
        attentions = attention_modules(decoder)
        half = (torch.float16, torch.bfloat16)
        for layer in options.layers:
            attention = attentions[layer]
            if not hasattr(attention, "memory"):
                put_memory(decoder.layers[layer], attention, MemoryLayer(method, layer))
            memory: Any = attention.memory
            weight = next(attention.parameters())
            starts = None
            if layer in options.attention_layers and not low_cpu_mem_usage:
                starts = projection_weights(attention, model.config)  # type: ignore[arg-type]  # as above
            device = torch.device("meta") if low_cpu_mem_usage else weight.device
            rounded = weight.dtype in half or not weight.is_floating_point()  # then float32, like LoRA in PEFT
            dtype = torch.float32 if rounded and autocast_adapter_dtype else weight.dtype
            memory.add_adapter(adapter_name, options, starts, device, dtype)
            memory.train(attention.training)
            memory.set_adapter(self.active_adapters, inference_mode=config.inference_mode)
            if config.inference_mode:
                memory.awaited.add(adapter_name)
        lowest: Any = attentions[options.layers[0]].memory
        lowest.beside[adapter_name] = trained_beside(model, adapter_name)
        if not hasattr(decoder, "memory_hooks"):
            checks = [GenerationChecks(model)] if isinstance(model, GenerationMixin) else []
            decoder.memory_hooks = [*add_hooks(model), *checks]
            self.register_load_state_dict_post_hook(check_complete)  # type: ignore[no-untyped-call]  # torch's

    def _check_alone(self, adapter_name: str) -> None:
        """Raise ValueError for two methods on one base: a cache holds one memory. (LoRA alone may be there.)"""
        configs: dict[str, Any] = {n: c for n, c in self.peft_config.items() if isinstance(c, MemoryAdapterConfig)}
        kinds = {name: method_named(config.peft_type).name for name, config in configs.items()}
        for attention in attention_modules(find_decoder(self.model)):
            memory = getattr(attention, "memory", None)
            if memory is not None and not isinstance(memory, MemoryLayer):
                raise ValueError(
                    f"{type(attention).__name__} already has a child named 'memory': this model has a memory already."
                )
            if memory is not None:
                kinds[""] = memory.method.name  # perhaps of another PeftModel around the same base
        others = {kind for kind in kinds.values() if kind != kinds[adapter_name]}
        if others:
            raise ValueError(
                f"Two methods cannot share one base model (already there: {sorted(others)}). Load it twice."
            )

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Call the base model's. PEFT looks this up at once, and a base without a head has none."""
        return self.model.prepare_inputs_for_generation(*args, **kwargs)

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter; if it was active, activate the first of the others, on every layer."""
        was_active = adapter_name in self.active_adapters
        super().delete_adapter(adapter_name)
        if was_active and self.peft_config:  # layers that only the deleted adapter had activate none
            self.set_adapter(min(self.peft_config))

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "Memories cannot be combined by weight: each adapter remembers differently. Train one on both data sets, "
            "or switch with set_adapter()."
        )

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(CANNOT_MERGE)

    def unmerge_adapter(self) -> None:
        raise ValueError(CANNOT_MERGE)

    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("adapter_names") is not None:
            raise ValueError("adapter_names: a batch cannot mix memories of several adapters. Use set_adapter().")
        return super()._enable_peft_forward_hooks(*args, **kwargs)

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        if merge:
            raise ValueError(CANNOT_MERGE)
        self.detach_memories()
        return super()._unload_and_optionally_merge(merge, *args, **kwargs)

    def merge_lora(self) -> PreTrainedModel:
        """Return the base with LoRA and saved modules merged, without memories. The adapter is consumed.

        Weights keep their precision. Layer by layer they are merged in float32 or better, and rounded once.

        Raises:
            ValueError: LoRA has a bias where the base has none. Nothing has changed.
        """
        for path, layer in self.model.named_modules():
            biased = isinstance(layer, LoraLayer) and any(layer.lora_bias.values())
            if biased and getattr(layer.get_base_layer(), "bias", None) is None:
                raise ValueError(f"lora_bias=True cannot be merged: {path} of the base has no bias to add it to.")
        self.detach_memories()
        self.untie()
        for layer in self.model.modules():
            if isinstance(layer, LoraLayer):
                weights = [(weight, weight.dtype) for weight in layer.get_base_layer().parameters()]
                for weight, dtype in weights:
                    weight.data = weight.data.to(torch.promote_types(dtype, torch.float32))
                layer.merge(safe_merge=True)
                for weight, dtype in weights:
                    weight.data = weight.data.to(dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All adapters are already merged")
            super()._unload_and_optionally_merge(safe_merge=True)
        return self.model

    def untie(self) -> None:
        """Give a head and embeddings that share a weight one each, if LoRA is on either: it changes that one alone."""
        model: Any = self.model
        ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
        own = [getattr(end, "base_layer", end) for end in ends]
        if None in own or own[0].weight is not own[1].weight or not any(isinstance(end, LoraLayer) for end in ends):
            return
        own[1].weight = nn.Parameter(own[1].weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False

    def detach_memories(self) -> None:
        """Remove memories and hooks, so that the base computes what it did before."""
        decoder: Any = find_decoder(self.model)
        for attention in attention_modules(decoder):
            if hasattr(attention, "memory"):
                for handle in attention.memory.handles:  # type: ignore[union-attr]  # a MemoryLayer
                    handle.remove()
                del attention.memory
        for handle in decoder.memory_hooks:
            handle.remove()
        del decoder.memory_hooks
        restore_attention(self.model)


def check_complete(tuner: nn.Module, incompatible: Any) -> None:
    """Raise ValueError if PEFT has loaded a part of an adapter, or tensors of another one (hook after loading)."""
    missing = {key.removeprefix("base_model.") for key in incompatible.missing_keys}
    keys = [key for key, _ in tuner.named_parameters()]
    unknown = [key for key in incompatible.unexpected_keys if ".lora_mem_" in key]
    if unknown:
        raise ValueError(f"The file holds tensors that this adapter does not have: {sorted(unknown)[:5]}.")
    trained = any(place(key, tuner.peft_config)[0] == "adapter" for key in keys)  # type: ignore[arg-type]  # names of adapters
    if trained and missing.issuperset(keys):
        raise ValueError("No tensor of the file fits this model: it belongs to another base or method.")
    for name in list(tuner.peft_config):  # type: ignore[arg-type]  # an attribute of a module
        own = [key for key in keys if place(key, [name])[0] == "adapter"]
        lacking = missing.intersection(own)
        if lacking and len(lacking) < len(own):
            raise ValueError(incomplete(name, sorted(lacking)))
        if not lacking:
            for module in tuner.modules():
                if isinstance(module, MemoryLayer):
                    module.awaited.discard(name)


def projection_weights(attention: nn.Module, config: PretrainedConfig) -> tuple[Tensor, ...]:
    """Return a layer's W_q, W_k, W_v, W_o, dequantized, without LoRA."""
    modules = []
    for name in architecture(config).projections:
        module = getattr(attention, name)
        modules.append(module.get_base_layer() if hasattr(module, "get_base_layer") else module)
    return split_projections([dequantize_module_weight(module).detach() for module in modules], base_shape(config))
