"""Few queries: the ring holds the entries, exact search finds them all, and every cell of the tables is filled."""

import importlib
import sys
from pathlib import Path

import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_every_number_of_queries_and_every_precision_is_measured(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    few = importlib.import_module("few_queries")
    torch.manual_seed(0)
    stored = torch.randn(300, 24)
    entries = few.ring(stored, torch.float32).entries(0)
    assert len(entries.spans) == 2 and torch.equal(torch.cat(entries.spans).sort(0).values, stored.sort(0).values)
    rows = [few.by_queries(stored, asked, 2) for asked in (1, 20)] + few.by_precision(stored, 2)
    assert [row["name"] for row in rows] == ["1", "20", "float32", "bfloat16", "int8", "float32, auto"]
    assert all(row["ratio"] > 0 and row["low"] <= row["ratio"] <= row["high"] for row in rows)
    assert [row["recall"] for row in rows[:2]] == [1, 1]
    title, _, line, _ = few.shown_rows(rows, "single")
    assert title.count("|") == line.count("|") == 6 and "d 24, 300 entries" in line


def test_a_neighbor_that_is_lost_is_seen(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    few = importlib.import_module("few_queries")
    search = few.get_search("exact")

    def worse(queries, entries, topk, similarity):
        return search(-queries, entries, topk, similarity)

    monkeypatch.setattr(few, "get_search", lambda name: worse)
    assert few.by_queries(torch.randn(300, 24), 4, 1)["recall"] < 0.5
