"""CacheFormer in some layers alone, and with queries that learn to choose segments."""

import pytest
import torch
from attention_core import SHAPE, random_inputs, rotate
from memories import loss_and_gradients, projections
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import cacheformers
from cacheformers.methods.cacheformer.attention import attend
from cacheformers.methods.cacheformer.cacheformer import CacheFormerParts, Projected
from cacheformers.methods.cacheformer.memory import CacheFormerOnBaseOptions
from cacheformers.methods.cacheformer.naive import naive
from cacheformers.methods.cacheformer.representatives import REPRESENTATIVES, asking
from cacheformers.methods.cacheformer.state import CacheFormerState
from cacheformers.methods.cacheformer.supervision import retrieval_loss
from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap
from cacheformers.modeling.memory import Gold

FOUND = {"representatives": "mean", "long": False, "overlap": False, "selection": "prefix", "select_rows": 8}
SIZES = {"window_tokens": 8, "pool_tokens": 4, "pool_vectors": 2, "topk": 2, "neighbors": 1}
LEARNS = {"method": "cacheformer_on_base", **FOUND, **SIZES, "reading_retrieves": False, "retrieval_weight": 1.0}
TIME = 41


def options_for(**changes):
    shape = {"heads": SHAPE.heads, "kv_heads": SHAPE.kv_heads, "head_dim": SHAPE.head_dim}
    chosen = {"layers": (0,), **FOUND, **SIZES, "segment_tokens": TIME, **changes}
    return CacheFormerOnBaseOptions(base=SHAPE, **shape, **chosen)


def outputs_of(model, ids):
    """What self-attention of each layer gets and returns, `[rows, time, h]`."""
    found, handles = {}, []
    for layer, module in enumerate(attention_modules(find_decoder(unwrap(model)))):

        def keep(_, args, kwargs, output, layer=layer):
            found.setdefault(layer, []).append((kwargs["hidden_states"], output[0]))

        handles.append(module.register_forward_hook(keep, with_kwargs=True))
    model(ids)
    for handle in handles:
        handle.remove()
    return {layer: [torch.cat(side, 1) for side in zip(*pieces, strict=True)] for layer, pieces in found.items()}


@torch.no_grad()
def test_layers_without_a_cache_see_their_windows(make_model, ids):
    """The lowest layer retrieves as if all did, those above it attend as if none did, and keep no more."""
    model = make_model("llama_gqa", method="cacheformer_on_base", **SIZES, **FOUND, cache_layers=[0])
    all_layers = make_model("llama_gqa", method="cacheformer_on_base", **SIZES, **FOUND)
    here, there = outputs_of(model, ids), outputs_of(all_layers, ids)
    assert torch.equal(here[0][1], there[0][1]) and not torch.allclose(here[1][1], there[1][1], atol=1e-3)
    windows = make_model("llama_gqa", method="cacheformer_on_base", **SIZES, **FOUND, cache=False)
    for layer in (1, 2):
        module = attention_modules(find_decoder(unwrap(model)))[layer].memory
        q, k, v, mixed = projections(model, layer, ids)
        positions = torch.arange(ids.shape[1])[None].expand(2, -1)
        turn = find_decoder(unwrap(model)).rotary_emb(q, positions)
        turned = apply_rotary_pos_emb(q, k, *turn)
        for row in range(2):
            inputs = Projected(*turned, v, q, k).each(lambda tensor, row=row: tensor[row : row + 1])
            expected, _ = naive(module.options.of_layer(layer), module.active_parts, inputs, None)
            torch.testing.assert_close(mixed[row : row + 1], expected, atol=1e-5, rtol=1e-4)
    memory = cacheformers.read(model, ids, progress=False)
    sizes = [memory.state.layers[layer].nbytes for layer in range(3)]
    none = cacheformers.read(windows, ids, progress=False).state.layers[1].nbytes
    assert sizes[0] > 2 * sizes[1] and sizes[1] == sizes[2] == none
    assert set(memory.state.retrieved()) == {0}


