"""A whole model from scratch: its configuration, checked against its tokenizer, and its first weights."""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cacheformers.common.base_model import (
    StartOptions,
    base_identity,
    check_attention,
    check_vocabulary,
    checkpoint_activations,
)
from cacheformers.common.documents import DocumentRow
from cacheformers.common.recipe import option
from cacheformers.modeling.architectures import WholeConfig, architecture, base_shape
from cacheformers.modeling.memory import BaseShape, LocalWindow
from cacheformers.training.optim import Rates
from cacheformers.training.settings import TrainOptions, resumed_settings
from cacheformers.training.tokenizer import open_tokenizer


@dataclass
class ScratchOptions:
    """What is trained from scratch, and how."""

    _argument_group_name = "training from scratch (with --init scratch)"
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
    rate: float = option(1e-3, help="Peak learning rate of all weights; gates have gate_factor times this.")
    precision: Literal["float32", "bf16"] = option(
        "float32",
        help="'bf16': matrix products in bfloat16 (autocast), often faster; weights, optimizer, norms, softmax "
        "and searches stay in float32.",
    )


NOT_THE_MODEL = ("architectures", "auto_map", "dtype", "transformers_version")  # fields that are not about the model

# Options that mean something for an adapter only, besides those of its memory.
OF_ADAPTERS = (
    *("base", "dtype", "quantize", "method", "memory_start", "start_segments", "lora_targets", "lora_dropout"),
    *("lora_rate", "lora_from_layer", "memory_rate", "sharding", "estimate", "estimate_processes", "skip_base"),
    *("hub_base_model", "distill", "distill_all"),
)


@dataclass(frozen=True)
class Segments:
    """Options of a model without a memory, which reads each segment by itself."""

    base: BaseShape
    segment_tokens: int

    @property
    def window(self) -> LocalWindow:
        """The window of self-attention."""
        return LocalWindow(self.segment_tokens)

    @property
    def positions(self) -> int:
        """Positions that the model must have."""
        return self.segment_tokens


class Scratch:
    """A whole model to train, and its tokenizer. Its attributes and methods are those of `Adaptation`.

    Raises:
        OSError: the file or the tokenizer does not exist.
        ValueError: the file is not a model configuration, or does not fit the tokenizer.
    """

    base: str | None = None

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
        if train.start_from is not None:
            changes = check_start(train.start_from, self.config, self._tokenizer)
            self.title = f"{self.config.model_type} from {train.start_from} ({changes})"
        self.rates = Rates(options.rate, options.rate, options.rate * train.gate_factor, train.weight_decay)

    def tokenizer(self, accelerator: Accelerator) -> PreTrainedTokenizerBase:
        """Return the tokenizer that was given."""
        return self._tokenizer

    def settings(self) -> dict[str, Any]:
        """Return what a resumed run must share: the options of the model, and its configuration's identity."""
        return resumed_settings(self.model, self.options, model=base_identity(self.config))

    def make(self, accelerator: Accelerator, documents: DocumentRow, resumed: bool) -> PreTrainedModel:
        """Make the model with random weights, or those that it starts from; the same in every process."""
        torch.manual_seed(self.train.seed)
        chosen, start = self.model.attn_implementation, self.train.start_from
        arguments = {"dtype": torch.float32, **({} if chosen is None else {"attn_implementation": chosen})}
        model: PreTrainedModel = (
            AutoModelForCausalLM.from_config(self.config, **arguments)
            if start is None or resumed
            else AutoModelForCausalLM.from_pretrained(start, config=self.config, **arguments)
        )
        if self.train.activation_checkpointing:
            checkpoint_activations(model)
        return model.to(accelerator.device)


