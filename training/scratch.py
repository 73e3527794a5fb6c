"""A whole model from random weights: which one a recipe asks for, checked against its tokenizer, and made."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cacheformers.common.base_model import StartOptions, base_identity, check_attention, check_vocabulary
from cacheformers.common.documents import DocumentRow
from cacheformers.common.recipe import option
from cacheformers.modeling.attach import architecture, base_shape
from cacheformers.modeling.memory import BaseShape, LocalWindow
from cacheformers.modeling.whole import WholeConfig
from cacheformers.training.optim import Rates
from cacheformers.training.settings import TrainOptions, resumed_settings
from cacheformers.training.start import check_start, started
from cacheformers.training.subject import Subject
from cacheformers.training.tokenizer import open_tokenizer


@dataclass
class ScratchOptions:
    """What is trained from scratch, and how."""

    model_config: str | None = option(
        None,
        help="The new model: a config.json with its model_type, sizes and, where it has one, its memory's options. "
        "This package's models, or a plain decoder such as llama. A cacheformer and a plain decoder read rows of "
        "'segment_tokens' by themselves (in the file; default: 1024, and max_position_embeddings). Token ids, and the "
        "vocabulary's size if the file does not say, come from the tokenizer.",
    )
    tokenizer: str | None = option(
        None,
        help="A folder or Hub id with a tokenizer (recipes/train_tokenizer.py makes one), or 'bytes': 256 of them and "
        "an end of text, without the latter where the file says 'vocab_size': 256.",
    )
    start_from: str | None = option(
        None,
        help="A folder with a model that was trained before: start from its weights instead of random ones, with the "
        "switches of --model_config. Every weight must be in both and fit. Default: random weights.",
    )
    rate: float = option(1e-3, help="Peak learning rate of all weights; gates have gate_factor times this.")
    precision: Literal["float32", "bf16"] = option(
        "float32",
        help="'bf16': matrix products in bfloat16 (autocast), often faster; weights, optimizer, norms, softmax "
        "and searches stay in float32.",
    )


ScratchOptions._argument_group_name = "training from scratch (with --init scratch)"  # type: ignore[attr-defined]

# Options that mean something for an adapter only, besides those of its memory.
OF_ADAPTERS = (
    *("base", "dtype", "quantize", "method", "memory_start", "start_segments", "lora_targets", "lora_dropout"),
    *("lora_rate", "memory_rate", "sharding", "estimate", "estimate_processes", "skip_base", "hub_base_model"),
)


def check_given(init: str, given: Collection[str], memory: Collection[str]) -> None:
    """Refuse options that would have no effect.

    Args:
        given: names of the options that were set.
        memory: names of the options of an adapter's memory, and of LoRA.

    Raises:
        ValueError: names them.
    """
    if init == "pretrained":
        unused = sorted({field.name for field in fields(ScratchOptions)} & set(given))
        if unused:
            raise ValueError(f"{', '.join(unused)}: only with --init scratch.")
        return
    unused = sorted(set(memory) & set(given))
    if unused:
        raise ValueError(f"{', '.join(unused)}: with --init scratch the memory's options stand in the --model_config.")
    unused = sorted(set(OF_ADAPTERS) & set(given))
    if unused:
        raise ValueError(
            f"{', '.join(unused)}: only with --init pretrained (a model from scratch has no base or LoRA)."
        )


@dataclass(frozen=True)
class Segments:
    """How a model without a memory reads: each segment by itself."""

    base: BaseShape
    segment_tokens: int

    @property
    def window(self) -> LocalWindow:
        """What self-attention sees."""
        return LocalWindow(self.segment_tokens)


class Scratch(Subject):
    """A whole model of random weights, and its tokenizer.

    Raises:
        OSError: there is no such file or tokenizer.
        ValueError: a configuration that is none, or does not fit its tokenizer.
    """

    base = None

    def __init__(self, model: StartOptions, train: TrainOptions, options: ScratchOptions) -> None:
        if options.model_config is None or options.tokenizer is None:
            raise ValueError(
                "--init scratch needs --model_config (a config.json) and --tokenizer (a folder, or bytes)."
            )
        if not 0 <= options.rate < math.inf:
            raise ValueError(f"rate must not be negative, got {options.rate}.")
        check_attention(model.attn_implementation)
        self.model, self.train, self.options = model, train, options
        path = Path(options.model_config)
        self._tokenizer = open_tokenizer(options.tokenizer, decoder_of(read_config(path)).get("vocab_size"))
        self.config = model_config(path, self._tokenizer)
        self.remembers = hasattr(self.config, "options")
        try:
            self.memory = self.config.options() if self.remembers else segments(self.config)
        except TypeError as error:
            raise ValueError(f"{options.model_config}: an option is of the wrong type ({error}).") from error
        if not self.remembers and train.backprop_segments > 1:
            raise ValueError("backprop_segments is for memories: choose longer rows ('segment_tokens' in the file).")
        self.title = f"{self.config.model_type} from scratch"
        if options.start_from is not None:
            changes = check_start(options.start_from, self.config, self._tokenizer)
            self.title = f"{self.config.model_type} from {options.start_from} ({changes})"
        self.rates = Rates(options.rate, options.rate, options.rate * train.gate_factor, train.weight_decay)

    def tokenizer(self, accelerator: Accelerator) -> PreTrainedTokenizerBase:
        """The one that was given."""
        return self._tokenizer

    def settings(self) -> dict[str, Any]:
        """What the model is, and the options of its training."""
        return resumed_settings(self.model, self.options, model=base_identity(self.config))

    def make(self, accelerator: Accelerator, documents: DocumentRow, resumed: bool) -> PreTrainedModel:
        """The model with its random weights, or those that it starts from."""
        torch.manual_seed(self.train.seed)
        chosen, start = self.model.attn_implementation, self.options.start_from
        arguments = {"dtype": torch.float32, **({} if chosen is None else {"attn_implementation": chosen})}
        model: PreTrainedModel = (
            AutoModelForCausalLM.from_config(self.config, **arguments)
            if start is None or resumed
            else started(start, self.config, arguments)
        )
        if self.train.activation_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return model.to(accelerator.device)


def model_config(path: Path, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The configuration in a file, with the tokenizer's first and last token, and its size where the file has none.

    Raises:
        OSError: there is no such file.
        ValueError: it is no configuration of a model that is known here, or does not fit the tokenizer.
    """
    given = read_config(path)
    decoder = decoder_of(given)
    decoder.setdefault("vocab_size", len(tokenizer))
    for name in ("bos_token_id", "eos_token_id"):
        decoder[name] = getattr(tokenizer, name)
    try:
        config: PretrainedConfig = AutoConfig.for_model(**given)
    except StrictDataclassError as error:
        raise ValueError(f"{path}: {error}") from error
    check_fields(path, given, config)
    if decoder is not given:
        check_fields(path, decoder, config.get_text_config())
    check_vocabulary(config, tokenizer)
    return config


