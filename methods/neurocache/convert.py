"""Convert a checkpoint folder of the published Neurocache package to an adapter of this one.

    cacheformers convert PUBLISHED_FOLDER OUT --base BASE

The published folder (alisafaya/neurocache, `save_pretrained`) holds `neurocache_config.json` and
`neurocache_model.safetensors` or `neurocache_model.bin`: `h_proj`, `h_norm`, `cache_attns.J.{q,k,v,o}_proj`, where J
counts the attention layers from the lowest, and, if LoRA was also trained, its tensors under PEFT's names.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from cacheformers.adapters.folders import new_folder
from cacheformers.methods.neurocache import NeurocacheAdapterConfig
from cacheformers.modeling.architectures import architecture, attention_modules, base_shape, find_decoder, unwrap

CONFIG_FILE = "neurocache_config.json"
WEIGHTS_FILES = ("neurocache_model.safetensors", "neurocache_model.bin")  # as the package: the first one found
HEADS = {"published": "reference", "fixed": "reference-fixed-heads"}
SAME_NAME = ("cache_size", "cache_dtype", "compression_factor", "topk", "neighborhood_size", "context_size")
NEEDED: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(SAME_NAME, int),
    "cache_dtype": str,
    "similarity_fn": str,
    "retrieval_map": (dict, type(None)),
    "attention_layers": (list, type(None)),
}
ATTENTION = re.compile(r"cache_attns\.(\d+)\.([qkvo])_proj\.weight")
LORA = re.compile(r"(?:base_model\.model\.)?(?P<path>.*\.layers\.(?P<layer>\d+)\..*)\.lora_(?P<matrix>[AB])\.weight")


def convert(
    published: str | Path, out: str | Path, base: str | Path, heads: str = "published", lora_alpha: float | None = None
) -> Path:
    """Write an adapter folder that computes what the published package computes from its checkpoint.

    Args:
        published: checkpoint folder of the published package.
        out: folder to write; it must not exist or must be empty.
        base: folder or Hub id of the base model that the checkpoint was trained on.
        heads: "published", or "fixed" to let every head attend to all retrieved states.
        lora_alpha: LoRA's alpha, which the published folder does not record.

    Raises:
        ValueError: the folder cannot be converted, with the reason; nothing was written.
        OSError: files are missing or cannot be written.
    """
    published = Path(published)
    with new_folder(out) as folder:
        settings = read_settings(published)
        weights = read_weights(published)
        base_config = AutoConfig.from_pretrained(base)
        config = adapter_config(settings, weights, heads, lora_alpha)
        location = Path(base)
        config.base_model_name_or_path = str(location.resolve()) if location.is_dir() else str(base)
        model = empty_adapter(base_config, config)
        tensors = rename(weights, model, base_config)
        check(tensors, get_peft_model_state_dict(model))

        config.made_for, config.inference_mode = base_shape(base_config).description, True
        config.save_pretrained(str(folder))
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return Path(out)


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the published configuration; raise ValueError if this package cannot compute what it describes."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder} is not a checkpoint folder of the published package: it has no {CONFIG_FILE}.")
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is damaged: it does not hold a JSON object.")
    if "cache_layers" in settings:
        raise ValueError(
            f"{path} has `cache_layers`: it was written by the package's release 0.0.1 or an early commit, which "
            "compute something else (0.0.1 replaces self-attention instead of adding to it). Only checkpoints with a "
            "`retrieval_map` can be converted."
        )
    missing = [name for name in NEEDED if name not in settings]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}: it is incomplete, or of an unknown version.")
    wrong = [name for name, kind in NEEDED.items() if not isinstance(settings[name], kind)]
    if wrong:
        raise ValueError(f"{path} is damaged: " + ", ".join(f"{name} is {settings[name]!r}" for name in wrong) + ".")
    if settings.get("neurocache_type", "ONDEVICE") != "ONDEVICE":
        raise ValueError(f"{path}: neurocache_type {settings['neurocache_type']!r} is unknown; only ONDEVICE converts.")
    if settings.get("cache_type", "FIFO") != "FIFO":
        raise ValueError(
            f"{path}: cache_type {settings['cache_type']!r} is not offered. In training, the package's "
            "least-recently-used cache evicts different slots for keys and values, so the checkpoint learned from "
            "mismatched pairs."
        )
    if settings.get("global_cache"):
        raise ValueError(
            f"{path}: global_cache is not offered. It lets documents share one cache; here documents never mix."
        )
    return settings


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the published tensors, without running code that a file may contain."""
    path = next((folder / name for name in WEIGHTS_FILES if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(f"{folder} has no weights: expected {' or '.join(WEIGHTS_FILES)}.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is damaged, or holds more than tensors: {error}") from error
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise ValueError(f"{path} does not hold a dictionary of tensors.")
    return weights


def adapter_config(
    settings: dict[str, Any], weights: dict[str, Tensor], heads: str, lora_alpha: float | None
) -> NeurocacheAdapterConfig:
    """Convert the published configuration; LoRA's settings are read off its tensors."""
    if heads not in HEADS:
        raise ValueError(f"heads must be one of {', '.join(HEADS)}, got {heads!r}.")
    lora: dict[str, Any] = {"target_modules": []}
    found = [(match, tensor) for name, tensor in weights.items() if (match := LORA.fullmatch(name))]
    if found:
        rank = next((tensor.shape[0] for match, tensor in found if match["matrix"] == "A"), 0)
        if lora_alpha is None:
            raise ValueError(
                f"The checkpoint holds LoRA weights of rank {rank}, but the published folder does not record their "
                "alpha: pass --lora-alpha. The package's training script uses 64 for rank 32, its defaults."
            )
        lora = {
            "target_modules": sorted({match["path"].rpartition(".")[2] for match, _ in found}),
            "layers_to_transform": sorted({int(match["layer"]) for match, _ in found}),
            "r": rank,
            "lora_alpha": int(lora_alpha) if float(lora_alpha).is_integer() else lora_alpha,
        }
    elif lora_alpha is not None:
        raise ValueError("--lora-alpha was given, but the checkpoint holds no LoRA weights.")
    return NeurocacheAdapterConfig(
        **{name: settings[name] for name in SAME_NAME},
        retrieval_map=settings["retrieval_map"] or None,
        attention_layers=settings["attention_layers"] or None,
        similarity=settings["similarity_fn"],
        gate="none",
        compatibility=HEADS[heads],
        task_type="CAUSAL_LM",
        **lora,
    )


def empty_adapter(base_config: PretrainedConfig, config: NeurocacheAdapterConfig) -> PeftModel:
    """Make the adapter on its base, both without memory for weights, to learn the names and shapes of tensors."""
    architecture(base_config)  # names the supported ones if this is none of them
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(base_config)
    return get_peft_model(model, config, low_cpu_mem_usage=True)


def rename(weights: dict[str, Tensor], model: PeftModel, base_config: PretrainedConfig) -> dict[str, Tensor]:
    """Rename the published tensors to this package's names."""
    transformer = unwrap(model)
    attentions = attention_modules(find_decoder(transformer))
    paths = {id(module): path for path, module in transformer.named_modules()}
    options = model.active_peft_config.resolve(base_shape(base_config))

    def of_layer(layer: int) -> str:
        return f"base_model.model.{paths[id(attentions[layer])]}.memory.lora_mem_"

    first = of_layer(options.first_layer)
    names = {
        "h_proj.weight": f"{first}down.weight",
        "h_norm.weight": f"{first}norm.weight",
        "h_norm.bias": f"{first}norm.bias",
    }
    renamed = {}
    for name, tensor in weights.items():
        if match := ATTENTION.fullmatch(name):
            number = int(match[1])
            if number >= len(options.attention_layers):
                raise ValueError(
                    f"The checkpoint has cache attention number {number} ({name}), but attention_layers has only "
                    f"{len(options.attention_layers)}: {list(options.attention_layers)}. Is it of another base model?"
                )
            new = f"{of_layer(options.attention_layers[number])}{match[2]}.weight"
        elif match := LORA.fullmatch(name):
            new = f"base_model.model.{match['path']}.lora_{match['matrix']}.weight"
        elif name in names:
            new = names[name]
        else:
            raise ValueError(f"The checkpoint holds a tensor of unknown meaning: {name}.")
        renamed[new] = tensor.clone(memory_format=torch.contiguous_format)
    return renamed


def check(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise ValueError unless the tensors are exactly those that the adapter has, each in its shape."""
    missing, unexpected = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing or unexpected:
        raise ValueError(
            "The checkpoint does not fit this base model and its own configuration. "
            f"Missing: {sorted(missing) or 'none'}; without a place: {sorted(unexpected) or 'none'}."
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, but this base model and the checkpoint's configuration need "
                f"{list(expected[name].shape)}. Is it a checkpoint of another base model?"
            )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="cacheformers convert",
        description="Convert a checkpoint folder of the published Neurocache package to an adapter.",
    )
    parser.add_argument("published", type=Path, help=f"folder with {CONFIG_FILE} and {' or '.join(WEIGHTS_FILES)}")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--base", required=True, help="folder or Hub id of the base model it was trained on")
    parser.add_argument(
        "--heads",
        choices=sorted(HEADS),
        default="published",
        help="'published' computes exactly what the package computes; 'fixed' is for a checkpoint trained with a "
        "corrected copy of it, in which every head sees all retrieved states",
    )
    parser.add_argument("--lora-alpha", type=float, help="needed where the checkpoint holds LoRA weights")
    given = parser.parse_args(arguments)
    try:
        out = convert(given.published, given.out, given.base, given.heads, given.lora_alpha)
    except (ValueError, OSError) as error:
        sys.exit(f"Nothing was written: {error}")
    print(f"Wrote {out}. Load it with `import cacheformers` and AutoModelForCausalLM.from_pretrained({str(out)!r}).")


if __name__ == "__main__":
    main()
