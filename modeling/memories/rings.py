"""The state of memories that store pairs: a ring per layer, and the pairs of open segments."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from cacheformers.modeling.memories.base import MemoryState, by_layer, joined, keep_columns, part
from cacheformers.modeling.search.store import Ring

Self = TypeVar("Self", bound="RingState")


class RingState(MemoryState):
    """Rings of keys and values, filled when segments close.

    What a forward reads and leaves behind is the method's own: its `end` calls `add`.
    """

    def __init__(self, rings: dict[int, Ring]) -> None:
        self.rings = rings
        self.keys: dict[int, Tensor] = {}  # layer -> [rows, columns, width] of open segments
        self.values: dict[int, Tensor] = {}  # layer -> [rows, columns, value_width]

    def add(self, keys: dict[int, Tensor], values: dict[int, Tensor]) -> None:
        """Append pairs `[rows, time, ...]` as new columns."""
        for held, new in ((self.keys, keys), (self.values, values)):
            for layer, tensor in new.items():
                held[layer] = torch.cat([held[layer], tensor], 1) if layer in held else tensor

    def check(self, row: int, columns: Tensor) -> None:
        for layer in self.rings:
            for tensor in (self.keys[layer], self.values[layer]):
                if not bool(torch.isfinite(tensor[row, columns.to(tensor.device)]).all()):
                    raise ValueError(
                        f"The open segment of row {row} holds NaN or Inf in layer {layer}; nothing was stored, and "
                        "what was read before is as it was. Check the model's weights and dtype (float16 overflows in "
                        f"many models: use bfloat16), then go on from a clone() taken before, or reset([{row}])."
                    )

    def commit(self, row: int, columns: Tensor) -> None:
        for layer, ring in self.rings.items():
            chosen = columns.to(ring.keys.device)
            ring.append(row, self.keys[layer][row, chosen], self.values[layer][row, chosen])

    def keep(self, columns: Tensor) -> None:
        for held in (self.keys, self.values):
            for layer, tensor in held.items():
                held[layer] = keep_columns(tensor, columns, 1)

    def reset(self, rows: Sequence[int]) -> None:
        for ring in self.rings.values():
            ring.reset(rows)

    def select(self, rows: Sequence[int]) -> None:
        for ring in self.rings.values():
            ring.select(rows)
        for held in (self.keys, self.values):
            for layer, tensor in held.items():
                held[layer] = tensor[torch.tensor(rows, device=tensor.device)]

    def clone(self: Self) -> Self:
        twin = copy.copy(self)
        twin.rings = {layer: ring.clone() for layer, ring in self.rings.items()}
        twin.keys, twin.values = dict(self.keys), dict(self.values)
        return twin

    def to(self, device: torch.device | str) -> None:
        for ring in self.rings.values():
            ring.to(device)
        for held in (self.keys, self.values):
            for layer, tensor in held.items():
                held[layer] = tensor.to(device)

    def state_dict(self) -> dict[str, Tensor]:
        rings = {
            f"{layer}.{name}": held for layer, ring in self.rings.items() for name, held in ring.state_dict().items()
        }
        return joined(rings=rings, keys=self.keys, values=self.values)

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        for layer, ring in self.rings.items():
            ring.load_state_dict(part(tensors, f"rings.{layer}"))
        device = next(iter(self.rings.values())).keys.device
        self.keys = by_layer(part(tensors, "keys"), device)
        self.values = by_layer(part(tensors, "values"), device)

    @property
    def nbytes(self) -> int:
        waiting = sum(tensor.nbytes for held in (self.keys, self.values) for tensor in held.values())
        return waiting + sum(ring.nbytes for ring in self.rings.values())
