"""Gated attention: recorded data, the specification, and what is read."""

import pytest
import torch
import torch.nn.functional as F
from attention_core import golden_files, random_inputs
from gated_cases import (
    CHANNELS,
    SCALING,
    WINDOW,
    close,
    options_for,
    parts_for,
    recorded_reads,
    since,
    some_gates,
    specified,
    stream,
    upto,
)
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cacheformers.methods.gated_attention import near_far
from cacheformers.methods.gated_attention.gated_attention import (
    GatedParts,
    gates_for_inference,
    gates_for_training,
    naive,
)
from cacheformers.methods.gated_attention.near_far import one_pass, two_passes
from cacheformers.methods.gated_attention.state import gate_losses


@pytest.fixture(params=[256, 3], ids=["one tile", "tiles of 3"])
def tile(request, monkeypatch):
    monkeypatch.setattr(near_far, "TILE", request.param)


# Recorded data


@pytest.mark.parametrize("path", golden_files("gated_attention", "*.safetensors"))
@pytest.mark.parametrize("run", ["naive", "two passes"])
def test_recorded_data(path, run):
    golden = load_file(path)
    window = int(path.stem.rpartition("w")[2])
    options = options_for(window_tokens=window, sparsity_weight=0.7, mean_weight=0.3)
    x, q, k, v = (golden[name].clone().requires_grad_() for name in "xqkv")
    parts = recorded_parts(golden)
    logits = parts.logits(x)
    gates = gates_for_training(options, logits)
    assert close(logits[:, 0], golden["gate_logit"]) and close(gates[:, 0], golden["gate"])
    output = specified(q, k, v, gates, window) if run == "naive" else two_passes(q, k, v, gates, window, SCALING)
    assert close(output, golden["out"])
    losses = gate_losses(options, [gates], torch.ones(gates[:, 0].shape, dtype=torch.bool))
    loss = (output * golden["grad_out"]).sum() + losses.total
    assert close(losses.sparsity[None], golden["sparsity_mean"]) and close(losses.mean[None], golden["mean_gate"])
    assert close(loss[None], golden["loss"])
    loss.backward()
    gradients = {"x": x, "q": q, "k": k, "v": v}
    gradients |= {"gate_weight": parts.token_gate.weight, "gate_bias": parts.token_gate.bias}
    for name, tensor in gradients.items():
        assert close(tensor.grad, golden[f"grad.{name}"]), name


@torch.no_grad()
@pytest.mark.parametrize("path", golden_files("gated_attention", "*.safetensors"))
def test_recorded_probabilities(path):
    golden = load_file(path)
    window = int(path.stem.rpartition("w")[2])
    for row in range(len(golden["q"])):
        found = naive(*(golden[name][row] for name in "qkv"), golden["gate"][row][None], window, SCALING)
        for ours, name in zip(
            found[1:], ("out_local", "out_global", "p", "p_local", "p_global", "lse_local", "lse_global"), strict=True
        ):
            assert close(ours, golden[name][row]), name


@torch.no_grad()
@pytest.mark.parametrize("path", golden_files("gated_attention", "*.safetensors"))
@pytest.mark.parametrize("threshold", [0.0, 0.25])
def test_recorded_inference(path, threshold, tile):
    golden = load_file(path)
    window = int(path.stem.rpartition("w")[2])
    options = options_for(window_tokens=window, threshold=threshold)
    gates = gates_for_inference(options, recorded_parts(golden).logits(golden["x"]))
    output = one_pass(golden["q"], golden["k"], golden["v"], gates, window, SCALING)
    prefix = f"thr{threshold}." if threshold else ""
    assert close(gates[:, 0], golden[f"{prefix}gate"]) and close(output, golden[f"{prefix}out"])


def recorded_parts(golden):
    linear = torch.nn.Linear(32, 1, dtype=torch.float64)
    linear.weight.data, linear.bias.data = golden["gate_weight"].clone(), golden["gate_bias"].clone()
    return GatedParts(linear)


# The specification


@pytest.mark.parametrize("channels", CHANNELS.values(), ids=CHANNELS)
@pytest.mark.parametrize(("time", "window"), [(1, 4), (4, 4), (5, 4), (23, 4), (23, 1), (23, 22), (23, 40)])
def test_both_ways_equal_the_specification(channels, time, window, tile):
    direction = torch.randn(2, 4, time, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results = []
    for attention in (lambda *inputs: two_passes(*inputs, window, SCALING), lambda *i: specified(*i, window)):
        inputs = [*(t.requires_grad_() for t in random_inputs(2, time)[:3])]
        inputs.append(some_gates(2, channels, time).requires_grad_())
        output = attention(*inputs)
        results.append((output, *torch.autograd.grad((output * direction).sum(), inputs)))
    for fast, slow in zip(*results, strict=True):
        assert close(fast, slow)
    with torch.no_grad():
        assert close(one_pass(*inputs, window, SCALING), results[1][0])
        closed = inputs[3].masked_fill(inputs[3] < 0.6, 0)
        closed[0] = 0
        assert close(one_pass(*inputs[:3], closed, window, SCALING), specified(*inputs[:3], closed, window))


@torch.no_grad()
@pytest.mark.parametrize("new", [1, 2, 6])
def test_the_last_queries_alone(new, tile):
    q, k, v, _ = random_inputs(2, 23)
    soft = some_gates(2, 1, 23)
    for gates in (soft, soft.masked_fill(soft < 0.5, 0)):
        whole = specified(q, k, v, gates)
        last = (q[:, :, -new:], k, v, gates[:, :, -new:])
        assert close(one_pass(*last, WINDOW, SCALING), whole[:, :, -new:])
        assert close(two_passes(*last, WINDOW, SCALING), whole[:, :, -new:])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype):
    q, k, v, _ = random_inputs(2, 300)
    gates = some_gates(2, 4, 300)
    exact = one_pass(q, k, v, gates, 32, SCALING)
    output = one_pass(q.to(dtype), k.to(dtype), v.to(dtype), gates.float(), 32, SCALING)
    assert output.dtype == dtype
    assert float((output.double() - exact).abs().max()) < (1e-5 if dtype == torch.float32 else 0.03)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["one pass", "two passes"])
