"""A new model that starts from the weights of one that was trained before, with other switches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

NOT_THE_MODEL = ("architectures", "auto_map", "dtype", "transformers_version")  # what a configuration says besides


def check_start(folder: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """See whether a model can start from an earlier one; nothing is loaded.

    Returns:
        In which fields the two configurations differ, to be shown.

    Raises:
        OSError: there is no model.
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
            there |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
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


def started(folder: str, config: PretrainedConfig, arguments: dict[str, Any]) -> PreTrainedModel:
    """A model with the weights of an earlier one, after `check_start`."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, config=config, **arguments)
    return model
