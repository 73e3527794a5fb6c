"""Retrieval heads against their specification; what holds for every memory is in machine/test_rules.py."""

import pytest
import torch
from conftest import method_options
from memories import loss_and_gradients, projections

import cacheformers
from cacheformers.methods.retrieval_heads import naive, retrieval_loss
from cacheformers.modeling.architectures import attention_modules, base_shape, find_decoder, unwrap
from cacheformers.modeling.memory import Gold
from cacheformers.modeling.search.store import Ring

SPANS = [(0, 7), (7, 20), (20, 21), (21, 40), (30, 30)]
HEADS = {"one head": {1: [0]}, "both heads": {1: [1, 0]}, "two layers": {0: [1], 2: [0]}}


def by_token(model, layer, ids):
    """Queries and keys of a document as the projections give them, `[tokens, heads, d]`."""
    queries, keys, *_ = projections(model, layer, ids)
    return queries[0].transpose(0, 1), keys[0].transpose(0, 1)


def learned(model, layer, ids, group):
    """What a layer's trained part adds to its queries, by key-value head, `[tokens, kv heads, group, d]`."""
    attention, seen = attention_modules(find_decoder(unwrap(model)))[layer], []
    handle = attention.register_forward_pre_hook(lambda *call: seen.append(call[2]["hidden_states"]), with_kwargs=True)
    model(ids)
    handle.remove()
    weight = attention.memory.active_parts.query.weight
    return (torch.cat(seen, 1)[0] @ weight.T).unflatten(-1, (-1, group, attention.head_dim))


@torch.no_grad()
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("base", ["llama_gqa", "phi", "opt", "granite"])
@pytest.mark.parametrize("heads", HEADS)
def test_scores_are_what_the_specification_says(make_model, ids, base, heads, before, trained):
    """Nothing that was read is visible to a query here, so it is the beginning of a text to its layers."""
    model = make_model(base, method="retrieval_heads", heads=HEADS[heads], retrieval_weight=float(trained))
    if trained:
        generator = torch.Generator().manual_seed(0)
        for name, weight in model.named_parameters():
            if ".memory." in name:
                weight.normal_(generator=generator)
    document, query = ids[:1, :40], ids[1:2, 40:50]
    memory = cacheformers.read(model, document, progress=False)
    found = cacheformers.recall(model, memory, query[0].tolist(), SPANS, skip=before)
    wanted = []
    for layer, own in HEADS[heads].items():
        queries, keys = by_token(model, layer, query)[0], by_token(model, layer, document)[1]
        if trained:
            by_kv = queries.unflatten(1, (keys.shape[1], -1))
            by_kv[:, sorted(own)] += learned(model, layer, query, by_kv.shape[2])
        attention = attention_modules(find_decoder(unwrap(model)))[layer]
        queries = queries * attention.scaling * attention.head_dim**0.5  # Granite's scores have a scale of their own
        wanted += [torch.tensor(naive(queries, keys, [head], before, SPANS)) for head in own]
    torch.testing.assert_close(found, torch.stack(wanted).mean(0), atol=1e-6, rtol=1e-5)
    assert float(found[:-1].std()) > 1e-3 and found[-1] == -1


@torch.no_grad()
def test_nothing_that_the_model_computes_changes(make_model, ids):
    window = {"local_window": "sliding", "window_tokens": 12, "sink_tokens": 3}
    model = make_model("llama_gqa", method="retrieval_heads", **window)
    assert torch.equal(model(ids).logits, make_model("llama_gqa", method="windowed", **window)(ids).logits)


@torch.no_grad()
def test_the_first_token_belongs_to_no_passage(make_model, ids):
    model = make_model("llama_gqa", method="retrieval_heads")
    memory = cacheformers.read(model, ids[:1, :40], progress=False)
    query = ids[1, 40:50].tolist()
    first, rest, whole = cacheformers.recall(model, memory, query, [(0, 1), (1, 40), (0, 40)]).tolist()
    assert first == 0 and rest == whole and 0 < whole < 1


@torch.no_grad()
def test_forgotten_tokens_are_not_found(make_model, ids):
    model = make_model("llama_gqa", method="retrieval_heads", cache_size=16)
    memory = cacheformers.read(model, ids[:1, :40], progress=False)
    query = ids[0, 20:24].tolist()
    gone, oldest, rest = cacheformers.recall(model, memory, query, [(0, 24), (24, 25), (25, 40)]).tolist()
    assert gone == -1 and oldest > 0 and oldest + rest == pytest.approx(1, abs=1e-6)


