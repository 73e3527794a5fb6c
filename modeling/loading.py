"""Loading a model refuses what transformers only warns of."""

from __future__ import annotations

from typing import Any


def check_complete(loading_info: Any) -> None:
    """Compare a file with the model.

    Raises:
        ValueError: tensors are missing, which transformers would make up, or belong to memories that the configuration
            does not describe.
    """
    missing = sorted(loading_info.missing_keys)
    foreign = sorted(key for key in loading_info.unexpected_keys if ".memory." in key)
    if missing or foreign:
        what = "has no tensors for" if missing else "holds tensors that the configuration does not describe:"
        keys = missing or foreign
        raise ValueError(
            f"The file {what} {', '.join(keys[:5])}{f' and {len(keys) - 5} more' if len(keys) > 5 else ''}. It is "
            "damaged, or belongs to another configuration or version: save or export the model again."
        )
