"""Gated attention: states in pieces, copies and files, losses, fixed heads and options."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from attention_core import random_inputs, run_pieces
from gated_cases import (
    CHANNELS,
    DEVICES,
    WINDOW,
    close,
    layer_for,
    mean_gates,
    options_for,
    parts_for,
    since,
    specified,
    stream,
    upto,
)
from torch.utils.checkpoint import checkpoint

import cacheformers
from cacheformers.methods.gated_attention.gated_attention import (
    GatedParts,
    fix_heads,
    gates_for_inference,
    gates_for_training,
    make_parts,
)
from cacheformers.methods.gated_attention.state import KeyValues, Storage, gate_losses
from cacheformers.modeling.cache import MemoryCache


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
    assert close(mean_gates(memory)[0], means)


def gate_means(parts, inputs):
    return torch.sigmoid(parts.logits(inputs[3]))[:, :, WINDOW:].mean((0, 2))


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


@torch.no_grad()
def test_a_step_does_not_touch_what_is_there():
    options = options_for()
    parts, inputs = parts_for(options), random_inputs(1, 30)
    _, memory = stream(options, parts, upto(inputs, 20), chunks=[19, 1])
    before = memory.state.held["far", 0].storage
    _, memory = stream(options, parts, since(inputs, 20), memory=memory, chunks=[1] * 10)
    assert memory.state.held["far", 0].storage is before


@torch.no_grad()
class Slow(Storage):
    """Another thread has its turn whenever one looks what room is taken."""

    @property
    def claimed(self):
        found = self.taken
        time.sleep(0.05)
        return found

    @claimed.setter
    def claimed(self, columns):
        self.taken = columns


def test_threads_go_on_from_one_memory():
    """Each has its own columns, whoever takes the room that is left."""
    start = KeyValues(Slow(torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 9, 4), 8), 8)

    @torch.no_grad()
    def go_on(number):
        return start.appended(*torch.full((2, 1, 1, 1, 4), float(number)))

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(go_on, range(1, 4)))
    for number, each in enumerate(found, 1):
        assert (each.keys[0, 0, 8] == number).all() and (each.values[0, 0, 8] == number).all()
        assert not each.keys[0, 0, :8].any() and each.length == 9
    assert sum(each.storage is start.storage for each in found) == 1


def test_closed_gates_forget_what_is_far():
    """With cache_size 0 every token sees its window alone, and no more is kept."""
    options = options_for()
    parts, inputs = parts_for(options), random_inputs(2, 40)
    state = options.new_state(2, DEVICES, torch.float64, cache_size=0)
    memory = MemoryCache(state, options.window, 2, {})
    output, memory = stream(options, parts, inputs, memory=memory, chunks=[7] * 5 + [1] * 5)
    expected = specified(*inputs[:3], torch.zeros(2, 1, 40, dtype=torch.float64))
    assert close(output, expected.transpose(1, 2))
    assert memory.state.held["near", 0].keys.shape[2] <= 7 + 2 * WINDOW and not mean_gates(memory)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"far_heads": {0: [1], 2: []}}, {"far_distance": 5}], ids=str)
def test_a_window_of_one_token_keeps_nothing_and_can_be_joined(make_model, ids, options):
    model = make_model("llama_gqa", method="gated_attention", window_tokens=1, segment_tokens=16, **options)
    memory, other = (cacheformers.read(model, part, progress=False) for part in (ids[:, :20], ids[:, 20:50]))
    separate = [model(ids[:, 60:], past_key_values=given.clone()).logits for given in (memory, other)]
    memory.join([other])
    together = model(ids[:, 60:].repeat(2, 1), past_key_values=memory).logits
    assert close(together, torch.cat(separate))


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
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        gate_losses(options, [torch.sigmoid(logits)], torch.ones(1, 200, dtype=torch.bool)).total.backward()
        optimizer.step()
    distance = (torch.sigmoid(logits.detach()) - 0.5).abs()
    assert float((distance > 0.45).float().mean()) > 0.98 if sign == "+" else float(distance.max()) < 0.02


def test_losses_leave_out_tokens_with_nothing_far():
    options = options_for(mean_weight=1.0)
    parts, inputs = parts_for(options), random_inputs(2, 9)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :3] = False
    _, memory = stream(options, parts, inputs, real=real)
    means = mean_gates(memory)
    assert int(memory.state.last.counted.sum()) == (9 - WINDOW) + (6 - WINDOW)
    gates = torch.sigmoid(parts.logits(inputs[3]))[:, 0]
    expected = torch.cat([gates[0, WINDOW:], gates[1, 3 + WINDOW :]]).mean()
    assert close(means[0][0], expected)
    nothing = gate_losses(options, [gates[:, None]], torch.zeros(2, 9, dtype=torch.bool))
    assert float(nothing.total.detach()) == 0.0 and nothing.total.requires_grad


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


def test_what_a_state_cannot_do():
    options = options_for(far_heads=((0, ()),))
    with torch.no_grad():
        _, memory = stream(options, parts_for(options), random_inputs(1, 60), chunks=[1] * 60)
    with pytest.raises(ValueError, match="forgotten what was before"):
        memory.crop(-1)
