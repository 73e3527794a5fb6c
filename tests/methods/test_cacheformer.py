"""CacheFormer's attention: recorded runs, its specification with gradients, causality, documents, options."""

import itertools
import random

import pytest
import torch
from cacheformer_cases import CHOICES, label, make_options, pairwise, random_inputs, random_parts
from cacheformer_golden import rotate_pairs, selection_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cacheformers.methods.cacheformer import tiles as cacheformer_tiles
from cacheformers.methods.cacheformer.attention import attend, selected_segments
from cacheformers.methods.cacheformer.cacheformer import CacheFormerOptions
from cacheformers.methods.cacheformer.naive import choose_segments, naive
from cacheformers.methods.cacheformer.selection import select_segments
from cacheformers.methods.cacheformer.state import CacheFormerState

CASES = [pytest.param(choice, id=label(choice)) for choice in pairwise()]
TIME = 37


def naive_rows(options, parts, projected):
    rows = [projected.each(lambda tensor, row=row: tensor[row : row + 1]) for row in range(len(projected.q))]
    return torch.cat([naive(options, parts, row, rotate_pairs)[0] for row in rows])


# The choice of segments


@pytest.mark.parametrize("case", selection_cases())
def test_recorded_selections(case):
    expected = case["expect"]
    assert choose_segments(case["scores"], case["allowed"], case["k"], case["u"]) == expected
    scores = torch.tensor(case["scores"])
    assert select_segments(scores, torch.tensor(case["allowed"]), case["k"], case["u"]).tolist() == expected


@settings(max_examples=300, deadline=None)
@given(
    scores=st.lists(st.integers(0, 4), min_size=1, max_size=14),
    allowed=st.integers(0, 14),
    topk=st.integers(1, 4),
    neighbors=st.integers(1, 5),
    sink=st.booleans(),
)
def test_selection_equals_the_plain_walk(scores, allowed, topk, neighbors, sink):
    """Few different scores, so that ties, duplicates and both edges are frequent."""
    allowed = min(allowed, len(scores))
    expected = choose_segments([float(score) for score in scores], allowed, topk, neighbors, sink)
    found = select_segments(torch.tensor(scores).float(), torch.tensor(allowed), topk, neighbors, sink)
    assert found.tolist() == expected


# The specification


def assert_equals_the_specification(choice):
    """Outputs, lists and gradients of every input and part."""
    options = make_options(choice)
    parts = random_parts(options)
    inputs = random_inputs(options, TIME)
    weights = {
        **{f"{name}.{n}": p for name, part in parts._asdict().items() if part for n, p in part.named_parameters()},
        **{name: t.requires_grad_() for name, t in inputs._asdict().items() if isinstance(t, Tensor)},
    }
    expected, lists = naive(options, parts, inputs, rotate_pairs)
    found = attend(options, parts, inputs, rotate_pairs)
    assert float((found - expected).detach().abs().max()) < 1e-12
    if options.cache:
        assert selected_segments(options, parts, inputs, rotate_pairs)[0].tolist() == lists
    direction = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    wanted = torch.autograd.grad((expected * direction).sum(), list(weights.values()), allow_unused=True)
    grown = torch.autograd.grad((found * direction).sum(), list(weights.values()), allow_unused=True)
    touched = 0
    for name, left, right in zip(weights, grown, wanted, strict=True):
        left, right = (torch.zeros(()) if side is None else side for side in (left, right))
        assert float((left - right).abs().max()) <= 1e-10 * max(float(right.abs().max()), 1.0), name
        touched += bool(right.any())
    assert touched >= 2


@pytest.mark.parametrize("choice", CASES)
def test_equals_the_specification(choice):
    assert_equals_the_specification(choice)


@pytest.mark.parametrize("bound", [("TILE_TOKENS", 3), ("MOST_SCORES", 150)])
@pytest.mark.parametrize("choice", CASES[::4])
def test_small_tiles_of_single_heads_make_no_difference(choice, bound, monkeypatch):
    monkeypatch.setattr(cacheformer_tiles, bound[0], {"cpu": bound[1]})
    monkeypatch.setattr(cacheformer_tiles, "SCORES_AT_ONCE", {"cpu": 1})
    assert_equals_the_specification(choice)


