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

from peft import get_peft_model

from cacheformers.common.base_model import ModelOptions, base_config, load_base
from cacheformers.common.recipe import RecipeParser, option
from cacheformers.methods import DEFAULT
from cacheformers.modeling.architectures import base_shape
from cacheformers.modeling.method import METHODS, is_method
from cacheformers.training.methods import MethodOptions, chosen_options, of_other_methods


@dataclass
class AttachOptions:
    """What is written, and where."""

    _argument_group_name = "adapter"
    output: str = option(help="Folder for the adapter and its tokenizer. It must be new or empty.")
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
    print(f"Wrote {options.output}: {METHODS[chosen.method].title} on {model.base}, not trained.")


def attach(model: ModelOptions, options: AttachOptions, memory: MethodOptions) -> None:
    """Save an adapter with a new memory, without LoRA.

    Raises:
        OSError: there is no such base, or the folder cannot be written.
        ValueError: the options do not fit the base, or the folder holds files.
    """
    output = Path(options.output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} holds files: choose a new --output.")
    if not is_method(options.method):
        raise ValueError(f"--method must be one of {', '.join(METHODS)}, got {options.method!r}.")
    config: Any = memory.config(**memory.values(), target_modules=[], task_type="CAUSAL_LM")
    config.resolve(base_shape(base_config(model.base)))
    base, tokenizer = load_base(model, "cpu")
    get_peft_model(base, config).save_pretrained(str(output))
    tokenizer.save_pretrained(str(output))


if __name__ == "__main__":
    main()
