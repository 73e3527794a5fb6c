"""Read in chunks, compare memories, and look at what a layer's projections give."""

import torch

from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap


def chunked(model, ids, size, mask=None, memory=None):
    """The logits of ids that are read chunk by chunk, and the memory."""
    logits = []
    for start in range(0, ids.shape[1], size):
        part = None if mask is None else mask[:, start : start + size]
        output = model(ids[:, start : start + size], attention_mask=part, past_key_values=memory)
        memory = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, 1), memory


def loss_and_gradients(model, loss, checkpointing):
    """A loss, and its gradients by the names of parameters, with or without activation checkpointing."""
    if checkpointing:
        unwrap(model).gradient_checkpointing_enable({"use_reentrant": False})
    found = loss()
    found.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return float(found.detach()), gradients


def projections(model, layer, ids):
    """What W_q, W_k and W_v of a layer give (after norms of heads), and what W_o is given, `[rows, heads, time, d]`."""
    attention = attention_modules(find_decoder(unwrap(model)))[layer]
    seen = {name: [] for name in "qkvo"}
    output = next(getattr(attention, name) for name in ("o_proj", "out_proj", "dense") if hasattr(attention, name))
    handles = [output.register_forward_pre_hook(lambda module, args: seen["o"].append(args[0]))]
    for name in "qkv":
        module = getattr(attention, f"{name}_norm", None) or getattr(attention, f"{name}_proj")
        handles.append(module.register_forward_hook(lambda *call, name=name: seen[name].append(call[-1])))
    model(ids)
    for handle in handles:
        handle.remove()
    return [torch.cat(seen[name], 1).reshape(*ids.shape, -1, attention.head_dim).transpose(1, 2) for name in "qkvo"]


def assert_equal(one, other):
    """Bit for bit, whatever shares a place in memory."""
    first, second = one.state_dict(), other.state_dict()
    assert {name for name in first if ".rings." not in name} == {name for name in second if ".rings." not in name}
    for name, tensor in first.items():
        if ".rings." not in name:
            assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name
    assert one.state.rings.keys() == other.state.rings.keys()
    for layer, ring in one.state.rings.items():
        twin = other.state.rings[layer]
        assert ring.capacity == twin.capacity and ring.keys.dtype == twin.keys.dtype
        for row in range(one.batch_size):
            mine, theirs = ring.entries(row), twin.entries(row)
            assert mine.first == theirs.first
            assert torch.equal(torch.cat(mine.spans), torch.cat(theirs.spans))
    assert one.fingerprint == other.fingerprint and one.signature == other.signature and one.window == other.window
