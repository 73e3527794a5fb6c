"""Nearest-neighbour search behind one interface."""

from __future__ import annotations

from functools import cache

from cacheformers.modeling.search.base import SIMILARITIES, Search
from cacheformers.modeling.search.exact import ExactSearch
from cacheformers.modeling.search.faiss_search import FaissExact, FaissIndex
from cacheformers.modeling.search.measure import recall

__all__ = ["SIMILARITIES", "ExactSearch", "FaissExact", "FaissIndex", "Search", "get_search", "recall"]


@cache
def get_search(name: str) -> Search:
    """Build a search back end.

    Args:
        name: `"exact"`; `"faiss"`, exact through faiss; `"faiss:<index_factory string>"`, approximate; or `"auto"`.
    """
    # "auto" is exact. CPU time of one thread, k = 16: faiss takes a quarter of it for one or two queries of a float32
    # store, and 0.7 of it for many queries of up to 16K entries, but up to six times as much for large stores.
    if name in ("exact", "auto"):
        return ExactSearch()
    if name == "faiss":
        return FaissExact()
    if name.startswith("faiss:"):
        return FaissIndex(name.removeprefix("faiss:"))
    raise ValueError(
        f"unknown search {name!r}: it must be 'auto', 'exact', 'faiss' or 'faiss:' and a faiss index_factory string "
        "such as 'faiss:IVF4096,Flat' or 'faiss:HNSW32'"
    )
