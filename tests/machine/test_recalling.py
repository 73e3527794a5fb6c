"""`recall`: parts of a document by how near the memory's entries are to a query, against the definition."""

import pytest
import torch
import torch.nn.functional as F
from memories import assert_equal

import cacheformers

SPANS = [(0, 7), (7, 20), (20, 21), (21, 40), (30, 30)]


def entries(model, ids):
    """The entries that reading leaves behind, `[tokens, d]`."""
    memory = cacheformers.read(model, ids, progress=False)
    (ring,) = memory.state.rings.values()
    return torch.cat(ring.entries(0).spans)


def test_scores_are_late_interaction(make_model, ids):
    """No memory comes before the first retrieval layer, so a query's vectors are the entries of reading it alone."""
    model = make_model("llama_gqa", hit_scores=True)
    document, query = ids[:1, :40], ids[1, 40:50]
    memory = cacheformers.read(model, document, progress=False)
    before = memory.clone()
    cosines = F.normalize(entries(model, query), dim=-1) @ F.normalize(entries(model, document), dim=-1).T
    expected = []
    for start, end in SPANS:
        best = [max((float(cosines[token, place]) for place in range(start, end)), default=-1) for token in range(10)]
        expected.append(sum(best))
    torch.testing.assert_close(cacheformers.recall(model, memory, query.tolist(), SPANS), torch.tensor(expected))
    assert_equal(memory, before)


def test_what_comes_before_a_query_does_not_count(make_model, ids):
    model = make_model("llama_gqa", hit_scores=True)
    memory = cacheformers.read(model, ids[:1, :40], progress=False)
    query = ids[1, 40:50].tolist()
    counted = cacheformers.recall(model, memory, query, SPANS, skip=4)
    beginning = cacheformers.recall(model, memory, query[:4], SPANS)
    torch.testing.assert_close(counted + beginning, cacheformers.recall(model, memory, query, SPANS))


@torch.no_grad()
@pytest.mark.parametrize(("tokens", "sees"), [(10, True), (20, False)])
def test_a_short_query_sees_the_local_window(make_model, ids, tokens, sees):
    """One that fills a segment sees itself alone, because a part of it would enter the memory."""
    window = {"local_window": "sliding", "window_tokens": 12, "sink_tokens": 3}
    model = make_model("llama_gqa", method="retrieval_heads", **window)
    memory, query = cacheformers.read(model, ids[:1, :40], progress=False), ids[1:2, 40 : 40 + tokens]
    asked = memory.clone() if sees else memory.with_window(tokens + 1)
    model(query, past_key_values=asked)
    expected = asked.state.span_scores(tokens, 0, 40, SPANS)
    found = cacheformers.recall(model, memory, query[0].tolist(), SPANS)
    torch.testing.assert_close(found, expected)
    if sees:
        alone = memory.with_window(tokens + 1)
        model(query, past_key_values=alone)
        assert not torch.allclose(found, alone.state.span_scores(tokens, 0, 40, SPANS), atol=1e-4)


def test_rows_are_asked_by_number(make_model, ids):
    model = make_model("llama_gqa", hit_scores=True)
    memory = cacheformers.read(model, ids[:2, :40], progress=False)
    alone = cacheformers.read(model, ids[1:2, :40], progress=False)
    query = ids[0, 50:56].tolist()
    both = [cacheformers.recall(model, memory, query, SPANS, row) for row in range(2)]
    torch.testing.assert_close(both[1], cacheformers.recall(model, alone, query, SPANS))
    assert not torch.equal(both[0], both[1])


@pytest.mark.parametrize("method", ["neurocache", "memorizing"])
def test_methods_that_keep_no_queries_count_what_was_retrieved(make_model, ids, method):
    model = make_model("llama_gqa", method=method)
    memory = cacheformers.read(model, ids[:1, :40], progress=False)
    asked = memory.with_window(9)
    with torch.no_grad():
        model(ids[1:2, 40:48], past_key_values=asked)
    found = [layer[0, -8:].tolist() for layer in asked.state.retrieved().values()]
    expected = [
        sum(any(start <= place < end for layer in found for place in layer[token]) for token in range(8))
        for start, end in SPANS[:-1]
    ]
    scores = cacheformers.recall(model, memory, ids[1, 40:48].tolist(), SPANS)
    assert scores.tolist() == [*expected, -8]


def test_documents_of_fewer_tokens_than_are_looked_up(make_model, ids):
    model = make_model("llama_gqa", topk=4)
    memory = cacheformers.read(model, ids[:1, :3], progress=False)
    assert cacheformers.recall(model, memory, ids[0, 20:25].tolist(), [(0, 1), (1, 3)]).tolist() == [5, 5]


def test_forgotten_tokens_are_not_recalled(make_model, ids):
    model = make_model("llama_gqa", hit_scores=True, cache_size=16)
    memory = cacheformers.read(model, ids[:1, :40], progress=False)
    forgotten, kept = cacheformers.recall(model, memory, ids[0, 20:24].tolist(), [(0, 24), (24, 40)]).tolist()
    assert forgotten == -4 and kept > forgotten


def test_errors_say_what_to_do(make_model, ids):
    retrieving, other = make_model("llama_gqa"), make_model("llama_gqa", method="infini_attention")
    memory = cacheformers.read(other, ids[:1, :40], progress=False)
    with pytest.raises(ValueError, match="retrieves nothing"):
        cacheformers.recall(other, memory, [1, 2], SPANS)
    with pytest.raises(ValueError, match="empty query"):
        cacheformers.recall(retrieving, cacheformers.read(retrieving, ids[:1, :40], progress=False), [], SPANS)
