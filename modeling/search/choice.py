"""`search="auto"`: the exact back end that measured fastest on searches of about the same size."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.constants import HF_HOME
from torch import Tensor

from cacheformers.modeling.search.base import Search
from cacheformers.modeling.search.exact import ExactSearch
from cacheformers.modeling.search.faiss_search import FaissExact

if TYPE_CHECKING:
    from cacheformers.modeling.search.store import Entries

SHIPPED_TABLE = Path(__file__).with_name("fastest.json")
# What `python benchmarks/calibrate.py` writes; where it exists, the shipped table is not read.
OWN_TABLE = Path(HF_HOME) / "cacheformers" / "fastest_search.json"


class AutoSearch(Search):
    """Exact search with the back end that a table names; which one it is changes no result but by rounding."""

    def find(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        stored = entries.spans[0]
        name = fastest(len(queries), entries.count, stored.shape[1], stored.dtype, queries.device.type)
        search = FaissExact() if name == "faiss" and find_spec("faiss") else ExactSearch()
        return search.find(queries, entries, topk, similarity)


def fastest(queries: int, entries: int, width: int, dtype: torch.dtype, device: str) -> str:
    """`"exact"` or `"faiss"`: what the nearest row of the table says, in orders of magnitude; `"exact"` without one."""
    rows = [row for row in table() if (row["dtype"], row["device"]) == (str(dtype).removeprefix("torch."), device)]

    def distance(row: dict[str, Any]) -> float:
        sizes = ((row["queries"], queries), (row["entries"], entries), (row["width"], width))
        return sum(math.log(measured / asked) ** 2 for measured, asked in sizes)

    return min(rows, key=distance)["fastest"] if rows else "exact"


@cache
def table() -> list[dict[str, Any]]:
    """Rows of `queries`, `entries`, `width`, `dtype`, `device`, `fastest`; read once."""
    path = OWN_TABLE if OWN_TABLE.is_file() else SHIPPED_TABLE
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows
