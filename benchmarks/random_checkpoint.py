"""Write a model folder of a real model's layout with random bfloat16 weights, a shard at a time.

    python benchmarks/random_checkpoint.py llama-2-7b data/seven_b/llama-2-7b/base       # 13.5 GB
    python benchmarks/random_checkpoint.py llama-2-7b data/small --layers 2

Layouts are the folders of recipes/base_configs. Names and shapes of all tensors are those that transformers gives the
model; files are cut by size. Matrices and embeddings are normal numbers of the configuration's initializer_range, norms
are 1, biases 0, so that activations stay finite; what the model says means nothing. No more than a shard is in memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from models import BASE_CONFIGS
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

Shapes = dict[str, torch.Size]


def main() -> None:
    """Write a folder and say what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layout", choices=sorted(path.name for path in BASE_CONFIGS.iterdir()))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="only so many layers (default: as many as the real model)")
    parser.add_argument("--shard_gb", type=float, default=2, help="largest file (default: %(default)s)")
    given = parser.parse_args()
    config = AutoConfig.from_pretrained(BASE_CONFIGS / given.layout, dtype=torch.bfloat16)
    config.num_hidden_layers = given.layers or config.num_hidden_layers
    size = write_checkpoint(config, given.folder, int(1e9 * given.shard_gb))
    print(f"{given.folder}: {size / 1e9:.2f} GB of weights in {len(list(given.folder.glob('*.safetensors')))} files")


def write_checkpoint(config: PretrainedConfig, folder: Path, shard_bytes: int) -> int:
    """Write configuration, index and shards; return the bytes of all weights."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    found, places = list(shards(parameter_shapes(config), shard_bytes)), {}
    for number, names in enumerate(found, 1):
        file = f"model-{number:05d}-of-{len(found):05d}.safetensors"
        std = config.initializer_range if hasattr(config, "initializer_range") else config.init_std
        tensors = {name: random_tensor(name, shape, std) for name, shape in names.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        del tensors  # before those of the next file are made
        places.update(dict.fromkeys(names, file))
    total = sum(2 * shape.numel() for names in found for shape in names.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return total


def parameter_shapes(config: PretrainedConfig) -> Shapes:
    """Return the shape of each parameter by name; one that is tied to another is left out, as in saved models."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def shards(shapes: Shapes, shard_bytes: int) -> Iterator[Shapes]:
    """Divide parameters into groups of at most so many bytes in bfloat16, in their order."""
    group: Shapes = {}
    size = 0
    for name, shape in shapes.items():
        if group and size + 2 * shape.numel() > shard_bytes:
            yield group
            group, size = {}, 0
        group[name] = shape
        size += 2 * shape.numel()
    yield group


def random_tensor(name: str, shape: torch.Size, std: float) -> Tensor:
    """Return a parameter's values."""
    if len(shape) == 1:
        return (torch.zeros if name.endswith("bias") else torch.ones)(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, std)


if __name__ == "__main__":
    main()
