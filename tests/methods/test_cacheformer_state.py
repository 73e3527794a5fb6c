"""CacheFormer decodes what it was trained on: every chunking, ragged rows, padding, rows that move, bounded reads."""

import random

import pytest
import torch
from cacheformer_cases import label, make_options, pairwise, random_inputs, random_parts
from cacheformer_golden import rotate_pairs
from torch import Tensor

from cacheformers.methods.cacheformer.attention import attend
from cacheformers.methods.cacheformer.cacheformer import CacheFormerOptions, CacheFormerParts, Projected
from cacheformers.methods.cacheformer.state import CacheFormerState

TIME = 41
BASE = {"kv_heads": 2, "window_tokens": 8, "pool_tokens": 4, "topk": 2}
PRETRAINED = {"weights": "pretrained", "local_norm": False}
CASES = [pytest.param(choice, id=label(choice)) for choice in pairwise(1) if make_options(choice).causal]
pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


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


def padded(pieces, lefts, time):
    """Documents as the rows of a batch, each after so much padding, with anything in it."""
    generator = torch.Generator().manual_seed(9)
    real = torch.zeros(len(pieces), time, dtype=torch.bool)
    tensors = []
    for side in range(5):
        first = pieces[0][side]
        if not isinstance(first, Tensor):
            tensors.append(None)
            continue
        whole = 5 * torch.randn(len(pieces), first.shape[1], time, 4, generator=generator, dtype=first.dtype)
        for row, (piece, left) in enumerate(zip(pieces, lefts, strict=True)):
            whole[row, :, left : left + piece.q.shape[2]] = piece[side][0]
            real[row, left : left + piece.q.shape[2]] = True
        tensors.append(whole)
    return Projected(*tensors), real


@pytest.mark.parametrize("choice", CASES)
def test_any_chunking_is_teacher_forcing(choice):
    options = make_options(choice)
    parts, inputs = random_parts(options), random_inputs(options, TIME, rows=2)
    expected = attend(options, parts, inputs, rotate_pairs)
    for lengths in chunkings(TIME):
        read = decode(CacheFormerState(options, 2, torch.float64), parts, inputs, lengths)
        assert float((read - expected).abs().max()) < 1e-9


@pytest.mark.parametrize("weights", [{}, PRETRAINED], ids=["tied", "pretrained"])
@pytest.mark.parametrize("neighbors", [1, 2, 3])
@pytest.mark.parametrize("selection", ["previous_block", "token", "prefix"])
def test_rows_of_different_lengths_and_padding(selection, neighbors, weights):
    """Left padding, right padding, rows that pause: each row as if alone, however it is cut."""
    options = make_options({**BASE, **weights, "selection": selection, "neighbors": neighbors, "select_rows": None})
    parts = random_parts(options)
    lengths, lefts, time = [41, 30, 19, 3], [0, 11, 9, 38], 41
    pieces = [random_inputs(options, length, seed=50 + length) for length in lengths]
    inputs, real = padded(pieces, lefts, time)
    for cut in chunkings(time):
        read = decode(CacheFormerState(options, 4, torch.float64), parts, inputs, cut, real)
        assert not read.transpose(1, 2)[~real].any()
        for row, piece in enumerate(pieces):
            expected = attend(options, parts, piece, rotate_pairs)[0]
            found = read[row, :, lefts[row] : lefts[row] + lengths[row]]
            assert float((found - expected).abs().max()) < 1e-9


@pytest.mark.parametrize("selection", ["previous_block", "token", "prefix"])
def test_single_precision(selection):
    options = make_options({**BASE, "selection": selection, "neighbors": 2})
    parts = CacheFormerParts(*(part and part.float() for part in random_parts(options)))
    inputs = random_inputs(options, TIME).each(Tensor.float)
    expected = attend(options, parts, inputs)
    for lengths in chunkings(TIME):
        read = decode(CacheFormerState(options, 1, torch.float32), parts, inputs, lengths)
        assert float((read - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("weights", [{}, PRETRAINED], ids=["tied", "pretrained"])
def test_rows_move_as_beams_do(weights):
    """Rows are taken several times, left out and swapped in mid-block; each goes on as the row that it was."""
    options = make_options({**BASE, **weights, "neighbors": 2})
    parts, first = random_parts(options), random_inputs(options, 29, rows=3)
    then = random_inputs(options, 12, rows=4, seed=8)
    order = [2, 0, 0, 1]
    state = CacheFormerState(options, 3, torch.float64)
    decode(state, parts, first, [29])
    kept = state.clone()
    state.select(order)
    read = decode(state, parts, then, [1] * 12)
    joined = [torch.cat([a[order], b], 2) for a, b in zip(first[:5], then[:5], strict=True) if a is not None]
    whole = Projected(*joined[:2], *([None] if options.tied else joined[2:3]), *joined[-2:])
    assert float((read - attend(options, parts, whole, rotate_pairs)[:, :, 29:]).abs().max()) < 1e-9

    other = CacheFormerState(options, 3, torch.float64)
    other.load_state_dict({name: tensor.clone() for name, tensor in kept.state_dict().items()})
    again = first.each(lambda tensor: tensor.flip(2))
    assert torch.equal(decode(other, parts, again, [3] * 9 + [2]), decode(kept, parts, again, [3] * 9 + [2]))
    assert kept.tokens_read == [58] * 3


def test_a_reset_row_begins_a_new_document():
    options = make_options({**BASE, "neighbors": 2})
    parts, first, then = random_parts(options), random_inputs(options, 29, rows=2), random_inputs(options, 31, 2, 8)
    state = CacheFormerState(options, 2, torch.float64)
    decode(state, parts, first, [29])
    state.reset([1])
    read = decode(state, parts, then, [5, 9, 17])
    fresh = then.each(lambda tensor: tensor[1:])
    assert state.tokens_read == [60, 31]
    assert float((read[1:] - attend(options, parts, fresh, rotate_pairs)).abs().max()) < 1e-9


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
    twin.shelves["keys"].vectors[:, :, :300][:, :, hidden] = 1e3
    step = random_inputs(options, 4, seed=6)
    assert int(hidden.sum()) >= 300 - 12 - 2 * 2 * 4
    assert torch.equal(decode(twin, parts, step, [1] * 4), decode(state, parts, step, [1] * 4))


def test_a_decoder_cannot_know_the_papers_rule():
    options = make_options({**BASE, "selection": "paper_block"})
    with pytest.raises(ValueError, match="cannot generate"):
        CacheFormerState(options, 1, torch.float64)
