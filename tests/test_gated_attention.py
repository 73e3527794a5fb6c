"""Gated attention: recorded data, the specification, what is read, states, losses and fixed heads."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).parent))
from attention_core import SHAPE, golden_files, load, random_inputs, run_pieces

from cacheformers.modeling.memories import near_far
from cacheformers.modeling.memories.gated_attention import (
    GatedAttentionOptions,
    GatedParts,
    attend,
    fix_heads,
    gate_losses,
    gates_for_inference,
    gates_for_training,
    make_parts,
    naive,
)
from cacheformers.modeling.memories.near_far import one_pass, two_passes

DEVICES = {0: torch.device("cpu")}
SCALING = 8**-0.5
WINDOW = 4
CHANNELS = {"layer": 1, "kv_head": 2, "head": 4}


@pytest.fixture(params=[256, 3], ids=["one tile", "tiles of 3"])
def tile(request, monkeypatch):
    monkeypatch.setattr(near_far, "TILE", request.param)


def options_for(**changes) -> GatedAttentionOptions:
    return GatedAttentionOptions(**{"base": SHAPE, "layers": (0,), "window_tokens": WINDOW, **changes})


def parts_for(options, seed=0, spread=1.0) -> GatedParts:
    """Gates that differ from token to token."""
    torch.manual_seed(seed)
    parts = GatedParts(**make_parts(options))
    for linear in parts:
        if linear is not None:
            linear.double()
            torch.nn.init.normal_(linear.weight, std=spread * linear.in_features**-0.5)
            torch.nn.init.zeros_(linear.bias)
    return parts


def some_gates(rows, channels, time):
    return torch.rand(rows, channels, time, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def specified(q, k, v, gates, window=WINDOW):
    return torch.stack([naive(q[row], k[row], v[row], gates[row], window, SCALING).output for row in range(len(q))])


def close(ours, recorded, bound=1e-12):
    assert ours.shape == recorded.shape
    return float((ours - recorded).detach().abs().max()) <= bound


# Recorded data


@pytest.mark.parametrize("path", golden_files("gated_attention", "*.safetensors"))
@pytest.mark.parametrize("run", ["naive", "two passes"])
def test_recorded_data(path, run):
    golden = load(path)
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
    golden = load(path)
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
    golden = load(path)
    window = int(path.stem.rpartition("w")[2])
    options = options_for(window_tokens=window, threshold=threshold)
    gates = gates_for_inference(options, recorded_parts(golden).logits(golden["x"]))
    output, _ = one_pass(golden["q"], golden["k"], golden["v"], gates, window, SCALING)
    prefix = f"thr{threshold}." if threshold else ""
    assert close(gates[:, 0], golden[f"{prefix}gate"]) and close(output, golden[f"{prefix}out"])


def recorded_parts(golden) -> GatedParts:
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
        assert close(one_pass(*inputs, window, SCALING)[0], results[1][0])
        closed = inputs[3].masked_fill(inputs[3] < 0.6, 0)
        closed[0] = 0
        assert close(one_pass(*inputs[:3], closed, window, SCALING)[0], specified(*inputs[:3], closed, window))


@torch.no_grad()
@pytest.mark.parametrize("new", [1, 2, 6])
def test_the_last_queries_alone(new, tile):
    q, k, v, _ = random_inputs(2, 23)
    soft = some_gates(2, 1, 23)
    for gates in (soft, soft.masked_fill(soft < 0.5, 0)):
        whole = specified(q, k, v, gates)
        last = (q[:, :, -new:], k, v, gates[:, :, -new:])
        assert close(one_pass(*last, WINDOW, SCALING)[0], whole[:, :, -new:])
        assert close(two_passes(*last, WINDOW, SCALING), whole[:, :, -new:])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype):
    q, k, v, _ = random_inputs(2, 300)
    gates = some_gates(2, 4, 300)
    exact = one_pass(q, k, v, gates, 32, SCALING)[0]
    output = one_pass(q.to(dtype), k.to(dtype), v.to(dtype), gates.float(), 32, SCALING)[0]
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
        assert close(one_pass(q, k, v, gates, 32, SCALING)[0], expected, 1e-6)


@torch.no_grad()
@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_the_future_changes_nothing(threshold):
    """Neither keys and values nor gates of later tokens."""
    options = options_for(threshold=threshold)
    parts, inputs = parts_for(options), random_inputs(1, 22)
    before, _ = stream(options, parts, inputs)
    for t in (0, 3, 4, 13, 21):
        changed = [tensor.clone() for tensor in inputs]
        for tensor in changed:
            tensor[(slice(None),) * (tensor.dim() - 2) + (t,)] += 1
        after, _ = stream(options, parts, changed)
        assert torch.equal(after[:, :t], before[:, :t]) and not torch.equal(after[:, t:], before[:, t:])


@torch.no_grad()
def test_without_the_fused_softmax(tile):
    """Values of another width than keys go the way of other devices."""
    q, k, v, _ = random_inputs(2, 23)
    soft = some_gates(2, 2, 23)
    for gates in (soft, soft.masked_fill(soft < 0.5, 0)):
        narrow = one_pass(q, k, v[..., :6], gates, WINDOW, SCALING)[0]
        assert close(narrow, specified(q, k, v, gates)[..., :6])


# What is read


@torch.no_grad()
@pytest.mark.parametrize("new", [1, 5, 40])
def test_closed_gates_read_nothing_far(new):
    """Keys and values that nobody may read are NaN."""
    q, k, v, _ = random_inputs(2, 40)
    gates = torch.zeros(2, 1, new, dtype=torch.float64)
    if new < 40:
        k[:, :, : 40 - new - WINDOW + 1] = v[:, :, : 40 - new - WINDOW + 1] = float("nan")
    output, reads = one_pass(q[:, :, -new:], k, v, gates, WINDOW, SCALING)
    assert bool(torch.isfinite(output).all())
    assert reads.far_pairs == 0 and reads.skipped == reads.decisions == 2 * min(new, 40 - WINDOW)
    assert reads.near_pairs <= 2 * 4 * new * (new + WINDOW)


@torch.no_grad()
@pytest.mark.parametrize("channels", CHANNELS.values(), ids=CHANNELS)
def test_only_open_rows_read_what_is_far(channels):
    q, k, v, _ = random_inputs(1, 40)
    gates = torch.zeros(1, channels, 40, dtype=torch.float64)
    gates[0, 0, 30] = 0.7
    _, reads = one_pass(q, k, v, gates, WINDOW, SCALING)
    assert reads.skipped == channels * (40 - WINDOW) - 1
    assert 30 - WINDOW < reads.far_pairs // (4 // channels) <= 40, "one query, in the heads of its gate"


@torch.no_grad()
def test_one_pass_reads_each_pair_once():
    time, window = 2048, 512
    q, k, v, _ = random_inputs(1, time, dtype=torch.float32)
    _, reads = one_pass(q, k, v, torch.ones(1, 1, time), window, SCALING)
    assert reads.near_pairs + reads.far_pairs < 4 * (time * (time + 1) // 2 + 2 * near_far.TILE * time)


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
def test_decoding_reads_far_only_where_a_row_opens():
    options = options_for(threshold=0.3)
    parts, inputs = parts_for(options, spread=3.0), random_inputs(3, 40)
    expected, _ = stream(options, parts, inputs)
    gates = gates_for_inference(options, parts.logits(inputs[3]))[:, 0, 20:]
    _, memory = stream(options, parts, upto(inputs, 20))
    far_before, skipped_before = memory.state.reads[0].far_pairs, memory.state.reads[0].skipped
    output, memory = stream(options, parts, since(inputs, 20), memory=memory, chunks=[1] * 20)
    assert close(output, expected[:, 20:])
    reads = memory.state.reads[0]
    far = (gates > 0) * torch.arange(20 - WINDOW + 1, 40 - WINDOW + 1)
    assert reads.far_pairs - far_before == 4 * int(far.sum()), "each open query, every far key once a head"
    assert reads.skipped - skipped_before == int((gates == 0).sum()) > 0
    assert 0 < reads.skipped_share < 1


# States


def layer_for(options, parts, training=False):
    def layer(call, q, k, v, x):
        call.local.update(k, v, 1)  # as a layer without gates does
        return attend(options, 0, parts, x, q, k, v, SCALING, call, training)

    return layer


def stream(options, parts, inputs, memory=None, training=False, **more):
    state = options.new_state(len(inputs[0]), DEVICES, inputs[0].dtype)
    return run_pieces(state, options.window, layer_for(options, parts, training), tuple(inputs), memory=memory, **more)


def upto(inputs, end):
    return tuple(t[:, :, :end] if t.dim() == 4 else t[:, :end] for t in inputs)


def since(inputs, start):
    return tuple(t[:, :, start:] if t.dim() == 4 else t[:, start:] for t in inputs)


@torch.no_grad()
@pytest.mark.parametrize("threshold", [0.0, 0.4])
@pytest.mark.parametrize("gate_per", CHANNELS)
@pytest.mark.parametrize("gate_hidden", [None, 6])
def test_pieces_equal_one_pass_and_single_steps(threshold, gate_per, gate_hidden):
    options = options_for(threshold=threshold, gate_per=gate_per, gate_hidden=gate_hidden, segment_tokens=6)
    parts, inputs = parts_for(options), random_inputs(2, 23)
    gates = gates_for_inference(options, parts.logits(inputs[3]))
    assert threshold == 0 or 0 < float((gates == 0).double().mean()) < 1
    expected = specified(*inputs[:3], gates).transpose(1, 2)
    for chunks in ([23], [1] * 23, [7, 7, 7, 2], [4, 1, 18]):
        output, memory = stream(options, parts, inputs, chunks=chunks)
        assert close(output, expected)
    means = gate_means(parts, inputs)
    assert close(memory.state.gate_means[0], means)


def gate_means(parts, inputs):
    return torch.sigmoid(parts.logits(inputs[3]))[:, :, WINDOW:].mean((0, 2))


@torch.no_grad()
def test_threshold_zero_is_what_was_trained():
    options = options_for(threshold=0.0)
    parts, inputs = parts_for(options), random_inputs(2, 23)
    with torch.enable_grad():
        trained, _ = stream(options, parts, inputs, training=True)
    output, _ = stream(options, parts, inputs)
    assert close(output, trained)


@torch.no_grad()
@pytest.mark.parametrize("threshold", [0.0, 0.4])
@pytest.mark.parametrize("fixed", [False, True])
def test_padding_is_as_if_it_were_not_there(threshold, fixed):
    options = options_for(threshold=threshold, segment_tokens=8, far_heads=((0, (1,)),) if fixed else ())
    parts, inputs, lengths = parts_for(options), random_inputs(3, 23), [23, 12, 4]
    for left in (True, False):
        real = torch.arange(23) < torch.tensor(lengths)[:, None]
        real = real.flip(1) if left else real
        for chunks in ([23], [6] * 3 + [5], [1] * 23):
            output, _ = stream(options, parts, inputs, real=real, chunks=chunks)
            for row in range(3):
                columns = real[row].nonzero()[:, 0]
                mine = [t[row : row + 1][:, :, columns] if t.dim() == 4 else t[row : row + 1, columns] for t in inputs]
                assert close(output[row : row + 1, columns], stream(options, parts, mine)[0])


def test_padding_in_training():
    options = options_for()
    parts, inputs = parts_for(options), [tensor.requires_grad_() for tensor in random_inputs(2, 23)]
    real = torch.ones(2, 23, dtype=torch.bool)
    real[1, :11] = False
    output, _ = stream(options, parts, inputs, real=real, training=True)
    alone, _ = stream(options, parts, [t[1:2] for t in since(inputs, 11)], training=True)
    assert close(output[1:2, 11:], alone)
    padded = torch.autograd.grad(output[1].square().sum(), inputs)
    expected = torch.autograd.grad(alone.square().sum(), inputs)
    for left, right in zip(padded, expected, strict=True):
        assert close(left, right)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "checkpointed"])
def test_gradients_through_pieces(recompute):
    options = options_for(segment_tokens=6, sparsity_weight=0.5, mean_weight=0.2)
    direction = torch.randn(2, 23, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results = []
    for run in ("pieces", "naive"):
        inputs = [tensor.requires_grad_() for tensor in random_inputs(2, 23)]
        parts, losses = parts_for(options), []
        if run == "pieces":
            plain = layer_for(options, parts, training=True)

            def layer(call, *tensors, plain=plain, losses=losses):
                again = {"use_reentrant": False}
                output = checkpoint(plain, call, *tensors, **again) if recompute else plain(call, *tensors)
                losses.append(gate_losses(options, call.reading.gates.values(), call.reading.counted).total)
                return output

            state = options.new_state(2, DEVICES, torch.float64)
            output, _ = run_pieces(state, options.window, layer, tuple(inputs))
        else:
            gates = torch.sigmoid(parts.logits(inputs[3]))
            output = specified(*inputs[:3], gates).transpose(1, 2)
            counted = torch.ones(2, 23, dtype=torch.bool)
            counted[:, :WINDOW] = False
            for start in range(0, 23, 6):
                piece = slice(start, start + 6)
                losses.append(gate_losses(options, [gates[:, :, piece]], counted[:, piece]).total)
        total = (output * direction).sum() + sum(losses)
        results.append(torch.autograd.grad(total, [*inputs, parts.token_gate.weight, parts.token_gate.bias]))
    for fast, slow in zip(*results, strict=True):
        assert close(fast, slow)


def test_steps_after_detach_do_not_reach_back():
    options = options_for()
    parts, inputs = parts_for(options), [tensor.requires_grad_() for tensor in random_inputs(1, 20)]
    _, memory = stream(options, parts, upto(inputs, 10), training=True)
    memory.state.detach()
    output, _ = stream(options, parts, since(inputs, 10), memory=memory, training=True)
    gradient = torch.autograd.grad(output.sum(), inputs[1])[0]
    assert torch.count_nonzero(gradient[:, :, :10]) == 0 and torch.count_nonzero(gradient[:, :, 10:]) > 0


@torch.no_grad()
@pytest.mark.parametrize("fixed", [False, True])
def test_rows_are_chosen_cloned_and_saved(fixed):
    options = options_for(far_heads=((0, (1,)),) if fixed else ())
    parts, inputs, rows = parts_for(options), random_inputs(3, 30), [2, 0, 2]
    whole, _ = stream(options, parts, inputs)
    _, memory = stream(options, parts, upto(inputs, 17))
    twin, saved = memory.clone(), memory.clone()
    first, _ = stream(options, parts, since(inputs, 17), memory=memory)
    twin.select(rows)
    chosen, _ = stream(options, parts, [t[rows] for t in since(inputs, 17)], memory=twin, chunks=[1] * 13)
    assert close(first, whole[:, 17:]) and close(chosen, whole[rows, 17:])
    tensors = saved.state_dict()
    saved.state = options.new_state(3, DEVICES, torch.float64)
    saved.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, "cpu")
    again, _ = stream(options, parts, since(inputs, 17), memory=saved)
    assert close(again, whole[:, 17:])


@torch.no_grad()
def test_two_copies_go_their_own_ways():
    """Both append where the other one would: neither sees the other's columns."""
    options = options_for()
    parts, inputs, others = parts_for(options), random_inputs(1, 30), random_inputs(1, 30, seed=9)
    _, memory = stream(options, parts, upto(inputs, 12), chunks=[1] * 12)
    twin = memory.clone()
    ours, theirs = [], []
    for t in range(12, 30):
        ours.append(stream(options, parts, since(upto(inputs, t + 1), t), memory=memory)[0])
        theirs.append(stream(options, parts, since(upto(others, t + 1), t), memory=twin)[0])
    joined = [torch.cat([a[:, :, :12], b[:, :, 12:]], 2) for a, b in zip(inputs[:3], others[:3], strict=True)]
    joined.append(torch.cat([inputs[3][:, :12], others[3][:, 12:]], 1))
    assert close(torch.cat(ours, 1), stream(options, parts, inputs)[0][:, 12:])
    assert close(torch.cat(theirs, 1), stream(options, parts, joined)[0][:, 12:])


