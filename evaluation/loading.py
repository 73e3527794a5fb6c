"""Processes and models, for all commands of evaluation."""

from __future__ import annotations

import resource
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from peft import PeftConfig, PeftModel
from torch import nn
from tqdm.auto import tqdm
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from cacheformers.adapters.folders import load_adapter_config
from cacheformers.common.base_model import ModelOptions, base_config, base_folder, load_base, load_tokenizer
from cacheformers.common.gguf_base import is_gguf
from cacheformers.modeling.architectures import WholeConfig, base_shape
from cacheformers.modeling.composite import CompositeConfig
from cacheformers.modeling.method import is_method


def prepare(
    model: ModelOptions, adapter: str | None
) -> tuple[PartialState, PretrainedConfig, PreTrainedTokenizerBase, PeftConfig | None]:
    """Start the processes; return them, the base's configuration and tokenizer, and the adapter's configuration."""
    state = make_state(model.device)
    if is_gguf(model.base):
        with state.main_process_first():  # it is converted once
            base_folder(model.base)
    config = None if adapter is None else load_adapter_config(adapter)
    return state, base_config(model.base), load_tokenizer(model.base), config


def load(model: ModelOptions, adapter: str | None, device: torch.device, **changes: Any) -> nn.Module:
    """Load a base model, its configuration changed, and an adapter on it, for evaluation."""
    base = load_base(model, device, **changes)[0]
    return (base if adapter is None else PeftModel.from_pretrained(base, adapter)).eval()


def make_state(device: str) -> PartialState:
    """Join the processes that the launcher has started, each with a device of its own."""
    state = PartialState(
        cpu=device == "cpu" or not torch.accelerator.is_available(),
        timeout=timedelta(days=7),  # those that are done first wait for the others
    )
    state.wait_for_everyone()  # so that a process that finds an error and leaves was there when others joined
    return state


def progress(title: str, total: int | None = None, unit: str = " tokens") -> Any:
    """Make a progress bar, which only the main process shows."""
    return tqdm(total=total, unit=unit, unit_scale=True, desc=title, disable=not PartialState().is_main_process)


def peak_bytes(model: nn.Module) -> int:
    """Return the most memory used so far: of the GPU, or of the process on a CPU."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_config(base: PretrainedConfig, adapter: PeftConfig | None) -> Any:
    """Return the configuration that has the memory's options; None without a memory.

    Raises:
        ValueError: the model's tokens depend on later ones, so it cannot generate.
    """
    if isinstance(base, WholeConfig):
        if not base.causal:
            raise ValueError("A model with selection='paper_block' cannot generate: its tokens depend on later ones.")
        return base
    if adapter is not None and is_method(str(adapter.peft_type)):
        return adapter
    return base if isinstance(base, CompositeConfig) else None


def counted_positions(base: PretrainedConfig, memory: Any) -> int | None:
    """Return the positions of a base model that limit a text although there is a memory; None for no limit.

    There is a limit where positions are learned embeddings and the method counts on from segment to segment.

    Args:
        memory: what `memory_config` returns for the base model.
    """
    if isinstance(base, WholeConfig):
        return None
    options = config_options(base, memory)
    shape = options.base
    return None if shape.rotary or options.window.kept_tokens < shape.max_positions else shape.max_positions


def config_options(base: PretrainedConfig, memory: Any) -> Any:
    """Return a memory's options on its base, from what `memory_config` returns for that."""
    if isinstance(base, WholeConfig):
        return base
    return base.options() if isinstance(base, CompositeConfig) else memory.resolve(base_shape(base))
