"""Nearest-neighbor search: exact, by faiss, and by its indexes."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheformers.modeling.search import ExactSearch, FaissExact, FaissIndex, faiss_search, get_search, recall
from cacheformers.modeling.search import exact as exact_search
from cacheformers.modeling.search.base import between
from cacheformers.modeling.search.store import Entries, Ring, packed, unpacked

SEEDS = st.integers(0, 2**20)
SIMILARITY = st.sampled_from(["l2", "dot"])


def gaussian(count, width, _):
    return torch.randn(count, width)


def normalized(count, width, _):
    return F.layer_norm(torch.randn(count, width), (width,))


def clustered(count, width, noise):
    """A few centers with a little noise around them."""
    centers = torch.randn(5, width)
    return centers[torch.randint(5, (count,))] + noise * torch.randn(count, width)


def positional(count, width, noise):
    """A large vector shared by all tokens at the same position of a segment, and some content."""
    shared = 3 * torch.randn(32, width)
    return shared[torch.arange(count) % 32] + noise * torch.randn(count, width)


DATA = st.sampled_from([gaussian, normalized, clustered, positional])
NOISE = st.sampled_from([1.0, 1e-2, 1e-3, 1e-4])


def made(data, seed, *counts, width, noise):
    """Tensors `[count, width]` drawn together, in random order where the kind of data has none."""
    torch.manual_seed(seed)
    return list(data(sum(counts), width, noise).split(list(counts)))


def fill(ring, stored, piece):
    """Append to row 0 piece by piece."""
    for part in stored.split(piece):
        ring.append(0, part)
    return ring.entries(0)


def scored(queries, stored, similarity):
    """float64 scores `[n, count]` of all entries."""
    products = queries.double() @ stored.double().T
    return products if similarity == "dot" else 2 * products - stored.double().square().sum(1)


def told_apart(queries, kinds, similarity):
    """The queries to which no two kinds of entries are so equally near that they would count as tied."""
    gaps = scored(queries, kinds, similarity).sort(dim=1).values.diff(dim=1)
    size = queries.double().square().sum(1, keepdim=True) + kinds.double().square().sum(1).max()
    return queries[(gaps > 1.5e-6 * size).all(1)]


@settings(max_examples=300, deadline=None)
@given(
    data=DATA,
    noise=NOISE,
    similarity=SIMILARITY,
    seed=SEEDS,
    back_end=st.sampled_from(["exact", "exact", "faiss", "auto"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    width=st.sampled_from([8, 33, 64, 200]),
    stored=st.integers(0, 900),
    capacity=st.integers(1, 600),
    piece=st.integers(1, 700),
    asked=st.sampled_from([0, 1, 2, 17, 70]),
    topk=st.integers(1, 40),
)
def test_exact_search_finds_every_neighbor(
    data, noise, similarity, seed, back_end, dtype, width, stored, capacity, piece, asked, topk
):
    queries, everything = made(data, seed, asked, stored, width=width, noise=noise)
    queries, everything = queries.to(dtype), everything.to(dtype)
    ring = Ring(1, capacity, width, dtype=dtype)
    entries = fill(ring, everything, piece)
    kept = everything[max(stored - capacity, 0) :]
    search = get_search(back_end)

    scores, hits = search(queries, entries, topk, similarity)

    assert scores.shape == hits.shape == (asked, topk)
    assert scores.dtype == dtype and hits.dtype == torch.int64
    found = min(topk, len(kept))
    assert (hits[:, :found] >= 0).all() and (hits[:, :found] < max(len(kept), 1)).all()
    assert (hits[:, found:] == -1).all() and (scores[:, found:] == -torch.inf).all()
    assert (scores[:, 1:] <= scores[:, :-1]).all()
    assert recall(hits, queries, Entries((kept,)), topk, similarity) == 1.0
    if found:
        size = queries.double().square().sum(1, keepdim=True) + kept.double().square().sum(1)
        error = (scores[:, :found] - scored(queries, kept, similarity).gather(1, hits[:, :found])).abs()
        assert (error <= (1e-14 if dtype == torch.float64 else 2e-6) * size.gather(1, hits[:, :found])).all()

    ring.reset([0])
    assert (search(queries, ring.entries(0), topk, similarity)[1] == -1).all()
    ring.append(0, everything[:5])
    again = search(queries, ring.entries(0), topk, similarity)[1]
    assert recall(again, queries, Entries((everything[:5][-capacity:],)), topk, similarity) == 1.0


@settings(max_examples=20, deadline=None)
@given(data=DATA, similarity=SIMILARITY, seed=SEEDS, back_end=st.sampled_from(["exact", "faiss"]))
def test_bfloat16_store(data, similarity, seed, back_end):
    queries, everything = made(data, seed, 600, 1500, width=128, noise=1.0)
    entries = fill(Ring(1, 1100, 128, dtype=torch.bfloat16), everything, 300)
    scores, hits = get_search(back_end)(queries, entries, 16, similarity)
    assert scores.dtype == torch.float32
    assert recall(hits, queries, entries, 16, similarity) >= 0.999
    assert recall(hits, queries, Entries((everything[-1100:],)), 16, similarity) >= 0.99


@settings(max_examples=20, deadline=None)
@given(
    data=DATA,
    similarity=SIMILARITY,
    seed=SEEDS,
    back_end=st.sampled_from(["exact", "faiss", "auto"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    width=st.sampled_from([8, 33, 128]),
    asked=st.sampled_from([1, 17, 100]),
    piece=st.integers(100, 700),
)
def test_int8_store(data, similarity, seed, back_end, dtype, width, asked, piece):
    """What is found is the best of the rounded entries, of all of them."""
    queries, everything = made(data, seed, asked, 1500, width=width, noise=1.0)
    ring = Ring(1, 1100, width, dtype=torch.int8)
    entries = fill(ring, everything, piece)
    kept = everything[-1100:]
    step = kept.abs().amax(1, keepdim=True) / 127
    rounded = (kept / step).round() * step
    scores, hits = get_search(back_end)(queries.to(dtype), entries, 16, similarity)
    assert scores.dtype == dtype
    assert recall(hits, queries, Entries((rounded,)), 16, similarity) == 1.0
    size = queries.double().square().sum(1, keepdim=True) + rounded.double().square().sum(1)
    error = (scores - scored(queries, rounded, similarity).gather(1, hits)).abs()
    assert (error <= 3e-6 * size.gather(1, hits)).all()
    assert ring.nbytes == 1100 * (width + 4)


def test_int8_entries_of_zeros():
    ring = Ring(2, 4, 8, dtype=torch.int8)
    ring.append(1, torch.zeros(3, 8))
    scores, hits = get_search("exact")(torch.ones(1, 8), ring.entries(1), 4, "l2")
    assert scores.tolist() == [[0.0, 0.0, 0.0, -torch.inf]] and hits.tolist() == [[0, 1, 2, -1]]


@pytest.mark.parametrize(
    ("asked", "width", "dtype", "installed", "expected"),
    [
        (1, 16, torch.float32, True, True),
        (2, 16, torch.float32, True, False),
        (1024, 16, torch.float32, True, False),
        (1024, 128, torch.float32, True, True),
        (1, 16, torch.bfloat16, True, False),
        (1, 16, torch.float32, False, False),
    ],
)
def test_auto_uses_faiss_for_one_query_and_for_many(asked, width, dtype, installed, expected, monkeypatch):
    calls = []

    def find(self, queries, *rest):
        calls.append(len(queries))
        return ExactSearch().find(queries, *rest)

    monkeypatch.setattr(FaissExact, "find", find)
    if not installed:
        monkeypatch.setitem(sys.modules, "faiss", None)
    queries, stored = made(gaussian, 0, asked, 300, width=width, noise=0.0)
    get_search("auto")(queries, Entries((stored.to(dtype),)), 4, "l2")
    assert calls == [asked] * expected


@settings(max_examples=50, deadline=None)
@given(
    similarity=SIMILARITY,
    seed=SEEDS,
    back_end=st.sampled_from(["exact", "faiss"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    count=st.integers(1, 1200),
    topk=st.integers(1, 50),
    asked=st.sampled_from([1, 3, 40]),
    seam=st.integers(0, 1200),
)
def test_oldest_of_equal_scores_comes_first(similarity, seed, back_end, dtype, count, topk, asked, seam):
    # Sums of ±1 are exact in float32, and there are at most 17 different scores.
    torch.manual_seed(seed)
    queries, stored = torch.randn(asked, 16).sign(), torch.randn(count, 16).sign()
    queries = queries.double() if dtype == torch.float64 else queries
    entries = Entries(tuple(part for part in stored.to(dtype).split([min(seam, count), max(count - seam, 0)])))
    scores, hits = get_search(back_end)(queries, entries, topk, similarity)
    best = scored(queries, stored, similarity).sort(dim=1, descending=True, stable=True)
    found = min(topk, count)
    assert torch.equal(hits[:, :found], best.indices[:, :found])
    assert torch.equal(scores[:, :found].double(), best.values[:, :found])


@settings(max_examples=30, deadline=None)
@given(
    similarity=SIMILARITY,
    seed=SEEDS,
    back_end=st.sampled_from(["exact", "faiss", "auto"]),
    width=st.sampled_from([16, 33, 100, 256]),
    copies=st.integers(2, 40),
    topk=st.integers(1, 30),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_rounding_does_not_decide_between_equal_entries(similarity, seed, back_end, width, copies, topk, dtype):
    """Whatever the rounding of states is, and however many queries come at a time."""
    torch.manual_seed(seed)
    kinds = torch.randn(50, width, dtype=dtype)
    asked = torch.cat([kinds, torch.randn(50, width, dtype=dtype)])[torch.randperm(100)]
    asked = told_apart(asked, kinds, similarity)[:45]
    kind = torch.randint(50, (50 * copies,))
    noise = 1e-7 if dtype == torch.float32 else 1e-15
    ranks = scored(asked, kinds, similarity).argsort(dim=1, descending=True).argsort(dim=1)  # of the kinds
    expected = ranks[:, kind].argsort(dim=1, stable=True)[:, :topk].sort(dim=1).values
    for sizes in ([45], [1, 2, 42], [1] * 45):
        stored, queries = (
            exact * (1 + noise * torch.randn(len(exact), width, dtype=dtype)) for exact in (kinds[kind], asked)
        )
        search, entries = get_search(back_end), Entries((stored[:30], stored[30:]))
        hits = torch.cat([search(part, entries, topk, similarity)[1] for part in queries.split(sizes)])
        assert torch.equal(hits.sort(dim=1).values, expected)


def test_only_ties_are_searched_again(monkeypatch):
    """The second search converts every entry to float64, which no decoding step without a tie should wait for."""
    monkeypatch.setattr(exact_search, "_oldest_of_equal", lambda *_: pytest.fail("nothing is tied"))
    queries, stored = made(gaussian, 0, 20, 500, width=64, noise=0.0)
    scores, hits = get_search("exact")(queries, Entries((stored,)), 8, "l2")
    assert scores.shape == hits.shape == (20, 8)


def test_nan_is_never_found():
    queries, stored = torch.randn(4, 8), torch.randn(500, 8)
    queries[1], stored[7] = torch.nan, torch.nan
    scores, hits = get_search("exact")(queries, Entries((stored,)), 6, "l2")
    assert (hits[1] == -1).all() and not (hits == 7).any()
    assert not scores.isnan().any()
    others = [0, 2, 3]
    clean = get_search("exact")(queries[others], Entries((stored.nan_to_num(1e9),)), 6, "l2")
    assert torch.equal(scores[others], clean[0]) and torch.equal(hits[others], clean[1])


@settings(max_examples=60, deadline=None)
@given(
    data=DATA,
    noise=NOISE,
    similarity=SIMILARITY,
    seed=SEEDS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64]),
    asked=st.sampled_from([1, 7, 40]),
    topk=st.sampled_from([1, 16, 60]),
    nan=st.booleans(),
)
def test_tiles_find_what_all_scores_at_once_do(data, noise, similarity, seed, dtype, asked, topk, nan):
    """Many tiles, and many more entries than places: near ones in tight clusters are too many candidates."""
    queries, everything = made(data, seed, asked, 2500, width=48, noise=noise)
    everything[77::500] = torch.nan if nan else 0.0
    entries = fill(Ring(1, 2100, 48, dtype=dtype), everything, 700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_search, "ON_CPU", exact_search.ON_CPU._replace(scores=1 << 15, rows=16))
        patch.setattr(exact_search, "SPARE", 40)
        scores, hits = ExactSearch()(queries, entries, topk, similarity)
    stored = between(entries, 0, entries.count).double()
    size = queries.double().square().sum(1, keepdim=True) + stored.square().sum(1)
    best = scored(queries, stored, similarity).nan_to_num(-torch.inf)
    last = best.topk(topk).values[:, -1:]
    near = (best - last).abs() <= 2.0**-20 * size
    best = torch.where(near, last, best)
    expected = best.sort(dim=1, descending=True, stable=True).indices[:, :topk].sort(dim=1).values
    assert torch.equal(hits.sort(dim=1).values, expected)
    assert (scores[:, 1:] <= scores[:, :-1]).all()


@pytest.mark.parametrize("similarity", ["l2", "dot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_gpu_s_large_tiles_find_what_small_ones_do(dtype, similarity):
    queries, stored = made(clustered, 0, 1500, 6000, width=64, noise=1e-3)
    entries = fill(Ring(1, 5000, 64, dtype=dtype), stored, 700)
    scores, hits = ExactSearch()(queries, entries, 16, similarity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_search, "ON_CPU", exact_search.ON_GPU)
        large_scores, large_hits = ExactSearch()(queries, entries, 16, similarity)
    assert torch.equal(large_hits, hits)
    torch.testing.assert_close(large_scores, scores, rtol=0, atol=0)


@pytest.mark.parametrize("back_end", ["exact", "faiss", "faiss:Flat"])
def test_half_precision_around_the_search_does_not_reach_it(back_end):
    queries, stored = made(gaussian, 0, 30, 800, width=64, noise=0.0)
    search, entries = get_search(back_end), Entries((stored,))
    scores, hits = search(queries, entries, 8, "l2")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(search(queries.requires_grad_(), entries, 8, "l2")[1], hits)
    assert not scores.requires_grad
    assert not exact_search._rounds_products(queries.device)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(search(queries, entries, 8, "l2")[1], hits)
        assert exact_search._rounds_products(queries.device)
    finally:
        torch.set_float32_matmul_precision(precision)


MEMORY = """
import ctypes, torch
from cacheformers.modeling.search import ExactSearch
from cacheformers.modeling.search.store import Entries

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

