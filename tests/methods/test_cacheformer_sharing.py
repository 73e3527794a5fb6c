"""Questions about a text, beams and copies share what they have read, and change nothing of each other."""

import pytest
import torch
from cacheformer_cases import label, make_options, pairwise, random_inputs, random_parts
from cacheformer_golden import rotate_pairs

import cacheformers
from cacheformers.methods.cacheformer.naive import naive
from cacheformers.methods.cacheformer.shelf import Shelf
from cacheformers.methods.cacheformer.state import SEGMENTS, CacheFormerState

CASES = [choice for choice in pairwise(seed=1) if choice["selection"] != "paper_block"]
LENGTHS = 41, 30


class Rows:
    """A state, and beside it every row's tokens since its beginning, for the specification."""

    def __init__(self, options, parts, state, told):
        self.options, self.parts, self.state, self.told = options, parts, state, told

    def clone(self):
        return Rows(self.options, self.parts, self.state.clone(), list(self.told))

    def select(self, rows):
        self.state.select(rows)
        self.told = [self.told[row] for row in rows]

    def read(self, seed, counts):
        """Read so many random tokens; return the largest error of any row."""
        most, rows = max(counts), range(len(counts))
        drawn = random_inputs(self.options, max(self.state.tokens_read) + most, len(counts), seed)
        places = [torch.arange(start, start + most) for start in self.state.tokens_read]
        new = drawn.each(lambda tensor: torch.stack([tensor[row][:, places[row]] for row in rows]))
        real = torch.arange(most) < torch.tensor(counts)[:, None]
        found = self.state.attend(self.parts, new, rotate_pairs, real)
        errors = []
        for row, count in enumerate(counts):
            added = new.each(lambda tensor, row=row, count=count: tensor[row : row + 1, :, :count])
            before, self.told[row] = self.told[row], joined(self.told[row], added)
            expected = naive(self.options, self.parts, self.told[row], rotate_pairs)[0]
            begin = 0 if before is None else before.q.shape[2]
            errors.append((found[row, :, :count] - expected[0, :, begin:]).abs().max())
        return float(max(errors))


def joined(before, after):
    if before is None:
        return after
    values = None if before.v is None else torch.cat([before.v, after.v], 2)
    sides = [torch.cat([getattr(before, side), getattr(after, side)], 2) for side in ("q", "k", "plain_q", "plain_k")]
    return type(after)(sides[0], sides[1], values, *sides[2:])


def on_shelves(state):
    return sum(shelf.nbytes for shelf in state.shelves.values())


def two_texts(choice):
    options = make_options(choice)
    rows = Rows(options, random_parts(options), CacheFormerState(options, 2, torch.float64), [None, None])
    assert rows.read(5, LENGTHS) < 1e-10
    return rows


@torch.no_grad()
@pytest.mark.parametrize("choice", CASES, ids=label)
def test_questions_of_different_lengths_and_beams_that_change_places(choice):
    """While the texts go on, too; of copies of copies, and of rows of which all but one text are left out."""
    texts = two_texts(choice)
    asked = texts.clone()
    asked.select([0, 1, 1, 0])
    assert asked.read(6, [5, 3, 1, 4]) < 1e-10
    again = asked.clone()
    asked.select([3, 1, 2, 1])
    assert texts.read(7, [9, 11]) < 1e-10
    assert asked.read(8, [1, 1, 1, 1]) < 1e-10 and again.read(9, [2, 6, 6, 1]) < 1e-10
    asked.select([2, 1, 3])
    assert asked.read(10, [7, 2, 9]) < 1e-10
    for row, told in enumerate(asked.told):
        assert asked.state.tokens_read[row] == told.q.shape[2]
    loaded = CacheFormerState(asked.options, 3, torch.float64)
    loaded.load_state_dict(asked.state.state_dict())
    anew = Rows(asked.options, asked.parts, loaded, list(asked.told))
    asked.state.reset([1])
    asked.told[1] = None
    assert asked.read(11, [3, 20, 3]) < 1e-10 and anew.read(12, [3, 3, 3]) < 1e-10


def test_gradients_are_those_of_a_copy():
    """A graph reads the shared text as if each row had its own."""
    choice = {"window_tokens": 8, "pool_tokens": 4, "pool_vectors": 2, "topk": 2, "weights": "separate"}
    with torch.no_grad():
        texts = two_texts(choice | {"kv_heads": 2, "neighbors": 1})
        texts.select([0, 0, 1])
        texts.read(6, [3, 4, 3])
        alone = CacheFormerState(texts.options, 3, torch.float64)
        alone.load_state_dict(texts.state.state_dict())
    drawn = random_inputs(texts.options, 6, 3, 7)
    found = []
    for state in (texts.state.clone(), alone):
        sides = [getattr(drawn, side).clone().requires_grad_() for side in ("q", "k", "v")]
        read = state.attend(texts.parts, type(drawn)(*sides, drawn.plain_q, drawn.plain_k), rotate_pairs)
        found.append([read, *torch.autograd.grad(read.square().sum(), sides)])
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)


