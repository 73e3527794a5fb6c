"""Search with faiss: exact on each span where that is faster, or with any of its indexes for very large stores."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from cacheformers.modeling.search.base import Search, ranked, result_dtype
from cacheformers.modeling.search.exact import ExactSearch, gathered, settle
from cacheformers.modeling.search.store import Entries, unpacked

# Bytes converted to float32 at a time if the store has another type.
BLOCK_BYTES = 32 << 20
# Bytes of candidates that are scored at a time, few enough for a core's cache.
CACHED_BYTES = 1 << 20
# faiss wants this many training points per centroid.
POINTS_PER_CENTROID = 39
# Entries that an index proposes for each one that is asked for. Codes of one bit a number (`PQ72x4fs` of 288 numbers)
# put 0.96 of the 16 nearest among their best 64, and 0.99 among their best 128 (docs/results/costs.md).
CANDIDATES = 8
# From this number of entries on the index proposes twice as many: more entries share a code.
MANY_ENTRIES = 2**24
# Half the root of the number of an inverted file's lists are searched, but at least this many.
MIN_LISTS = 8
# Nodes kept while a graph index is searched; faiss's default of 16 loses a tenth of the hits.
GRAPH_CANDIDATES = 128
# Widths for which a factory string is tried: each usual number of sub-quantizers divides one of them.
TRIAL_WIDTHS = (3840, 7168, 9216)
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


class FaissExact(Search):
    """Exact search with `faiss.knn` (`knn_gpu` on CUDA), which reads float32 entries in place."""

    def __init__(self) -> None:
        load_faiss()

    def find(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        if queries.dtype == torch.float64:
            # faiss has no float64.
            return ExactSearch().find(queries, entries, topk, similarity)
        metric = _metric(similarity)
        rows = queries.float().contiguous()
        scores, hits = rows.new_empty(len(rows), 0), rows.new_empty(len(rows), 0, dtype=torch.int64)
        start = 0
        for block in _blocks(entries):
            # One more than requested, to see whether the last place is tied.
            values, found = _nearest(rows, block, min(topk + 1, len(block)), metric)
            values = _scores(values, rows, similarity)
            scores, hits = ranked(torch.cat([scores, values], 1), torch.cat([hits, found + start], 1), topk + 1)
            start += len(block)
        return settle(rows, entries, scores, hits, topk, similarity)


@dataclass
class _Index:
    """A faiss index and the lifelong numbers of the entries `[first, end)` that it holds.

    A faiss id plus `base` is a lifelong number. Inverted files keep the numbers themselves (base 0); the others count
    their entries, and the count shifts when the oldest are removed.
    """

    faiss: Any
    filters: bool
    numbered: bool
    base: int
    first: int
    end: int


class FaissIndex(Search):
    """Approximate search with the index that a `faiss.index_factory` string names, on the host.

    The index proposes `candidates` entries for each one asked for, and the store's own entries decide among them. So an
    index may round strongly, and scores are exact for the entries found.

    The index is kept in `entries.index` and follows the store: before a search new entries are added. Entries older
    than `entries.first` are filtered out, and removed when they are as many as the others. The index is trained on
    entries from the whole store as soon as there are enough of them; until then the search is exact.

    Args:
        factory: such as `"IVF4096,PQ72x4fs"` (4,096 lists for a million entries; a quarter of their numbers, coded in
            4 bits each), `"IVF4096,Flat"` or `"HNSW32"`.
    """

    def __init__(self, factory: str) -> None:
        self.factory = factory
        faiss = load_faiss()
        index, reasons = None, []
        for width in TRIAL_WIDTHS:
            try:
                index = faiss.index_factory(width, factory)
                break
            except RuntimeError as error:
                reasons.append(str(error))
        if index is None:
            raise ValueError(f"faiss does not understand the index {factory!r}: {reasons[0]}")
        if isinstance(_inner(faiss, index), (faiss.IndexNSG, faiss.IndexNNDescent, faiss.IndexIDMap)):
            raise ValueError(f"the index {factory!r} cannot follow a store that grows and forgets: try 'HNSW32'")

    def find(self, queries: Tensor, entries: Entries, topk: int, similarity: str) -> tuple[Tensor, Tensor]:
        kept = self._synchronized(entries, queries.shape[1], similarity)
        if kept is None:
            return ExactSearch().find(queries, entries, topk, similarity)
        faiss = load_faiss()
        first, end = entries.first, entries.first + entries.count
        parameters = None
        if kept.filters:
            parameters = _parameters(faiss, kept.faiss, faiss.IDSelectorRange(first - kept.base, end - kept.base))
        rows = queries.float().cpu().contiguous().numpy()
        # faiss fills up with id -1 where it finds too few.
        ids = torch.from_numpy(kept.faiss.search(rows, candidates(entries.count) * topk, params=parameters)[1])
        hits = (ids + kept.base - first).masked_fill(ids < 0, -1)
        return _rescored(queries, entries, hits.to(queries.device), topk, similarity)

    def _synchronized(self, entries: Entries, width: int, similarity: str) -> _Index | None:
        """Return the index with every entry in it; None while there are too few to train it."""
        first, end = entries.first, entries.first + entries.count
        name = f"{self.factory} {similarity}"
        kept: _Index | None = entries.index.get(name)
        if kept is None:
            kept = self._trained(entries, width, similarity)
            if kept is None:
                return None
            entries.index[name] = kept
        # A view of the past may need removed entries, or must not see later ones.
        if first < kept.first or first >= kept.end or (end < kept.end and not kept.filters):
            _empty(kept, first)
        dead = first - kept.first
        if dead and (not kept.filters or dead >= entries.count):
            _drop(kept, first)
        for block in _blocks(entries, max(kept.end - first, 0)):
            rows = block.cpu().numpy()
            if kept.numbered:
                kept.faiss.add_with_ids(rows, torch.arange(kept.end, kept.end + len(rows)).numpy())
            else:
                kept.faiss.add(rows)
            kept.end += len(rows)
        return kept

    def _trained(self, entries: Entries, width: int, similarity: str) -> _Index | None:
        faiss = load_faiss()
        index = faiss.index_factory(width, self.factory, _metric(similarity))
        if not index.is_trained:
            needed = max(width, POINTS_PER_CENTROID * max(_centroids(faiss, index)))
            if entries.count < needed:
                return None
            sample = torch.linspace(0, entries.count - 1, needed, dtype=torch.float64).long()
            index.train(gathered(entries, sample.to(entries.spans[0].device)).float().cpu().numpy())
        numbered = isinstance(_inner(faiss, index), faiss.IndexIVF)
        base = 0 if numbered else entries.first
        return _Index(index, _filters(faiss, index, width), numbered, base, entries.first, entries.first)


def candidates(count: int) -> int:
    """Return how many entries an index of `count` entries proposes for each one that is asked for."""
    return CANDIDATES * (2 if count >= MANY_ENTRIES else 1)


def load_faiss() -> Any:
    """Import faiss, an optional dependency."""
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise ImportError(
            "this search needs faiss: `pip install cacheformers[cpu]`, or `pip install cacheformers[gpu]` for CUDA"
        ) from error


@functools.cache
def _gpu_resources(device: int) -> Any:
    resources = load_faiss().StandardGpuResources()
    # By default faiss reserves 1.5 GiB.
    resources.setTempMemory(64 << 20)
    return resources


def _nearest(queries: Tensor, block: Tensor, topk: int, metric: int) -> tuple[Tensor, Tensor]:
    """Return faiss's values and ids `[n, topk]` of float32 entries `[count, width]`."""
    faiss = load_faiss()
    if not queries.is_cuda:
        values, ids = faiss.knn(queries.numpy(), block.numpy(), topk, metric)
        return torch.from_numpy(values), torch.from_numpy(ids)
    if not hasattr(faiss, "knn_gpu"):
        raise ImportError("the installed faiss has no CUDA support: `pip install cacheformers[gpu]`")
    importlib.import_module("faiss.contrib.torch_utils")
    device = queries.device.index or 0
    values, ids = faiss.knn_gpu(_gpu_resources(device), queries, block, topk, metric=metric, device=device)
    return values, ids