search = ExactSearch()
for asked, count, width, topk, dtype in [
    (1, 1_000_000, 64, 16, torch.bfloat16),
    (600, 20_000, 1024, 16, torch.bfloat16),
    (5000, 2_000, 64, 256, torch.float32),
]:
    stored = torch.randn(1000, width).to(dtype).repeat(count // 1000, 1)
    queries, third = torch.randn(asked, width), count // 3
    search(queries[:2], Entries((stored[:500],)), topk, "l2")
    extra = []
    for _ in range(3):  # pages that the system brings in by itself (libraries, swap) come once
        ctypes.CDLL(None).malloc_trim(0)
        open("/proc/self/clear_refs", "w").write("5")
        before = status("VmRSS")
        search(queries, Entries((stored[third:], stored[:third])), topk, "l2")
        extra.append((status("VmHWM") - before) / 1024 - asked * topk * 12 / 2**20)
    print(min(extra))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_bounded():
    # glibc otherwise keeps some of what is freed, more or less of it from run to run.
    returning = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, env=returning)
    extra = [float(line) for line in run.stdout.split()]
    assert len(extra) == 3 and max(extra) <= 64


FACTORIES = ["IVF8,Flat", "HNSW16", "Flat", "PCA16,IVF4,Flat", "PQ8x4", "IVF4,PQ8x4fs", "SQ8"]


