"""CacheFormer on pretrained layers: its specification with gradients, what a layer really sees, and what is refused."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from attention_core import SHAPE, random_inputs, rotate, run_pieces
from conftest import adapter_config
from memories import chunked, projections
from peft import get_peft_model

import cacheformers
from cacheformers.hub.card import refresh_card
from cacheformers.methods.cacheformer import memory as cacheformer_memory
from cacheformers.methods.cacheformer import tiles as cacheformer_tiles
from cacheformers.methods.cacheformer.cacheformer import CacheFormerParts, Projected, make_parts
from cacheformers.methods.cacheformer.memory import CacheFormerOnBaseOptions, attend
from cacheformers.methods.cacheformer.naive import naive
from cacheformers.methods.cacheformer.representatives import REPRESENTATIVES
from cacheformers.methods.cacheformer.tiles import Run
from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap
from cacheformers.modeling.rotary import rotation

DEVICES = {0: torch.device("cpu")}
TIME = 41
CHUNKS = [[41], [1] * 41, [9, 1, 17, 3, 11]]
SIZES = {"window_tokens": 8, "pool_tokens": 4, "pool_vectors": 2, "topk": 2, "neighbors": 2, "segment_tokens": 6}
MEANS = {"representatives": "mean", "long": False, "overlap": False}
WHOLE = {"segment_tokens": TIME, "sink": True, "topk": 3, "neighbors": 1}
JOINED = {
    "packed, of blocks": {**MEANS, **WHOLE, "packed": True, "select_rows": 2},
    "tokens so far, of blocks": {**MEANS, **WHOLE, "packed": True, "selection": "prefix", "select_rows": 4},
    "budget, of blocks": {**MEANS, **WHOLE, "cache_tokens": 16, "far_distance": 5, "select_rows": 2},
    "8 bits, of blocks": {**WHOLE, "cache_int8": True, "magnitude": "mean", "select_rows": 2},
    "not far, of windows": {**MEANS, **WHOLE, "far_distance": 5, "window_tokens": 4, "select_rows": 2},
    "gated, of windows": {**WHOLE, "aggregation": "gated", "window_tokens": 4},
    "compressed alone, of windows": {**WHOLE, "cache": False, "window_tokens": 4},
}
CHOICES = {
    **JOINED,
    "default": {},
    "each token": {"selection": "token", "overlap": False},
    "so far": {"selection": "prefix", "select_rows": 5, "aggregation": "separate"},
    "gated": {"aggregation": "gated", "magnitude": "mean", "sink": True},
    "normed": {"global_norm": True, "shared_projection": False, "neighbors": 3},
    "means": {**MEANS, "selection": "prefix", "sink": True},
    "means of each token": {**MEANS, "selection": "token", "topk": 3},
    "means not far": {**MEANS, "far_distance": 5, "neighbors": 2},
    "means not far so far": {**MEANS, "far_distance": 5, "selection": "prefix", "topk": 1, "aggregation": "separate"},
    "means not far of each token": {**MEANS, "far_distance": 4, "selection": "token", "topk": 1},
    "tokens": {**MEANS, "representatives": "tokens", "pool_vectors": 3, "sink": True},
    "tokens of each token, not far": {
        **{**MEANS, "representatives": "tokens", "selection": "token"},
        **{"far_distance": 5, "topk": 1},
    },
    "packed": {**MEANS, "packed": True, "topk": 3, "select_rows": 3},
    "packed for each token": {**MEANS, "packed": True, "selection": "prefix", "neighbors": 1, "topk": 3},
    "bounds": {**MEANS, "representatives": "bounds", "topk": 3},
    "bounds so far": {**MEANS, "representatives": "bounds", "selection": "prefix", "select_rows": 3, "topk": 1},
    "budget": {"cache_tokens": 16, "sink": True},
    "budget of means": {**MEANS, "cache_tokens": 16, "sink": True, "select_rows": 3, "far_distance": 5},
    "budget of tokens, so far": {
        **{**MEANS, "representatives": "tokens", "selection": "prefix"},
        **{"cache_tokens": 9, "neighbors": 1, "select_rows": 3},
    },
    "budget of bounds of each token": {
        **{**MEANS, "representatives": "bounds", "selection": "token"},
        **{"cache_tokens": 9, "neighbors": 1, "sink": True, "packed": True},
    },
    "8 bits": {"cache_int8": True, "aggregation": "gated"},
    "8 bits of a budget of means": {
        **{**MEANS, "cache_int8": True, "selection": "prefix"},
        **{"cache_tokens": 16, "sink": True, "far_distance": 5},
    },
    "no long": {"long": False, "pool_tokens": 2, "select_rows": 3},
    "compressed alone": {"cache": False},
    "window alone": {"cache": False, "overlap": False, "long": False},
}


@pytest.fixture(params=CHOICES)
def options(request):
    return options_for(**CHOICES[request.param])


def rotation_of(decoder, layer):
    """Turns keys of one layer; None for a base without rotary positions."""
    rotate = rotation(decoder)
    return None if rotate is None else partial(rotate, layer=layer)


def options_for(**changes):
    shape = {"heads": SHAPE.heads, "kv_heads": SHAPE.kv_heads, "head_dim": SHAPE.head_dim}
    return CacheFormerOnBaseOptions(base=SHAPE, layers=(0,), **shape, **{**SIZES, **changes})


def parts_for(options):
    """None of them neutral."""
    torch.manual_seed(3)
    modules = make_parts(options)
    for module in modules.values():
        for parameter in module.double().parameters():
            parameter.data += 0.5 * torch.randn_like(parameter)
    return CacheFormerParts(**modules)


def project(q, k, v, positions=None):
    if positions is None:
        positions = torch.arange(q.shape[2])[None]
    return Projected(rotate(q, positions), rotate(k, positions), v, q, k)


def specified(options, parts, q, k, v, text=0):
    """`[rows, time, heads, d]`, each row a document."""
    rows = [[tensor[row : row + 1] for tensor in (q, k, v)] for row in range(len(q))]
    rows = [naive(options, parts, project(*row), rotate, text)[0] for row in rows]
    return torch.cat(rows).transpose(1, 2)


def stream(options, parts, inputs, reading=False, memory=None, **more):
    """Through a memory, piece by piece; `reading` as while read() reads."""

    def layer(call, q, k, v, _):
        call.rotate = lambda keys, shift, layer: rotate(keys, shift)
        call.local.update(k, v, 1)  # as a layer without the method does
        return attend(options, 0, parts, project(q, k, v, call.positions[:, -q.shape[2] :]), call)

    state = options.new_state(len(inputs[0]), DEVICES, inputs[0].dtype) if memory is None else memory.state
    state.reading = reading
    return run_pieces(state, options.window, layer, (*inputs, inputs[0][:, 0]), memory=memory, **more)


def some_inputs(rows, time=TIME):
    return [1.5 * tensor for tensor in random_inputs(rows, time)[:3]]


def trained(parts):
    return [parameter for module in parts if module is not None for parameter in module.parameters()]


def gradients(output, wanted):
    direction = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(5))
    found = torch.autograd.grad((output * direction).sum(), wanted, allow_unused=True)
    return [torch.zeros(()) if gradient is None else gradient for gradient in found]


def same(left, right, bound=1e-10):
    return float((left - right).detach().abs().max()) <= bound * max(float(right.detach().abs().max()), 1.0)


# The specification


@pytest.mark.parametrize("name", JOINED)
def test_tiles_of_whole_blocks_or_windows(name):
    """Most tokens are in such tiles, so that the tests below are about them."""
    options = options_for(**JOINED[name])
    period = options.window_tokens if "windows" in name else options.block_rows
    tiles = Run(options, (0,), TIME, 1.0).cut(TIME)
    assert [begin for begin, _ in tiles] + [TIME] == [0] + [end for _, end in tiles]
    assert sum(end - begin for begin, end in tiles if end - begin > period) > TIME / 2


@torch.no_grad()
def test_as_on_a_gpu(options, monkeypatch):
    """There no fused attention gives the log-sum-exp of scores: another path, the same outputs."""
    parts, inputs = parts_for(options), some_inputs(2)
    fused = stream(options, parts, inputs, chunks=CHUNKS[0])[0]
    monkeypatch.setattr(cacheformer_tiles, "FUSED_ON", ())
    found = stream(options, parts, inputs, chunks=CHUNKS[0])[0]
    assert same(found, specified(options, parts, *inputs), 1e-12) and same(found, fused, 1e-12)


def test_pieces_equal_the_specification(options):
    """Gradients too: those of one forward reach through every piece of it."""
    parts, inputs = parts_for(options), [tensor.requires_grad_() for tensor in some_inputs(2)]
    wanted = [*inputs, *trained(parts)]
    expected = specified(options, parts, *inputs)
    slopes = gradients(expected, wanted)
    for chunks in CHUNKS:
        found, memory = stream(options, parts, inputs, chunks=chunks)
        assert same(found, expected, 1e-12)
        for ours, theirs in zip(gradients(found, wanted), slopes, strict=True):
            assert same(ours, theirs)
        with torch.no_grad():
            assert same(stream(options, parts, inputs, chunks=chunks)[0], expected, 1e-12)
        assert memory.tokens_read == [TIME] * 2


def test_padding_is_as_if_it_were_not_there(options):
    """Rows of different lengths, so that windows, segments and blocks end elsewhere in each; gradients too."""
    parts, lengths = parts_for(options), [36, 23, 3]
    inputs = [tensor.requires_grad_() for tensor in some_inputs(3)]
    real = torch.zeros(3, TIME, dtype=torch.bool)
    for row, (start, length) in enumerate(zip((5, 0, 38), lengths, strict=True)):  # padded left, right, and left
        real[row, start : start + length] = True
    wanted = [*inputs, *trained(parts)]
    rows = [[tensor[row : row + 1, :, real[row]] for tensor in inputs] for row in range(3)]
    expected = torch.cat([specified(options, parts, *row)[0] for row in rows])
    slopes = gradients(expected, wanted)
    for chunks in CHUNKS:
        found, memory = stream(options, parts, inputs, real=real, chunks=chunks)
        assert same(found[real], expected, 1e-12) and not found[~real].any()
        for ours, theirs in zip(gradients(found[real], wanted), slopes, strict=True):
            assert same(ours, theirs)
        with torch.no_grad():
            assert same(stream(options, parts, inputs, real=real, chunks=chunks)[0][real], expected, 1e-12)
        assert memory.tokens_read == lengths


@pytest.mark.parametrize("name", [name for name, changes in CHOICES.items() if changes.get("cache", True)])
def test_a_text_may_be_read_without_retrieval(name):
    """Windows and the first segment, then questions that make their own choice; gradients too, and padded rows."""
    text = 24 if name in JOINED else 27  # whole windows, or not
    options = options_for(**CHOICES[name], reading_retrieves=False)
    parts, inputs = parts_for(options), [tensor.requires_grad_() for tensor in some_inputs(2)]
    begin, end = ([tensor[:, :, part] for tensor in inputs] for part in (slice(text), slice(text, None)))
    expected = specified(options, parts, *inputs, text)
    slopes = gradients(expected[:, text:], inputs)
    assert not same(expected, specified(options, parts, *inputs))
    for first, then in (([text], [TIME - text]), ([9, text - 9], [1] * (TIME - text)), ([1] * text, [TIME - text])):
        read, memory = stream(options, parts, begin, reading=True, chunks=first)
        asked, memory = stream(options, parts, end, memory=memory, chunks=then)
        assert same(torch.cat([read, asked], 1), expected, 1e-12)
        for ours, theirs in zip(gradients(asked, inputs), slopes, strict=True):
            assert same(ours, theirs)
        if not options.sink:
            assert not stream(options, parts, begin, reading=True)[1].state.retrieved()
    real = torch.arange(text + 3) >= torch.tensor([[3], [0]])  # the second row's text is longer
    padded = [F.pad(tensor[:, :, : text + 3], (0, 0, 3, 0))[:, :, : text + 3] for tensor in inputs]
    padded = [torch.stack([early[0], tensor[1, :, : text + 3]]) for early, tensor in zip(padded, inputs, strict=True)]
    with torch.no_grad():
        _, memory = stream(options, parts, padded, reading=True, real=real)
        rest = [torch.stack([t[0, :, text : TIME - 3], t[1, :, text + 3 :]]) for t in inputs]
        asked, _ = stream(options, parts, rest, memory=memory)
    assert same(asked[:1], expected[:1, text : TIME - 3], 1e-12)
    assert same(
        asked[1:], specified(options, parts, *(tensor[1:] for tensor in inputs), text + 3)[:, text + 3 :], 1e-12
    )


@pytest.mark.parametrize("choice", [name for name, changes in CHOICES.items() if changes.get("cache", True)])
def test_what_each_token_retrieves_is_told(choice):
    """As first tokens of segments, -1 for none and for padding."""
    options = options_for(**{**CHOICES[choice], "segment_tokens": TIME})
    parts, inputs, lengths = parts_for(options), some_inputs(2), [TIME, 30]
    real = torch.arange(TIME) >= torch.tensor([[0], [TIME - 30]])
    _, memory = stream(options, parts, inputs, real=real)
    _, later = stream(options, parts, inputs, real=real, chunks=[TIME - 5, 5])
    assert memory.state.retrieves and memory.state.retrieved_tokens == options.pool_tokens
    assert torch.equal(later.state.retrieved()[0], memory.state.retrieved()[0][:, -5:])
    anything = False
    for row, length in enumerate(lengths):
        told = memory.state.retrieved()[0][row].unflatten(1, (options.kv_heads, -1))
        assert bool((told[: TIME - length] == -1).all())
        one = (tensor[row : row + 1, :, TIME - length :] for tensor in inputs)
        for head, chosen in enumerate(naive(options, parts, project(*one), rotate)[1]):
            for token, segments in enumerate(chosen):
                found = told[TIME - length + token, head]
                assert found[found >= 0].tolist() == [s * options.pool_tokens for s in sorted(segments) if s >= 0]
                anything |= bool(len(found[found >= 0]))
    assert anything
    before = memory.state.retrieved()[0]
    memory.select([1, 0, 1])
    assert torch.equal(memory.state.retrieved()[0], before[[1, 0, 1]])
    assert not options_for(cache=False).new_state(1, DEVICES, torch.float32).retrieves


@torch.no_grad()
@pytest.mark.parametrize("kind", REPRESENTATIVES)
def test_a_block_may_ask_for_what_leaves_its_window(kind):
    """Tokens 12 to 15 ask for tokens 4 to 7, which they still have in their window and tokens 16 to 19 have not."""
    options = options_for(**MEANS | {"representatives": kind, "select_rows": 4, "topk": 1, "neighbors": 1})
    parts, (q, k, v) = parts_for(options), some_inputs(1, 20)
    k[:, :, 4:8, 0], q[..., 12:16, 0] = 9.0, 9.0
    assert all(head[16] == [1] for head in naive(options, parts, project(q, k, v), rotate)[1])
    for chunks in ([20], [1] * 20, [14, 6]):
        _, memory = stream(options, parts, (q, k, v), chunks=chunks)
        assert memory.state.retrieved()[0][0, -1].tolist() == [4] * options.kv_heads


def test_what_is_read_later_does_not_disturb_a_graph():
    """A backward after the memory went on without gradients, was copied, reset and moved."""
    options = options_for()
    parts, inputs = parts_for(options), [tensor.requires_grad_() for tensor in some_inputs(3)]
    real = torch.arange(TIME) < torch.tensor([[41], [30], [19]])
    expected = gradients(stream(options, parts, inputs, real=real)[0], inputs)
    found, memory = stream(options, parts, inputs, real=real)
    memory.detach()
    with torch.no_grad():
        for twin in (memory, memory.clone()):
            stream(options, parts, some_inputs(3, 13), memory=twin)
            twin.select([2, 0, 0])
            twin.reset([1])
            stream(options, parts, some_inputs(3, 13), memory=twin)
    for ours, theirs in zip(gradients(found, inputs), expected, strict=True):
        assert torch.equal(ours, theirs)


# Through a model


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


@torch.no_grad()
@pytest.mark.parametrize("base", ["llama_gqa", "llama_gqa yarn", "mistral_full", "opt_long", "qwen3", "phi"])
def test_a_layer_attends_as_specified(make_model, ids, base):
    """Keys are compressed unrotated, then turned by the model's own rotation, whatever part of a head it turns; OPT's
    queries come scaled. Only rotary angles are float32."""
    name, _, scaled = base.partition(" ")
    changes = {"base": {"rope_parameters": YARN}} if scaled else {}
    model = make_model(name, method="cacheformer_on_base", segment_tokens=128, **changes)
    decoder = find_decoder(unwrap(model))
    q, k, v, mixed = projections(model, 1, ids)
    turn, memory = rotation_of(decoder, 1), attention_modules(decoder)[1].memory
    positions = torch.arange(75)[None].expand(2, -1)
    factor = getattr(decoder.rotary_emb, "attention_scaling", 1.0) if turn is not None else 1.0
    assert (factor > 1.1) == bool(scaled)
    q, k = q * factor, k * factor
    turned = (q, k) if turn is None else (turn(q, positions), turn(k, positions))
    for row in range(2):
        inputs = Projected(*turned, v, q, k).each(lambda tensor, row=row: tensor[row : row + 1])
        expected, _ = naive(memory.options, memory.active_parts, inputs, turn)
        assert same(mixed[row : row + 1], expected, 1e-5)


LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}


@torch.no_grad()
@pytest.mark.parametrize("kind", REPRESENTATIVES)
@pytest.mark.parametrize(
    ("base", "rope"),
    [("llama_gqa", YARN), ("llama_gqa", LINEAR), ("llama_gqa", LLAMA3), ("qwen3", None), ("phi", None)],
    ids=["yarn", "linear", "llama3", "qwen3", "partial"],
)
def test_a_layer_retrieves_and_moves_as_specified(make_model, ids, base, rope, kind):
    """Beyond the 64 positions of the base, by its own rotation, however it is scaled."""
    changes = {} if rope is None else {"base": {"rope_parameters": rope}}
    where = {"packed": True} if kind == "bounds" else {"far_distance": 8}
    chosen = {**MEANS, "representatives": kind, "selection": "prefix", **where}
    model = make_model(base, method="cacheformer_on_base", segment_tokens=128, **chosen, **changes)
    decoder = find_decoder(unwrap(model))
    q, k, v, mixed = projections(model, 1, ids)
    turn, memory = rotation_of(decoder, 1), attention_modules(decoder)[1].memory
    positions = torch.arange(75)[None].expand(2, -1)
    factor = getattr(decoder.rotary_emb, "attention_scaling", 1.0)
    assert (factor > 1.1) == (rope is YARN)
    for row in range(2):
        turned = (turn(q * factor, positions), turn(k * factor, positions))
        inputs = Projected(*turned, v, q, k * factor).each(lambda tensor, row=row: tensor[row : row + 1])
        expected, lists = naive(memory.options, memory.active_parts, inputs, turn)
        assert same(mixed[row : row + 1], expected, 1e-5)
        assert lists[0][-1][0] >= 0


@torch.no_grad()
@pytest.mark.parametrize("base", ["llama_gqa", "opt_long", "qwen3", "phi"])
def test_short_texts_are_the_base(make_base, ids, base):
    """Of at most two windows, in batches with padding too, whatever the parts hold; longer ones are not."""
    mask = torch.ones_like(ids[:, :30])
    mask[0, :14], mask[1, 9:] = 0, 0
    plain = make_base(base)
    expected = plain(ids[:, :30], attention_mask=mask).logits, plain(ids[:, :17]).logits
    model = get_peft_model(plain, adapter_config("cacheformer_on_base")).eval()
    for name, parameter in model.named_parameters():
        if "lora_mem_" in name:
            parameter.normal_()
    assert same(model(ids[:, :30], attention_mask=mask).logits[mask.bool()], expected[0][mask.bool()], 1e-5)
    difference = (model(ids[:, :17]).logits - expected[1]).abs().amax((0, 2))
    assert float(difference[:16].max()) < 1e-9 < 1e-4 < float(difference[16])


@torch.no_grad()
@pytest.mark.parametrize("base", ["llama_gqa", "mistral", "opt_long", "qwen2"])
def test_some_layers(make_model, ids, base):
    """The others see what the base's own layers see, and their keys are held once."""
    model = make_model(base, method="cacheformer_on_base", layers=[0, 2])
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    logits, memory = chunked(model, ids, 7, mask)
    assert same(logits[mask.bool()], model(ids, attention_mask=mask).logits[mask.bool()], 1e-9)
    assert set(memory.local) == {1} and memory.local[1][0].shape[2] == 75
    assert set(memory.state.layers) == {0, 2} and memory.tokens_read == [75, 62]
    names = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert names and not any("layers.1." in name for name in names)