def test_tiles_after_a_million_tokens_have_few_scores():
    """Where compressed columns are scored; a text that is read by windows alone has tiles as long as ever."""
    sizes = {"kv_heads": 2, "window_tokens": 8, "pool_tokens": 4, "pool_vectors": 2, "topk": 2}
    options = make_options(sizes | {"long": False, "overlap": False})
    queries = torch.zeros(3, 4, 128, 4)
    stores = cacheformer_tiles.Stores(queries, *[torch.zeros(1, 1, 1, 4).expand(3, 2, 2**19, 4)] * 2)
    tokens = cacheformer_tiles.Run(options, (2**20,), 128, 1.0).tile_tokens(queries, stores)
    assert 1 < tokens < 16 and 3 * 2 * tokens * 2**19 <= 2**25
    by_windows = cacheformer_tiles.Run(options.by_windows(), (2**20,), 128, 1.0)
    assert by_windows.tile_tokens(queries, stores) == 128


@pytest.mark.parametrize("choice", [case for case in CASES if case.values[0]["selection"] in ("token", "prefix")])
def test_lists_of_each_token_are_gathered_or_hidden(choice, monkeypatch):
    """Short texts hide what a token has not chosen; here all is gathered, as in long ones and while decoding."""
    monkeypatch.setattr(cacheformer_tiles, "ALL_AT_ONCE", 0)
    assert_equals_the_specification(choice)


@pytest.mark.parametrize("choice", CASES[::5])
def test_half_precision_follows(choice):
    """Sums are in float32, so bfloat16 inputs give what their float64 copies give, but for the output's rounding."""
    options = make_options({**choice, "cache": False})
    parts, inputs = random_parts(options), random_inputs(options, TIME).each(Tensor.bfloat16)
    expected = naive(options, parts, inputs.each(Tensor.double), rotate_pairs)[0]
    found = attend(options, parts, inputs, rotate_pairs)
    assert found.dtype == torch.bfloat16
    assert float((found - expected).detach().abs().mean()) < 0.02 * float(expected.detach().abs().mean())


@pytest.mark.parametrize("time", [1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 17])
@pytest.mark.parametrize("weights", ["tied", "pretrained"])
def test_lengths_that_divide_nothing(time, weights):
    options = make_options(
        {"kv_heads": 2, "window_tokens": 8, "pool_tokens": 4, "weights": weights, "local_norm": weights == "tied"}
    )
    parts, inputs = random_parts(options), random_inputs(options, time, rows=2)
    found = attend(options, parts, inputs, rotate_pairs)
    assert float((found - naive_rows(options, parts, inputs)).detach().abs().max()) < 1e-12


# Causality


def leaking_pairs(options, time):
    """(t, t') where changing token t' changes what row t < t' reads."""
    parts, inputs = random_parts(options), random_inputs(options, time)
    other = random_inputs(options, time, seed=11)
    rows = inputs.each(lambda tensor: tensor.expand(time, -1, -1, -1).clone())
    for token in range(time):  # row `token` of the batch has that token changed
        for tensor, change in zip(rows[:5], other[:5], strict=True):
            if tensor is not None:
                tensor[token, :, token] = change[0, :, token]
    plain = attend(options, parts, inputs.each(lambda tensor: tensor.expand(time, -1, -1, -1)), rotate_pairs)
    changed = attend(options, parts, rows, rotate_pairs)
    differs = (plain != changed).any(-1).any(1)  # [changed token, row]
    assert bool(differs.diagonal().all())
    return [(t, token) for token, t in differs.nonzero().tolist() if t < token]


@torch.no_grad()
@pytest.mark.parametrize("choice", [case for case in CASES if make_options(case.values[0]).causal])
def test_no_token_depends_on_a_later_one(choice):
    """Every pair (t, t'), exactly, in float64."""
    assert leaking_pairs(make_options(choice), TIME) == []


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("selection", ["previous_block", "token", "prefix", None], ids=str)
def test_no_configuration_lets_a_token_depend_on_a_later_one(selection):
    """All of them, but for sizes (those are in the sample above); None is no cache."""
    names = ["aggregation", "long", "overlap", "weights"]
    if selection is not None:
        names += ["magnitude", "exclude_window", "sink"]
    tried = 0
    for values in itertools.product(*(CHOICES[name] for name in names)):
        choice = {"window_tokens": 4, "pool_tokens": 2, "topk": 2, "neighbors": 2, "kv_heads": 2}
        choice |= dict(zip(names, values, strict=True))
        choice["local_norm"] = choice["weights"] != "pretrained"
        choice |= {"cache": False} if selection is None else {"selection": selection}
        assert leaking_pairs(make_options(choice), 18) == [], choice
        tried += 1
    assert tried == (36 if selection is None else 36 * 2 * 2 * 2)


# Decoding: every chunking, and bounded reads

STEPS = 41
STATE_CASES = [pytest.param(choice, id=label(choice)) for choice in pairwise(1) if make_options(choice).causal]


