"""Gated DeltaNet: the rule against its specification, segments, states, padding, gates."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention_core import SCALING, SHAPE, attention_layer, random_inputs, rotate, run_pieces
from memories import projections
from peft import get_peft_model
from torch.utils.checkpoint import checkpoint

import cacheformers
from cacheformers.methods.gated_deltanet import DeltaParts, GatedDeltaNetOptions, attend, fold, make_parts, naive
from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap
from cacheformers.training.statistics import memory_statistics

DEVICES = {0: torch.device("cpu")}
N = 5


def options_for(**changes):
    return GatedDeltaNetOptions(**{"base": SHAPE, "layers": (0,), "segment_tokens": N, **changes})


def some_parts(options, dtype=torch.float64):
    """Alpha around 0.9, and everything else around its middle, different for every token."""
    torch.manual_seed(5)
    parts = DeltaParts(**make_parts(options))
    for linear, middle in zip(parts, (2.0, 0.0, 0.3), strict=True):
        linear.weight = torch.nn.Parameter(torch.randn(linear.weight.shape, dtype=torch.float64).mul(0.2).to(dtype))
        linear.bias = torch.nn.Parameter(torch.randn(linear.bias.shape, dtype=torch.float64).add(middle).to(dtype))
    return parts


def numbers_of(parts, x):
    """Alpha and beta `[rows, kv_heads, time]` and g `[rows, heads, time]`, as the equations have them."""
    alpha, beta, gate = ((x @ linear.weight.mT + linear.bias).mT for linear in parts)
    return 1 / (1 + torch.exp(-alpha)), 1 / (1 + torch.exp(-beta)), torch.tanh(gate)


def random_tokens(time, seed=0, rows=2, heads=2, size=8, dtype=torch.float64):
    """S, keys of any length, values, log alpha and beta of a text, as `fold` takes them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(rows, heads, *shape, dtype=torch.float64, generator=generator)

    drawn = (normal(size + 2, size), normal(time, size), normal(time, size + 2), normal(time), normal(time))
    state, keys, values, alpha, beta = drawn
    return [tensor.to(dtype) for tensor in (state, keys, values, F.logsigmoid(3 + 2 * alpha), torch.sigmoid(2 * beta))]


def token_by_token(state, keys, values, log_alpha, beta):
    """The rule as it is written, `keys` of length 1."""
    for t in range(keys.shape[2]):
        key, value = keys[:, :, t, :, None], values[:, :, t, :, None]
        alpha, written = log_alpha.exp()[:, :, t, None, None], beta[:, :, t, None, None]
        state = alpha * state @ (torch.eye(key.shape[2], dtype=key.dtype) - written * key @ key.mT)
        state = state + written * value @ key.mT
    return state


def close(ours, expected, bound=1e-12):
    assert ours.shape == expected.shape
    return float((ours - expected).detach().abs().max()) <= bound


