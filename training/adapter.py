"""An adapter on a pretrained base: its config, its model, and what its memory starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from cacheformers.common.base_model import (
    StartOptions,
    base_config,
    base_folder,
    base_identity,
    check_attention,
    check_quantization,
    checkpoint_activations,
    load_base,
    load_tokenizer,
    weights_identity,
)
from cacheformers.common.documents import DocumentRow
from cacheformers.common.gguf_base import is_gguf
from cacheformers.modeling.architectures import architecture, base_shape
from cacheformers.modeling.method import METHODS, method_named
from cacheformers.training.lanes import Lanes
from cacheformers.training.methods import MethodOptions
from cacheformers.training.optim import Rates, trained_parameters
from cacheformers.training.settings import TrainOptions, resumed_settings

OF_LORA = ("r", "lora_alpha", "target_modules", "layers_to_transform")
START_DOCUMENTS = 4  # whose beginnings are read for memory_start "states"


class Adaptation:
    """An adapter to train on a pretrained base. `Scratch` has the same attributes and methods.

    Args:
        memory_options: of the method; for LoRA alone of the one that it is compared with.

    Attributes:
        title: its name in the first line of the output.
        memory: the memory's options on this base (of LoRA alone those of the method that it is compared with).
        remembers: whether a memory is trained.
        rates: learning rates.
        base: the pretrained model as it was named; None for a whole model.

    Raises:
        OSError, ImportError: the base does not exist, or a package is missing.
        ValueError: the options do not fit the base or each other.
    """

    def __init__(self, model: StartOptions, train: TrainOptions, memory_options: MethodOptions) -> None:
        if not model.base:
            raise ValueError(
                "--base is needed: the pretrained model to adapt. (--init scratch trains one from scratch.)"
            )
        check_quantization(model.quantize)
        check_attention(model.attn_implementation)
        self.model, self.train, self.memory_options = model, train, memory_options
        self.config = base_config(model.base)
        self.adapter, self.memory = adapter_config(self.config, train, memory_options)
        if train.lora_from_layer >= (layers := base_shape(self.config).layers):
            raise ValueError(f"--lora_from_layer {train.lora_from_layer}: the base's layers are 0 to {layers - 1}.")
        self.title, self.base = f"{train.method} on {model.base}", model.base
        if train.start_from is not None:
            check_start(train.start_from, self.adapter, self.memory)
            self.title += f", from {train.start_from}"
        self.remembers = train.method != "lora"
        gate_rate = train.memory_rate * train.gate_factor
        self.rates = Rates(
            train.lora_rate, train.memory_rate, gate_rate, train.weight_decay, lowest=train.lora_from_layer
        )

    def tokenizer(self, accelerator: Accelerator) -> PreTrainedTokenizerBase:
        """Load the base's tokenizer. Every process must call this."""
        if is_gguf(self.model.base):
            with accelerator.main_process_first():  # it is converted once
                base_folder(self.model.base)
        return load_tokenizer(self.model.base)

    def settings(self) -> dict[str, Any]:
        """Return what a resumed run must share: the options of base and memory, what the base is, and its weights."""
        weights = weights_identity(self.model.base, self.config)
        return resumed_settings(self.model, self.memory_options, base=base_identity(self.config), base_weights=weights)

    def make(self, accelerator: Accelerator, documents: DocumentRow, resumed: bool) -> PeftModel:
        """Load the base and add the adapter, the same in every process. Every process must call this.

        Args:
            resumed: a checkpoint will replace what is trained.
        """
        train = self.train
        start = None if resumed else train.start_from
        base, _ = load_base(self.model, accelerator.device)
        torch.manual_seed(train.seed)
        model: PeftModel = (
            get_peft_model(base, self.adapter)
            if start is None
            else PeftModel.from_pretrained(base, start, config=self.adapter, is_trainable=True)
        )
        if train.activation_checkpointing:
            checkpoint_activations(base)
            base.disable_input_require_grads()  # transformers asks for them; frozen layers below need no gradients
        if self.remembers and train.memory_start != "copies" and start is None and not resumed:
            accelerator.print(f"Reading {train.start_segments} segments to start the memory from.")
            start_memory(model, documents, self.memory.segment_tokens, train)
        return model


