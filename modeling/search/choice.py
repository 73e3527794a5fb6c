"""`search="auto"`: exact search with the faster of two back ends."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cacheformers.modeling.search.base import Search
from cacheformers.modeling.search.exact import ExactSearch
from cacheformers.modeling.search.faiss_search import FaissExact

if TYPE_CHECKING:
    from cacheformers.modeling.search.store import Entries

# From this number of queries on, `faiss.knn` uses matrix products at every width; below it may take 7 times as long.
MANY_QUERIES = 1024


class AutoSearch(Search):
    """Search exactly, with faiss where it is faster; the choice changes scores by rounding only.

    On CPUs faiss is faster for a single query and for many, over a float32 store, which it reads in place. Everything
    else goes to `ExactSearch`: a few queries, other dtypes, CUDA, and all searches without faiss
    (measured: docs/results/costs.md).
    """

    def find(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        stored = entries.spans[0]
        suited = len(queries) == 1 or len(queries) >= MANY_QUERIES
        if suited and stored.dtype == torch.float32 and stored.device.type == "cpu" and find_spec("faiss"):
            return FaissExact().find(queries, entries, topk, similarity)
        return ExactSearch().find(queries, entries, topk, similarity)