@torch.no_grad()
def test_a_step_does_not_touch_what_is_there():
    options = options_for()
    parts, inputs = parts_for(options), random_inputs(1, 30)
    _, memory = stream(options, parts, upto(inputs, 20), chunks=[19, 1])
    before = memory.state.held["far", 0].storage
    _, memory = stream(options, parts, since(inputs, 20), memory=memory, chunks=[1] * 10)
    assert memory.state.held["far", 0].storage is before


@torch.no_grad()
def test_removed_and_forgotten_tokens():
    options = options_for()
    parts, inputs = parts_for(options), random_inputs(2, 30)
    whole, _ = stream(options, parts, inputs)
    _, memory = stream(options, parts, upto(inputs, 25))
    memory.crop(-8)
    output, memory = stream(options, parts, since(inputs, 17), memory=memory)
    assert close(output, whole[:, 17:])
    memory.reset([1])
    output, memory = stream(options, parts, inputs, memory=memory)
    assert close(output[1:], whole[1:]) and not close(output[:1], whole[:1], 1e-3)
    memory.reset()
    output, memory = stream(options, parts, inputs, memory=memory)
    assert close(output, whole)


# Gates and losses


@torch.no_grad()
@pytest.mark.parametrize("gate_hidden", [None, 6])
def test_gates_start_where_the_base_is(gate_hidden):
    options = options_for(gate_hidden=gate_hidden, gate_per="head")
    parts, x = GatedParts(**make_parts(options)), torch.randn(2, 9, 32)
    assert torch.allclose(torch.sigmoid(parts.logits(x)), torch.tensor(0.982), atol=1e-3)
    open_parts = GatedParts(**make_parts(replace(options, gate_bias=math.inf)))
    assert torch.equal(torch.sigmoid(open_parts.logits(x)), torch.ones(2, 4, 9))
    assert parts.logits(x.bfloat16()).dtype == torch.float32


