"""The pretrained model that is adapted: found, checked against its tokenizer, loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from cacheformers.adapters.folders import check_base_folder
from cacheformers.common.documents import fingerprint
from cacheformers.common.gguf_base import check_file, converted, is_gguf
from cacheformers.common.recipe import option
from cacheformers.modeling.origin import digest

# Files of weights in a model folder, in the order in which transformers looks for them.
WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
BLOCK = 4096  # bytes
BLOCKS = 64  # of a tensor; a tensor that is not larger than this is hashed whole
BLOCKS_OF_A_FILE = 16384  # of a file whose tensors cannot be told apart without unpacking it


@dataclass
class ModelOptions:
    """Which pretrained model is adapted, and how its weights are held."""

    _argument_group_name = "base model"
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

    _argument_group_name = "the model that a run starts from"
    base: str = option("", help=f"{fields(ModelOptions)[0].metadata['help']} Needed with --init pretrained.")
    init: Literal["pretrained", "scratch"] = option(
        "pretrained",
        help="'pretrained' trains an adapter on --base. 'scratch' trains every weight of a new model, which "
        "--model_config describes.",
    )


def load_base(
    options: ModelOptions, device: str | torch.device, **changes: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the base model onto a device, and its tokenizer.

    A quantized one is left as it is loaded, without `prepare_model_for_kbit_training`: that would turn its norms,
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
        model.to(device)  # type: ignore[arg-type]  # transformers wraps `to`
    return model, tokenizer


def load_tokenizer(base: str) -> PreTrainedTokenizerBase:
    """Load the base model's tokenizer."""
    return AutoTokenizer.from_pretrained(base_folder(base))


def base_config(base: str) -> PretrainedConfig:
    """Load the base model's configuration alone, without converting anything.

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


def short_name(place: str) -> str:
    """Return the last part of a folder or a Hub id; `.` has one, too."""
    return Path(place).absolute().name


def base_identity(config: PretrainedConfig) -> str:
    """Hash a base's configuration; the hash does not depend on where the model is stored."""
    facts = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name not in ("_name_or_path", "transformers_version")
    }
    return fingerprint(json.loads(json.dumps(facts, default=str, sort_keys=True)))


def weights_identity(base: str, config: PretrainedConfig) -> str:
    """Hash a base model's weights in a moment, however large they are.

    Of every tensor of a local model its name, type, shape and some blocks of bytes count, evenly spread, in whichever
    files the tensors are. A model of the Hub counts with its id and commit.

    Raises:
        FileNotFoundError: the folder holds no weights.
        ValueError: a file is damaged.
    """
    folder = Path(base_folder(base))
    if not folder.is_dir():
        return f"{base}@{getattr(config, '_commit_hash', None)}"
    found = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if found is None:
        raise FileNotFoundError(f"{folder} holds no {SAFE_WEIGHTS_NAME}: is the model saved there completely?")
    files = [found]
    if found.name.endswith(".json"):
        parts = json.loads(found.read_text(encoding="utf-8"))["weight_map"].values()
        files = [folder / name for name in sorted(set(parts))]
    return fingerprint(sorted(line for file in files for line in hashed_tensors(file)))


def hashed_tensors(path: Path) -> Iterator[list[Any]]:
    """Name, type, shape and hash of each tensor in a safetensors file; of any other file, one hash."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            yield [path.name, size, sampled(file, 0, size, BLOCKS_OF_A_FILE)]
            return
        start = 8 + int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(start - 8) if start < size else b"")
        except ValueError as error:
            raise ValueError(f"{path} is not a safetensors file: copy or download it again.") from error
        for name, facts in header.items():
            if name != "__metadata__":
                first, last = (start + offset for offset in facts["data_offsets"])
                yield [name, facts["dtype"], facts["shape"], sampled(file, first, last, BLOCKS)]


def sampled(file: BinaryIO, start: int, end: int, blocks: int) -> str:
    """Hash some evenly spread blocks of a part of a file, or all of a small part."""
    parts = []
    for place in range(start, end, max(BLOCK, (end - start) // blocks)):
        file.seek(place)
        parts.append(file.read(min(BLOCK, end - place)))
    return digest(*parts)


def base_folder(base: str) -> str:
    """Return what `from_pretrained` takes for the base: a GGUF file's converted folder; anything else unchanged."""
    return str(converted(Path(base))) if is_gguf(base) else base


def check_vocabulary(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError where the tokenizer has ids that the model does not know."""
    known = config.get_text_config().vocab_size
    if len(tokenizer) > known:
        raise ValueError(f"The tokenizer has {len(tokenizer)} entries, the model {known}: they do not belong together.")


def check_end(base: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError where the tokenizer's end of text is none of the ends at which the model stops generating."""
    folder = base_folder(base)
    try:
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:  # a base without generation_config.json
        ends = base_config(base).get_text_config().eos_token_id
    ends = [ends] if isinstance(ends, int) else ends
    if ends and tokenizer.eos_token_id not in ends:
        there = ", ".join(repr(tokenizer.convert_ids_to_tokens(end)) for end in ends)
        raise ValueError(
            f"The tokenizer of {base} ends texts with {tokenizer.eos_token!r}, and the model stops at {there}: answers "
            "would be learned with an end that it goes on after. Correct eos_token in tokenizer_config.json, or "
            "eos_token_id in generation_config.json."
        )


def check_attention(implementation: str | None) -> None:
    """Raise ValueError for attention that cannot leave out the padding where documents end."""
    if implementation not in (None, "sdpa", "eager"):
        raise ValueError(f"attn_implementation {implementation!r} cannot mask padding in segments: use sdpa or eager.")


def check_quantization(quantize: str) -> None:
    """Raise ImportError if quantized weights are wanted and bitsandbytes is missing."""
    if quantize != "none" and find_spec("bitsandbytes") is None:
        raise ImportError(f"quantize={quantize} takes bitsandbytes. Run: pip install bitsandbytes")


def quantization(options: ModelOptions, config: PretrainedConfig) -> BitsAndBytesConfig:
    """As in QLoRA: normal floats of 4 bits, their scales quantized as well; or LLM.int8."""
    if options.quantize == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    computed = config.dtype or torch.bfloat16 if options.dtype == "auto" else getattr(torch, options.dtype)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=computed,
    )


def checkpoint_activations(model: Any) -> None:
    """Keep no activations of a model's layers: the backward computes them again."""
    # As transformers 5.17 calls it; later releases have both names.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
