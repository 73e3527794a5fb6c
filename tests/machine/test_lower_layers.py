"""`read` runs the upper layers over the end of a text alone, and nobody can tell from the memory."""

import pytest
import torch

import cacheformers
from cacheformers.modeling import segments
from cacheformers.modeling.architectures import find_decoder, unwrap

LAYERS = 5
LOW = {  # what stores is in layer 1, of five
    "retrieval_heads": {"heads": {1: [0]}},
    "neurocache": {"retrieval_map": {1: 1}, "attention_layers": [1, 3]},
    "memorizing": {"attention_layers": [1]},
    "gated_deltanet": {"layers": [0, 1]},
}
CASES = [
    *(("llama_gqa", method) for method in LOW),
    ("mistral", "retrieval_heads"),
    ("qwen3", "neurocache"),
    ("phi", "retrieval_heads"),
]
WINDOWS = [
    pytest.param({"segment_tokens": 16, "window_tokens": 6, "sink_tokens": 2}, id="short window"),
    pytest.param({"segment_tokens": 8, "window_tokens": 20, "sink_tokens": 0}, id="long window"),
    pytest.param({"segment_tokens": 8, "window_tokens": 8, "sink_tokens": 1}, id="a segment"),
]


@pytest.fixture
def make(make_model):
    def build(name, method, **options):
        base = {"num_hidden_layers": LAYERS}
        settings = {"local_window": "sliding", **LOW[method], **options}
        return make_model(name, dtype=torch.float64, base=base, method=method, **settings)

    return build


@pytest.fixture
def text():
    return torch.randint(3, 128, (2, 230), generator=torch.Generator().manual_seed(7))


def counted(model):
    """How often each layer has run, as long as the model lives."""
    runs = [0] * LAYERS
    for place, layer in enumerate(find_decoder(unwrap(model)).layers):
        layer.register_forward_hook(lambda *_, place=place: runs.__setitem__(place, runs[place] + 1))
    return runs


def assert_same(model, one, other):
    """Entries, columns in sight, and what follows."""
    used = one.timeline.used
    assert torch.equal(used, other.timeline.used) and one.tokens_read == other.tokens_read
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        pair = [tensor, theirs[name]]
        if name.startswith("local."):
            pair = [side.transpose(1, 2)[used] for side in pair]
        assert torch.equal(*pair), name
    more = torch.randint(3, 128, (one.batch_size, 30), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        logits = [model(more, past_key_values=memory.clone()).logits for memory in (one, other)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("name", "method"), CASES)
def test_the_end_of_a_text_sees_nothing_of_what_was_left_out(make, text, monkeypatch, name, method, window):
    model = make(name, method, **window)
    runs = counted(model)
    least = []
    for documents, flush in (
        ([text[0]], True),
        ([text[0], text[1, :213]], False),
        ([text[0, :208], text[1, :7]], True),
    ):
        before = list(runs)
        short = cacheformers.read(model, documents, flush=flush, progress=False)
        below, above = (runs[layer] - before[layer] for layer in (0, LAYERS - 1))
        least.append(above / below)
        with monkeypatch.context() as patch:
            patch.setattr(segments, "out_of_sight", lambda *_: False)
            whole = cacheformers.read(model, documents, flush=flush, progress=False)
        assert_same(model, short, whole)
    assert min(least) < 0.6


def test_a_memory_is_read_on_as_if_all_layers_had_run(make, text, monkeypatch):
    """In two texts, the second of which begins within a segment or after one that was closed early."""
    model = make("llama_gqa", "retrieval_heads", segment_tokens=16, window_tokens=6, sink_tokens=2)
    runs = counted(model)
    for first, flush in ((90, True), (93, True), (93, False), (1, True), (96, False)):
        memories = []
        for out_of_sight in (segments.out_of_sight, lambda *_: False):
            monkeypatch.setattr(segments, "out_of_sight", out_of_sight)
            memory = cacheformers.read(model, text[0, :first], flush=flush, progress=False)
            before = list(runs)
            memories.append(cacheformers.read(model, text[0, first:], memory=memory, progress=False))
            memories[-1].layers_left_out = runs[0] - before[0] > runs[-1] - before[-1]
        assert_same(model, *memories)
        within_a_segment = first == 93 and not flush
        assert memories[0].layers_left_out is not within_a_segment and not memories[1].layers_left_out
        monkeypatch.undo()


def test_an_error_leaves_no_window_that_upper_layers_have_not_seen(make, text):
    """Sinks stay, which all layers have read; what follows is as with a window that begins there."""
    model = make("llama_gqa", "retrieval_heads", segment_tokens=16, window_tokens=6, sink_tokens=2)
    memory = cacheformers.read(model, text[0, :40], progress=False)

    def stop(module, args, output):
        if memory.tokens_read[0] >= 200:
            raise KeyboardInterrupt

    handle = find_decoder(unwrap(model)).layers[0].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        cacheformers.read(model, text[0, 40:], memory=memory, progress=False)
    handle.remove()
    assert memory.timeline.used.sum() == memory.timeline.sink.sum() == 2
    entries = memory.state.rings[1].entries(0)
    assert memory.tokens_read == [200] == [entries.first + sum(len(span) for span in entries.spans)]
    with torch.no_grad():
        assert torch.isfinite(model(text[1:, :30], past_key_values=memory).logits).all()