def test_choices():
    logits = torch.linspace(-6, 6, 2001, dtype=torch.float64).requires_grad_()
    soft = torch.sigmoid(logits)
    hard = gates_for_training(options_for(gate_choice="straight_through"), logits)
    assert set(hard.tolist()) == {0.0, 1.0}
    assert torch.equal(torch.autograd.grad(hard.sum(), logits)[0], torch.autograd.grad(soft.sum(), logits)[0])
    torch.manual_seed(0)
    many = logits.detach()[1200].expand(20000)
    noisy = gates_for_training(options_for(gate_choice="gumbel"), many)
    assert float((noisy > 0.5).double().mean() - soft.detach()[1200]) == pytest.approx(0, abs=0.01)
    clipped = gates_for_training(options_for(gate_choice="hard_concrete"), many)
    assert 0.05 < float((clipped == 0).double().mean()) < 0.5 and 0.05 < float((clipped == 1).double().mean()) < 0.9
    for choice in ("soft", "gumbel", "straight_through", "hard_concrete"):
        inferred = gates_for_inference(options_for(gate_choice=choice), logits.detach())
        assert torch.equal(inferred, gates_for_inference(options_for(gate_choice=choice), logits.detach()))
        assert (set(inferred.tolist()) == {0.0, 1.0}) == (choice == "straight_through")
    assert bool((gates_for_inference(options_for(gate_choice="hard_concrete"), logits.detach()) == 0).any())


