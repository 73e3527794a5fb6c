"""How many bytes CacheFormer holds: a budget for raw segments, and nothing that nobody can retrieve."""

import pytest
import torch
from cacheformer_cases import make_options, random_inputs, random_parts
from cacheformer_golden import rotate_pairs
from cacheformer_models import random_ids, tiny_model

import cacheformers
from cacheformers.methods.cacheformer.cacheformer import CacheFormerOptions
from cacheformers.methods.cacheformer.naive import naive
from cacheformers.methods.cacheformer.state import CacheFormerState
from cacheformers.modeling.search.store import unpacked

SIZES = {"kv_heads": 2, "window_tokens": 8, "pool_tokens": 4, "pool_vectors": 2, "topk": 2, "neighbors": 1}
BUDGETS = {
    "newest": {"cache_tokens": 16},
    "sink": {"cache_tokens": 16, "sink": True, "exclude_window": True},
    "small blocks": {"cache_tokens": 9, "select_rows": 3, "weights": "pretrained", "local_norm": False},
    "each token": {"cache_tokens": 16, "selection": "token", "sink": True},
    "scored alone": {"cache_tokens": 16, "selection": "prefix", "sink": True, "long": False, "overlap": False},
    "8 bits": {"cache_tokens": 16, "cache_int8": True, "sink": True, "weights": "separate"},
    "no cache": {"cache": False, "sink": True},
    "window alone": {"cache": False, "long": False, "overlap": False},
}
WITHOUT_VECTORS = ["scored alone", "window alone"]


def state_after(options, parts, inputs, tokens, step=1):
    state = CacheFormerState(options, len(inputs.q), torch.float64)
    go_on(state, parts, inputs, 0, tokens, step)
    return state


def go_on(state, parts, inputs, begin, end, step=1):
    """Read tokens in steps, and return what heads read."""
    pieces = [slice(start, min(start + step, end)) for start in range(begin, end, step)]
    return torch.cat([read(state, parts, inputs, piece) for piece in pieces], 2)


def read(state, parts, inputs, piece):
    return state.attend(parts, inputs.each(lambda tensor: tensor[:, :, piece]), rotate_pairs)


@torch.no_grad()
@pytest.mark.parametrize("name", BUDGETS)
def test_what_is_forgotten_takes_no_room(name):
    """Keys and values stay as many, however they were read; so does all the rest where no compressed vector is read."""
    options = make_options(SIZES | BUDGETS[name])
    parts, inputs = random_parts(options), random_inputs(options, 200)
    number = 1 if options.tied else 2
    most = options.most_window_tokens * number * options.kv_heads * options.head_dim * 8
    sizes = {}
    for step in (1, 40):
        for tokens in (120, 200):
            state = state_after(options, parts, inputs, tokens, step)
            assert sum(state.shelves[side].whole.nbytes for side in ("keys", "values")[:number]) <= most
            sizes[step, tokens] = {key: tensor.shape for key, tensor in state.state_dict().items()}
    for tokens in (120, 200):
        kept = {key: shape for key, shape in sizes[1, tokens].items() if "shelves" in key}
        assert kept == {key: shape for key, shape in sizes[40, tokens].items() if "shelves" in key}
    if name in WITHOUT_VECTORS:
        assert sizes[1, 120] == sizes[1, 200]


@torch.no_grad()
@pytest.mark.parametrize("name", BUDGETS)
def test_rows_that_are_selected_saved_and_begin_again(name):
    """Of different lengths, so that other segments have left in each; and forwards longer than the budget."""
    options = make_options(SIZES | BUDGETS[name])
    parts, inputs = random_parts(options), random_inputs(options, 90, rows=3)
    state, lengths = CacheFormerState(options, 3, torch.float64), [70, 41, 6]
    real = torch.arange(70) < torch.tensor(lengths)[:, None]
    state.attend(parts, inputs.each(lambda tensor: tensor[:, :, :70]), rotate_pairs, real)
    twin = CacheFormerState(options, 3, torch.float64)
    twin.load_state_dict(state.state_dict())
    for one in (state, twin):
        one.select([1, 0, 1])
        one.reset([2])
    assert state.tokens_read == [41, 70, 0]
    for row, begin in enumerate(state.tokens_read):
        source = [1, 0, 2][row]
        whole = inputs.each(lambda tensor, source=source: tensor[source : source + 1])
        expected = naive(options, parts, whole.each(lambda tensor, end=begin + 20: tensor[:, :, :end]), rotate_pairs)[0]
        later = whole.each(lambda tensor, begin=begin: tensor[:, :, begin : begin + 20].expand(3, -1, -1, -1))
        for one in (state.clone(), twin.clone()):
            found = torch.cat([read(one, parts, later, slice(start, start + 5)) for start in range(0, 20, 5)], 2)
            assert float((found[row] - expected[0, :, begin:]).abs().max()) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("weights", ["tied", "separate"])