# The rule


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 16, 64])
@pytest.mark.parametrize("time", [1, 16, 23])
def test_chunks_equal_single_tokens(chunk_tokens, time):
    """With gradients to all inputs."""
    results = []
    for run in ("chunks", "tokens"):
        inputs = [tensor.requires_grad_() for tensor in random_tokens(time)]
        state, keys, *others = inputs
        keys = F.normalize(keys, dim=-1)
        if run == "chunks":
            new = fold(state, keys, *others, chunk_tokens=chunk_tokens)
        else:
            new = token_by_token(state, keys, *others)
        direction = torch.randn(new.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        results.append((new, *torch.autograd.grad((new * direction).sum(), inputs)))
    for name, fast, slow in zip(("S", "dS", "dk", "dv", "d log alpha", "d beta"), *results, strict=True):
        assert close(fast, slow), name
        assert float(slow.abs().max()) > 1e-3, name


@torch.no_grad()
def test_tokens_that_neither_forget_nor_write_are_not_there():
    """What padding would be, with chunks that begin elsewhere."""
    state, keys, values, log_alpha, beta = random_tokens(23)
    keys = F.normalize(keys, dim=-1)
    real = torch.rand(23, generator=torch.Generator().manual_seed(1)) < 0.6
    padded = fold(state, keys, values, log_alpha * real, beta * real, chunk_tokens=4)
    without = [side[:, :, real] for side in (keys, values, log_alpha, beta)]
    assert close(padded, fold(state, *without, chunk_tokens=4))
    assert torch.equal(fold(state, keys, values, log_alpha * 0, beta * 0), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_alpha", [-1e-7, -5.0, -40.0, -1000.0])
def test_products_of_alphas_may_vanish(dtype, log_alpha):
    """Of 128 tokens, in two chunks: nothing overflows, and gradients are those of single tokens."""
    results = []
    for run in ("chunks", "tokens"):
        kind = dtype if run == "chunks" else torch.float64
        tokens = random_tokens(128, dtype=kind)
        tokens[3] = torch.full_like(tokens[3], log_alpha)
        tokens[3][:, :, 50:60] = -1e-4
        inputs = [tensor.requires_grad_() for tensor in tokens]
        state, keys, *others = inputs
        new = (fold if run == "chunks" else token_by_token)(state, F.normalize(keys, dim=-1), *others)
        results.append((new, *torch.autograd.grad(new.square().sum(), inputs)))
    for fast, slow in zip(*results, strict=True):
        assert bool(torch.isfinite(fast).all())
        bound = 1e-10 if dtype == torch.float64 else 1e-4
        assert close(fast.double(), slow, bound * max(1.0, float(slow.abs().max())))


@torch.no_grad()
def test_one_key_again_and_again():
    """The worst case for the triangular system: every token overwrites the one before."""
    state, keys, values, log_alpha, beta = random_tokens(256, dtype=torch.float32)
    keys = F.normalize(keys[:, :, :1], dim=-1).expand_as(keys)
    beta = torch.full_like(beta, 0.999)
    expected = token_by_token(*(side.double() for side in (state, keys, values, log_alpha, beta)))
    assert close(fold(state, keys, values, log_alpha, beta).double(), expected, 1e-5)


# Segments


def stream(options, parts, inputs, **more):
    rows, dtype = len(inputs[0]), inputs[0].dtype
    return run_pieces(
        options.new_state(rows, DEVICES, dtype), options.window, attention_layer(options, parts, attend), inputs, **more
    )


def document(options, parts, inputs, **more):
    """Outputs `[rows, heads, time, d_v]` of whole documents, and S after all complete segments."""
    output, memory = stream(options, parts, inputs, **more)
    memory.close(memory.timeline.full_rows(), None)
    return output.transpose(1, 2), memory.state.held[0]


def specified(options, parts, q, k, v, x):
    """The naive function over every row."""
    alpha, beta, gates = numbers_of(parts, x)
    documents = []
    for row in range(len(q)):
        local = torch.empty_like(q[row])
        for start in range(0, q.shape[2], N):
            span = slice(start, start + N)
            near = [side[row : row + 1, :, span] for side in (q, k, v)]
            turned = [rotate(side, torch.arange(side.shape[2])[None]) for side in near[:2]]
            scores = turned[0] @ turned[1].repeat_interleave(2, 1).mT * SCALING
            later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            shares = torch.softmax(scores.masked_fill(later, float("-inf")), -1)
            local[:, span] = (shares @ near[2].repeat_interleave(2, 1))[0]
        documents.append(naive(options, gates[row], alpha[row], beta[row], q[row], k[row], v[row], local))
    return torch.stack([found.output for found in documents]), documents


@pytest.mark.parametrize("time", [3, 10, 23])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "checkpointed"])
def test_segments_equal_the_specification(time, recompute):
    """With gradients to all inputs and parts, through the state, with and without activation checkpointing."""
    options = options_for()
    direction = torch.randn(2, 4, time, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results = []
    for run in ("fast", "naive"):
        inputs = [tensor.requires_grad_() for tensor in random_inputs(2, time)]
        parts = some_parts(options)
        trained = [parameter for linear in parts for parameter in linear.parameters()]
        if run == "fast":
            plain = attention_layer(options, parts, attend)

            def layer(*arguments, plain=plain):
                return checkpoint(plain, *arguments, use_reentrant=False) if recompute else plain(*arguments)

            output, _ = run_pieces(options.new_state(2, DEVICES, torch.float64), options.window, layer, inputs)
            output = output.transpose(1, 2)
        else:
            output, _ = specified(options, parts, *inputs)
        gradients = torch.autograd.grad((output * direction).sum(), (*inputs, *trained), materialize_grads=True)
        results.append((output, *gradients))
    for fast, slow in zip(*results, strict=True):
        assert close(fast, slow)
    assert all(float(slow.abs().max()) > 1e-3 for slow in results[1]) == (time > N)


# States


@torch.no_grad()
def test_a_thousand_segments_in_bfloat16():
    options = options_for(segment_tokens=64)
    inputs = random_inputs(1, 64 * 1000, dtype=torch.bfloat16)
    output, held = document(options, some_parts(options, torch.float32), inputs)
    exact, held_exact = document(options, some_parts(options), [t.double() for t in inputs])
    assert output.dtype == torch.bfloat16 and held.dtype == torch.float32
    assert close(held.double(), held_exact, 1e-4)
    assert close(output.double(), exact, 0.05)


@torch.no_grad()
def test_autocast_leaves_the_memory_in_float32():
    options = options_for()
    parts, inputs = some_parts(options, torch.float32), random_inputs(2, 23, dtype=torch.float32)
    _, expected = document(options, parts, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, held = document(options, parts, inputs)
    assert torch.equal(held, expected)


# Through a whole model


@torch.no_grad()
@pytest.mark.parametrize("base", ["llama_gqa", "mistral", "opt", "qwen3"])
def test_the_model_follows_the_specification(make_model, ids, base):
    """What W_o is given, from queries, keys and values before their rotation, and x as attention gets it."""
    model = make_model(base, method="gated_deltanet")
    attention = attention_modules(find_decoder(unwrap(model)))[1]
    seen = []
    handle = attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("hidden_states", args[0] if args else None)),
        with_kwargs=True,
    )
    q, k, v, mixed = projections(model, 1, ids)
    handle.remove()
    alpha, beta, gates = numbers_of(attention.memory.active_parts, torch.cat(seen, 1))
    assert float(alpha.std()) > 1e-4 and float(beta.std()) > 0.1 and float(gates.std()) > 0.1
    options, zero = attention.memory.options, torch.zeros_like(q[0])
    far = torch.stack(
        [naive(options, gates[row], alpha[row], beta[row], q[row], k[row], v[row], zero).output for row in range(2)]
    )
    for name, parameter in model.named_parameters():
        if "layers.1." in name and "lora_mem_gate" in name:
            parameter.zero_()
    near = projections(model, 1, ids)[3]
    assert float(far[:, :, 16:].abs().amax(-1).min()) > 1e-4
    assert float((mixed - near - far).abs().max()) < 1e-5  # rotary angles are float32