def test_open_gates_are_full_attention(attention):
    q, k, v, _ = random_inputs(2, 300, dtype=torch.float32)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALING, enable_gqa=True)
    gates = torch.ones(2, 1, 300)
    if attention == "two passes":
        assert torch.equal(two_passes(q, k, v, gates, 32, SCALING), expected)
    else:
        assert close(one_pass(q, k, v, gates, 32, SCALING), expected, 1e-6)


@torch.no_grad()
def test_without_the_fused_softmax(tile):
    """Values of another width than keys go the way of other devices."""
    q, k, v, _ = random_inputs(2, 23)
    soft = some_gates(2, 2, 23)
    for gates in (soft, soft.masked_fill(soft < 0.5, 0)):
        narrow = one_pass(q, k, v[..., :6], gates, WINDOW, SCALING)
        assert close(narrow, specified(q, k, v, gates)[..., :6])


# What is read


@torch.no_grad()
@pytest.mark.parametrize("new", [1, 5, 40])
def test_closed_gates_read_nothing_far(new, monkeypatch):
    """Keys and values that nobody may read are NaN."""
    reads = recorded_reads(monkeypatch)
    q, k, v, _ = random_inputs(2, 40)
    gates = torch.zeros(2, 1, new, dtype=torch.float64)
    if new < 40:
        k[:, :, : 40 - new - WINDOW + 1] = v[:, :, : 40 - new - WINDOW + 1] = float("nan")
    assert bool(torch.isfinite(one_pass(q[:, :, -new:], k, v, gates, WINDOW, SCALING)).all())
    assert not reads


@torch.no_grad()
@pytest.mark.parametrize("channels", CHANNELS.values(), ids=CHANNELS)
def test_only_open_rows_read_what_is_far(channels, monkeypatch):
    reads = recorded_reads(monkeypatch)
    q, k, v, _ = random_inputs(1, 40)
    gates = torch.zeros(1, channels, 40, dtype=torch.float64)
    gates[0, 0, 30] = 0.7
    one_pass(q, k, v, gates, WINDOW, SCALING)
    assert reads == [4 // channels * (30 - WINDOW + 1)], "one query, in the heads of its gate"


@torch.no_grad()
def test_one_pass_reads_each_far_pair_once(monkeypatch):
    time, window, reads = 2048, 512, recorded_reads(monkeypatch)
    q, k, v, _ = random_inputs(1, time, dtype=torch.float32)
    one_pass(q, k, v, torch.ones(1, 1, time), window, SCALING)
    assert sum(reads) < 4 * ((time - window) * (time - window + 1) // 2 + near_far.TILE * time)


class Largest(TorchDispatchMode):
    """The most numbers that any tensor of an operation holds."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        self.most = max(self.most, *(tensor.numel() for tensor in tensors), 0)
        return result


@pytest.mark.parametrize("run", ["one pass", "two passes"])
def test_no_square_matrix(run):
    time, window = 2048, 256
    inputs = [tensor.requires_grad_(run == "two passes") for tensor in random_inputs(1, time, dtype=torch.float32)[:3]]
    gates = torch.rand(1, 1, time)
    with Largest() as seen, torch.set_grad_enabled(run == "two passes"):
        if run == "one pass":
            one_pass(*inputs, gates, window, SCALING)
        else:
            two_passes(*inputs, gates, window, SCALING).sum().backward()
    assert seen.most <= 2 * near_far.TILE * (near_far.TILE + window) < time * time / 8


@torch.no_grad()
def test_decoding_reads_far_only_where_a_row_opens(monkeypatch):
    options = options_for(threshold=0.3)
    parts, inputs = parts_for(options, spread=3.0), random_inputs(3, 40)
    expected, _ = stream(options, parts, inputs)
    gates = gates_for_inference(options, parts.logits(inputs[3]))[:, 0, 20:]
    _, memory = stream(options, parts, upto(inputs, 20))
    reads = recorded_reads(monkeypatch)
    output, memory = stream(options, parts, since(inputs, 20), memory=memory, chunks=[1] * 20)
    assert close(output, expected[:, 20:])
    far = (gates > 0) * torch.arange(20 - WINDOW + 1, 40 - WINDOW + 1)
    assert sum(reads) == 4 * int(far.sum()), "each open query, every far key once a head"
    assert 0 < int((gates == 0).sum()) < gates.numel()