@pytest.mark.parametrize(
    ("factory", "similarity", "dtype"),
    [
        *((factory, similarity, torch.float32) for factory in FACTORIES for similarity in ("l2", "dot")),
        ("IVF8,Flat", "l2", torch.int8),
        ("IVF4,PQ8x4fs", "dot", torch.int8),
    ],
)
def test_approximate_index_follows_the_store(factory, similarity, dtype):
    capacity = 700
    _, everything = made(gaussian, 1, 0, 3000, width=32, noise=0.0)
    everything = unpacked(packed(everything))  # which int8 holds exactly
    ring, search = Ring(1, capacity, 32, dtype=dtype), get_search(f"faiss:{factory}")
    exact = factory in ("IVF8,Flat", "HNSW16", "Flat")
    # Reset once before the ring is full, when the old numbers would still look like living ones.
    for sizes in ([30, 400, 200], [1, 30, 400, 250, 90, 400, 900, 20, 333, 500]):
        written = 0
        for size in sizes:
            ring.append(0, everything[written : written + size])
            written += size
            count = min(written, capacity)
            kept = everything[written - count : written]
            asked = kept[-20:] + 0.1 * torch.randn(min(20, count), 32)
            scores, hits = search(asked, ring.entries(0), 8, similarity)
            assert (hits < count).all() and (scores[:, 1:] <= scores[:, :-1]).all()
            assert (hits[:, 0] >= 0).all()
            for row in hits:
                assert len(set(row[row >= 0].tolist())) == int((row >= 0).sum())
            found = scored(asked, kept, similarity).gather(1, hits.clamp(min=0)).float()
            torch.testing.assert_close(scores, found.masked_fill(hits < 0, -torch.inf), atol=1e-3, rtol=1e-3)
            assert recall(hits, asked, Entries((kept,)), 8, similarity) >= (0.9 if exact else 0.7)
            for index in (held for name, held in ring.index[0].items() if name != "lengths"):
                assert index.end == written and index.faiss.ntotal < 2 * capacity
        ring.reset([0])
        assert (search(everything[:3], ring.entries(0), 8, similarity)[1] == -1).all()


