"""What is evaluated, as options of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from cacheformers.common.recipe import option

CONTROLS = ("other_document", "shuffled", "longer_window")


@dataclass
class EvalOptions:
    """What is evaluated, and against what.

    Raises:
        ValueError: a number that makes no sense, or a control that does not exist.
    """

    valid: list[str] | None = option(None, help="Held-out documents, in the forms of --train. Default: no evaluation.")
    valid_documents: int | None = option(None, help="Evaluate on the first so many documents. Default: on all.")
    valid_tokens: int | None = option(None, help="Evaluate on the first so many tokens of each. Default: on all.")
    valid_min_tokens: int | None = option(
        None, help="Leave held-out documents with fewer tokens out. Default: min_tokens, as in training."
    )
    valid_rows: int = option(1, help="Held-out documents that each process reads side by side: rows of a batch.")
    cache_sizes: list[int] | None = option(
        None,
        help="Evaluate with so many entries; 0: memory off. Default: 0 and cache_size; for a model from scratch also "
        "twice that. A memory without entries is evaluated off and on.",
    )
    controls: list[str] | None = option(
        None,
        help="What the memory is checked against. 'other_document': every document reads the entries of another one. "
        "'shuffled': entries stand in a wrong order, so those beside a hit are wrong (hits are not). 'longer_window': "
        "memory off, and self-attention sees as many more tokens as take the bytes of a full memory. With --method "
        "lora only the last applies. Default: none.",
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
            raise ValueError(f"controls: {', '.join(unknown)} is none of {', '.join(CONTROLS)}.")


EvalOptions._argument_group_name = "evaluation"  # type: ignore[attr-defined]
