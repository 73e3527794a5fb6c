"""DeepSpeed's ZeRO-2 divides what the optimizer remembers among processes: each writes down its own share."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def find_zero(optimizer: Any) -> Any:
    """DeepSpeed's optimizer inside Accelerate's wrapper; None where DeepSpeed is not used."""
    while optimizer is not None and not hasattr(optimizer, "single_partition_of_fp32_groups"):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def zero_share(zero: Any) -> dict[str, Tensor]:
    """This process's share of weights and moments, `group.key`."""
    held = {}
    for number, share in enumerate(zero.single_partition_of_fp32_groups):
        held[f"{number}.weights"] = share
        held |= {f"{number}.{key}": value for key, value in zero.optimizer.state[share].items()}
    return held


def restore_zero_share(zero: Any, held: dict[str, Tensor]) -> None:
    """Give DeepSpeed's optimizer what `zero_share` returned in the same process of another run."""
    for number, share in enumerate(zero.single_partition_of_fp32_groups):
        own = {
            key.partition(".")[2]: value.to(share.device) for key, value in held.items() if key.startswith(f"{number}.")
        }
        share.data.copy_(own.pop("weights"))
        zero.optimizer.state[share] = own