def model_config(path: Path, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Read a configuration; first and last token, and a missing vocabulary size, come from the tokenizer.

    Raises:
        OSError: the file does not exist.
        ValueError: it is not the configuration of a known model, or does not fit the tokenizer.
    """
    given = read_config(path)
    decoder = decoder_of(given)
    decoder.setdefault("vocab_size", len(tokenizer))
    decoder |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    try:
        config: PretrainedConfig = AutoConfig.for_model(**given)
    except StrictDataclassError as error:
        raise ValueError(f"{path}: {error}") from error
    for part, own in ((given, config), (decoder, config.get_text_config())):
        check_fields(path, part, own)
    check_vocabulary(config, tokenizer)
    return config


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration file; raise OSError if there is none, ValueError if it does not configure a model."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(given, dict) or not isinstance(given.get("text_config", {}), dict) or "model_type" not in given:
        raise ValueError(f'{path} is no model configuration: it must hold {{"model_type": ..., ...}}.')
    return given


def decoder_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that describes the decoder: what the memory is around, or all of it.

    Raises:
        ValueError: the model type is unknown.
    """
    if "text_config" not in config_class(given["model_type"]).sub_configs:
        return given
    decoder: dict[str, Any] = given.setdefault("text_config", {})
    config_class(decoder.setdefault("model_type", "llama"))
    return decoder


def config_class(model_type: str) -> type[PretrainedConfig]:
    """Return the configuration class of a model type; raise ValueError for an unknown one."""
    try:
        return type(AutoConfig.for_model(model_type))
    except ValueError as error:
        raise ValueError(f"model_type {model_type!r} is unknown to transformers and to this package.") from error


def check_fields(path: Path, given: dict[str, Any], config: PretrainedConfig) -> None:
    """Raise ValueError for a field that transformers would keep without using it."""
    kind = type(config)
    written = kind().to_dict()  # a saved configuration holds more than its fields
    known = {field.name for field in fields(kind)} | set(written) | {"model_type", "segment_tokens", "auto_map"}
    unknown = next((name for name in given if name not in known and not name.startswith("_")), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, known, n=1)
        hint = f": did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"{path}: {config.model_type} has no option {unknown!r}{hint}")


def segments(config: PretrainedConfig) -> Segments:
    """Return how a model without a memory method reads; raise ValueError if it cannot read segments of this length."""
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


def check_start(folder: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Check that a model can start from the weights of an earlier one; nothing is loaded.

    Returns:
        The fields in which the two configurations differ, to be shown.

    Raises:
        OSError: the folder holds no model.
        ValueError: it is of another type, has other weights, or was trained with another tokenizer.
    """
    if not Path(folder, "config.json").is_file():
        raise OSError(f"--start_from {folder}: there is no model (config.json).")
    earlier = AutoConfig.from_pretrained(folder)
    if earlier.model_type != config.model_type:
        raise ValueError(f"--start_from {folder} is a {earlier.model_type} model, not a {config.model_type}.")
    if AutoTokenizer.from_pretrained(folder).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"--start_from {folder} was trained with another tokenizer: give this folder as --tokenizer.")
    check_weights(folder, config)
    before, now = earlier.to_dict(), config.to_dict()
    differing = [name for name in now if not name.startswith("_") and now[name] != before.get(name)]
    changes = [f"{name} {before.get(name)} -> {now[name]}" for name in differing if name not in NOT_THE_MODEL]
    return "; ".join(changes) or "nothing changed"


def check_weights(folder: str, config: PretrainedConfig) -> None:
    """Raise ValueError if a weight is in the folder or in the new model only, or has another shape."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wanted = {name: shape for name, shape in wanted.items() if name not in model.all_tied_weights_keys}
    there: dict[str, tuple[int, ...]] = {}
    for path in Path(folder).glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            there |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # a safetensors file is no mapping
    wrong = {
        "lacks": sorted(wanted.keys() - there.keys()),
        "alone has": sorted(there.keys() - wanted.keys()),
        "has in another shape": sorted(name for name in wanted.keys() & there.keys() if wanted[name] != there[name]),
    }
    found = [f"{what} {', '.join(names[:3])}{', ...' if names[3:] else ''}" for what, names in wrong.items() if names]
    if found:
        raise ValueError(
            f"--start_from {folder} {'; '.join(found)}: its weights are not those of the --model_config. Branches of "
            "a cacheformer can be switched; sizes, and what else has weights (gates for each branch), cannot change."
        )