@pytest.mark.parametrize("sign", ["+", "paper"])
def test_where_the_sparsity_term_ends(sign):
    """With the plus gates go to 0 and 1, with the report's sign all go to 0.5."""
    torch.manual_seed(0)
    options = options_for(sparsity_weight=1.0, sparsity_sign=sign)
    logits = torch.randn(1, 1, 200, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.05)
    for _ in range(300):
        optimiser.zero_grad()
        gate_losses(options, [torch.sigmoid(logits)], torch.ones(1, 200, dtype=torch.bool)).total.backward()
        optimiser.step()
    distance = (torch.sigmoid(logits.detach()) - 0.5).abs()
    assert float((distance > 0.45).float().mean()) > 0.98 if sign == "+" else float(distance.max()) < 0.02


def test_losses_leave_out_tokens_with_nothing_far():
    options = options_for(mean_weight=1.0)
    parts, inputs = parts_for(options), random_inputs(2, 9)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :3] = False
    _, memory = stream(options, parts, inputs, real=real)
    assert memory.state.tokens_counted == (9 - WINDOW) + (6 - WINDOW)
    gates = torch.sigmoid(parts.logits(inputs[3]))[:, 0]
    expected = torch.cat([gates[0, WINDOW:], gates[1, 3 + WINDOW :]]).mean()
    assert close(memory.state.gate_means[0][0], expected)
    nothing = gate_losses(options, [gates[:, None]], torch.zeros(2, 9, dtype=torch.bool))
    assert float(nothing.total.detach()) == 0.0 and nothing.total.requires_grad