@torch.no_grad()
def test_what_a_token_is_said_to_retrieve(make_model, ids):
    """The keys that each query head scores highest, of all that was read before but the first token."""
    model = make_model("llama_gqa", method="retrieval_heads", heads={1: [1]}, topk=3)
    memory = cacheformers.read(model, ids[:2, :40], progress=False)
    asked = memory.with_window(11)
    model(ids[:2, 40:50], past_key_values=asked)
    (found,) = asked.state.retrieved().values()
    for row in range(2):
        queries, keys = (by_token(model, 1, part[row : row + 1]) for part in (ids[:2, 40:50], ids[:2, :40]))
        scores = torch.einsum("thd,nd->thn", queries[0].unflatten(1, (2, -1))[:, 1], keys[1][:, 1])
        scores[..., 0] = -torch.inf
        assert torch.equal(found[row].sort(-1).values, scores.topk(3).indices.flatten(1).sort(-1).values)


@torch.no_grad()
def test_fewer_tokens_than_are_retrieved(make_model, ids):
    model = make_model("llama_gqa", method="retrieval_heads", topk=4)
    asked = cacheformers.read(model, ids[:1, :3], progress=False).with_window(3)
    model(ids[1:2, :2], past_key_values=asked)
    (found,) = asked.state.retrieved().values()
    assert found.shape == (1, 2, 8) and {*found.flatten().tolist()} == {-1, 1, 2}


PARTS = (slice(0, 2), slice(2, 5))  # as a batch is read where segments close


def test_nothing_was_read(make_model, ids):
    model = make_model("llama_gqa", method="retrieval_heads")
    memory = cacheformers.new_memory(model, 1)
    assert cacheformers.recall(model, memory, ids[0, :6].tolist(), [(0, 0)]).tolist() == [-1.0]
    with torch.no_grad():
        model(input_ids=ids[:1, :6], past_key_values=memory, use_cache=True)
    assert all(bool((found == -1).all()) for found in memory.state.retrieved().values())


