"""`evaluate_model`: a trained model with and without its memory, against base and controls, on held-out documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peft import PeftModel
from torch import nn

from cacheformers.common.recipe import option
from cacheformers.evaluation.held_out import HeldOut, token_nats
from cacheformers.evaluation.readers import (
    Damaged,
    Forgetting,
    Reader,
    Remembering,
    free_positions,
    has_memory,
    other_document,
    shuffled,
    window_of_equal_bytes,
)
from cacheformers.evaluation.run import Run, measure
from cacheformers.modeling.architectures import WholeConfig, find_decoder, unwrap

CONTROLS = ("other_document", "shuffled", "longer_window")


@dataclass
class EvalOptions:
    """Options of the evaluation and its controls; a wrong number or an unknown control raises ValueError."""

    _argument_group_name = "evaluation"
    valid: list[str] | None = option(None, help="Held-out documents, in the forms of --train. Default: no evaluation.")
    valid_documents: int | None = option(None, help="Evaluate on the first N documents. Default: on all.")
    valid_tokens: int | None = option(None, help="Evaluate on the first N tokens of each. Default: on all.")
    valid_min_tokens: int | None = option(
        None, help="Leave held-out documents with fewer tokens out. Default: min_tokens, as in training."
    )
    valid_rows: int = option(1, help="Held-out documents that each process reads side by side: rows of a batch.")
    cache_sizes: list[int] | None = option(
        None,
        help="Evaluate with N entries; 0: memory off. Default: 0 and cache_size; for a model from scratch also "
        "twice that. A memory without entries is evaluated off and on.",
    )
    controls: list[str] | None = option(
        None,
        help="What the memory is checked against. 'other_document': every document reads the entries of another one. "
        "'shuffled': entries are in a wrong order, so those beside a hit are wrong (hits are not). 'longer_window': "
        "memory off, and self-attention sees more tokens, whose keys and values take the bytes of a full memory. With "
        "--method lora only the last applies. Default: none.",
    )
    skip_base: bool = option(False, help="Do not evaluate the base model.")
    plots: bool = option(True, help="Draw plots into the output folder (needs matplotlib).")

    def __post_init__(self) -> None:
        for name in ("valid_documents", "valid_tokens", "valid_min_tokens", "valid_rows"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be greater than 0, got {value}.")
        if any(size < 0 for size in self.cache_sizes or []):
            raise ValueError(f"cache_sizes must not be negative, got {self.cache_sizes}.")
        unknown = [name for name in self.controls or [] if name not in CONTROLS]
        if unknown:
            raise ValueError(f"controls: {', '.join(unknown)} is not one of {', '.join(CONTROLS)}.")


LEAKS = (
    "teacher-forced, and selection='paper_block' lets a token depend on later ones: no decoder obtains this "
    "(cacheformers perplexity --stepwise measures what one does)"
)


def evaluate_model(model: nn.Module, documents: Sequence[HeldOut], options: EvalOptions, memory: Any) -> dict[str, Run]:
    """Evaluate the base, the model with each cache size (or its memory off and on), and the controls.

    In several processes each reads its share of the documents, and all get the same runs.

    Args:
        model: with its adapter, or trained from scratch (then without a base); wrapped (DDP, FSDP2, compile) or not.
        memory: the options of its memory, resolved against the base; for LoRA alone those of the adapter that it is
            compared with; for a plain model its `Segments`.

    Raises:
        ValueError: an option is not possible here (see `check_evaluation`).
        FloatingPointError: a loss is not finite.
    """
    check_evaluation(documents, options, memory)
    runs: dict[str, Run] = {}
    shown, kept = context_tokens(memory), window_tokens(memory)

    def add(name: str, reader: Reader, cache_size: int | None = None, control: bool = False, note: str = "") -> None:
        losses = token_nats(model, documents, reader, memory.segment_tokens, options.valid_rows, name.capitalize())
        runs[name] = measure(documents, losses, memory.segment_tokens, kept, cache_size, control, note)

    adapter = next((module for module in model.modules() if isinstance(module, PeftModel)), None)  # in wrappers
    if adapter is not None and not options.skip_base:
        with adapter.disable_adapter():
            add("base", Forgetting(shown))
    remembers = has_memory(model)
    controls = options.controls or []
    if remembers and stores(memory, "entries"):
        # From scratch, twice the size as well: the papers train with a small memory and read with a larger one.
        usual = [0, memory.cache_size] if adapter is not None else [0, memory.cache_size, 2 * memory.cache_size]
        for size in usual if options.cache_sizes is None else options.cache_sizes:
            add(f"cache {size:,}" if size else "cache off", Remembering(size), size)
        if "other_document" in controls:
            add("other document", Damaged(other_document, together=2), memory.cache_size, control=True)
        if "shuffled" in controls:
            add("shuffled", Damaged(shuffled), memory.cache_size, control=True)
    elif remembers and not stores(memory, "nothing"):
        add("off", Remembering(0))
        add("memory", Remembering())
    elif adapter is not None:
        add(memory.method.name if remembers else "lora", Remembering() if remembers else Forgetting(shown))
    else:
        whole = unwrap(model)
        leaks = isinstance(whole.config, WholeConfig) and not whole.config.causal
        name, note = str(whole.config.model_type), LEAKS if leaks else ""  # type: ignore[union-attr]  # its configuration
        add(name, Remembering() if remembers else Forgetting(shown), note=note)
    if "longer_window" in controls:
        more, note = longer_window(model, memory)
        add("longer window", Forgetting(kept + more), control=True, note=note)
    return runs


def context_tokens(memory: Any) -> int:
    """Return how many tokens before a segment self-attention alone sees: the window's, as far as positions go."""
    return max(min(memory.window.kept_tokens, memory.base.max_positions - memory.segment_tokens), 0)