def test_a_token_that_must_look_far_learns_to():
    """One kind of token copies the first token's value, which its window does not show; the others do not."""
    torch.manual_seed(0)
    options = options_for(mean_weight=0.05, gate_bias=0.0)
    parts = GatedParts(**make_parts(options))
    optimiser = torch.optim.Adam(parts.token_gate.parameters(), lr=0.05)
    q, k = torch.zeros(8, 4, 24, 8), torch.zeros(8, 2, 24, 8)
    q[..., 0], k[:, :, 0, 0] = 30.0, 1.0
    asking = torch.rand(8, 24) < 0.3
    x = torch.randn(8, 24, 32) * 0.1
    x[..., 0] += asking * 2.0
    for _ in range(200):
        v = torch.randn(8, 2, 24, 8)
        near = two_passes(q, k, v, torch.zeros(8, 1, 24), WINDOW, SCALING)
        target = torch.where(asking[:, None, :, None], v[:, :, :1].repeat_interleave(2, 1), near)
        gates = torch.sigmoid(parts.logits(x))
        error = (two_passes(q, k, v, gates, WINDOW, SCALING) - target)[:, :, WINDOW:].square().mean()
        counted = (torch.arange(24) >= WINDOW).expand(8, -1)
        optimiser.zero_grad()
        (error + gate_losses(options, [gates], counted).total).backward()
        optimiser.step()
    gates = torch.sigmoid(parts.logits(x)).detach()[:, 0]
    assert float(gates[asking].min()) > 0.8 and float(gates[~asking].max()) < 0.2


