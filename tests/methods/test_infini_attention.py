"""Infini-attention: recorded data, the specification, segments, states and padding."""

from dataclasses import replace

import pytest
import torch
from attention_core import SCALING, SHAPE, attention_layer, golden_files, random_inputs, rotate, run_pieces
from safetensors.torch import load_file

from cacheformers.methods.infini_attention import (
    InfiniAttentionOptions,
    InfiniParts,
    attend,
    feature,
    naive,
)
from cacheformers.modeling.method import Share

DEVICES = {0: torch.device("cpu")}
N = 5
VARIANTS = {
    f"{rule}, {empty}{', truncated' if truncated else ''}": {"rule": rule, "empty": empty, "truncated": truncated}
    for rule in ("linear", "delta")
    for empty in ("bypass", "literal")
    for truncated in (False, True)
}


def options_for(**changes):
    return InfiniAttentionOptions(**{"base": SHAPE, "layers": (0,), "segment_tokens": N, **changes})


def parts_with(beta):
    parts = InfiniParts(Share(len(beta)))
    parts.beta.weight = torch.nn.Parameter(beta.clone())
    return parts


def some_beta():
    return torch.tensor([-1.0, 0.3, 0.0, 2.0], dtype=torch.float64)


def absolute(tensor):
    return rotate(tensor, torch.arange(tensor.shape[2])[None])


def document(options, parts, q, k, v, **more):
    """Outputs `[rows, heads, time, d_v]` of whole documents, and the memory of all complete segments."""
    output, memory = stream(options, parts, (q, k, v, q[:, 0]), **more)
    memory.close(memory.timeline.full_rows(), None)
    return output.transpose(1, 2), memory.state.held[0]


def specified(options, beta, q, k, v):
    """The naive function over every row, `[rows, heads, time, d_v]`."""
    turned_q, turned_k = absolute(q), absolute(k)
    return [
        naive(options, beta, q[row], k[row], v[row], turned_q[row], turned_k[row], SCALING) for row in range(len(q))
    ]


def outputs(documents):
    return torch.stack([document.output for document in documents])


# Recorded data


@pytest.mark.parametrize("path", golden_files("infini_attention", "*.safetensors"))
@pytest.mark.parametrize("empty", ["bypass", "literal"])
@pytest.mark.parametrize("truncated", [False, True], ids=["bptt", "truncated"])
def test_recorded_data(path, empty, truncated):
    golden = load_file(path)
    options = options_for(rule=path.stem.split("_")[1], empty=empty, truncated=truncated)
    for run in ("naive", "segments"):
        q, k, v = (golden[name].clone().requires_grad_() for name in "qkv")
        parts = parts_with(golden["beta"])
        if run == "naive":
            output = outputs(specified(options, parts.beta.weight, q, k, v))
        else:
            output, _ = document(options, parts, q, k, v)
        assert close(output, golden[f"{empty}.out"])
        (output * golden["grad_out"]).sum().backward()
        gradients = {"q": q.grad, "k": k.grad, "v": v.grad, "beta": parts.beta.weight.grad}
        for name, gradient in gradients.items():
            recorded = golden[f"{empty}.{'truncated' if truncated else 'bptt'}.grad.{name}"]
            assert close(torch.zeros_like(recorded) if gradient is None else gradient, recorded), (run, name)


@pytest.mark.parametrize("path", golden_files("infini_attention", "*.safetensors"))
def test_recorded_memories(path):
    golden = load_file(path)
    options = options_for(rule=path.stem.split("_")[1])
    documents = specified(options, golden["beta"], golden["q"], golden["k"], golden["v"])
    segments = len(documents[0].matrices)
    assert f"seg{segments}.M" not in golden
    for segment in range(segments):
        span = slice(segment * N, (segment + 1) * N)
        for row, found in enumerate(documents):
            assert close(found.dot[:, span], golden[f"seg{segment}.dot"][row])
            assert close(found.mem[:, span], golden[f"seg{segment}.mem"][row])
            assert close(found.matrices[segment], golden[f"seg{segment}.M"][row])
            assert close(found.norms[segment], golden[f"seg{segment}.z"][row])
        if golden["k"].shape[2] >= span.stop:
            so_far = [golden[name][:, :, : span.stop] for name in "qkv"]
            _, held = document(options, parts_with(golden["beta"]), *so_far)
            assert close(held.matrix, golden[f"seg{segment}.M"])
            assert close(held.norm, golden[f"seg{segment}.z"])