# The published rule


@torch.no_grad()
def test_the_papers_rule_takes_whole_documents(make_base, ids):
    with pytest.warns(UserWarning, match="depend on tokens after it"):
        model = get_peft_model(
            make_base("llama_gqa"), adapter_config("cacheformer_on_base", selection="paper_block")
        ).eval()
    q, k, v, mixed = projections(model, 1, ids[:1])
    decoder = find_decoder(unwrap(model))
    turn, memory = rotation_of(decoder, 1), attention_modules(decoder)[1].memory
    positions = torch.arange(75)[None]
    expected, _ = naive(
        memory.options, memory.active_parts, Projected(turn(q, positions), turn(k, positions), v, q, k), turn
    )
    assert same(mixed, expected, 1e-5)
    for arguments in ({}, {"use_cache": False}, {"use_cache": False, "num_beams": 2}):
        with pytest.raises(ValueError, match="cannot generate"):
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, **arguments)
    one = model(ids[:1], use_cache=False, logits_to_keep=1).logits  # what is not generated may be looked at
    assert one.shape[1] == 1
    for read in (ids, ids[:, :8]):
        with pytest.raises(ValueError, match="nor read into a memory"):
            cacheformers.read(model, read, progress=False)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match="no padding"):
        model(ids, attention_mask=mask)


