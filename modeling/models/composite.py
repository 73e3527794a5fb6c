"""What the model classes of every method share: a base model of transformers with a memory inside.

    config.json            text_config (the base model's own), and the method's options
    model.language_model   the base model without its head, under its own names; a memory on each augmented attention
    lm_head                the base model's own head

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
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from cacheformers.hub.push import PushesWithCard
from cacheformers.modeling.attach import (
    add_hooks,
    architecture,
    attention_modules,
    base_shape,
    before_model,
    check_window,
    find_decoder,
    put_memory,
    split_projections,
)
from cacheformers.modeling.attention import route_attention
from cacheformers.modeling.generation import ChecksPrompts
from cacheformers.modeling.memories import METHODS
from cacheformers.modeling.memories.method import Method, MethodOnLayer
from cacheformers.modeling.models.loading import check_complete
from cacheformers.modeling.models.shim import ShimConfig


class CompositeConfig(ShimConfig):
    """A base model's configuration and a memory's options.

    Attributes:
        text_config: of the base model, as an object or a dictionary with its `model_type`. Default: Llama's.
        tie_word_embeddings: default: as `text_config` says.
        memory_method: name of the memory method, where it is not the model type.
    """

    sub_configs = {"text_config": AutoConfig}
    memory_method: ClassVar[str | None] = None

    text_config: PretrainedConfig | dict[str, Any] | None = None
    tie_word_embeddings: bool | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.text_config, PretrainedConfig):
            self.text_config = AutoConfig.for_model(**{"model_type": "llama", **(self.text_config or {})})
        if self.tie_word_embeddings is None:
            self.tie_word_embeddings = getattr(self.text_config, "tie_word_embeddings", False)
        self.text_config.tie_word_embeddings = self.tie_word_embeddings
        # Setting ours sets the base's: an instance keeps what it has.
        kwargs.setdefault("attn_implementation", self.text_config._attn_implementation)
        super().__post_init__(**kwargs)

    @classmethod
    def method_name(cls) -> str:
        """The memory method's, which is also its PEFT type, in capitals."""
        return cls.memory_method or cls.model_type

    @property
    def method(self) -> Method:
        """The memory method."""
        return METHODS[self.method_name()]

    def options(self) -> Any:
        """The method's options on this base.

        Raises:
            ValueError: options that do not fit the base, or a base that is not supported.
        """
        config: Any = self
        return config.resolve(base_shape(config.text_config))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, but a base model's configuration is not taken for one of this class.

        Raises:
            ValueError: the configuration has another `model_type`.
        """
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
        base_weights: the layer's own W_q, W_k, W_v, W_o to start from; None starts at random.
    """

    options: Any = None

    def __init__(
        self, method: Method, options: Any, layer: int, base_weights: tuple[Tensor, ...] | None = None
    ) -> None:
        super().__init__()
        self.method, self.options, self.layer = method, options, layer
        for name, part in method.make_parts(options, layer, base_weights).items():
            self.add_module(name, part)

    @property
    def active_parts(self) -> Any:
        return self.method.parts(**self._modules)

    def check_loaded(self) -> None:
        """Refuse what would be trained without being used. (A missing tensor raises in `from_pretrained`.)

        Raises:
            ValueError: LoRA was put on a part of the memory.
        """
        wrapped = [name for name, part in self.named_children() if hasattr(part, "base_layer")]
        if wrapped:
            raise ValueError(
                f"LoRA was put on the memory ({', '.join(wrapped)} of layer {self.layer}), where it has no effect: "
                "name the base model's layers in target_modules. To train the memory: modules_to_save=['memory']."
            )


