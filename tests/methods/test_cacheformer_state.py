"""CacheFormer decodes what it was trained on: every chunking, ragged rows, padding, rows that move, bounded reads."""

import random

import pytest
import torch
from cacheformer_cases import label, make_options, pairwise, random_inputs, random_parts
from cacheformer_golden import rotate_pairs
from torch import Tensor

from cacheformers.methods.cacheformer.attention import attend
from cacheformers.methods.cacheformer.cacheformer import CacheFormerOptions
from cacheformers.methods.cacheformer.state import CacheFormerState

TIME = 41
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


@pytest.mark.parametrize("choice", CASES)
def test_any_chunking_is_teacher_forcing(choice):
    options = make_options(choice)
    parts, inputs = random_parts(options), random_inputs(options, TIME, rows=2)
    expected = attend(options, parts, inputs, rotate_pairs)
    for lengths in chunkings(TIME):
        read = decode(CacheFormerState(options, 2, torch.float64), parts, inputs, lengths)
        assert float((read - expected).abs().max()) < 1e-9


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
