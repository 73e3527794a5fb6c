"""Neurocache against its naive specification, with gradients, for every ablation of the paper."""

from dataclasses import replace

import pytest
import torch
from memories import chunked

import cacheformers
from cacheformers.methods.neurocache import neurocache
from cacheformers.methods.neurocache.hit_scores import Found, HitScores
from cacheformers.methods.neurocache.naive import naive
from cacheformers.methods.neurocache.neurocache import TEMPERATURE, in_few_lengths, retrieval_loss
from cacheformers.modeling.architectures import find_decoder
from cacheformers.modeling.memory import Gold
from cacheformers.modeling.search.store import Ring

ABLATIONS = {
    "paper": {},
    "k1": {"topk": 1},
    "k8": {"topk": 8},
    "all": {"topk": 40},
    "w1": {"neighborhood_size": 1},
    "w4": {"neighborhood_size": 4},
    "c1": {"context_size": 1},
    "c4": {"context_size": 4},
    "c longer than a segment": {"context_size": 20},
    "d=h": {"compression_factor": 1},
    "d=h/2": {"compression_factor": 2},
    "d=h/16": {"compression_factor": 16},
    "dot": {"similarity": "dot"},
    "no gate": {"gate": "none"},
    "one layer": {"attention_layers": [2]},
    "small store": {"cache_size": 7, "topk": 3},
    "store of a segment": {"cache_size": 16},
    "store larger than the text": {"cache_size": 1000},
    "segment of 5": {"segment_tokens": 5},
    "hit scores": {"hit_scores": True},
    "hit scores, w1, c1": {"hit_scores": True, "neighborhood_size": 1, "context_size": 1},
    "hit scores, w4, c4": {"hit_scores": True, "neighborhood_size": 4, "context_size": 4},
    "hit scores, d=h": {"hit_scores": True, "compression_factor": 1, "similarity": "dot"},
    "hit order": {"hit_scores": True, "hit_order": True, "neighborhood_size": 4, "context_size": 4},
    "hit scores, small store": {"hit_scores": True, "cache_size": 7, "topk": 3},
}


def observe(model, ids):
    """Run a document in one pass; returns every augmented layer's input x and the branch it added."""
    memories = [getattr(layer.self_attn, "memory", None) for layer in model.base_model.model.model.layers]
    seen = {layer: ([], []) for layer, memory in enumerate(memories) if memory is not None}
    methods = {layer: memories[layer].method for layer in seen}
    for layer, (inputs, outputs) in seen.items():

        def branch(*arguments, layer=layer, inputs=inputs, outputs=outputs):
            inputs.append(arguments[3])
            outputs.append(methods[layer].branch(*arguments))
            return outputs[-1]

        memories[layer].method = replace(methods[layer], branch=branch)
    model(ids)
    for layer, method in methods.items():
        memories[layer].method = method
    return {
        layer: (torch.cat(inputs, 1), None if outputs[0] is None else torch.cat(outputs, 1))
        for layer, (inputs, outputs) in seen.items()
    }


def expected_branch(model, observed, layer, row):
    attentions = [decoder_layer.self_attn for decoder_layer in model.base_model.model.model.layers]
    options = attentions[1].memory.adapter_options["default"]
    encoder, parts = attentions[1].memory.parts("default"), attentions[layer].memory.parts("default")
    return naive(options, encoder, parts, observed[1][0][row].detach(), observed[layer][0][row].detach())


@torch.no_grad()
@pytest.mark.parametrize(
    ("base", "ablation"), [("llama_mha", "paper"), *(("llama_gqa", ablation) for ablation in ABLATIONS)]
)
def test_equals_the_specification(make_model, ids, base, ablation):
    model = make_model(base, **ABLATIONS[ablation])
    observed = observe(model, ids)
    for layer in (1, 2):
        if observed.get(layer, (None, None))[1] is None:
            continue
        for row in range(2):
            expected = expected_branch(model, observed, layer, row)
            assert float((observed[layer][1][row] - expected).abs().max()) < 1e-10
            assert float(expected.abs().max()) > 1e-4
            first = model.base_model.model.model.layers[1].self_attn.memory.options.segment_tokens
            assert torch.count_nonzero(observed[layer][1][row, :first]) == 0, "nothing read: exactly 0"