class CompositePreTrainedModel(PushesWithCard, PreTrainedModel):
    """How a memory is put on a base model, initialised and loaded.

    Loading raises ValueError where transformers would make up what is missing in the file, or pass over a memory that
    the configuration does not describe.
    """

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _skip_keys_device_placement = ["past_key_values", "memory_state"]
    _keep_in_fp32_modules = ["memory"]  # which quantisers leave out, too

    @property
    def base_language_model(self) -> PreTrainedModel:
        """The base model, without its head."""
        return self.base_model.language_model  # type: ignore[return-value]

    def attach_memories(self, language_model: PreTrainedModel, from_base: bool) -> None:
        """Put a memory on each augmented attention module of a base model.

        Args:
            from_base: memories start from the base's own weights; otherwise at random.
        """
        method, options, text_config = self.config.method, self.config.options(), self.config.text_config
        check_window(language_model, options)
        if method.attend is not None:
            route_attention(language_model)
        attentions = attention_modules(find_decoder(language_model))
        for layer in options.layers:
            attention = attentions[layer]
            weight = next(attention.parameters())
            starts = None
            if from_base:
                own = [getattr(attention, name).weight.detach() for name in architecture(text_config).projections]
                starts = split_projections(own, base_shape(text_config))
            memory = CompositeMemory(method, options, layer, starts)
            half = weight.dtype in (torch.float16, torch.bfloat16)  # float32 then, as in the adapters
            put_memory(attention, memory.to(weight.device, torch.float32 if half else weight.dtype))
            if not weight.is_meta:
                mark_initialized(memory)
        add_hooks(language_model)

    def memories(self) -> list[CompositeMemory]:
        """The memories, lowest layer first."""
        return [module for module in self.modules() if isinstance(module, CompositeMemory)]

    @torch.no_grad()
    def initialize_weights(self) -> None:
        # Memories first: inside the base model, transformers would ask the base's class, which does not know them.
        for memory in self.memories():
            self._initialize_weights(memory)
            mark_initialized(memory)
        super().initialize_weights()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, CompositeMemory):
            return super()._init_weights(module)  # type: ignore[no-untyped-call]
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
        options = self.config.options()  # a memory belongs to models with the same vocabulary
        for memory in self.memories():
            memory.options = options
        return embeddings

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        # Not in from_pretrained: its report is another one if it goes on to load an adapter.
        super()._adjust_missing_and_unexpected_keys(loading_info)
        check_complete(loading_info)


class CompositeModel(CompositePreTrainedModel):
    """A base model with a memory, without a head.

    Args:
        language_model: a base to take over instead of a new one.
        from_base: memories start from its weights, not at random.
    """

    def __init__(self, config: CompositeConfig, language_model: PreTrainedModel | None = None, from_base: bool = False):
        super().__init__(config)
        self.language_model = language_model or AutoModel.from_config(config.text_config)
        self.attach_memories(self.language_model, from_base)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> BaseModelOutputWithPast:
        """As the base model's, for any number of ids.

        Args:
            input_ids: `[rows, time]`.
            kwargs: of the base model's forward; `past_key_values` may be a `MemoryCache`.
        """
        return self.language_model(input_ids=input_ids, **kwargs)


class CompositeForCausalLM(ChecksPrompts, CompositePreTrainedModel, GenerationMixin):
    """A base language model with a memory.

    Args:
        base: a pretrained base to take over instead of a new one; memories then start from its weights.
    """

    model_class: ClassVar[type[CompositeModel]]

    def __init__(self, config: CompositeConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        causal: Any = base or AutoModelForCausalLM.from_config(config.text_config)
        self.model = self.model_class(config, causal.base_model, from_base=base is not None)
        self.lm_head = causal.get_output_embeddings()
        embeddings = self.get_input_embeddings()
        path = next(path for path, module in self.named_modules() if module is embeddings)
        self._tied_weights_keys = {"lm_head.weight": f"{path}.weight"}
        self.register_forward_pre_hook(before_model, with_kwargs=True)
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def from_base(cls, base: str | Path | PreTrainedModel, **options: Any) -> Self:
        """Put a new memory on a pretrained base model.

        With the default gate the model computes what the base computes (on at most a segment) until it is trained.

        Args:
            base: a folder, a Hub id, or a causal language model, which is taken over and not copied.
            options: the memory's, fields of the configuration class.

        Raises:
            ValueError: the base is of an unsupported type, quantised, or has a memory already; or an option does not
                fit it.
        """
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto") if isinstance(base, str | Path) else base
        if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
            raise ValueError(f"{type(model).__name__} is not a causal language model of transformers.")
        if getattr(model, "is_quantized", False):
            raise ValueError("A quantised base cannot become part of a model: put an adapter on it.")
        if any(hasattr(attention, "memory") for attention in attention_modules(find_decoder(model))):
            raise ValueError("This model has a memory already: pass its base model, or export its adapter.")
        mark_initialized(model)
        config_class: Any = cls.config_class
        config = config_class(text_config=model.config, dtype=model.config.dtype, **options)
        composite = cls(config, model)
        composite.generation_config = model.generation_config
        return composite.train(model.training)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As the base model's, for any number of ids.

        Args:
            input_ids: `[rows, time]`.
            attention_mask: `[rows, time]`, 0 for padding.
            past_key_values: a `MemoryCache` to go on with.
            labels: `[rows, time]`, -100 where there is no loss.
            logits_to_keep: how many of the last logits are wanted (0: all), or which.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )
        wanted = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, wanted])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def mark_initialized(module: nn.Module) -> None:
    """Tell transformers that every module in here has its values already."""
    for part in module.modules():
        part._is_hf_initialized = True  # type: ignore[assignment]