@torch.no_grad()
@pytest.mark.parametrize("window", [{}, {"local_window": "sliding", "window_tokens": 12, "sink_tokens": 3}])
def test_an_untrained_adapter_is_the_base_in_its_window_at_any_length(make_base, config_factory, ids, window):
    """Bit for bit, also where segments are stored."""
    found, memory = {}, {}
    for method in ("gated_deltanet", "windowed"):
        model = get_peft_model(make_base("llama_gqa"), config_factory(method, target_modules=[], **window)).eval()
        output = model(ids)
        found[method], memory[method] = output.logits, output.past_key_values
    assert torch.equal(found["gated_deltanet"], found["windowed"])
    assert all(bool(held.any()) for held in memory["gated_deltanet"].state.held.values())


def test_gradients_reach_closed_gates_and_then_the_rest(make_base, config_factory, ids):
    """Gates at 0 have a gradient as soon as a segment is stored; alpha and beta have one when gates have left 0."""
    model = get_peft_model(make_base("llama_gqa"), config_factory("gated_deltanet")).train()

    def moved(text):
        model.zero_grad()
        model(text).logits.square().mean().backward()
        gradients = {n.partition("lora_mem_")[2]: p.grad for n, p in model.named_parameters() if "lora_mem_" in n}
        assert all(gradient is not None for gradient in gradients.values())
        return {name.partition(".")[0] for name, gradient in gradients.items() if bool(gradient.any())}

    assert moved(ids[:, :16]) == set()
    assert moved(ids[:, :32]) == {"gate"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_mem_gate" in name:
                parameter.sub_(parameter.grad)
    assert moved(ids[:, :16]) == set()
    assert moved(ids[:, :32]) == {"alpha", "beta", "gate"}


@torch.no_grad()
def test_statistics_are_of_the_last_forwards_tokens(make_model, ids):
    model = make_model("llama_gqa", method="gated_deltanet", layers=[0, 2])
    memory = cacheformers.new_memory(model, 2)
    assert memory_statistics(model, [memory]) == {}
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    model(ids[:, :10], past_key_values=memory, attention_mask=mask[:, :10])
    found, state = memory_statistics(model, [memory]), memory.state
    real = mask[:, :10].bool()
    for name, side in (("alpha", state.tensors["log_alpha"]), ("beta", state.tensors["beta"]), ("gate", state.gates)):
        numbers = torch.cat([side[layer].transpose(1, 2)[real].flatten() for layer in (0, 2)])
        numbers = numbers.exp() if name == "alpha" else numbers.abs()
        assert found[f"{name}_mean"] == pytest.approx(float(numbers.mean()), rel=1e-5)
    assert found["gate_max"] == pytest.approx(float(numbers.max()), rel=1e-6)
    assert replace(options_for(), layers=[0]).signature["method"] == "gated_deltanet"