@pytest.mark.parametrize("kind", REPRESENTATIVES)
def test_other_queries_choose_than_those_that_attend(kind):
    """As specified; what represents a segment is said by queries of attention. No gradient reaches the others."""
    options = options_for(representatives=kind)
    q, k, v, _ = random_inputs(1, TIME)
    looking = random_inputs(1, TIME, seed=1)[0].requires_grad_()
    positions = torch.arange(TIME)[None]
    inputs = Projected(rotate(q, positions), rotate(k, positions), v, q, k)
    expected, chosen = naive(options, CacheFormerParts(), inputs._replace(looking=looking), rotate)
    found = attend(options, CacheFormerParts(), inputs._replace(looking=looking), rotate)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert not found.requires_grad
    assert chosen != naive(options, CacheFormerParts(), inputs, rotate)[1]


@pytest.mark.parametrize("budget", [None, 16])
@pytest.mark.parametrize("kind", REPRESENTATIVES)
def test_the_loss_is_its_definition(kind, budget):
    """Against loops over tokens, heads and passages, in float64, with gradients; what is near or gone is left out."""
    options = options_for(representatives=kind, cache_tokens=budget, sink=budget is not None)
    rows, vectors = 3, options.pool_vectors
    state = CacheFormerState(options, rows, torch.float64)
    read, time = [32, 20, 32], 5
    q, k, v, _ = random_inputs(rows, 32 + time)
    real = torch.ones(rows, 32, dtype=torch.bool)
    real[1, 20:] = False
    positions = torch.arange(32 + time)[None].expand(rows, -1).clone()
    positions[1, 32:] -= 12
    turned = (rotate(q, positions), rotate(k, positions))
    inputs = Projected(*turned, v, q, k)
    with torch.no_grad():
        state.attend(CacheFormerParts(), inputs.each(lambda tensor: tensor[:, :, :32]), rotate, real)
        state.attend(CacheFormerParts(), inputs.each(lambda tensor: tensor[:, :, 32:]), rotate)
    looking = random_inputs(rows, time, seed=1)[0].requires_grad_()
    queries = asking(kind, looking) * 8**-0.5
    asks = torch.zeros(rows, 8, dtype=torch.bool)
    asks[0, 1:4] = asks[1, :2] = asks[2, 4] = True
    # The first row's second passage is in a window in part, the third row's whole.
    passages = [[range(10, 13), range(17, 30), range(0, 2)], [range(5, 6)], [range(25, 28)]]
    gold = Gold(asks, passages)
    found = retrieval_loss(queries, read, state, gold)

    losses = []
    for row, tokens in ((0, (1, 2, 3)), (1, (0, 1))):
        allowed = 24 // 4 if row == 0 else 8 // 4  # before the windows of token 32, and of token 20
        kept = list(range(allowed))
        if budget and row == 0:
            kept = [0, *range(allowed - 3, allowed)]  # four segments
        by_segment = state.shelves["long_keys"].whole[row, :, : vectors * len(kept)].unflatten(1, (-1, vectors))
        wanted = [{place // 4 for place in passage} & set(kept) for passage in passages[row]]
        for t in tokens:
            logs = []
            for segments in (segments for segments in wanted if segments):
                for kv_head in range(2):
                    shares = []
                    for query in queries[row, 2 * kv_head : 2 * kv_head + 2, t]:
                        scores = torch.stack([vector @ query for own in by_segment[kv_head] for vector in own])
                        chances = torch.softmax(scores, 0).unflatten(0, (-1, vectors)).sum(1)
                        shares.append(sum(chances[kept.index(segment)] for segment in segments))
                    logs.append(torch.log(sum(shares) / 2))
            losses.append(-sum(logs) / len(logs))
    expected = sum(losses) / 6
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    parts = (slice(2), slice(2, 5))
    pieces = [retrieval_loss(queries[:, :, part], read, state, gold, part.start or 0) for part in parts]
    torch.testing.assert_close(sum(pieces), expected, rtol=1e-12, atol=1e-12)
    (one,), (other,) = (torch.autograd.grad(loss, looking, retain_graph=True) for loss in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert retrieval_loss(queries, read, state, None) == 0


def asked_loss(model, ids):
    """The loss of a memory, of a question about what each row read, in training."""
    memory = cacheformers.read(model.eval(), ids[:, :48], progress=False)
    question = ids[:, 48:56]
    memory.state.gold = Gold(torch.ones_like(question, dtype=torch.bool), [[range(4, 8)], [range(20, 30)]])
    model.train()(question, past_key_values=memory)
    return memory.state.loss


def test_questions_learn_to_retrieve_a_passage(make_model, ids):
    """A few steps on one question; only the trained parts have a gradient of it, and windows stay as they were."""
    model = make_model("llama_gqa", **{**LEARNS, "topk": 1})
    before = model(ids[:1, :12]).logits.detach()
    trained = {name: weight for name, weight in model.named_parameters() if ".memory." in name}
    assert [tuple(weight.shape) for weight in trained.values()] == [(4 * 12, 32)] * 3
    optimizer = torch.optim.Adam(trained.values(), lr=0.1)
    start = float(asked_loss(model, ids).detach())
    for _ in range(60):
        loss = asked_loss(model, ids)
        optimizer.zero_grad()
        loss.backward()
        assert all(weight.grad is None for name, weight in model.named_parameters() if name not in trained)
        optimizer.step()
    assert float(loss.detach()) < 0.1 < start
    memory = cacheformers.read(model.eval(), ids[:, :48], progress=False)
    with torch.no_grad():
        model(ids[:, 48:56], past_key_values=memory)
    for found in memory.state.retrieved().values():
        assert bool((found[0] == 4).all()) and bool(((found[1] >= 20) & (found[1] < 30)).all())
    assert torch.equal(model(ids[:1, :12]).logits, before)


def test_the_loss_of_a_memory_is_its_weight_times_the_mean_of_the_layers(make_model, ids):
    def loss(layers, weight):
        return float(
            asked_loss(make_model("llama_gqa", **{**LEARNS, "cache_layers": layers, "retrieval_weight": weight}), ids)
        )

    # A layer's loss does not depend on what those above it do.
    first, both = loss([0], 1.0), loss([0, 1], 0.5)
    second = loss([0, 1], 1.0) * 2 - first
    assert min(first, second) > 0.1 and both == pytest.approx(0.5 * (first + second) / 2, rel=1e-6)
    off = make_model("llama_gqa", **LEARNS)
    memory = cacheformers.read(off, ids[:, :48], progress=False, cache_size=0)
    memory.state.gold = Gold(torch.ones(2, 8, dtype=torch.bool), [[range(4, 8)], [range(20, 30)]])
    off.train()(ids[:, 48:56], past_key_values=memory)
    assert memory.state.loss == 0


def test_learning_with_activation_checkpointing(make_model, ids):
    """The same loss and gradients, of what is trained alone, in every graph."""

    def gradients(checkpointing):
        model = make_model("llama_gqa", **{**LEARNS, "cache_layers": [0, 2]})
        return loss_and_gradients(model, lambda: asked_loss(model, ids), checkpointing)

    (plain, wanted), (checkpointed, found) = gradients(False), gradients(True)
    assert plain == checkpointed and wanted.keys() == found.keys()
    assert len(wanted) == 2 and all(".memory." in name for name in wanted)
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0 and torch.equal(found[name], gradient)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_layers": [0, 5]}, "layers 0 to 2"),
        ({"cache_layers": []}, "at least one layer"),
        ({"layers": [0, 1], "cache_layers": [2]}, r"cache_layers \[2\] names layers that have other attention"),
        ({"retrieval_weight": -1.0}, "retrieval_weight must be at least 0"),
        ({"retrieval_weight": 1.0, "selection": "paper_block"}, "leave retrieval_weight out"),
        ({"retrieval_weight": 1.0, "representatives": "compressed"}, "choose one of mean, tokens, bounds"),
    ],
)
def test_errors_say_what_fits(make_model, options, message):
    with pytest.raises(ValueError, match=message):
        make_model("llama_gqa", method="cacheformer_on_base", **{**SIZES, **FOUND, **options})
