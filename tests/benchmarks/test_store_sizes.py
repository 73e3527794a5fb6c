"""Stores of many sizes: what is made of real entries lies near them, and its indexes find what exact search finds."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from cacheformers.modeling.search.store import unpacked

pytest.importorskip("faiss")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1), (torch.int8, 0.27)])
def test_a_larger_store_is_made_of_real_entries_and_searched_by_its_indexes(dtype, share, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    sizes = importlib.import_module("store_sizes")
    torch.manual_seed(0)
    real = (torch.randn(50, 1, 64) + 0.3 * torch.randn(50, 40, 64)).flatten(0, 1)  # 2,000 entries in 50 groups
    stored = sizes.fill(real, 12_000, dtype, tmp_path / "entries")
    assert stored.nbytes == (tmp_path / "entries").stat().st_size <= share * 12_000 * 64 * 4
    rows = unpacked(stored)
    torch.testing.assert_close(rows[:2000], real, atol=0.02, rtol=0)
    nearest = torch.cdist(rows[2000:2200], real).amin(1)
    between = torch.cdist(real, real).fill_diagonal_(torch.inf).amin(1).mean()
    assert 0.5 * between < nearest.mean() < 1.2 * between
    found = sizes.measure(stored, real[:20] + 0.05 * torch.randn(20, 64), 16, 2, tmp_path / "index")
    assert [row["asked"] for row in found] == [1, 1, 1, 20, 20, 20]
    exact, inverted, compressed = found[:3]
    assert exact["ratio"] == exact["recall"] == 1 and inverted["search"] == "IVF256,SQ8"
    assert inverted["recall"] > 0.9 and compressed["recall"] > 0.9
    assert compressed["bytes"] < inverted["bytes"] < 1.5 * 12_000 * 64
    for panel in sizes.panels(found):
        assert set(panel.lines) == {
            f"{kind}, {asked} asked" for kind in ("exact", "IVF", "IVF and PQ") for asked in (1, 20)
        }