# Fixed heads


@torch.no_grad()
def test_fixed_heads_see_all_or_their_window():
    options = options_for(gate_per="kv_head", far_heads=((0, (1,)),))
    parts, inputs = parts_for(options), random_inputs(2, 40)
    gates = torch.tensor([0.0, 1.0], dtype=torch.float64)[:, None].expand(2, 2, 40)
    expected = specified(*inputs[:3], gates).transpose(1, 2)
    for chunks in ([40], [1] * 40, [17, 23], [9, 1, 30]):
        output, memory = stream(options, parts, inputs, chunks=chunks)
        assert close(output, expected)
    with torch.enable_grad():
        assert close(stream(options, parts, inputs)[0], expected)
    assert memory.state.held["near", 0].keys.shape[1] == memory.state.held["far", 0].keys.shape[1] == 1


@torch.no_grad()
def test_local_heads_drop_what_is_far():
    inputs = random_inputs(1, 4000, dtype=torch.float32)
    nbytes = {}
    for name, far_heads in {"gates": (), "half": ((0, (1,)),), "all local": ((0, ()),)}.items():
        options = options_for(far_heads=far_heads)
        parts = GatedParts(**make_parts(options))
        _, memory = stream(options, parts, inputs, chunks=[100] * 40)
        nbytes[name] = memory.state.nbytes
    assert nbytes["half"] < 0.55 * nbytes["gates"]
    assert nbytes["all local"] < 0.08 * nbytes["gates"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("gate_per", "means", "expected"),
    [
        ("kv_head", [0.2, 0.9], (1,)),
        ("head", [0.1, 0.6, 0.4, 0.49], (0,)),
        ("layer", [0.7], (0, 1)),
        ("layer", [0.3], ()),
    ],
)
def test_heads_are_fixed_by_their_mean_gates(gate_per, means, expected):
    options = fix_heads(options_for(gate_per=gate_per), {0: torch.tensor(means)})
    assert options.far_heads == ((0, expected),) and options.fixed(0) == expected


# Options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (3,)}, "layers 0 to 2"),
        ({"window_tokens": 0}, "window_tokens must be at least 1"),
        ({"gate_hidden": 0}, "leave it out for a linear gate"),
        ({"gate_hidden": -2}, "gate_hidden must be at least 1"),
        ({"gate_per": "token"}, "gate_per must be one of"),
        ({"gate_choice": "hard"}, "gate_choice must be one of"),
        ({"gate_temperature": 0.0}, "gate_temperature must be positive"),
        ({"sparsity_sign": "-"}, "sparsity_sign must be one of"),
        ({"mean_weight": -1.0}, "mean_weight must be at least 0"),
        ({"threshold": 0.6}, "between 0 and 0.5"),
        ({"far_heads": ((0, (2,)),)}, "2 kv heads"),
        ({"far_heads": ((1, (0,)),)}, "method's layers are"),
    ],
)
def test_wrong_options(changes, message):
    with pytest.raises(ValueError, match=message):
        options_for(**changes)


def test_what_a_state_cannot_do():
    with pytest.raises(ValueError, match="leave cache_size out"):
        options_for().new_state(1, DEVICES, torch.float32, cache_size=4)
    options = options_for(far_heads=((0, ()),))
    with torch.no_grad():
        _, memory = stream(options, parts_for(options), random_inputs(1, 60), chunks=[1] * 60)
    with pytest.raises(ValueError, match="forgotten what was before"):
        memory.crop(-1)
