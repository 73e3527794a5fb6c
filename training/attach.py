"""Put a memory on a pretrained model without training it, and save it as an adapter.

cacheformers attach recipes/attach/training_free.yaml --base BASE --output ADAPTER

Every command that takes --adapter takes the folder: read, ask, longbench, perplexity, passkey, export. What the method
trains keeps its start, so that most methods compute what the base computes within its window; docs/training_free.md has
the settings that read without training.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)

from cacheformers.adapters.folders import load_adapter_config
from cacheformers.common.base_model import ModelOptions, base_config, load_base
from cacheformers.common.recipe import RecipeParser, option
from cacheformers.methods import DEFAULT
from cacheformers.modeling.architectures import base_shape
from cacheformers.modeling.method import METHODS, is_method
from cacheformers.training.methods import MethodOptions, chosen_options, of_other_methods

# What a LoRA is like, in its config.
LORA = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out", "lora_bias"),
)


@dataclass
class AttachOptions:
    """What is written, and where."""

    _argument_group_name = "adapter"
    output: str = option(help="Folder for the adapter and its tokenizer. It must be new or empty.")
    lora: str | None = option(
        None,
        help="Adapter of the same base, a folder or a Hub id, whose LoRA goes into the new adapter. Default: no LoRA.",
    )
    memory_from: str | None = option(
        None,
        help="Adapter with the same method and base, a folder or a Hub id, whose trained parts of the memory go into "
        "the new one. Parts that it lacks keep their start, so this switches an option on that trains more. Default: "
        "nothing is trained.",
    )
    method: str = option(DEFAULT, help=f"The memory: {', '.join(METHODS)}. This help shows the options of this one.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write an adapter as a recipe and the command line say."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    memory = chosen_options(given)
    kinds = [ModelOptions, AttachOptions, memory]
    parser = RecipeParser(kinds, (__doc__ or "").splitlines()[0], of_other_methods(memory))
    model, options, chosen = parser.parse(given)
    try:
        attach(model, options, chosen)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    learned = "not trained" if options.memory_from is None else f"as {options.memory_from} has learned it"
    print(f"Wrote {options.output}: {METHODS[chosen.method].title} on {model.base}, {learned}.")


def attach(model: ModelOptions, options: AttachOptions, memory: MethodOptions) -> None:
    """Save an adapter with a new memory, or with the LoRA and the trained memory of others.

    Raises:
        OSError: there is no such base, or the folder cannot be written.
        ValueError: the options do not fit the base, the folder holds files, or another adapter does not fit.
    """
    output = Path(options.output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} holds files: choose a new --output.")
    if not is_method(options.method):
        raise ValueError(f"--method must be one of {', '.join(METHODS)}, got {options.method!r}.")
    learned = None if options.lora is None else load_adapter_config(options.lora)
    if not isinstance(learned, LoraConfig | None):
        kind: Any = learned.peft_type
        raise ValueError(f"--lora {options.lora} is an adapter of type {kind.value}, not LoRA.")
    lora = {"target_modules": []} if learned is None else {name: getattr(learned, name) for name in LORA}
    config: Any = memory.config(**{**memory.values(), **lora}, task_type="CAUSAL_LM")
    if options.memory_from is not None:
        kind = load_adapter_config(options.memory_from).peft_type
        if kind != config.peft_type:
            there, here = (getattr(each, "value", each) for each in (kind, config.peft_type))
            raise ValueError(f"--memory_from {options.memory_from} is an adapter of {there}, not of {here}.")
    config.resolve(base_shape(base_config(model.base)))
    base, tokenizer = load_base(model, "cpu")
    made: Any = get_peft_model(base, config)
    if options.lora is not None:
        take_lora(made, options.lora)
    if options.memory_from is not None:
        take_memory(made, options.memory_from)
    made.save_pretrained(str(output))
    tokenizer.save_pretrained(str(output))


def take_lora(model: PeftModel, adapter: str) -> None:
    """Copy the LoRA of another adapter; raise ValueError unless it fits tensor by tensor, and is all but a memory."""
    tensors = {name: tensor for name, tensor in load_peft_weights(adapter).items() if ".memory." not in name}
    if not tensors:
        raise ValueError(f"--lora {adapter} holds no LoRA.")
    whole = get_peft_model_state_dict(model)
    own = {name: tensor for name, tensor in whole.items() if ".memory." not in name}
    shapes, there = ({name: tensor.shape for name, tensor in side.items()} for side in (own, tensors))
    if shapes != there:
        wrong = sorted(name for name in {*shapes, *there} if shapes.get(name) != there.get(name))
        raise ValueError(
            f"--lora {adapter} does not fit: {len(wrong)} tensors are missing here or there or have other shapes, such "
            f"as {wrong[0]}. It must be LoRA on the same base, with nothing else that was trained."
        )
    set_peft_model_state_dict(model, {**whole, **tensors})


def take_memory(model: PeftModel, adapter: str) -> None:
    """Copy what another adapter's memory has learned; raise ValueError unless each tensor has its place."""
    tensors = {name: tensor for name, tensor in load_peft_weights(adapter).items() if ".memory." in name}
    whole = get_peft_model_state_dict(model)
    wrong = [name for name, tensor in tensors.items() if name not in whole or whole[name].shape != tensor.shape]
    if not tensors or wrong:
        found = f"{len(wrong)} tensors have no place, such as {wrong[0]}" if wrong else "its memory trains nothing"
        raise ValueError(
            f"--memory_from {adapter} does not fit: {found}. Choose the options with which it was trained, and more."
        )
    set_peft_model_state_dict(model, {**whole, **tensors})


if __name__ == "__main__":
    main()
