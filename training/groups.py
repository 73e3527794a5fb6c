"""The lanes of one process, in the batches in which they go through the model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from cacheformers.common.documents import DocumentRow
from cacheformers.modeling.attach import new_memory
from cacheformers.modeling.cache import MemoryCache
from cacheformers.training.lanes import Lanes


@dataclass
class Group:
    """Lanes that go through the model together, and the memory of what they have read (None without a memory)."""

    lanes: Lanes
    memory: MemoryCache | None


def make_groups(
    model: nn.Module,
    documents: DocumentRow,
    lanes: int,
    tokens: int,
    seed: int,
    remembers: bool,
    groups: int = 1,
    process: int = 0,
    processes: int = 1,
) -> list[Group]:
    """Divide the lanes of a run among processes, and each process's lanes among `groups` batches.

    Args:
        model: in training mode, so that the memories keep what training needs.
        lanes: of the whole run; a multiple of `processes * groups`.
        tokens: that each lane reads in a step.
        remembers: give each group a memory.
    """
    rows = lanes // (processes * groups)
    first = process * groups * rows
    made = []
    for start in range(first, first + groups * rows, rows):
        own = Lanes(documents, lanes, tokens, seed, own=range(start, start + rows))
        made.append(Group(own, new_memory(model, rows) if remembers else None))
    return made
