"""The state of memories that store pairs: a ring per layer, and what belongs to the tokens of open segments."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from cacheformers.modeling.memories.base import MemoryState, by_layer, joined, keep_columns, part
from cacheformers.modeling.search.store import Ring

Self = TypeVar("Self", bound="RingState")

STORE_DTYPES = (None, "float32", "float64", "bfloat16", "float16")


class StoreOptions:
    """Options of a method that stores: which dtype its entries have."""

    cache_dtype: str | None

    def store_dtype(self, device: torch.device, dtype: torch.dtype) -> torch.dtype:
        """As asked for, else float64 for a float64 model, bfloat16 on a GPU, float32 on the CPU."""
        if self.cache_dtype is not None:
            return getattr(torch, self.cache_dtype)
        if dtype == torch.float64:
            return dtype
        return torch.float32 if device.type == "cpu" else torch.bfloat16


class RingState(MemoryState):
    """Rings of keys and values, filled when segments close.

    What a forward reads and leaves behind is the method's own: its `end` calls `add`.

    Attributes:
        rings: by layer.
        open: by name and layer, `[rows, columns, ...]`. `keys`, and `values` where there are some, go into the ring of
            their layer when a segment closes; the rest is let go.
    """

    def __init__(self, rings: dict[int, Ring], beside: Sequence[str] = ()) -> None:
        self.rings = rings
        self.open: dict[str, dict[int, Tensor]] = {name: {} for name in ("keys", "values", *beside)}

    def add(self, **new: Mapping[int, Tensor]) -> None:
        """Append `[rows, time, ...]` as new columns, by name and layer."""
        for name, tensors in new.items():
            held = self.open[name]
            for layer, tensor in tensors.items():
                held[layer] = torch.cat([held[layer], tensor], 1) if layer in held else tensor

    def check(self, row: int, columns: Tensor) -> None:
        for held in (self.open["keys"], self.open["values"]):
            for layer, tensor in held.items():
                if not bool(torch.isfinite(tensor[row, columns.to(tensor.device)]).all()):
                    raise ValueError(
                        f"The open segment of row {row} holds NaN or Inf in layer {layer}; nothing was stored, and "
                        "what was read before is as it was. Check the model's weights and dtype (float16 overflows in "
                        f"many models: use bfloat16), then go on from a clone() taken before, or reset([{row}])."
                    )

    def commit(self, row: int, columns: Tensor) -> None:
        for layer, ring in self.rings.items():
            chosen = columns.to(ring.keys.device)
            values = self.open["values"].get(layer)
            ring.append(row, self.open["keys"][layer][row, chosen], None if values is None else values[row, chosen])

    def kept(self, row: int, closed: int) -> int:
        return min(ring.count(row) for ring in self.rings.values())

    def keep(self, columns: Tensor) -> None:
        for held in self.open.values():
            for layer, tensor in held.items():
                held[layer] = keep_columns(tensor, columns, 1)

    def reset(self, rows: Sequence[int]) -> None:
        for ring in self.rings.values():
            ring.reset(rows)

    def select(self, rows: Sequence[int]) -> None:
        for ring in self.rings.values():
            ring.select(rows)
        for held in self.open.values():
            for layer, tensor in held.items():
                held[layer] = tensor[torch.tensor(rows, device=tensor.device)]

    def clone(self: Self) -> Self:
        twin = copy.copy(self)
        twin.rings = {layer: ring.clone() for layer, ring in self.rings.items()}
        twin.open = {name: dict(held) for name, held in self.open.items()}
        return twin

    def to(self, device: torch.device | str) -> None:
        for ring in self.rings.values():
            ring.to(device)
        for held in self.open.values():
            for layer, tensor in held.items():
                held[layer] = tensor.to(device)

    def state_dict(self) -> dict[str, Tensor]:
        rings = {
            f"{layer}.{name}": held for layer, ring in self.rings.items() for name, held in ring.state_dict().items()
        }
        return joined(rings=rings, **self.open)

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        for layer, ring in self.rings.items():
            ring.load_state_dict(part(tensors, f"rings.{layer}"))
        device = next(iter(self.rings.values())).keys.device
        self.open = {name: by_layer(part(tensors, name), device) for name in self.open}

    @property
    def nbytes(self) -> int:
        waiting = sum(tensor.nbytes for held in self.open.values() for tensor in held.values())
        return waiting + sum(ring.nbytes for ring in self.rings.values())


def token_numbers(ring: Ring, hits: Tensor) -> Tensor:
    """Hits `[rows, columns, places]`, counted from a row's oldest entry, as numbers of its document's tokens."""
    first = torch.tensor([ring.entries(row).first for row in range(ring.rows)], device=hits.device)
    return torch.where(hits >= 0, hits + first[:, None, None], hits)
