"""Gated attention with `far_distance`: the specification, what is read and kept, and texts beyond all positions."""

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from attention_core import random_inputs, rotate, run_pieces
from gated_cases import CHANNELS, DEVICES, SCALING, WINDOW, close, options_for, parts_for, recorded_reads, some_gates
from torch.utils.checkpoint import checkpoint

import cacheformers
from cacheformers.methods.gated_attention import near_far
from cacheformers.methods.gated_attention.gated_attention import attend, gates_for_inference, naive
from cacheformers.methods.gated_attention.near_far import Operands, one_pass, tile_by_tile
from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.rotary import Rotation, rotation

FAR = 7
TIME = 23


@pytest.fixture(params=[256, 3], ids=["one tile", "tiles of 3"])
def tile(request, monkeypatch):
    monkeypatch.setattr(near_far, "TILE", request.param)


def turn(states, distances):
    """`rotate` for `naive`: `[tokens, d]` by `[tokens]` positions."""
    return rotate(states[None, None], distances[None])[0, 0]


def specified(q, k, v, gates, window=WINDOW, far_distance=FAR):
    rows = zip(q, k, v, gates, strict=True)
    return torch.stack([naive(*row, window, SCALING, far_distance, turn).output for row in rows])


def placed(q, k, v, window=WINDOW, new=None, start=0):
    """What attention gets of the last `new` tokens of a text that begins at a position: near inputs, and far ones."""
    time = k.shape[2]
    positions = torch.arange(time)[None] + start
    near = rotate(q, positions), rotate(k, positions), v
    far = Operands(rotate(q, torch.full_like(positions, FAR)), k, v)
    if new is not None:
        first = max(time - new - window + 1, 0)
        near = near[0][:, :, -new:], near[1][:, :, first:], v[:, :, first:]
        far = far._replace(queries=far.queries[:, :, -new:])
    return near, far


def inverse_at(positions, width=8):
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = positions[..., None] * frequencies
    return Rotation(angles.cos(), angles.sin()).inverse


def layer_for(options, parts, training=False, recompute=False):
    def plain(call, q, k, v, x):
        new = call.positions[:, -q.shape[2] :]
        inputs = {"hidden": x, "query": rotate(q, new), "new_key": rotate(k, new), "new_value": v, "call": call}
        module = SimpleNamespace(training=training)
        return attend(
            options, 0, parts, SimpleNamespace(**inputs, scaling=SCALING, inverse=inverse_at(new), module=module)
        )

    def layer(call, q, k, v, x):
        call.rotate = lambda keys, shift, layer: rotate(keys, shift)
        call.local.update(k, v, 1)  # as a layer without gates does
        return checkpoint(plain, call, q, k, v, x, use_reentrant=False) if recompute else plain(call, q, k, v, x)

    return layer


def stream(options, parts, inputs, training=False, recompute=False, cache_size=None, **more):
    state = options.new_state(len(inputs[0]), DEVICES, inputs[0].dtype, cache_size=cache_size)
    return run_pieces(state, options.window, layer_for(options, parts, training, recompute), tuple(inputs), **more)


# The specification


@torch.no_grad()
def test_at_true_distances_it_is_what_it_was():
    q, k, v, _ = random_inputs(1, TIME)
    gates = some_gates(1, 2, TIME)
    near, _ = placed(q, k, v, start=5)
    without = naive(*(tensor[0] for tensor in near), gates[0], WINDOW, SCALING)
    assert close(specified(q, k, v, gates, far_distance=0)[0], without.output, 1e-10)