def _blocks(entries: Entries, start: int = 0) -> Iterator[Tensor]:
    """Yield entries from `start` on as float32 `[count, width]`, oldest first; float32 spans whole and uncopied."""
    for span in entries.spans:
        rest, start = span[start:], max(start - len(span), 0)
        if len(rest):
            size = len(rest) if rest.dtype == torch.float32 else max(BLOCK_BYTES // (4 * rest.shape[1]), 1)
            for block in rest.split(size):
                yield unpacked(block).float().contiguous()


def _metric(similarity: str) -> int:
    faiss = load_faiss()
    return int(faiss.METRIC_L2 if similarity == "l2" else faiss.METRIC_INNER_PRODUCT)


def _scores(values: Tensor, queries: Tensor, similarity: str) -> Tensor:
    """Turn values of faiss `[n, k]` into scores as `Search` defines them."""
    return queries.square().sum(1, keepdim=True) - values if similarity == "l2" else values


def _rescored(
    queries: Tensor, entries: Entries, candidates: Tensor, topk: int, similarity: str
) -> tuple[Tensor, Tensor]:
    """Return the best `topk` of each query's candidates, with scores and hits as `Search` defines them.

    Args:
        queries: `[n, width]`.
        candidates: `[n, candidates]`, entries counted from the oldest; -1 for none.
    """
    dtype = result_dtype(queries)
    scores = queries.new_empty(candidates.shape, dtype=dtype)
    rows = max(CACHED_BYTES // (candidates.shape[1] * queries.shape[1] * dtype.itemsize), 1)
    for asked, some, into in zip(queries.split(rows), candidates.split(rows), scores.split(rows), strict=True):
        asked = asked.to(dtype)[:, None]
        stored = gathered(entries, some.clamp(min=0).flatten()).to(asked).unflatten(0, some.shape)
        if similarity == "dot":
            into.copy_(torch.linalg.vecdot(stored, asked))
        else:
            # From differences, which do not lose what distinguishes near neighbors.
            into.copy_(asked.square().sum(2) - torch.linalg.vector_norm(stored.sub_(asked), dim=2).square())
    best, places = scores.masked_fill_(candidates < 0, -torch.inf).topk(topk)
    return ranked(best, candidates.gather(1, places), topk)


def _inner(faiss: Any, index: Any) -> Any:
    """Return the index inside transformations of the vectors."""
    index = faiss.downcast_index(index)
    return _inner(faiss, index.index) if isinstance(index, faiss.IndexPreTransform) else index


def _centroids(faiss: Any, index: Any) -> list[int]:
    """Return the sizes of the codebooks that an index learns."""
    index = faiss.downcast_index(index)
    sizes = [1]
    if isinstance(index, faiss.IndexPreTransform):
        transforms = [faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(index.chain.size())]
        sizes.extend(256 for transform in transforms if isinstance(transform, faiss.OPQMatrix))
    if hasattr(index, "nlist"):
        sizes.append(index.nlist)
    if hasattr(index, "pq"):
        sizes.append(index.pq.ksub)
    for part in ("index", "base_index", "storage"):
        if hasattr(index, part):
            sizes.extend(_centroids(faiss, getattr(index, part)))
    return sizes


def _parameters(faiss: Any, index: Any, selector: Any) -> Any:
    """Return search parameters for an index of any kind, restricted to the selector's ids."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return faiss.SearchParametersPreTransform(index_params=_parameters(faiss, index.index, selector))
    if isinstance(index, faiss.IndexRefine):
        return faiss.IndexRefineSearchParameters(base_index_params=_parameters(faiss, index.base_index, selector))
    if isinstance(index, faiss.IndexIVF):
        lists = min(max(math.ceil(math.sqrt(index.nlist) / 2), MIN_LISTS), index.nlist)
        return faiss.SearchParametersIVF(sel=selector, nprobe=lists)
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(sel=selector, efSearch=GRAPH_CANDIDATES)
    return faiss.SearchParameters(sel=selector)


def _filters(faiss: Any, index: Any, width: int) -> bool:
    """Whether a search in this index can be restricted to a range of ids."""
    try:
        query = torch.zeros(1, width).numpy()
        index.search(query, 1, params=_parameters(faiss, index, faiss.IDSelectorRange(0, 1)))
    except RuntimeError:
        return False
    return True


def _drop(kept: _Index, first: int) -> None:
    """Remove the entries before lifelong number `first`."""
    faiss = load_faiss()
    try:
        kept.faiss.remove_ids(faiss.IDSelectorRange(kept.first - kept.base, first - kept.base))
    except RuntimeError:
        # Graphs cannot remove entries: begin again.
        _empty(kept, first)
        return
    kept.base = kept.base if kept.numbered else first
    kept.first = first


def _empty(kept: _Index, first: int) -> None:
    """Remove all entries, but keep what was learned in training."""
    kept.faiss.reset()
    kept.base = 0 if kept.numbered else first
    kept.first = kept.end = first