@pytest.mark.filterwarnings("ignore:selection")
def test_the_papers_rule_can_be_trained(make_model, ids):
    def gradients(checkpointing):
        model = make_model("llama_gqa", method="cacheformer_on_base", selection="paper_block").train()
        if checkpointing:
            unwrap(model).gradient_checkpointing_enable({"use_reentrant": False})
            unwrap(model).enable_input_require_grads()
        model(ids, labels=ids).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, checkpointed = gradients(False), gradients(True)
    assert plain.keys() == checkpointed.keys() and all(same(checkpointed[name], plain[name]) for name in plain)


# What is refused


def test_where_far_distance_cannot_help(make_base, make_model, ids):
    """Layers that see everything need all positions; a rotation that changes with the length cannot be turned."""
    far = {"method": "cacheformer_on_base", **MEANS, "far_distance": 8}
    bounded = make_model("llama_gqa", **far)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        cacheformers.read(bounded, ids, progress=False)
    with pytest.warns(UserWarning, match="the model has 64"):
        cacheformers.read(make_model("llama_gqa", layers=[0, 2], **far), ids, progress=False)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match=r"rotation \(dynamic\) changes with the length"):
        make_model("llama_gqa", base={"rope_parameters": rope}, **far)


def test_cards_say_how_to_read(make_model, tmp_path):
    """Of the adapter and of its export; the model without a base takes the text as a prompt."""
    model = make_model("llama_gqa", method="cacheformer_on_base")
    model.save_pretrained(tmp_path / "adapter")
    cacheformers.CacheFormerOnBaseForCausalLM.from_base(model.unload()).save_pretrained(tmp_path / "model")
    for kind in ("adapter", "model"):
        refresh_card(tmp_path / kind)
        card = (tmp_path / kind / "README.md").read_text()
        assert "CacheFormer" in card and "singh2025cacheformer" in card and "cacheformers.read(" in card