def test_the_loss_is_its_definition():
    """Against loops over tokens, heads and passages, in float64, with gradients; what is old is forgotten."""
    generator = torch.Generator().manual_seed(0)
    ring = Ring(3, 12, 2 * 4, None, torch.float64, torch.device("cpu"))
    keys = torch.randn(3, 20, 2, 4, generator=generator, dtype=torch.float64)
    read = [20, 20, 9]
    for row, count in enumerate(read):
        ring.append(row, keys[row, :count].flatten(1))
    queries = torch.randn(3, 5, 2, 3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    asking = torch.zeros(3, 8, dtype=torch.bool)
    asking[0, 1:4] = asking[1, :2] = asking[2, 4] = True
    # A passage is forgotten in part, the second row's is gone, and the third's begins with the first token.
    gold = Gold(asking, [[range(10, 13), range(6, 9)], [range(0, 3)], [range(0, 2)]])
    found = retrieval_loss(queries, ring, gold)

    losses = []
    for row, t, kept, passages in (
        *((0, t, range(8, 20), [[10, 11, 12], [8]]) for t in (1, 2, 3)),
        (2, 4, range(9), [[1]]),
    ):
        logs = []
        for passage in passages:
            for head in range(2):
                shares = []
                for query in queries[row, t, head]:
                    attention = torch.softmax(torch.stack([keys[row, i, head] @ query for i in kept]), 0)
                    shares.append(sum(attention[i - kept[0]] for i in passage))
                logs.append(torch.log(sum(shares) / 3))
        losses.append(-sum(logs) / len(logs))
    expected = sum(losses) / 6  # over all that ask, so that batches add up however they are divided
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    pieces = [retrieval_loss(queries[:, part], ring, gold, part.start) for part in PARTS]
    torch.testing.assert_close(sum(pieces), expected, rtol=1e-12, atol=1e-12)
    (one,), (other,) = torch.autograd.grad(found, queries), torch.autograd.grad(expected, queries)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert retrieval_loss(queries, ring, None) == 0


def test_questions_learn_to_find_a_passage(make_model, ids):
    """A few steps on one question; only the trained part has a gradient of it, and the base's output stays."""
    model = make_model("llama_gqa", method="retrieval_heads", retrieval_weight=0.5)
    document, query = ids[:1, :40], ids[1:2, 40:50]
    before = model(ids[:1, :12]).logits.detach()
    memory = cacheformers.read(model, document, progress=False)
    passages = [(20, 24), (1, 20), (24, 40)]
    start = cacheformers.recall(model, memory, query[0].tolist(), passages)
    assert float(start[0]) < 0.5
    trained = {name: weight for name, weight in model.named_parameters() if ".memory." in name}
    assert [tuple(weight.shape) for weight in trained.values()] == [(2 * 12, 32)]
    optimizer = torch.optim.Adam(trained.values(), lr=0.05)
    model.train()
    for _ in range(30):
        asked = memory.with_window(11)
        asked.state.gold = Gold(torch.ones_like(query, dtype=torch.bool), [[range(20, 24)]])
        model(query, past_key_values=asked, use_cache=True)
        loss = asked.state.loss
        optimizer.zero_grad()
        loss.backward()
        assert all(weight.grad is None for name, weight in model.named_parameters() if name not in trained)
        optimizer.step()
    memory = cacheformers.read(model.eval(), document, progress=False)
    found = cacheformers.recall(model, memory, query[0].tolist(), passages)
    assert float(found[0]) > 0.9 and float(loss.detach()) == pytest.approx(-0.5 * float(found[0].log()), abs=0.05)
    assert torch.equal(model(ids[:1, :12]).logits, before)


def asked_loss(model, ids):
    """The loss of a memory, of a question of two pieces about what each row read, in training."""
    memory = cacheformers.read(model, ids[:, :32], progress=False)
    asking = torch.ones(2, 24, dtype=torch.bool)
    asking[0, 5:9] = False
    memory.state.gold = Gold(asking, [[range(4, 8)], [range(20, 30), range(2, 3)]])
    model.train()(ids[:, 32:56], past_key_values=memory)
    return memory.state.loss


def test_the_loss_of_a_memory_is_its_weight_times_the_mean_of_the_layers(make_model, ids):
    def loss(heads, weight):
        model = make_model("llama_gqa", method="retrieval_heads", heads=heads, retrieval_weight=weight)
        return float(asked_loss(model, ids).detach())

    first, third = loss({0: [0, 1]}, 1.0), loss({2: [1]}, 1.0)
    assert min(first, third) > 0.1 and abs(first - third) > 1e-3
    assert loss({0: [0, 1], 2: [1]}, 0.5) == pytest.approx(0.5 * (first + third) / 2, rel=1e-6)


def test_learning_with_activation_checkpointing(make_model, ids):
    """The same loss and gradients, of what is trained alone, in every graph."""

    def gradients(checkpointing):
        model = make_model("llama_gqa", method="retrieval_heads", heads={0: [0], 2: [1]}, retrieval_weight=1.0)
        return loss_and_gradients(model, lambda: asked_loss(model, ids), checkpointing)

    (plain, wanted), (checkpointed, found) = gradients(False), gradients(True)
    assert plain == checkpointed and wanted.keys() == found.keys()
    assert len(wanted) == 2 and all(".memory." in name for name in wanted)
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0 and torch.equal(found[name], gradient)


def test_bytes_are_those_of_the_keys(make_model, ids):
    model = make_model("llama_gqa", torch.float32, method="retrieval_heads", heads={0: [0], 2: [0, 1]})
    state = cacheformers.read(model, ids[:1, :32], progress=False).state
    assert {layer: tuple(ring.keys.shape) for layer, ring in state.rings.items()} == {0: (1, 32, 12), 2: (1, 32, 24)}
    half = make_model("llama_gqa", torch.float32, method="retrieval_heads", cache_dtype="bfloat16")
    assert cacheformers.read(half, ids[:1, :32], progress=False).state.rings[1].keys.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": {3: [0]}}, "layers 0 to 2"),
        ({"heads": {}}, "at least one layer"),
        ({"heads": {1: []}}, "at least one of this base's key-value heads 0 to 1"),
        ({"heads": {1: [2]}}, "key-value heads 0 to 1, each once, got .2."),
        ({"heads": {1: [0, 0]}}, "each once"),
        ({"heads": [[1, 0]]}, "must be a map from layers"),
        ({"cache_size": 0}, "cache_size must be at least 1"),
        ({"topk": 0}, "topk must be at least 1"),
        ({"retrieval_weight": -1.0}, "retrieval_weight must be at least 0"),
        ({"cache_dtype": "int8"}, "cache_dtype must be one of"),
        ({"segment_tokens": 500}, "has 64"),
    ],
)
def test_errors_say_what_fits(make_model, options, message):
    with pytest.raises(ValueError, match=message):
        make_model("llama_gqa", method="retrieval_heads", **options)


def test_default_heads(make_base, config_factory):
    options = config_factory("retrieval_heads", heads=None).resolve(base_shape(make_base("llama_gqa").config))
    assert options.heads == ((1, (0, 1)),) and method_options("retrieval_heads")["heads"] == {1: [0]}