@pytest.mark.parametrize("start", [0, 1000])
@pytest.mark.parametrize("channels", CHANNELS.values(), ids=CHANNELS)
@pytest.mark.parametrize(("time", "window"), [(1, 4), (4, 4), (5, 4), (23, 4), (23, 1), (23, 7), (6, 7)])
def test_both_ways_equal_the_specification(channels, time, window, start, tile):
    """Wherever the text begins: only distances count."""
    direction = torch.randn(2, 4, time, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results = []
    for run in ("tiles", "naive"):
        inputs = [*(t.requires_grad_() for t in random_inputs(2, time)[:3])]
        inputs.append(some_gates(2, channels, time).requires_grad_())
        if run == "tiles":
            near, far = placed(*inputs[:3], window, start=start)
            output = tile_by_tile(*near, inputs[3], window, SCALING, far)
        else:
            output = specified(*inputs, window)
        results.append((output, *torch.autograd.grad((output * direction).sum(), inputs)))
    for fast, slow in zip(*results, strict=True):
        assert close(fast, slow, 1e-10)
    with torch.no_grad():
        near, far = placed(*inputs[:3], window, start=start)
        assert close(one_pass(*near, inputs[3], window, SCALING, far), results[1][0], 1e-10)
        closed = inputs[3].masked_fill(inputs[3] < 0.6, 0)
        closed[0] = 0
        assert close(one_pass(*near, closed, window, SCALING, far), specified(*inputs[:3], closed, window), 1e-10)


@torch.no_grad()
@pytest.mark.parametrize("new", [1, 2, 6])
def test_the_last_queries_alone(new, tile):
    """Keys and values at true positions are of the first query's window and later."""
    q, k, v, _ = random_inputs(2, TIME)
    soft = some_gates(2, 1, TIME)
    for gates in (soft, soft.masked_fill(soft < 0.5, 0)):
        expected = specified(q, k, v, gates)[:, :, -new:]
        near, far = placed(q, k, v, new=new)
        assert close(one_pass(*near, gates[:, :, -new:], WINDOW, SCALING, far), expected, 1e-10)
        assert close(tile_by_tile(*near, gates[:, :, -new:], WINDOW, SCALING, far), expected, 1e-10)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype):
    q, k, v, _ = random_inputs(2, 300)
    gates = some_gates(2, 4, 300)
    near, far = placed(q, k, v, 32)
    exact = one_pass(*near, gates, 32, SCALING, far)
    near, far = [tensor.to(dtype) for tensor in near], Operands(*(tensor.to(dtype) for tensor in far))
    for attention in (one_pass, tile_by_tile):
        output = attention(*near, gates.float(), 32, SCALING, far)
        assert output.dtype == dtype
        assert float((output.double() - exact).abs().max()) < (1e-5 if dtype == torch.float32 else 0.03)


# A layer in pieces


@torch.no_grad()
@pytest.mark.parametrize("threshold", [0.0, 0.4])
@pytest.mark.parametrize("gate_per", CHANNELS)
def test_pieces_equal_one_pass_and_single_steps(threshold, gate_per):
    options = options_for(far_distance=FAR, threshold=threshold, gate_per=gate_per, segment_tokens=6)
    parts, inputs = parts_for(options), random_inputs(2, 40)
    expected = specified(*inputs[:3], gates_for_inference(options, parts.logits(inputs[3]))).transpose(1, 2)
    for chunks in ([40], [1] * 40, [7, 7, 7, 19], [4, 1, 35]):
        output, memory = stream(options, parts, inputs, chunks=chunks)
        assert close(output, expected, 1e-10)
        held = memory.state.held
        assert held["far", 0].keys.shape[2] == 40 and held["window", 0].keys.shape[2] <= 35 + 2 * WINDOW
    assert set(held) == {("far", 0), ("window", 0)}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "checkpointed"])
