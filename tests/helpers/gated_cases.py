"""What the tests of gated attention share: options, gates that differ from token to token, and reading in pieces."""

from types import SimpleNamespace

import torch
from attention_core import SHAPE, run_pieces

from cacheformers.methods.gated_attention import near_far
from cacheformers.methods.gated_attention.gated_attention import GatedParts, attend, make_parts, naive
from cacheformers.methods.gated_attention.options import GatedAttentionOptions

DEVICES = {0: torch.device("cpu")}
SCALING = 8**-0.5
WINDOW = 4
CHANNELS = {"layer": 1, "kv_head": 2, "head": 4}


def options_for(**changes):
    return GatedAttentionOptions(**{"base": SHAPE, "layers": (0,), "window_tokens": WINDOW, **changes})


def parts_for(options, seed=0, spread=1.0):
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


def layer_for(options, parts, training=False):
    def layer(call, q, k, v, x):
        call.local.update(k, v, 1)  # as a layer without gates does
        inputs = {"hidden": x, "query": q, "new_key": k, "new_value": v, "scaling": SCALING, "call": call}
        return attend(options, 0, parts, SimpleNamespace(**inputs, module=SimpleNamespace(training=training)))

    return layer


def stream(options, parts, inputs, memory=None, training=False, **more):
    state = options.new_state(len(inputs[0]), DEVICES, inputs[0].dtype)
    return run_pieces(state, options.window, layer_for(options, parts, training), tuple(inputs), memory=memory, **more)


def upto(inputs, end):
    return tuple(t[:, :, :end] if t.dim() == 4 else t[:, :end] for t in inputs)


def since(inputs, start):
    return tuple(t[:, :, start:] if t.dim() == 4 else t[:, start:] for t in inputs)


def mean_gates(memory):
    """The mean gate of each layer over counted tokens of the forward that ends here, `[channels]`."""
    if memory.state.pieces:
        memory.detach()
    gates, counted = memory.state.last
    return {layer: tensor.transpose(1, 2)[counted].mean(0) for layer, tensor in gates.items()}


def recorded_reads(monkeypatch):
    """How many pairs of a query and a far key attention reads without gradients from now on, call by call."""
    found, far_part = [], near_far.far_part

    def recording(queries, keys, values, mine, heads, start, window, chosen, scaling):
        part = far_part(queries, keys, values, mine, heads, start, window, chosen, scaling)
        found.append(part.lse.numel() * (start - window + int(chosen[-1]) + 1))
        return part

    monkeypatch.setattr(near_far, "far_part", recording)
    return found
