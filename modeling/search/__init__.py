"""Nearest-neighbor search behind one interface."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from cacheformers.modeling.search.base import Search, recall
from cacheformers.modeling.search.exact import ExactSearch
from cacheformers.modeling.search.faiss_search import FaissExact, FaissIndex
from cacheformers.modeling.search.store import Entries

__all__ = ["AutoSearch", "ExactSearch", "FaissExact", "FaissIndex", "Search", "get_search", "recall"]


# From this number of queries on, `faiss.knn` uses matrix products at every width; below it may take 7 times as long.
MANY_QUERIES = 1024
# Narrower vectors than this need more queries: of 32 or 64 numbers 1,024 take faiss longer than us, 4,096 do not.
WIDE = 128


class AutoSearch(Search):
    """Searches exactly, with faiss where it is faster; the choice changes scores only by rounding.

    On CPUs faiss is faster for one query and for many, over a float32 store, which it reads in place. `ExactSearch`
    does the rest: a few queries, other dtypes, CUDA, and all searches without faiss (docs/results/costs.md).
    """

    def find(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        stored = entries.spans[0]
        many = len(queries) >= MANY_QUERIES and queries.numel() >= MANY_QUERIES * WIDE
        suited = len(queries) == 1 or many
        if suited and stored.dtype == torch.float32 and stored.device.type == "cpu" and find_spec("faiss"):
            return FaissExact().find(queries, entries, topk, similarity)
        return ExactSearch().find(queries, entries, topk, similarity)


@cache
def get_search(name: str) -> Search:
    """Build a search back end.

    Args:
        name: `"exact"`; `"faiss"`, exact with faiss; `"auto"`, the faster of the two (see `AutoSearch`); or
            `"faiss:<index_factory string>"`, approximate.

    Raises:
        ValueError: unknown name.
        ImportError: faiss is not installed.
    """
    if name == "auto":
        return AutoSearch()
    if name == "exact":
        return ExactSearch()
    if name == "faiss":
        return FaissExact()
    if name.startswith("faiss:"):
        return FaissIndex(name.removeprefix("faiss:"))
    raise ValueError(
        f"unknown search {name!r}: it must be 'auto', 'exact', 'faiss' or 'faiss:' and a faiss "
        "index_factory string such as 'faiss:IVF4096,Flat' or 'faiss:HNSW32'"
    )