def test_gradients_through_pieces(recompute):
    options = options_for(far_distance=FAR, segment_tokens=6)
    direction = torch.randn(2, TIME, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results = []
    for run in ("pieces", "naive"):
        inputs, parts = [tensor.requires_grad_() for tensor in random_inputs(2, TIME)], parts_for(options)
        if run == "pieces":
            output, memory = stream(options, parts, inputs, training=True, recompute=recompute)
            assert memory.state.held["window", 0].dropped
        else:
            output = specified(*inputs[:3], torch.sigmoid(parts.logits(inputs[3]))).transpose(1, 2)
        wanted = [*inputs, parts.token_gate.weight, parts.token_gate.bias]
        results.append(torch.autograd.grad((output * direction).sum(), wanted))
    for fast, slow in zip(*results, strict=True):
        assert close(fast, slow, 1e-10)


@pytest.mark.parametrize("training", [False, True])
def test_padding(training):
    """Rows stand at different positions, and each is read as if it were alone."""
    options = options_for(far_distance=FAR, far_heads=(), segment_tokens=6)
    parts, inputs = parts_for(options), random_inputs(2, TIME)
    real = torch.ones(2, TIME, dtype=torch.bool)
    real[1, :9], real[0, 15:17] = False, False
    with torch.set_grad_enabled(training):
        output, memory = stream(options, parts, inputs, real=real, training=training, chunks=[10, 1, 8, 4])
    gates = torch.sigmoid(parts.logits(inputs[3]))
    for row in range(2):
        kept = real[row].nonzero()[:, 0]
        mine = [tensor[row : row + 1, :, kept] for tensor in (*inputs[:3], gates)]
        assert close(output[row : row + 1, kept], specified(*mine).transpose(1, 2), 1e-10)
    assert memory.state.held["window", 0].dropped


@torch.no_grad()
def test_fixed_heads():
    """A head that sees everything has a window and what is far; the other only its window."""
    options = options_for(gate_per="kv_head", far_distance=FAR, far_heads=((0, (1,)),))
    parts, inputs = parts_for(options), random_inputs(2, 40)
    gates = torch.tensor([0.0, 1.0], dtype=torch.float64)[:, None].expand(2, 2, 40)
    expected = specified(*inputs[:3], gates).transpose(1, 2)
    for chunks in ([40], [1] * 40, [9, 1, 30]):
        output, memory = stream(options, parts, inputs, chunks=chunks)
        assert close(output, expected, 1e-10)
    with torch.enable_grad():
        assert close(stream(options, parts, inputs)[0], expected, 1e-10)
    held = memory.state.held
    assert {name for name, _ in held} == {"far", "near", "window"}
    assert all(pair.keys.shape[1] == 1 for pair in held.values())


# What is read, and kept


@torch.no_grad()
@pytest.mark.parametrize("new", [1, 5])
def test_closed_gates_read_nothing_far(new, monkeypatch):
    reads = recorded_reads(monkeypatch)
    near, far = placed(*random_inputs(2, 40)[:3], new=new)
    gates = torch.zeros(2, 1, new, dtype=torch.float64)
    far = Operands(*(torch.full_like(tensor, float("nan")) for tensor in far))
    assert bool(torch.isfinite(one_pass(*near, gates, WINDOW, SCALING, far)).all())
    assert not reads


@torch.no_grad()
def test_without_a_memory_only_windows_are_kept():
    options = options_for(far_distance=FAR)
    parts, inputs = parts_for(options), random_inputs(2, 40)
    output, memory = stream(options, parts, inputs, cache_size=0, chunks=[7] * 5 + [1] * 5)
    assert close(output, specified(*inputs[:3], torch.zeros(2, 1, 40, dtype=torch.float64)).transpose(1, 2), 1e-10)
    assert set(memory.state.held) == {("near", 0)}


@torch.no_grad()
def test_bytes_and_copies():
    """Little more than without `far_distance`; copies share, and what they append does not meet."""
    sizes = {}
    for far in (0, FAR):
        options = options_for(far_distance=far)
        parts, inputs = parts_for(options), random_inputs(1, 400)
        _, memory = stream(options, parts, inputs, chunks=[100] * 4)
        sizes[far] = sum(pair.keys.nbytes + pair.values.nbytes for pair in memory.state.held.values())
    assert sizes[0] < sizes[FAR] < 1.1 * sizes[0]
    layer, more = layer_for(options, parts), random_inputs(1, 9, seed=5)
    twin = memory.clone()
    first, _ = run_pieces(memory.state, options.window, layer, more, memory=memory)
    run_pieces(memory.state, options.window, layer, random_inputs(1, 9, seed=6), memory=memory)
    assert torch.equal(run_pieces(twin.state, options.window, layer, more, memory=twin)[0], first)


def test_what_a_state_cannot_do():
    options = options_for(far_distance=FAR)
    with torch.no_grad():
        _, memory = stream(options, parts_for(options), random_inputs(1, 60), chunks=[1] * 60)
    with pytest.raises(ValueError, match="forgotten what was before"):
        memory.crop(-1)


# On a base


GATED = {"method": "gated_attention", "window_tokens": 6, "far_distance": 9}


def attention_of(model):
    """Keep what each layer's self-attention takes and gives, `{layer: (x, output)}`."""
    found = {}

    def keep(module, args, kwargs, output, layer):
        found[layer] = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], output[0])

    attentions = attention_modules(find_decoder(unwrap(model)))
    handles = [
        attention.register_forward_hook(partial(keep, layer=layer), with_kwargs=True)
        for layer, attention in enumerate(attentions)
    ]
    return attentions, found, handles


