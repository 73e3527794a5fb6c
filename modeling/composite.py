"""Model classes with a base model of transformers and a memory inside, from which every method derives its own.

    config.json            text_config (the base model's configuration), and the method's settings
    model.language_model   the base model without its head, with unchanged names; a memory on each augmented attention
    lm_head                the base model's head

A method adds a `CompositeConfig` with its settings, and the model classes that name it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast

from cacheformers.modeling.architectures import (
    architecture,
    attention_modules,
    base_shape,
    find_decoder,
    split_projections,
)
from cacheformers.modeling.attention import route_attention
from cacheformers.modeling.inputs import ChecksPrompts
from cacheformers.modeling.method import METHODS, MemoryMethod, MethodOnLayer
from cacheformers.modeling.pretrained import ForwardWithHead, MemoryPreTrainedModel, SavedConfig
from cacheformers.modeling.rotary import check_rotation
from cacheformers.modeling.segments import add_hooks, before_model, put_memory


class CompositeConfig(SavedConfig):
    """A base model's configuration and a memory's options.

    Attributes:
        text_config: of the base model, as an object or a dictionary with its `model_type`. Default: Llama's.
        tie_word_embeddings: default: as in `text_config`.
    """

    sub_configs = {"text_config": AutoConfig}

    text_config: PretrainedConfig | dict[str, Any] | None = None
    tie_word_embeddings: bool | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.text_config, PretrainedConfig):
            self.text_config = AutoConfig.for_model(**{"model_type": "llama", **(self.text_config or {})})
        if self.tie_word_embeddings is None:
            self.tie_word_embeddings = getattr(self.text_config, "tie_word_embeddings", False)
        self.text_config.tie_word_embeddings = self.tie_word_embeddings
        # This would set the base's implementation too: keep the one it has.
        kwargs.setdefault("attn_implementation", self.text_config._attn_implementation)
        experts = self.text_config._experts_implementation  # the same, which a model around a base cannot choose
        super().__post_init__(**kwargs)
        self.text_config._experts_implementation = experts

    @property
    def method(self) -> MemoryMethod:
        """The memory method."""
        return METHODS[self.model_type]

    def options(self) -> Any:
        """Resolve the method's settings against this base; raise ValueError if they do not fit."""
        config: Any = self
        return config.resolve(base_shape(config.text_config))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, but raise ValueError for the configuration of another kind of model."""
        kind = config_dict.get("model_type", cls.model_type)
        if kind != cls.model_type:
            causal = cls.__name__.replace("Config", "ForCausalLM")
            raise ValueError(
                f"This is the configuration of a {kind!r} model, not of a {cls.model_type!r} one. To put a memory on a "
                f"base model: {causal}.from_base."
            )
        return super().from_dict(config_dict, **kwargs)


class CompositeMemory(MethodOnLayer, nn.Module):
    """The memory of one attention module.

    Args:
        base_weights: the layer's W_q, W_k, W_v, W_o to start from; None starts at random.
    """

    options: Any = None

    def __init__(
        self, method: MemoryMethod, options: Any, layer: int, base_weights: tuple[Tensor, ...] | None = None
    ) -> None:
        super().__init__()
        self.method, self.options, self.layer = method, options, layer
        for name, part in method.make_parts(options, layer, base_weights).items():
            self.add_module(name, part)

    @property
    def active_parts(self) -> Any:
        return self.method.parts(**self._modules)

    def check_loaded(self) -> None:
        """Raise ValueError if LoRA was put on a part of the memory. (`from_pretrained` checks for missing tensors.)"""
        wrapped = [name for name, part in self.named_children() if hasattr(part, "base_layer")]
        if wrapped:
            raise ValueError(
                f"LoRA was put on the memory ({', '.join(wrapped)} of layer {self.layer}), where it has no effect: "
                "name the base model's layers in target_modules. To train the memory: modules_to_save=['memory']."
            )


class CompositePreTrainedModel(MemoryPreTrainedModel):
    """How a memory is put on a base model and initialized."""

    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _skip_keys_device_placement = ["past_key_values", "memory_state"]
    _keep_in_fp32_modules = ["memory"]  # and not quantized

    @property
    def base_language_model(self) -> PreTrainedModel:
        """The base model without its head."""
        return self.base_model.language_model  # type: ignore[return-value]  # a decoder

    def attach_memories(self, language_model: PreTrainedModel, from_base: bool) -> None:
        """Put a memory on each augmented attention module of a base model.

        Args:
            from_base: start from the base's weights, not at random.
        """
        method, options, text_config = self.config.method, self.config.options(), self.config.text_config
        check_rotation(language_model, options)
        if method.attend is not None:
            route_attention(language_model)
        decoder: Any = find_decoder(language_model)
        attentions = attention_modules(decoder)
        for layer in options.layers:
            attention = attentions[layer]
            weight = next(attention.parameters())
            starts = None
            if from_base:
                own = [getattr(attention, name).weight.detach() for name in architecture(text_config).projections]
                starts = split_projections(own, base_shape(text_config))
            memory = CompositeMemory(method, options, layer, starts)
            half = weight.dtype in (torch.float16, torch.bfloat16)  # float32 then, as in the adapters
            memory = memory.to(weight.device, torch.float32 if half else weight.dtype)
            put_memory(decoder.layers[layer], attention, memory)
            if not weight.is_meta:
                mark_initialized(memory)
        add_hooks(language_model)

    def memories(self) -> list[CompositeMemory]:
        """Return the memories, lowest layer first."""
        return [module for module in self.modules() if isinstance(module, CompositeMemory)]

    @torch.no_grad()
    def initialize_weights(self) -> None:
        # Memories first: for modules inside the base, transformers calls the base's class, which does not know them.
        for memory in self.memories():
            self._initialize_weights(memory)
            mark_initialized(memory)
        super().initialize_weights()  # type: ignore[no-untyped-call]  # transformers'

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, CompositeMemory):
            return super()._init_weights(module)  # type: ignore[no-untyped-call]  # transformers'
        missing = {
            name: parameter
            for name, parameter in module.named_parameters()
            if not getattr(parameter, "_is_hf_initialized", False)
        }
        if missing:
            fresh = dict(CompositeMemory(module.method, module.options, module.layer).named_parameters())
            for name, parameter in missing.items():
                init.copy_(parameter, fresh[name])

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        options = self.config.options()  # the vocabulary's size is among them
        for memory in self.memories():
            memory.options = options
        return embeddings


class CompositeModel(CompositePreTrainedModel):
    """A base model with a memory, without a head.

    Args:
        language_model: a base to take over instead of a new one.
        from_base: start memories from its weights, not at random.
    """

    def __init__(self, config: CompositeConfig, language_model: PreTrainedModel | None = None, from_base: bool = False):
        super().__init__(config)
        self.language_model = language_model or AutoModel.from_config(config.text_config)
        self.attach_memories(self.language_model, from_base)
        self.post_init()  # type: ignore[no-untyped-call]  # transformers'

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> BaseModelOutputWithPast:
        """Call the base model on ids `[rows, time]` of any length; `past_key_values` may be a `MemoryCache`."""
        return self.language_model(input_ids=input_ids, **kwargs)


class CompositeForCausalLM(ChecksPrompts, ForwardWithHead, CompositePreTrainedModel, GenerationMixin):
    """A base language model with a memory.

    Args:
        base: a pretrained base to take over instead of a new one; memories then start from its weights.
    """

    model_class: ClassVar[type[CompositeModel]]

    def __init__(self, config: CompositeConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        causal: Any = base or AutoModelForCausalLM.from_config(config.text_config)
        headless: Any = find_decoder(causal) if causal.base_model is causal else causal.base_model  # Llama 4 names none
        self.model = self.model_class(config, headless, from_base=base is not None)
        self.lm_head = causal.get_output_embeddings()
        embeddings = self.get_input_embeddings()
        path = next(path for path, module in self.named_modules() if module is embeddings)
        self._tied_weights_keys = {"lm_head.weight": f"{path}.weight"}
        self.register_forward_pre_hook(before_model, with_kwargs=True)
        self.post_init()  # type: ignore[no-untyped-call]  # transformers'

    def logits(self, hidden: Tensor) -> Tensor:
        text_config = self.config.text_config
        return architecture(text_config).logits(text_config, super().logits(hidden))

    @classmethod
    def from_base(cls, base: str | Path | PreTrainedModel, **options: Any) -> Self:
        """Put a new memory on a pretrained base model.

        Before training, most methods compute what the base computes on at most one segment.

        Args:
            base: a folder, a Hub id, or a causal language model, which is not copied.
            options: settings of the memory, fields of the configuration class.

        Raises:
            ValueError: the base is of an unsupported type, quantized, or has a memory already; or a setting does not
                fit it.
        """
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto") if isinstance(base, str | Path) else base
        if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
            raise ValueError(f"{type(model).__name__} is not a causal language model of transformers.")
        if getattr(model, "is_quantized", False):
            raise ValueError("A quantized base cannot become part of a model: put an adapter on it.")
        if any(hasattr(attention, "memory") for attention in attention_modules(find_decoder(model))):
            raise ValueError("This model has a memory already: pass its base model, or export its adapter.")
        mark_initialized(model)
        config_class: Any = cls.config_class
        config = config_class(text_config=model.config, dtype=model.config.dtype, **options)
        composite = cls(config, model)
        composite.generation_config = model.generation_config
        return composite.train(model.training)


def mark_initialized(module: nn.Module) -> None:
    """Tell transformers that every module inside has its values already."""
    for part in module.modules():
        part._is_hf_initialized = True  # type: ignore[assignment]  # a mark of transformers'