def read_config(path: Path) -> dict[str, Any]:
    """What a configuration file says.

    Raises:
        OSError: there is no such file.
        ValueError: it is no configuration of a model.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(given, dict) or not isinstance(given.get("text_config", {}), dict) or "model_type" not in given:
        raise ValueError(f'{path} is no model configuration: it must hold {{"model_type": ..., ...}}.')
    return given


def decoder_of(given: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that describes the decoder, with its type; a memory is around it, or it is all.

    Raises:
        ValueError: there is no such type.
    """
    if "text_config" not in config_class(given["model_type"]).sub_configs:
        return given
    decoder: dict[str, Any] = given.setdefault("text_config", {})
    config_class(decoder.setdefault("model_type", "llama"))
    return decoder


def config_class(model_type: str) -> type[PretrainedConfig]:
    """The configuration of a model type.

    Raises:
        ValueError: there is no such type.
    """
    try:
        return type(AutoConfig.for_model(model_type))
    except ValueError as error:
        raise ValueError(f"model_type {model_type!r} is unknown to transformers and to this package.") from error


def check_fields(path: Path, given: dict[str, Any], config: PretrainedConfig) -> None:
    """Refuse what transformers would keep without using it."""
    kind = type(config)
    written = kind().to_dict()  # what a saved configuration holds, among it what is no field
    known = {field.name for field in fields(kind)} | set(written) | {"model_type", "segment_tokens", "auto_map"}
    unknown = next((name for name in given if name not in known and not name.startswith("_")), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, known, n=1)
        hint = f": did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"{path}: {config.model_type} has no option {unknown!r}{hint}")


def segments(config: PretrainedConfig) -> Segments:
    """How a model without a memory on a base reads.

    Raises:
        ValueError: its type is not supported, or it cannot read segments of this length.
    """
    if isinstance(config, WholeConfig):
        return Segments(config.base_shape(), config.segment_tokens)
    architecture(config)
    base = base_shape(config)
    tokens = getattr(config, "segment_tokens", base.max_positions)
    if not isinstance(tokens, int) or not 0 < tokens <= base.max_positions:
        raise ValueError(
            f"segment_tokens must be from 1 to max_position_embeddings {base.max_positions}, got {tokens!r}."
        )
    return Segments(base, tokens)