@torch.no_grad()
@pytest.mark.parametrize(("base", "output"), [("llama_gqa", "o_proj"), ("phi", "dense")])
def test_a_base_computes_the_specification(make_model, ids, base, output):
    """With its own projections and rotation, on a text of more tokens than it has positions."""
    model = make_model(base, **GATED, segment_tokens=128)
    decoder = find_decoder(unwrap(model))
    assert ids.shape[1] > decoder.config.max_position_embeddings
    attentions, found, _ = attention_of(model)
    model(ids)
    turning = rotation(decoder)
    for layer, attention in enumerate(attentions):
        x, given = found[layer]
        q, k, v = (
            getattr(attention, f"{name}_proj")(x).unflatten(2, (-1, attention.head_dim)).transpose(1, 2)
            for name in "qkv"
        )
        gates = torch.sigmoid(attention.memory.active_parts.logits(x))

        def turned(states, distances, layer=layer):
            return turning(states[None, None], distances[None], layer)[0, 0]

        for row in range(len(x)):
            read = naive(q[row], k[row], v[row], gates[row], 6, attention.scaling, 9, turned).output
            expected = getattr(attention, output)(read.transpose(0, 1).flatten(1))
            assert close(given[row], expected, 1e-5)  # angles are float32


@torch.no_grad()
def test_positions_that_are_needed(make_model, ids):
    """Layers without gates see everything, at their true distance; so do all without `far_distance`."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        cacheformers.read(make_model("llama_gqa", **GATED), ids, progress=False)
    for changes in ({"layers": [0, 2]}, {"far_distance": 0}):
        with pytest.warns(UserWarning, match="the model has 64"):
            cacheformers.read(make_model("llama_gqa", **{**GATED, **changes}), ids, progress=False)


@torch.no_grad()
def test_memories_join_and_go_on(make_model, ids):
    """Rows whose windows stand in other columns."""
    model = make_model("llama_gqa", **GATED)
    memory = cacheformers.read(model, ids[:1, :60], progress=False)
    memory.join([cacheformers.read(model, ids[1:, :33], progress=False)])
    assert memory.tokens_read == [60, 33] and isinstance(memory, MemoryCache)
    logits = model(ids[:, 60:70], past_key_values=memory).logits
    for row, length in enumerate((60, 33)):
        alone = cacheformers.read(model, ids[row, :length], progress=False)
        expected = model(ids[row : row + 1, 60:70], past_key_values=alone).logits
        assert torch.allclose(logits[row : row + 1], expected, atol=1e-9)


@torch.no_grad()
def test_beams(make_model, ids):
    """Each of them has a window and a past of its own: read again at once, it is as likely."""
    model = make_model("llama_gqa", **GATED)
    found = model.generate(
        ids[:, :45],
        attention_mask=torch.ones_like(ids[:, :45]),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        num_beams=3,
        num_return_sequences=3,
        output_scores=True,
        return_dict_in_generate=True,
        length_penalty=0.0,
    )
    logits = torch.log_softmax(model(found.sequences).logits[:, 44:-1], -1)
    scores = logits.gather(2, found.sequences[:, 45:, None])[..., 0].sum(1)
    assert torch.allclose(scores.double(), found.sequences_scores.double(), atol=1e-4)


def test_rotations_that_cannot_be_turned(make_model):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match=r"far_distance=9 reads .*rotation \(dynamic\) changes .*use far_distance=0"):
        make_model("llama_gqa", base={"rope_parameters": rope}, **GATED)