@pytest.mark.parametrize(
    "ablation",
    [
        *("paper", "w4", "c4", "d=h", "d=h/2", "small store", "dot", "no gate"),
        *("hit scores", pytest.param("hit scores, w4, c4", marks=pytest.mark.slow), "hit scores, d=h", "hit order"),
    ],
)
def test_gradients_equal_the_specifications(make_model, ids, ablation):
    """Gradients of every part, W_p and its norm included, for the branch of each layer."""
    model = make_model("llama_gqa", **ABLATIONS[ablation]).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    memories = {name: p for name, p in model.named_parameters() if "lora_mem_" in name}
    direction = torch.randn(2, 75, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    for layer in (1, 2):
        observed = observe(model, ids)
        fast = torch.autograd.grad((observed[layer][1] * direction).sum(), list(memories.values()), allow_unused=True)
        slow_total = sum((expected_branch(model, observed, layer, row) * direction[row]).sum() for row in range(2))
        slow = torch.autograd.grad(slow_total, list(memories.values()), allow_unused=True)
        touched = 0
        for name, left, right in zip(memories, fast, slow, strict=True):
            if right is None:
                continue
            # The fast branch also passes gradient to lower layers through x; only this layer's own parts compare.
            if f"layers.{layer}." not in name and "lora_mem_down" not in name and "lora_mem_norm" not in name:
                continue
            if layer == 2 and ("lora_mem_down" in name or "lora_mem_norm" in name):
                continue
            touched += 1
            assert float((left - right).norm()) <= 1e-9 * float(right.norm() + 1e-12), name
        assert touched >= 4


@pytest.mark.parametrize("ablation", ["paper", "d=h", "hit scores", "hit scores, d=h", "hit order", "d=h/2"])
def test_gradients_of_the_inputs_equal_the_specifications(make_model, ids, ablation):
    """Gradient reaches the states of a segment through their queries of cache attention, never through the store."""
    model = make_model("llama_gqa", attention_layers=[1], **ABLATIONS[ablation]).train().requires_grad_(True)
    attention = model.base_model.model.model.layers[1].self_attn
    states = []
    handle = attention.register_forward_pre_hook(
        lambda module, args, kwargs: states.append(kwargs["hidden_states"]), with_kwargs=True
    )
    observed = observe(model, ids)
    handle.remove()
    added = observed[1][1]
    direction = torch.randn(added.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    fast = torch.autograd.grad((added * direction).sum(), states, allow_unused=True, materialize_grads=True)

    options, parts = attention.memory.adapter_options["default"], attention.memory.parts("default")
    for row in range(2):
        hidden = observed[1][0][row].detach().requires_grad_()
        expected = naive(options, parts, parts, hidden.detach(), hidden)
        (slow,) = torch.autograd.grad((expected * direction[row]).sum(), hidden)
        assert float(slow[16:].norm(dim=-1).min()) > 0
        assert float((torch.cat(fast, 1)[row] - slow).norm()) <= 1e-9 * float(slow.norm())


@pytest.mark.parametrize(("length", "dtype"), [(16, torch.float32), (11, torch.float64)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hit_scores": True},
        {"hit_scores": True, "hit_order": True},
        {"compression_factor": 1},
        {"compression_factor": 1, "hit_scores": True},
        {"compression_factor": 1, "hit_scores": True, "local_window": "sliding", "window_tokens": 12},
        {"compatibility": "reference"},
        {"compression_factor": 1, "compatibility": "reference"},
        {"compression_factor": 1, "compatibility": "reference-fixed-heads"},
    ],
    ids=str,
)
def test_what_is_stored_holds_no_graph(make_model, ids, options, length, dtype):
    """A backward after each forward, inside a segment too, gives what one backward at the end gives."""

    def gradients(at_once):
        model = make_model("llama_gqa", dtype, **options).train().requires_grad_(True)
        memory, losses = None, []
        for part in ids[:, : 5 * length].split(length, 1):
            output = model(part, past_key_values=memory, labels=part)
            memory = output.past_key_values
            assert not any(tensor.requires_grad for tensor in memory.state_dict().values())
            losses.append(output.loss)
            if not at_once:
                output.loss.backward()
        if at_once:
            sum(losses).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    alone, together = gradients(at_once=False), gradients(at_once=True)
    assert alone.keys() == together.keys()
    for name, gradient in together.items():
        bound = 1e-10 if dtype == torch.float64 else 1e-4
        assert float((alone[name] - gradient).norm()) <= bound * float(gradient.norm() + 1e-6), name


@torch.no_grad()
@pytest.mark.parametrize("ablation", ["paper", "hit scores", "hit scores, w4, c4", "hit order"])
def test_new_tokens_one_by_one_are_one_pass(make_model, ids, ablation):
    """A new token alone attends in another way, with other numbers for what each token before it retrieved."""
    model = make_model("llama_gqa", **ABLATIONS[ablation])
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_mem_scores" in name:
            parameter.add_(torch.randn_like(parameter))
    torch.testing.assert_close(chunked(model, ids, 1)[0], model(input_ids=ids).logits, rtol=0, atol=1e-9)


def test_what_hit_scores_start_from():
    """Of what a perfect hit brings along, the entry that follows it scores most; nothing scores more still."""
    perfect = Found(torch.ones(1, 1), torch.zeros(1, 1))
    for window, following in ((2, 1), (4, 2)):
        scores = HitScores(heads=3, context=2, neighborhood=window)
        near, far = scores([perfect, perfect])[0, 0].split(window)
        nothing = scores.score_of_nothing()[0]
        assert near.argmax() == following and float(near[following]) == pytest.approx(18.8)
        others = torch.cat([near[:following], near[following + 1 :], far])
        assert torch.allclose(others, torch.tensor(12.4)) and float(nothing) == 22
    assert HitScores(heads=3, context=1, neighborhood=1)([perfect]).shape == (1, 3, 1)


@torch.no_grad()
def test_several_retrieval_layers(make_model, ids):
    """Each attention layer reads what the last retrieval layer at or below it found."""
    model = make_model("llama_gqa", base={"num_hidden_layers": 4}, retrieval_map={1: 1, 2: 3})
    logits, memory = chunked(model, ids, 7)
    assert torch.allclose(logits, model(ids).logits, atol=1e-10)
    assert sorted(memory.state.rings) == [1, 3]


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_store_of_few_bits(make_model, ids, dtype):
    model = make_model("llama_gqa", torch.float32, cache_dtype=dtype)
    logits, memory = chunked(model, ids, 7)
    assert memory.state.rings[1].keys.dtype == getattr(torch, dtype)
    exact = make_model("llama_gqa", torch.float32)(ids).logits
    assert 0 < float((logits - exact).abs().mean()) < 0.02


def test_int8_is_for_reading(make_model, ids):
    model = make_model("llama_gqa", torch.float32, cache_dtype="int8")
    with pytest.raises(ValueError, match=r"in int8 cannot be trained.*another cache_dtype.*model.eval\(\)"):
        model.train()(ids, labels=ids)
    trained = make_model("llama_gqa", torch.float32)
    memory = cacheformers.read(trained, ids, progress=False)
    model.eval()(ids[:, :5], past_key_values=memory)  # models that differ in it may share a memory
    with pytest.raises(ValueError, match="compatibility modes .* has no int8"):
        make_model("llama_gqa", torch.float32, cache_dtype="int8", compatibility="reference")


@pytest.mark.parametrize("ablation", ["paper", "hit scores"])
def test_repeated_entries_change_neither_loss_nor_gradients(make_model, ids, ablation, monkeypatch):
    model = make_model("llama_gqa", **ABLATIONS[ablation]).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found, lengths = [], []
    for choose in (in_few_lengths, torch.clone):

        def chosen(numbers, choose=choose):
            lengths.append(len(choose(numbers)))
            return choose(numbers)

        monkeypatch.setattr(neurocache, "in_few_lengths", chosen)
        torch.manual_seed(0)  # of dropout
        loss = model(ids, labels=ids).loss
        found.append((loss.detach(), *torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)))
    half = len(lengths) // 2
    assert lengths[:half] != lengths[half:], "nothing was repeated"
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_what_is_encoded_again_has_few_lengths():
    kept = [in_few_lengths(torch.arange(length)) for length in range(2048, 8193)]
    assert len(set(map(len, kept))) == 17
    for length, numbers in enumerate(kept, 2048):
        assert len(numbers) < length * 9 / 8
        assert torch.equal(numbers[:length], torch.arange(length)) and (numbers[length:] == length - 1).all()


PARTS = (slice(0, 2), slice(2, 5))  # as a batch is read where segments close


def test_retrieval_loss_is_its_definition(make_model):
    """Against loops over tokens and entries, in float64, with gradients; what is old is forgotten."""
    model = make_model("llama_gqa", retrieval_weight=1.0)
    memory = next(part for part in find_decoder(model.base_model.model).layers if hasattr(part.self_attn, "memory"))
    layer = memory.self_attn.memory
    options, encoder = layer.options, layer.parts("default") if callable(layer.parts) else layer.parts
    generator = torch.Generator().manual_seed(0)
    ring = Ring(2, 12, options.width, options.base.hidden_size, torch.float64, torch.device("cpu"))
    states = torch.randn(2, 20, options.base.hidden_size, generator=generator, dtype=torch.float64)
    for row in range(2):
        ring.append(row, encoder.encode(states[row]).detach(), states[row])
    hidden = torch.randn(2, 5, options.base.hidden_size, generator=generator, dtype=torch.float64)
    asking = torch.zeros(2, 8, dtype=torch.bool)
    asking[0, 1:4] = asking[1, :2] = True
    gold = Gold(asking, [[range(10, 13)], [range(0, 3)]])  # the second row has forgotten its passage
    found = retrieval_loss(options, ring, encoder, hidden, gold)

    losses = []
    for t in range(1, 4):
        query = encoder.encode(hidden[0, t])
        scores = [
            -(query - encoder.encode(states[0, i])).square().sum() / (2 * options.width * TEMPERATURE)
            for i in range(8, 20)
        ]
        chances = torch.softmax(torch.stack(scores), 0)
        losses.append(-torch.log(chances[2:5].sum()))
    expected = torch.stack(losses).sum() / 5  # over all that ask, so that batches add up however they are divided
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    pieces = [retrieval_loss(options, ring, encoder, hidden[:, part], gold, part.start) for part in PARTS]
    torch.testing.assert_close(sum(pieces), expected, rtol=1e-9, atol=1e-9)
    trained = [encoder.down.weight, encoder.norm.weight, encoder.norm.bias]
    for one, other in zip(torch.autograd.grad(found, trained), torch.autograd.grad(expected, trained), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
