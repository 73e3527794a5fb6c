"""Write a model folder of a real model's layout with random bfloat16 weights, a shard at a time.

    python benchmarks/random_checkpoint.py llama-2-7b data/seven_b/llama-2-7b/base       # 13.5 GB
    python benchmarks/random_checkpoint.py llama-2-7b data/small --layers 2
    python benchmarks/random_checkpoint.py llama-2-7b data/seven_b/llama-2-7b/base_nf4 --quantize nf4        # 4 GB

Layouts are the folders of recipes/base_configs. Names and shapes of all tensors are those that transformers gives the
model; files are cut by size. Matrices and embeddings are normal numbers of the configuration's initializer_range, norms
are 1, biases 0, so that activations stay finite; what the model says means nothing. No more than a shard is in memory.
With `--quantize nf4` the folder is what `save_pretrained` writes of a model that bitsandbytes holds in 4 bits; layers
then share their numbers, because bitsandbytes needs seconds for a matrix.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from models import BASE_CONFIGS
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from cacheformers.common.base_model import ModelOptions, quantization

Shapes = dict[str, torch.Size]


def main() -> None:
    """Write a folder and say what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layout", choices=sorted(path.name for path in BASE_CONFIGS.iterdir()))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="only so many layers (default: as many as the real model)")
    parser.add_argument("--shard_gb", type=float, default=2, help="largest file (default: %(default)s)")
    parser.add_argument("--quantize", default="none", choices=["none", "nf4"], help="how linear layers are saved")
    given = parser.parse_args()
    config = AutoConfig.from_pretrained(BASE_CONFIGS / given.layout, dtype=torch.bfloat16)
    config.num_hidden_layers = given.layers or config.num_hidden_layers
    if given.quantize == "nf4":
        config.quantization_config = quantization(ModelOptions(given.layout, quantize="nf4"), config)
    size = write_checkpoint(config, given.folder, int(1e9 * given.shard_gb))
    print(f"{given.folder}: {size / 1e9:.2f} GB of weights in {len(list(given.folder.glob('*.safetensors')))} files")


def write_checkpoint(config: PretrainedConfig, folder: Path, shard_bytes: int) -> int:
    """Write configuration, index and shards, in 4 bits if the configuration says so; return the weights' bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    shapes, linear = parameter_shapes(config)
    in_4_bits = linear if hasattr(config, "quantization_config") else set()
    std = config.initializer_range if hasattr(config, "initializer_range") else config.init_std
    found, places, total = list(shards(shapes, shard_bytes)), {}, 0
    for number, names in enumerate(found, 1):
        file = f"model-{number:05d}-of-{len(found):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name, shape in names.items():
            if name in in_4_bits:
                tensors |= {f"{name}{part}": held.clone() for part, held in quantized_matrix(shape, std).items()}
            else:
                tensors[name] = random_tensor(name, shape, std)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
        del tensors  # before those of the next file are made
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return total


def parameter_shapes(config: PretrainedConfig) -> tuple[Shapes, set[str]]:
    """Return the shape of each parameter by name, and the names of the linear layers' matrices, without the head's.

    A parameter that is tied to another one is left out, as in saved models.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    head = model.get_output_embeddings()
    linear = {f"{name}.weight" for name, part in model.named_modules() if type(part) is nn.Linear and part is not head}
    return {name: parameter.shape for name, parameter in model.named_parameters()}, linear


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


@cache
def quantized_matrix(shape: torch.Size, std: float) -> dict[str, Tensor]:
    """Return what bitsandbytes saves of a random matrix in nf4 by what it appends to the name: codes, scales, state."""
    from bitsandbytes.functional import quantize_4bit

    matrix = random_tensor("", shape, std)
    codes, state = quantize_4bit(matrix, compress_statistics=True, quant_type="nf4")
    return {"": codes, **{f".{key}": tensor for key, tensor in state.as_dict(packed=True).items()}}


if __name__ == "__main__":
    main()
