"""The pretrained model that is adapted: found, checked against its tokenizer, loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cacheformers.adapters.folders import check_base_folder
from cacheformers.training.documents import fingerprint
from cacheformers.training.gguf_base import check_file, converted, is_gguf
from cacheformers.training.options import option


@dataclass
class ModelOptions:
    """Which pretrained model is adapted, and how its weights are held."""

    base: str = option(
        help="Pretrained causal language model: a local folder, a Hub id, or a .gguf file, which is converted once "
        "to a folder beside it."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", help="Precision of the base model's weights ('auto': as saved). The adapter is trained in float32."
    )
    quantize: Literal["none", "nf4", "int8"] = option(
        "none",
        help="Hold the base model's linear layers in 4 bits (nf4, as in QLoRA) or 8 (int8). Takes bitsandbytes.",
    )
    attn_implementation: str | None = option(
        None, help="How attention is computed: sdpa or eager. Default: what transformers chooses."
    )
    device: Literal["auto", "cpu"] = option(
        "auto", help="'auto': GPUs if there are any, one a process (CUDA_VISIBLE_DEVICES chooses)."
    )


@dataclass
class StartOptions(ModelOptions):
    """What a run starts from."""

    base: str = option("", help=f"{fields(ModelOptions)[0].metadata['help']} Needed with --init pretrained.")
    init: Literal["pretrained", "scratch"] = option(
        "pretrained",
        help="'pretrained' trains an adapter on --base. 'scratch' trains every weight of a new model, which "
        "--model_config describes.",
    )


ModelOptions._argument_group_name = "base model"  # type: ignore[attr-defined]
StartOptions._argument_group_name = "the model that a run starts from"  # type: ignore[attr-defined]


def load_base(
    options: ModelOptions, device: str | torch.device, **changes: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The base model, on a device, and its tokenizer.

    A quantised one is left as it is loaded, without `prepare_model_for_kbit_training`: that would turn its norms,
    embeddings and with them every activation into float32, and switch on reentrant checkpointing. The adapter's
    weights are float32 and the base's are frozen without it.

    Args:
        device: where this process computes; `options.device` is only a wish for it.
        changes: other values for fields of the base's configuration.

    Raises:
        OSError: there is no such model.
        ImportError: a package is missing that these options need.
        ValueError: model and tokenizer do not belong together; a GGUF file that cannot be converted.
    """
    check_quantization(options.quantize)
    config = base_config(options.base)
    tokenizer = load_tokenizer(options.base)
    check_vocabulary(config, tokenizer)
    arguments: dict[str, Any] = {"dtype": options.dtype, **changes}
    if options.attn_implementation is not None:
        arguments["attn_implementation"] = options.attn_implementation
    if options.quantize != "none":
        arguments["quantization_config"] = quantization(options, config)
        arguments["device_map"] = {"": device}
    model = AutoModelForCausalLM.from_pretrained(base_folder(options.base), **arguments)
    if options.quantize == "none":
        model.to(device)  # type: ignore[arg-type]
    return model, tokenizer


def load_tokenizer(base: str) -> PreTrainedTokenizerBase:
    """The base model's tokenizer."""
    return AutoTokenizer.from_pretrained(base_folder(base))


def base_config(base: str) -> PretrainedConfig:
    """The base model's configuration alone; nothing is converted for it.

    Raises:
        FileNotFoundError: there is no such base.
        ValueError: the folder holds an adapter.
    """
    if is_gguf(base):
        check_file(Path(base))
        return AutoConfig.from_pretrained(Path(base).parent, gguf_file=Path(base).name)
    check_base_folder(base)
    folder = Path(base)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise ValueError(f"{base} is an adapter, not a base model: give it as the adapter, and its base as the base.")
    return AutoConfig.from_pretrained(base)


def base_identity(config: PretrainedConfig) -> str:
    """A short hash of a base's configuration, the same wherever the model lies."""
    facts = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name not in ("_name_or_path", "transformers_version")
    }
    return fingerprint(json.loads(json.dumps(facts, default=str, sort_keys=True)))


def base_folder(base: str) -> str:
    """What `from_pretrained` takes for the base: a GGUF file's converted folder; anything else as it is."""
    return str(converted(Path(base))) if is_gguf(base) else base


def check_vocabulary(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError where the tokenizer has ids that the model does not know."""
    known = config.get_text_config().vocab_size
    if len(tokenizer) > known:
        raise ValueError(f"The tokenizer has {len(tokenizer)} entries, the model {known}: they do not belong together.")


def check_attention(implementation: str | None) -> None:
    """Raise ValueError for attention that cannot leave out the padding where documents end."""
    if implementation not in (None, "sdpa", "eager"):
        raise ValueError(f"attn_implementation {implementation!r} cannot mask padding in segments: use sdpa or eager.")


def check_quantization(quantize: str) -> None:
    """Raise ImportError if quantised weights are wanted and bitsandbytes is missing."""
    if quantize != "none" and find_spec("bitsandbytes") is None:
        raise ImportError(f"quantize={quantize} takes bitsandbytes. Run: pip install bitsandbytes")


def quantization(options: ModelOptions, config: PretrainedConfig) -> BitsAndBytesConfig:
    """As in QLoRA: normal floats of 4 bits, their scales quantised as well; or LLM.int8."""
    if options.quantize == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    computed = config.dtype or torch.bfloat16 if options.dtype == "auto" else getattr(torch, options.dtype)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=computed,
    )
