"""The ring of entries against plain lists: what it keeps, which rows share, and when it copies."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheformers.modeling.search.store import Ring


def contents(ring, row):
    return [float(entry[0]) for span in ring.entries(row).spans for entry in span]


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(1, 12), sizes=st.lists(st.integers(0, 30), max_size=8), keep_values=st.booleans())
def test_ring_keeps_the_newest_in_order(capacity, sizes, keep_values):
    ring = Ring(2, capacity, 3, value_width=2 if keep_values else None)
    written = 0
    for size in sizes:
        new = torch.arange(written, written + size, dtype=torch.float32)[:, None]
        ring.append(1, new.expand(-1, 3), -new.expand(-1, 2) if keep_values else None)
        written += size
        count = min(written, capacity)
        entries = ring.entries(1)
        assert contents(ring, 1) == list(range(written - count, written))
        assert (entries.first, entries.count, ring.count(1)) == (written - count, count, count)
        assert ring.keys.shape[1] <= capacity and ring.count(0) == 0
        if count:
            hits = torch.arange(count).expand(2, 2, count)
            slots = ring.slots(hits)[1]
            assert torch.equal(ring.keys.flatten(0, 1)[slots[0]], torch.cat(entries.spans))
            assert torch.equal(slots[0], slots[1])
            if ring.values is not None:
                assert torch.equal(ring.values.flatten(0, 1)[slots[0]][:, 0], -torch.cat(entries.spans)[:, 0])
            for part in range(count + 1):
                oldest = entries.oldest(part)
                assert torch.equal(torch.cat(oldest.spans), torch.cat(entries.spans)[:part])


def numbered(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, 2)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_ring_rows_never_mix(data):
    """Against plain lists, over any sequence of appends, selections, resets and clones."""
    capacity, count = data.draw(st.integers(1, 5)), 0
    ring = Ring(3, capacity, 2)
    rows = [[], [], []]
    snapshots = []
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["append", "append", "select", "reset", "clone", "view"]))
        row = data.draw(st.integers(0, len(rows) - 1))
        if action == "append":
            new = list(range(count, count + data.draw(st.integers(0, 7))))
            count += len(new)
            ring.append(row, numbered(*new) if new else torch.empty(0, 2))
            rows[row] = (rows[row] + new)[-capacity:]
        elif action == "select":
            chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5))
            ring.select(chosen)
            rows = [list(rows[i]) for i in chosen]
        elif action == "reset":
            ring.reset([row])
            rows[row] = []
        else:
            snapshots.append((ring.clone() if action == "clone" else ring.view(), [list(row) for row in rows]))
        for held, expected in [*snapshots, (ring, rows)]:
            assert held.rows == len(expected)
            assert [contents(held, i) for i in range(held.rows)] == expected
    slots = ring.slots(torch.zeros(ring.rows, 1, dtype=torch.long))
    for slot, kept in zip(slots[:, 0], rows, strict=True):
        if kept:
            assert float(ring.keys.flatten(0, 1)[slot, 0]) == kept[0]


def test_ring_copies_on_write_only_for_graphs():
    ring = Ring(1, 4, 2)
    ring.append(0, numbered(1, 2, 3, 4))
    with torch.no_grad():
        ring.view()
        before = ring.keys.data_ptr()
        ring.append(0, numbered(5))
        assert ring.keys.data_ptr() == before
    view = ring.view()
    weight = torch.ones((), requires_grad=True)
    result = (view.keys * weight).sum()
    ring.append(0, numbered(6))
    result.backward()  # fails if what the graph saved was overwritten
    assert contents(view, 0) == [2, 3, 4, 5] and contents(ring, 0) == [3, 4, 5, 6]
    pointer = ring.keys.data_ptr()
    ring.append(0, numbered(7))
    assert ring.keys.data_ptr() == pointer


@torch.no_grad()
def test_clones_share_entries_until_one_writes():
    ring = Ring(2, 4, 2)
    ring.append(0, numbered(1, 2, 3, 4))
    twin, other = ring.clone(), ring.clone()
    assert twin.keys.data_ptr() == ring.keys.data_ptr()
    twin.append(0, numbered(5))
    ring.append(0, numbered(6))
    other.reset([0])
    other.append(0, numbered(7))
    assert [contents(each, 0) for each in (ring, twin, other)] == [[2, 3, 4, 6], [2, 3, 4, 5], [7]]