def window_tokens(memory: Any) -> int:
    """Return how many tokens before a segment count as within the window; the method's own where all stay visible."""
    return memory.window_tokens if stores(memory, "everything") else memory.window.kept_tokens


def stores(memory: Any, *kinds: str) -> bool:
    """Return whether a memory keeps one of these (`MemoryMethod.stores`); a model without a method keeps nothing."""
    method = getattr(memory, "method", None)
    return method is not None and method.stores in kinds


def check_evaluation(documents: Sequence[HeldOut], options: EvalOptions, memory: Any) -> None:
    """Raise ValueError, before training, for controls and cache sizes that are not possible."""
    controls = options.controls or []
    if stores(memory, "matrix", "everything") and (controls or options.cache_sizes):
        raise ValueError(
            "controls and cache_sizes are about entries, and this memory has none to count or exchange: leave them "
            "out. It is evaluated off and on."
        )
    if controls and not stores(memory, "entries"):
        raise ValueError("controls are about what a memory has stored, and this model stores nothing: leave them out.")
    if "other_document" in controls and len(documents) < 2:
        raise ValueError("controls: other_document needs at least two held-out documents. Give more, or leave it out.")
    if "shuffled" in controls and getattr(memory, "neighborhood_size", 1) < 2:
        raise ValueError(
            "controls: shuffled changes nothing with neighborhood_size 1, because no hit brings neighbors along. "
            "Leave it out."
        )
    if "longer_window" in controls and free_positions(memory) < 1:
        raise ValueError(
            f"controls: longer_window has no room: segment_tokens and window_tokens fill the base model's "
            f"{memory.base.max_positions} positions. Choose a smaller segment_tokens, or leave it out."
        )


def longer_window(model: nn.Module, memory: Any) -> tuple[int, str]:
    """Return how many more tokens self-attention sees in place of a full memory, and a note on that number."""
    parameter = next(find_decoder(unwrap(model)).layers.parameters())  # type: ignore[union-attr]  # a ModuleList
    wanted, free = window_of_equal_bytes(memory, parameter.device, parameter.dtype), free_positions(memory)
    note = f"{wanted:,} more tokens of self-attention take the bytes of {memory.cache_size:,} entries"
    if wanted > free:
        note += f"; cut to {free:,}, which fit the base model's {memory.base.max_positions:,} positions"
    return min(wanted, free), note