def decode(state, parts, inputs, lengths, real=None):
    """Feed tokens in chunks of the given lengths."""
    read, begin = [], 0
    for length in lengths:
        chunk = slice(begin, begin + length)
        piece = inputs.each(lambda tensor, chunk=chunk: tensor[:, :, chunk])
        read.append(state.attend(parts, piece, rotate_pairs, None if real is None else real[:, chunk]))
        begin += length
    assert begin == inputs.q.shape[2]
    return torch.cat(read, 2)


def chunkings(time):
    """One by one, all at once, then one by one, and at random."""
    generator = random.Random(time)
    lengths = [1] * time
    mixed = []
    while sum(mixed) < time:
        mixed.append(min(generator.choice([1, 1, 2, 3, 5, 9, 17]), time - sum(mixed)))
    return [lengths, [time], [time // 2] + [1] * (time - time // 2), mixed]


@torch.no_grad()
@pytest.mark.parametrize("choice", STATE_CASES)
def test_any_chunking_is_teacher_forcing(choice):
    options = make_options(choice)
    parts, inputs = random_parts(options), random_inputs(options, STEPS, rows=2)
    expected = attend(options, parts, inputs, rotate_pairs)
    for lengths in chunkings(STEPS):
        read = decode(CacheFormerState(options, 2, torch.float64), parts, inputs, lengths)
        assert float((read - expected).abs().max()) < 1e-9


@torch.no_grad()
def test_what_a_step_reads_is_bounded():
    """Only the compressed vectors are read in a number that grows: windows and retrieved tokens do not, and what no
    step may read can be overwritten without harm."""
    options = CacheFormerOptions(heads=4, kv_heads=2, head_dim=4, window_tokens=8, pool_tokens=4, topk=2)
    parts, inputs = random_parts(options), random_inputs(options, 300)
    state = CacheFormerState(options, 1, torch.float64)
    decode(state, parts, inputs, [300])
    assert state.chooser is not None
    twin = state.clone()
    twin.change(Tensor.clone)  # which a copy does only where it goes on
    held = {p for c in twin.chooser.lists.unique().tolist() for p in range(4 * c, 4 * c + 4)} | set(range(288, 300))
    hidden = torch.tensor([position not in held for position in range(300)])
    twin.shelves["keys"].whole[:, :, :300][:, :, hidden] = 1e3
    step = random_inputs(options, 4, seed=6)
    assert int(hidden.sum()) >= 300 - 12 - 2 * 2 * 4
    assert torch.equal(decode(twin, parts, step, [1] * 4), decode(state, parts, step, [1] * 4))


# Worked examples


@torch.no_grad()
@pytest.mark.parametrize(
    ("time", "vectors", "topk", "neighbors", "overlap", "columns"),
    [(1024, 4, 7, 1, False, 624), (2048, 2, 5, 3, False, 752), (1024, 4, 7, 1, True, 880)],
    ids=["1024 x 624", "2048 x 752", "with overlap 2r"],
)
def test_columns_of_the_papers_examples(time, vectors, topk, neighbors, overlap, columns):
    """f = 2w + r + k*u*s, r counted once where overlap has no columns of its own; the last row sees all but the last
    segment's and the columns after itself."""
    options = CacheFormerOptions(
        heads=1,
        kv_heads=1,
        head_dim=2,
        pool_vectors=vectors,
        topk=topk,
        neighbors=neighbors,
        overlap=overlap,
        select_rows=32,
    )
    shown = cacheformer_tiles.Run(options, (0,), time, 1.0).views(
        torch.tensor([[time - 1]]), torch.zeros(1, 1, 1, topk * neighbors).long()
    )
    visible = sum(int(branch.limit) for branch in shown.values())
    assert visible == columns - vectors


# Options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool_tokens": 300}, "pool_tokens <= 2"),
        ({"pool_tokens": 5}, "must be even"),
        ({"select_rows": 256}, "wide_blocks=True"),
        ({"selection": "token", "select_rows": 4}, "leave out select_rows"),
        ({"selection": "best"}, "selection must be one of"),
        ({"aggregation": "sum"}, "aggregation must be one of"),
        ({"magnitude": "l1"}, "magnitude must be one of"),
        ({"kv_heads": 3}, "does not divide heads"),
        ({"topk": 0}, "topk must be at least 1"),
        ({"neighbors": 0}, "neighbors must be at least 1"),
        ({"select_rows": 0}, "select_rows must be at least 1"),
        ({"pretrained": True}, "tied=False"),
        ({"pretrained": True, "tied": False, "local_norm": False, "pool_tokens": 24}, "must divide window_tokens"),
    ],
)
def test_options_that_contradict_themselves(changes, message):
    with pytest.raises(ValueError, match=message):
        CacheFormerOptions(**{"heads": 4, "kv_heads": 4, "head_dim": 8, **changes})