def adapter_config(
    base: PretrainedConfig, options: TrainOptions, memory_options: MethodOptions
) -> tuple[LoraConfig, Any]:
    """Return the adapter config of the chosen method, and the memory's options on this base.

    LoRA alone gets the targets, layers and segments that it has beside the memory.

    Args:
        memory_options: of the method; for LoRA alone of the one that it is compared with.

    Raises:
        ValueError: the options do not fit the base or each other.
    """
    method = METHODS[memory_options.method]
    if options.memory_start != "copies" and options.memory_start not in method.starts:
        able = [name for name, other in METHODS.items() if options.memory_start in other.starts]
        raise ValueError(
            f"memory_start {options.memory_start!r} is for {', '.join(able) or 'no method'}: leave it out for "
            f"{memory_options.method}."
        )
    targets = options.lora_targets or list(architecture(base).lora_targets)
    without_lora = targets == ["none"]
    config: Any = memory_options.config(
        **memory_options.values(),
        target_modules=[] if without_lora else targets,
        lora_dropout=options.lora_dropout,
    )
    shape = base_shape(base)
    memory = config.resolve(shape)
    if not without_lora:
        config.layers_to_transform = list(
            memory.attention_layers if options.lora_layers == "memory" else range(shape.layers)
        )
    if without_lora and (options.method == "lora" or not method.parts._fields):
        raise ValueError(f"--method {options.method} with --lora_targets none leaves nothing to train.")
    if options.method != "lora":
        return config, memory
    shared = {name: getattr(config, name) for name in ("r", "lora_alpha", "lora_dropout", "layers_to_transform")}
    return LoraConfig(**shared, target_modules=targets, task_type="CAUSAL_LM"), memory


def check_start(folder: str, adapter: LoraConfig, memory: Any) -> None:
    """Check that training can start from the weights of an earlier adapter; nothing is loaded.

    Args:
        memory: options of the adapter's memory on its base; of LoRA alone they do not matter.

    Raises:
        OSError: the folder holds no adapter.
        ValueError: it is of another method, or has other LoRA or another memory.
    """
    if not Path(folder, "adapter_config.json").is_file():
        raise OSError(f"--start_from {folder}: there is no adapter (adapter_config.json).")
    earlier: Any = PeftConfig.from_pretrained(folder)
    there, here = (getattr(kind, "value", kind) for kind in (earlier.peft_type, adapter.peft_type))  # PEFT's own: enum
    if there != here:
        raise ValueError(f"--start_from {folder} is an adapter of {there}, not of {here}.")
    before, now = ({name: plain(getattr(config, name)) for name in OF_LORA} for config in (earlier, adapter))
    if here != PeftType.LORA:
        resolved = earlier.resolve(memory.base)
        before |= resolved.signature | {"trained parts": trained_in_layers(here, resolved)}
        now |= memory.signature | {"trained parts": trained_in_layers(here, memory)}
    differing = [f"{name} {before[name]} there, {now[name]} here" for name in now if before[name] != now[name]]
    if differing:
        raise ValueError(f"--start_from {folder} was trained with other options: {'; '.join(differing)}.")


def trained_in_layers(kind: Any, options: Any) -> list[str]:
    """Return the names of the parts that a method's layers train; no weights are made."""
    with torch.device("meta"):
        parts = [method_named(kind).make_parts(options, layer, None) for layer in options.layers]
    return sorted({name for own in parts for name in own})


def plain(value: Any) -> Any:
    """Return a value as it can be compared and shown: collections without an order are sorted."""
    return sorted(value) if isinstance(value, set | list | tuple) else value


def start_memory(model: PeftModel, documents: DocumentRow, segment_tokens: int, options: TrainOptions) -> None:
    """Start the memory's projections from the base's states in the first documents. Every process must call this.

    Raises:
        ValueError: there are too few segments (see the method's `starts`).
    """
    rows = min(START_DOCUMENTS, options.start_segments)
    lanes = Lanes(documents, rows, segment_tokens, options.seed)
    segments: list[torch.Tensor] = []
    while len(segments) < options.start_segments:
        step = lanes.step()
        segments += [ids[mask.bool()] for ids, mask in zip(step.input_ids, step.attention_mask, strict=True)]
    config: Any = model.active_peft_config
    method_named(config.peft_type).starts[options.memory_start](model, segments[: options.start_segments])
    # Machines of different kinds may find directions of different sign.
    broadcast([parameter.data for parameter in trained_parameters(model)])
