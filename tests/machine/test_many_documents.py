"""Many documents are read at once, and each gives the memory that it gives alone."""

import pytest
import torch
from conftest import ENLARGED, METHODS, SPECIAL, WHOLE, WITHIN_POSITIONS, every_method

import cacheformers
from cacheformers.modeling import reading
from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap

EXACT = 1e-9
SLIDING = {"local_window": "sliding", "window_tokens": 12, "sink_tokens": 3}
ASSOCIATIVE = {"method": "recurrent_memory", "associative": True, "key_size": 8}
VARIANTS = {
    "sinks": {"sink_tokens": 3, "hit_scores": True},
    "sliding": {**SLIDING, "exclude_window": True},
    "int8": {"cache_dtype": "int8"},
    "associative": ASSOCIATIVE,
    "associative sliding": {**ASSOCIATIVE, **SLIDING},
    "learned first": {"method": "recurrent_memory", "first": "learned"},
    "fixed heads": {"method": "gated_attention", "far_heads": {0: [1], 1: [], 2: [0, 1]}},
}
LENGTHS = [21, 48, 5, 37, 48]  # two end with a segment
CASES = [
    *every_method(["llama_gqa", "mistral", "opt"]),
    *WITHIN_POSITIONS,
    *(pytest.param(base, {}, id=base) for base in ("gemma3", "phi3", "gpt_oss") if base in SPECIAL),
    *(pytest.param("llama_gqa", options, id=f"llama_gqa {name}") for name, options in VARIANTS.items()),
    *(pytest.param(name, {}, id=name) for name in WHOLE),
]


@pytest.fixture
def documents():
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(3, 128, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(autouse=True)
def little_padding(monkeypatch):
    """Some ends of rows cut a forward, and others are padded."""
    monkeypatch.setattr(reading, "PADDING", 8)


def difference(left, right):
    return float((left - right).abs().max() / right.abs().max())


def assert_same(model, memory, alone, question, bound=EXACT):
    """Rows hold the same entries, and are asked the same."""
    assert memory.tokens_read == [each.tokens_read[0] for each in alone]
    assert memory.tokens_kept == [each.tokens_kept[0] for each in alone]
    for layer, ring in memory.state.rings.items():
        for row, each in enumerate(alone):
            found, expected = ring.entries(row), each.state.rings[layer].entries(0)
            assert found.first == expected.first and found.count == expected.count
            if found.count and ring.keys.dtype != torch.int8:
                assert difference(torch.cat(found.spans), torch.cat(expected.spans)) < bound
    questions = question.expand(len(alone), -1)
    logits = model(questions, past_key_values=memory).logits
    for row, each in enumerate(alone):
        assert difference(logits[row], model(question[None], past_key_values=each).logits[0]) < bound, row


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:This method does not restart positions")
@pytest.mark.parametrize(("base", "options"), CASES)
@pytest.mark.parametrize(("flush", "batch_size"), [(True, None), (False, 3)])
def test_every_document_is_read_as_if_it_were_alone(make_model, documents, base, options, flush, batch_size):
    """And read on in the same memory."""
    model = make_model(base, **options)
    bound = EXACT * ENLARGED.get(options.get("method", ""), 1)
    given = {"flush": flush, "progress": False}
    memory = cacheformers.read(model, documents, batch_size=batch_size, **given)
    alone = [cacheformers.read(model, document, **given) for document in documents]
    assert_same(model, memory.clone(), [each.clone() for each in alone], documents[0][:10], bound)
    more = [document.flip(0)[: 9 + 7 * number] for number, document in enumerate(documents)]
    assert cacheformers.read(model, more, memory=memory, batch_size=batch_size, **given) is memory
    for ids, each in zip(more, alone, strict=True):
        cacheformers.read(model, ids, memory=each, **given)
    assert_same(model, memory, alone, documents[1][:10], bound)


def columns_computed(model, lengths, **given):
    """Read, and return the shapes of what the lowest layer computed, `(rows, tokens)`."""
    shapes = []
    layer = attention_modules(find_decoder(unwrap(model)))[0]
    hook = layer.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["hidden_states"].shape[:2])), with_kwargs=True
    )
    cacheformers.read(model, [torch.arange(3, 3 + length) for length in lengths], progress=False, **given)
    hook.remove()
    return shapes


@pytest.mark.parametrize(
    ("lengths", "batch_size", "padding", "expected"),
    [
        (LENGTHS, None, 0, [(5, 5), (4, 11), (4, 5), (3, 11), (3, 5), (2, 11)]),
        ([6, 48, 21, 37, 70], None, 10, [(5, 16), (4, 5), (3, 11), (3, 5), (2, 11), (1, 16), (1, 6)]),
        (LENGTHS, None, 100, [(5, 16), (4, 16), (3, 16)]),
        (LENGTHS, 2, 0, [*[(2, 16)] * 4, (2, 5), (1, 11), (1, 5), (1, 5)]),
        (LENGTHS, 1, 0, [*[(1, 16)] * 8, (1, 5), (1, 16), (1, 5), (1, 5)]),
    ],
)
def test_rows_leave_where_their_documents_end(make_model, monkeypatch, lengths, batch_size, padding, expected):
    monkeypatch.setattr(reading, "PADDING", padding)
    model = make_model("llama_gqa")
    assert columns_computed(model, lengths, batch_size=batch_size) == expected


def test_a_document_that_cannot_be_read_leaves_a_given_memory_as_it_was(make_model, documents):
    model = make_model("llama_gqa")
    memory = cacheformers.read(model, documents, progress=False)
    before = memory.state_dict()
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        cacheformers.read(model, documents, memory=memory, batch_size=0, progress=False)
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with find_decoder(unwrap(model)).layers[0].register_forward_hook(fail), pytest.raises(KeyboardInterrupt):
        cacheformers.read(model, documents, memory=memory, progress=False)
    assert len(calls) == 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in memory.state_dict().items())


@torch.no_grad()
def test_memories_are_joined_for_a_batch(make_model, documents, tmp_path):
    """Also those that were loaded; what does not belong together is refused."""
    model = make_model("llama_gqa")
    alone = [cacheformers.read(model, document, progress=False) for document in documents]
    for number, memory in enumerate(alone):
        memory.save(tmp_path / str(number))
    loaded = [cacheformers.load_memory(tmp_path / str(number), model) for number in range(len(documents))]
    joint, *others = [each.clone() for each in loaded]
    joint.join(others)
    assert [memory.tokens_read for memory in others] == [[length] for length in LENGTHS[1:]]
    assert_same(model, joint.clone(), [each.clone() for each in alone], documents[0][:10])
    joint.save(tmp_path / "joint")
    assert_same(model, cacheformers.load_memory(tmp_path / "joint", model), alone, documents[0][:10])
    small = cacheformers.read(model, documents[0], cache_size=8, progress=False)
    with pytest.raises(ValueError, match="different models, adapters, tokenizers or cache sizes"):
        joint.join([small])
    for method in METHODS:
        other = make_model("llama_gqa", method=method)
        full, off = (cacheformers.read(other, documents[0], progress=False, cache_size=size) for size in (None, 0))
        for one, more in ((full, off), (off, full)):
            with pytest.raises(ValueError, match="different models, adapters, tokenizers or cache sizes"):
                one.join([more])
    left_open = cacheformers.read(model, documents[0], flush=False, progress=False)
    with pytest.raises(ValueError, match="flush=True"):
        joint.join([left_open])