def books(count, width):
    """Entries of ten books, one after the other: normalized, around centers of their own, mostly in 6 directions."""
    centers = 3 * torch.randn(10, width).repeat_interleave(count // 10, 0)
    topics = torch.randn(count, 6) @ torch.randn(6, width)
    return F.layer_norm(centers + topics + 0.3 * torch.randn(count, width), (width,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("similarity", ["l2", "dot"])
def test_codes_of_one_bit_a_number_find_what_mapped_entries_decide(tmp_path, dtype, similarity):
    torch.manual_seed(0)
    exact = books(20000, 64)
    asked = exact[::80] + 0.1 * torch.randn(250, 64)
    made = packed(exact) if dtype == torch.int8 else exact.to(dtype)
    mapped = torch.from_file(str(tmp_path / "entries"), shared=True, size=made.numel(), dtype=dtype).view_as(made)
    mapped.copy_(made)
    entries, search = Entries((mapped[:9000], mapped[9000:]), first=123), get_search("faiss:IVF128,PQ16x4fs")
    scores, hits = search(asked, entries, 16, similarity)
    stored = unpacked(made).float()
    found = scored(asked, stored, similarity).gather(1, hits).float()
    torch.testing.assert_close(scores, found, atol=1e-3, rtol=1e-5)
    # Of inner products, codes also lose what lengths contribute.
    assert recall(hits, asked, Entries((stored,)), 16, similarity) >= {"l2": 0.97, "dot": 0.8}[similarity]

    index = entries.index[f"IVF128,PQ16x4fs {similarity}"].faiss
    assert index.code_size == 8  # no copy of the entries
    again = search(asked, Entries(entries.spans, entries.first), 16, similarity)
    assert torch.equal(again[0], scores) and torch.equal(again[1], hits)


def test_large_stores_are_asked_for_more_candidates(monkeypatch):
    torch.manual_seed(0)
    stored = books(20000, 64)
    entries, search, asked = Entries((stored,)), get_search("faiss:IVF128,PQ16x4fs"), stored[::80]
    found = {}
    for least in (len(stored), len(stored) + 1):
        monkeypatch.setattr(faiss_search, "MANY_ENTRIES", least)
        found[least] = recall(search(asked, entries, 16, "dot")[1], asked, entries, 16, "dot")
    assert found[len(stored)] > found[len(stored) + 1] + 0.02


@pytest.mark.parametrize("factory", ["IVF4,Flat", "HNSW16", "PQ8x4"])
def test_approximate_index_serves_views_of_the_past(factory):
    """The recomputation of a forward may search a view after the store has moved on."""
    _, everything = made(gaussian, 2, 0, 4000, width=16, noise=0.0)
    ring, search = Ring(1, 800, 16), get_search(f"faiss:{factory}")
    fill(ring, everything[:900], 300)
    search(everything[:1], ring.entries(0), 4, "l2")
    view = ring.view()
    assert torch.is_grad_enabled()
    before = search(everything[100:110], view.entries(0), 4, "l2")[1]
    for written, size in ((900, 50), (950, 1500)):
        ring.append(0, everything[written : written + size])
        now = everything[written + size - 5 : written + size]
        assert (search(now, ring.entries(0), 1, "l2")[1][:, 0] >= 800 - 5 - (factory == "PQ8x4") * 800).all()
        hits = search(everything[100:110], view.entries(0), 4, "l2")[1]
        assert (hits < 800).all()
        assert (hits == before).float().mean() >= 0.9
        older = search(everything[100:110], view.entries(0).oldest(300), 4, "l2")[1]
        assert (older < 300).all()


def test_indexes_of_rows_that_share_or_part():
    _, everything = made(gaussian, 4, 0, 900, width=16, noise=0.0)
    ring, search = Ring(3, 200, 16), get_search("faiss:Flat")
    for row in range(3):
        ring.append(row, everything[row * 200 : row * 200 + 150])
    for _ in range(2):
        for row in range(3):
            entries = ring.entries(row)
            kept = torch.cat(entries.spans)
            hits = search(kept, entries, 1, "l2")[1]
            assert torch.equal(hits[:, 0], torch.arange(len(kept)))
        ring.select([0, 0, 1])
        ring.append(0, everything[600:700])
        ring.append(1, everything[700:710])


def test_too_few_entries_to_train_are_searched_exactly():
    queries, stored = made(gaussian, 3, 20, 500, width=32, noise=0.0)
    entries = Entries((stored,))
    hits = get_search("faiss:IVF64,Flat")(queries, entries, 16, "l2")[1]
    assert torch.equal(hits, get_search("exact")(queries, entries, 16, "l2")[1])
    assert set(entries.index) == {"lengths"}  # of exact search


@torch.no_grad()
@pytest.mark.parametrize("method", ["neurocache", "memorizing"])
@pytest.mark.parametrize("search", ["faiss", "auto", "faiss:Flat"])
def test_methods_find_the_same_with_every_back_end(make_model, ids, method, search):
    exact, found = (
        make_model("llama_gqa", torch.float32, method=method, search=name)(ids).logits for name in ("exact", search)
    )
    assert torch.allclose(found, exact, atol=1e-5, rtol=0)


def test_recall_counts_what_is_near_enough_once():
    stored, queries = torch.arange(5.0)[:, None], torch.tensor([[0.0]])
    entries = Entries((stored,))
    assert recall(torch.tensor([[1, 0]]), queries, entries, 2, "l2") == 1.0
    assert recall(torch.tensor([[0, 0]]), queries, entries, 2, "l2") == 0.5
    assert recall(torch.tensor([[0, 2]]), queries, entries, 2, "l2") == 0.5
    assert recall(torch.tensor([[0, -1]]), queries, entries, 2, "l2") == 0.5
    assert recall(torch.tensor([[0, 9]]), queries, entries, 2, "l2") == 0.5
    assert recall(torch.tensor([[4, 3]]), queries + 1, entries, 2, "dot") == 1.0
    twins = Entries((torch.tensor([[1.0], [1 + 1e-9], [3.0]], dtype=torch.float64),))
    assert recall(torch.tensor([[1]]), queries, twins, 1, "l2") == 1.0


def test_errors_say_what_to_do(monkeypatch):
    for name in ("nearest", "", "faiss-gpu", "bfloat16"):
        with pytest.raises(ValueError, match="'auto', 'exact', 'faiss' or 'faiss:'"):
            get_search(name)
    for factory in ("", "IVF", "IVF8,Nonsense"):
        with pytest.raises(ValueError, match="does not understand"):
            FaissIndex(factory)
    with pytest.raises(ValueError, match="grows and forgets"):
        FaissIndex("NSG16")
    entries = Entries((torch.randn(3, 4),))
    with pytest.raises(ValueError, match="l2, dot"):
        get_search("exact")(torch.randn(1, 4), entries, 1, "cosine")
    with pytest.raises(ValueError, match="at least 1"):
        get_search("exact")(torch.randn(1, 4), entries, 0, "l2")
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"cacheformers\[cpu\].*cacheformers\[gpu\]"):
        FaissExact()


def test_lengths_are_kept_beside_the_store():
    """A single query uses them: they follow what comes and goes, and views of the past, other rows and dtypes."""
    ring, query = Ring(2, 20, 8), torch.randn(1, 8)

    def check(entries, queries=query):
        stored = between(entries, 0, entries.count).double()
        distances = (queries.double() - stored).square().sum(1)
        scores, hits = ExactSearch()(queries, entries, 5, "l2")
        assert hits[0].tolist() == distances.sort().indices[:5].tolist()
        expected = queries.double().square().sum() - distances[hits[0]]
        assert torch.allclose(scores[0].double(), expected, rtol=0, atol=1e-5)

    views = []
    for time in (7, 7, 3, 1, 30, 19):
        for row in (0, 1):
            ring.append(row, torch.randn(time, 8))
            check(ring.entries(row))
        views.append(ring.entries(0).oldest(6))
        check(views[-1])
    kept = ring.index[0]["lengths"]
    check(ring.entries(0))
    assert ring.index[0]["lengths"] is kept  # nothing was computed again
    check(ring.entries(0), query.double())
    check(ring.entries(0))
    ring.reset([0])
    ring.append(0, torch.randn(9, 8))
    check(ring.entries(0))
    ring.select([1, 1])
    ring.append(0, torch.randn(4, 8))  # rows that shared one part
    check(ring.entries(0))
    check(ring.entries(1))