@torch.no_grad()
def test_read_tells_texts_from_questions(make_model, ids, tmp_path):
    """In one piece, in several, side by side and from a file; after an error, too, the next forward is a question."""
    settings = {**MEANS, "sink": True, "topk": 3, "neighbors": 1, "select_rows": 2}
    model = make_model("llama_gqa", method="cacheformer_on_base", reading_retrieves=False, **settings)
    quiet = partial(cacheformers.read, model, progress=False)
    text, question = ids[:, :53], ids[:, 53:]
    memory = quiet(text)
    assert set(memory.state.retrieved()[1].flatten().tolist()) == {0}  # of the last segment of the text
    memory.save(tmp_path / "text.safetensors")
    in_two = quiet(text[:, 31:], memory=quiet(text[:, :31]))
    beside = quiet([text[0], text[1], ids[0, :20]])
    beside.select([0, 1])
    from_file = cacheformers.load_memory(tmp_path / "text.safetensors", model)
    expected = model(question, past_key_values=memory.clone()).logits
    for other in (in_two, beside, from_file):
        assert same(model(question, past_key_values=other).logits, expected, 1e-12)
    assert len(set(other.state.retrieved()[1][0, -1].tolist())) > 2
    anew = quiet(ids[:, :20], memory=other)  # a text after a question
    assert set(anew.state.retrieved()[1].flatten().tolist()) == {0}
    assert not anew.state.layers[1].chooser.evidence.any()  # the earlier question has no vote on the next one

    choosing = make_model("llama_gqa", method="cacheformer_on_base", **settings)
    assert not same(choosing(question, past_key_values=cacheformers.read(choosing, text)).logits, expected)
    attention_modules(find_decoder(unwrap(model)))[1].v_proj.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        quiet(text, memory=memory)
    assert not memory.state.reading


@torch.no_grad()
@pytest.mark.parametrize("representatives", ["mean", "tokens"])
def test_opt_scores_segments_as_it_attends(make_model, ids, monkeypatch, representatives):
    """OPT scales its queries itself; without rotation those that score are those that attend."""
    model = make_model("opt", method="cacheformer_on_base", representatives=representatives, long=False, overlap=False)
    seen = []

    def noted(options, layer, parts, projected, call):
        seen.append((projected.asking(options) * projected.scale, projected.q * projected.scale))
        return attend(options, layer, parts, projected, call)

    monkeypatch.setattr(cacheformer_memory, "attend", noted)
    model(ids[:, :40], use_cache=True)
    assert seen
    for scoring, attending in seen:
        torch.testing.assert_close(scoring, attending)
