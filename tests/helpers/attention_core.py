"""Run an attention memory's core without a model: recorded data, rotary positions, and pieces of a text."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.memory import BaseShape

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden"
SCALING = 8**-0.5
SHAPE = BaseShape("llama", 32, 4, 2, 8, 3, 128, 4096, rotary=True)


def golden_files(method, pattern):
    """A test parameter for every recorded file of a method."""
    found = [pytest.param(path, id=path.stem) for path in sorted((GOLDEN / method).glob(pattern))]
    absent = pytest.mark.skip(reason=f"no recorded data ({pattern}) in ../shared/golden/{method}")
    return found or [pytest.param(None, id="none", marks=[absent])]


def rotate(tensor, positions):
    """Rotary positions `[rows, time]` (theta 10000, halves) on `[rows, heads, time, d]`."""
    width = tensor.shape[-1]
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = (positions[..., None] * frequencies).repeat(1, 1, 2)[:, None]
    first, second = tensor.double().chunk(2, -1)
    turned = tensor.double() * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
    return turned.to(tensor.dtype)


def random_inputs(rows, time, seed=0, dtype=torch.float64):
    """q `[rows, 4, time, 8]`, k and v `[rows, 2, time, 8]`, without rotary positions, and x `[rows, time, 32]`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, 4, time, 8), (rows, 2, time, 8), (rows, 2, time, 8), (rows, time, 32))
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes)


def allowed(call):
    """Which columns, old and new, each new column may see, `[rows, time, columns + time]`."""
    time, columns = call.real.shape[1], call.visible.shape[1]
    place = torch.arange(columns)
    itself = place == place[-time:, None]
    return (place <= place[-time:, None]) & call.visible[:, None] | itself


def attention_layer(options, parts, attend):
    """One attention layer over the columns that a call shows, with a method's `attend` inside."""

    def layer(call, q, k, v, x):
        new = call.positions[:, -q.shape[2] :]
        keys, values = call.local.update(rotate(k, new), v, 0)
        groups = q.shape[1] // k.shape[1]
        scores = rotate(q, new) @ keys.repeat_interleave(groups, 1).mT * SCALING
        scores = scores.masked_fill(~allowed(call)[:, None], torch.finfo(scores.dtype).min)
        near = (torch.softmax(scores, -1) @ values.repeat_interleave(groups, 1)).transpose(1, 2)
        inputs = SimpleNamespace(local=near, plain_query=q, plain_key=k, new_value=v, hidden=x, call=call)
        return attend(options, 0, parts, inputs)

    return layer


def run_pieces(state, window, layer, inputs, real=None, chunks=None, memory=None):
    """Feed columns to one attention layer as the decoder's hooks do: cut where segments end, close, attend, take up.

    Args:
        layer: given the call and the piece's inputs.
        chunks: how many columns each forward brings; None for all at once.

    Returns:
        The layer's outputs `[rows, time, ...]`, and the memory.
    """
    rows, time = inputs[-1].shape[:2]
    if memory is None:
        memory = MemoryCache(state, window, rows, {})
    real = torch.ones(rows, time, dtype=torch.bool) if real is None else real
    outputs, start = [], 0
    for chunk in chunks or [time]:
        for first, last in memory.timeline.pieces(real[:, start : start + chunk]):
            columns = slice(start + first, start + last)
            memory.close(memory.timeline.full_rows(), lambda keys, shift, layer: rotate(keys, shift))
            call = memory.begin(real[:, columns])
            piece = [tensor[:, :, columns] if tensor.dim() == 4 else tensor[:, columns] for tensor in inputs]
            outputs.append(layer(call, *piece))
            memory.end(call)
        start += chunk
    return torch.cat(outputs, 1), memory
