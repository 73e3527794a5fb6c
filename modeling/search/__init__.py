"""Nearest-neighbour search behind one interface."""

from __future__ import annotations

from functools import cache

from cacheformers.modeling.search.base import SIMILARITIES, Search
from cacheformers.modeling.search.choice import AutoSearch
from cacheformers.modeling.search.exact import ExactSearch
from cacheformers.modeling.search.faiss_search import FaissExact, FaissIndex
from cacheformers.modeling.search.measure import recall
from cacheformers.modeling.search.rounded import RoundedSearch

__all__ = [
    "SIMILARITIES",
    "AutoSearch",
    "ExactSearch",
    "FaissExact",
    "FaissIndex",
    "RoundedSearch",
    "Search",
    "get_search",
    "recall",
]


@cache
def get_search(name: str) -> Search:
    """Build a search back end.

    Args:
        name: `"exact"`; `"faiss"`, exact through faiss; `"auto"`, the one of these that a table of measurements says is
            fastest; `"bfloat16"`, products in bfloat16 and the best candidates again in float32, nearly exact; or
            `"faiss:<index_factory string>"`, approximate.
    """
    if name == "auto":
        return AutoSearch()
    if name == "exact":
        return ExactSearch()
    if name == "faiss":
        return FaissExact()
    if name == "bfloat16":
        return RoundedSearch()
    if name.startswith("faiss:"):
        return FaissIndex(name.removeprefix("faiss:"))
    raise ValueError(
        f"unknown search {name!r}: it must be 'auto', 'exact', 'faiss', 'bfloat16' or 'faiss:' and a faiss "
        "index_factory string such as 'faiss:IVF4096,Flat' or 'faiss:HNSW32'"
    )