def test_a_graph_that_is_shared_is_cut():
    """Of a text that was read with gradients, when questions went on without."""
    options = make_options({"kv_heads": 2, "window_tokens": 8, "pool_tokens": 4, "pool_vectors": 2, "topk": 2})
    parts, state = random_parts(options), CacheFormerState(options, 1, torch.float64)
    inputs = random_inputs(options, 50)
    state.attend(parts, inputs.each(lambda tensor: tensor[:, :, :44].clone().requires_grad_()), rotate_pairs)
    with torch.no_grad():
        state.attend(parts, inputs.each(lambda tensor: tensor[:, :, 44:]), rotate_pairs)
    assert state.shelves["keys"].shared.requires_grad
    state.detach()
    assert not any(
        shelf.shared.requires_grad or shelf.own.requires_grad for shelf in state.shelves.values() if shelf.begin
    )


@torch.no_grad()
@pytest.mark.parametrize("weights", ["tied", "separate", "pretrained"])
def test_a_text_is_held_once(weights):
    """The vectors of eight questions take no fourth of its bytes beside it, and copies of copies share it, too."""
    sizes = {"kv_heads": 2, "window_tokens": 8, "pool_tokens": 4, "pool_vectors": 2, "topk": 2}
    options = make_options(sizes | {"weights": weights, "local_norm": weights != "pretrained"})
    parts, state = random_parts(options), CacheFormerState(options, 1, torch.float64)
    inputs = random_inputs(options, 500)
    for begin in range(0, 500, 25):
        state.attend(parts, inputs.each(lambda tensor, begin=begin: tensor[:, :, begin : begin + 25]), rotate_pairs)
    assert state.shelves["keys"].shape[2] > 520  # there is room behind it
    text = {name: shelf.own.data_ptr() for name, shelf in state.shelves.items() if shelf.own.numel()}
    bytes_before = on_shelves(state)
    asked = state.clone()
    asked.select([0] * 8)
    question = random_inputs(options, 6, 8)
    for copied in (lambda: asked, asked.clone, state.clone):  # the first goes on in its own room
        twin = copied()
        rows = question.each(lambda tensor, count=twin.rows: tensor[:count])
        twin.attend(parts, rows, rotate_pairs)
        assert {name: twin.shelves[name].shared.data_ptr() for name in text} == text
        assert on_shelves(twin) < 1.25 * bytes_before
    assert {name: state.shelves[name].own.data_ptr() for name in text} == text


@pytest.mark.parametrize("more", [0, 30])
@pytest.mark.parametrize("whole", [False, True])
def test_read_makes_room_once(make_model, monkeypatch, whole, more):
    """Growing would hold old vectors and new ones at once; there is room for a question, too. Also where it goes on."""
    options = {"window_tokens": 8, "pool_tokens": 4, "pool_vectors": 1, "segment_tokens": 16}
    if whole:
        model = make_model("cacheformer", **options, num_hidden_layers=1, tied=False)
    else:
        model = make_model("llama_gqa", method="cacheformer_on_base", **options, layers=[1])
    held, rooms = {}, []
    before = CacheFormerState.write

    def write(self, name, starts, new):
        before(self, name, starts, new)
        own = self.shelves[name].own
        held.setdefault(name, set()).add(own.data_ptr())
        rooms.append(own)  # so that no address is used twice

    monkeypatch.setattr(CacheFormerState, "write", write)
    text = torch.arange(200)[None] % 50
    memory = cacheformers.read(model, text, progress=False)
    if more:
        held.clear()
        cacheformers.read(model, text[:, :more], progress=False, memory=memory)
    (state,) = memory.state.layers.values()
    assert all(len(places) == 1 for places in held.values()) and held.keys() == {"keys", "values", *SEGMENTS}
    tokens, segments = 200 + more, (200 + more) // 4
    assert state.shelves["keys"].shape[2] == tokens + tokens // 64
    assert state.shelves["long_keys"].shape[2] == segments + segments // 64
    assert memory.state.expected_tokens == 0


def test_what_is_shared_is_never_written():
    """Room behind a text belongs to the first that goes on; the text itself to nobody."""
    held = torch.arange(24.0).reshape(1, 1, 12, 2)
    before = held.clone()
    with torch.no_grad():
        text = Shelf(held, private=True)
        asked = text.select([0, 0], [8])
        for number in range(6):
            asked = asked.written([8 + number, 8 + number // 2], torch.full((2, 1, 1, 2), float(number)))
        assert torch.equal(held, before)
        assert asked.whole[0, 0, 8:14, 0].tolist() == [0, 1, 2, 3, 4, 5]
        assert asked.whole[1, 0, 8:11, 0].tolist() == [1, 3, 5]
        assert torch.equal(asked.whole[:, :, :8], held[:, :, :8].expand(2, 1, 8, 2))
        assert asked.select([1], [14, 11]).shared.data_ptr() == held.data_ptr()
        own = text.written([8], torch.full((1, 1, 1, 2), -1.0))
        assert own.own.data_ptr() == held.data_ptr() and held[0, 0, 8].tolist() == [-1, -1]