def test_eight_bits_take_the_room_of_a_window_and_of_bytes(weights):
    """Beside the windows: a byte for each number, and four for a vector, instead of four a number."""
    options = make_options(SIZES | {"weights": weights, "cache_int8": True})
    inputs = random_inputs(options, 200)
    state = state_after(options, random_parts(options), inputs, 200, 200).state_dict()
    for name in ("keys", "values")[: 1 if options.tied else 2]:
        assert state[f"shelves.{name}"].shape == (1, 2, 8, 4)  # of the last window; the next one begins
        rounded = state[f"shelves.cache_{name}"]
        assert rounded.dtype == torch.int8 and rounded.nbytes == 200 * options.kv_heads * (options.head_dim + 4)
        near = unpacked(rounded[:, :, 192:]).double()
        exact = state[f"shelves.{name}"]
        assert 0 < float((near - exact).abs().max()) <= float(exact.abs().max()) / 254 + 1e-6


@torch.no_grad()
def test_keys_that_earlier_releases_kept_are_forgotten():
    options = make_options(SIZES | BUDGETS["no cache"])
    parts, inputs = random_parts(options), random_inputs(options, 60)
    state = state_after(options, parts, inputs, 50, 50)
    saved, twin = state.state_dict(), CacheFormerState(options, 1, torch.float64)
    dropped = saved["shelves.keys"].new_full((1, 2, 50 - saved["shelves.keys"].shape[2], options.head_dim), 1e3)
    assert dropped.shape[2] == 40
    twin.load_state_dict({**saved, "shelves.keys": torch.cat([dropped, saved["shelves.keys"]], 2)})
    assert torch.equal(go_on(twin, parts, inputs, 50, 60), go_on(state, parts, inputs, 50, 60))
    assert twin.nbytes <= state.nbytes


@torch.no_grad()
@pytest.mark.parametrize("selection", ["previous_block", "token"])
def test_beams_of_padded_rows(selection):
    """From scratch: what is decoded with a cache is what whole documents give."""
    model = tiny_model(selection=selection, cache_tokens=16, sink=True, cache_int8=selection == "token")
    ids = random_ids(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :21] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 6, "num_beams": 3}
    expected = model.generate(ids, use_cache=False, **arguments)
    assert torch.equal(model.generate(ids, **arguments), expected)
    unbounded = tiny_model(selection=selection, sink=True)
    assert float((unbounded(ids).logits - model(ids).logits)[1].abs().amax(-1)[-1]) > 1e-6


@torch.no_grad()
def test_a_memory_file_holds_the_budget(make_model, ids, tmp_path):
    """On a base, whose other layer sees everything; rows of different lengths. Without that one text is forgotten."""
    chosen = {"representatives": "mean", "long": False, "overlap": False, "sink": True, "cache_tokens": 16}
    chosen["cache_int8"] = True
    model = make_model("llama_gqa", method="cacheformer_on_base", neighbors=1, layers=[0, 2], **chosen)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    memory = cacheformers.read(model, ids, mask, progress=False)
    assert memory.tokens_kept == memory.tokens_read == [75, 62]
    memory.save(tmp_path / "memory")
    loaded = cacheformers.load_memory(tmp_path / "memory", model)
    shelf = loaded.state.layers[0].shelves["cache_keys"].whole
    assert shelf.shape[2] < 40 and shelf.dtype == torch.int8
    question = ids[:, :9].flip(1)
    assert torch.equal(
        model(question, past_key_values=loaded.clone()).logits, model(question, past_key_values=memory.clone()).logits
    )
    alone = make_model("llama_gqa", method="cacheformer_on_base", neighbors=1, **chosen)
    # Of 62 tokens the window shows those from 48 on; the three segments before it can be retrieved, and the first.
    assert cacheformers.read(alone, ids, mask, progress=False).tokens_kept == [75 - 52, 62 - 36]


def test_a_budget_holds_what_is_retrieved_at_once():
    with pytest.raises(ValueError, match="choose cache_tokens >= 28"):
        CacheFormerOptions(heads=4, kv_heads=4, head_dim=8, pool_tokens=4, topk=7, cache_tokens=27)
