"""Compare memories."""

import torch


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
