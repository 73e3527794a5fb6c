"""Nearest-neighbor search behind one interface."""

from __future__ import annotations

from functools import cache

from cacheformers.modeling.search.base import Search, recall
from cacheformers.modeling.search.exact import ExactSearch
from cacheformers.modeling.search.faiss_search import AutoSearch, FaissExact, FaissIndex

__all__ = ["AutoSearch", "ExactSearch", "FaissExact", "FaissIndex", "Search", "get_search", "recall"]


@cache
def get_search(name: str | Search) -> Search:
    """Build a search back end.

    Args:
        name: `"exact"`; `"faiss"`, exact with faiss; `"auto"`, the faster of the two (see `AutoSearch`); or
            `"faiss:<index_factory string>"`, approximate; or the search itself.

    Raises:
        ValueError: unknown name.
        ImportError: faiss is not installed.
    """
    if isinstance(name, Search):
        return name
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
        "index_factory string such as 'faiss:IVF4096,PQ72x4fs' or 'faiss:HNSW32'"
    )