def close(ours, recorded, bound=1e-12):
    assert ours.shape == recorded.shape
    return float((ours - recorded).detach().abs().max()) <= bound


# The specification


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("time", [3, 10, 23])
def test_segments_equal_the_specification(variant, time):
    options = options_for(**VARIANTS[variant])
    direction = torch.randn(2, 4, time, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results = []
    for run in ("fast", "naive"):
        q, k, v = (tensor.requires_grad_() for tensor in random_inputs(2, time)[:3])
        parts = parts_with(some_beta())
        if run == "fast":
            output, _ = document(options, parts, q, k, v)
        else:
            output = outputs(specified(options, parts.beta.weight, q, k, v))
        gradients = torch.autograd.grad(
            (output * direction).sum(), (q, k, v, parts.beta.weight), materialize_grads=True
        )
        results.append((output, *gradients))
    for fast, slow in zip(*results, strict=True):
        assert close(fast, slow, 1e-12)
    if time > N:
        assert float(results[0][4].abs().min()) > 1e-3, "beta gets a gradient in every head"


def test_padding_gives_no_nan_gradients():
    options, parts = options_for(), parts_with(some_beta())
    q, k, v = (tensor.requires_grad_() for tensor in random_inputs(2, 23)[:3])
    real = torch.ones(2, 23, dtype=torch.bool)
    real[1, 3:] = False
    output, _ = document(options, parts, q, k, v, real=real)
    output[real[:, None].expand(-1, 4, -1)].sum().backward()
    for tensor in (q, k, v):
        assert bool(torch.isfinite(tensor.grad).all())
        assert torch.count_nonzero(tensor.grad[1, :, 3:]) == 0


# Numbers


@torch.no_grad()
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_a_thousand_segments_in_bfloat16(rule):
    options, parts = options_for(rule=rule, segment_tokens=64), parts_with(torch.zeros(4))
    q, k, v, _ = random_inputs(1, 64 * 1000, dtype=torch.bfloat16)
    output, held = document(options, parts, q, k, v)
    exact, held_exact = document(options, parts, *(t.double() for t in (q, k, v)))
    assert output.dtype == torch.bfloat16 and held.norm.dtype == torch.float32
    assert bool(torch.isfinite(output).all())
    assert float(((held.norm.double() - held_exact.norm) / held_exact.norm).abs().max()) < 1e-3
    assert float((output.double() - exact).abs().max()) < 0.05


def test_features_stay_positive():
    inputs = torch.tensor([-60.0, -20.0, -1e-8, 0.0, 2.0], requires_grad=True)
    features = feature(inputs)
    assert bool((features > 0).all())
    features.sum().backward()
    assert torch.allclose(inputs.grad, torch.where(inputs < 0, inputs.detach().exp(), 1))


# States


def stream(options, parts, inputs, memory=None, **more):
    q, k, v = inputs[:3]
    options = replace(options, base=replace(SHAPE, heads=q.shape[1], kv_heads=k.shape[1]))
    state = options.new_state(len(q), DEVICES, q.dtype)
    matrix = state.held[0].matrix  # recorded values are narrower than keys
    state.held[0] = state.held[0]._replace(matrix=matrix[..., : v.shape[3]])
    return run_pieces(state, options.window, attention_layer(options, parts, attend), inputs, memory=memory, **more)
