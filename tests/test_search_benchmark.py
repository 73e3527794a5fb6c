"""The benchmark of the search, the calibration and the table that `search="auto"` reads, at tiny sizes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cacheformers.modeling.search import choice, get_search
from cacheformers.modeling.search.store import Entries

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, which import each other by name
calibrate = importlib.import_module("calibrate")


def run(*options: object) -> None:
    subprocess.run([sys.executable, "benchmarks/search.py", *map(str, options)], cwd=ROOT, check=True)


@pytest.mark.slow
def test_reports_have_their_fields(tmp_path: Path) -> None:
    run("--quick", "--repeats", 1, "--dtype", "float32", "--out", tmp_path)
    report = json.loads((tmp_path / "search.json").read_text())
    assert {"about", "ratio", "ring_update", "rows"} <= set(report)
    for row in report["rows"]:
        assert row["recall"] == 1.0 and row["ratio"] > 0 and row["milliseconds"] > 0
    save_file({"entries": torch.randn(3000, 16)}, tmp_path / "states.safetensors")
    sizes = ("--capacity", 2000, "--segment", 100, "--segments", 3, "--factory", "IVF8,Flat")
    run("--ivf", tmp_path / "states.safetensors", *sizes, "--out", tmp_path)
    result = json.loads((tmp_path / "search_ivf.json").read_text())["result"]
    assert result["entries"] == 2000 and result["recall"] > 0.5 and result["ratio"] > 0


def test_another_search_must_be_worth_it() -> None:
    assert calibrate.fastest({"exact": 1.0, "faiss": 0.95}) == "exact"
    assert calibrate.fastest({"exact": 1.0, "faiss": 0.8}) == "faiss"


def test_shipped_table_names_what_there_is() -> None:
    rows = json.loads(choice.SHIPPED_TABLE.read_text(encoding="utf-8"))["rows"]
    assert rows and {row["fastest"] for row in rows} <= {"exact", "faiss"}


def test_calibration_decides_what_auto_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache" / "fastest.json"
    sizes = ["--queries", "1", "20", "--entries", "300", "--width", "16", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["calibrate", *sizes, "--out", str(path)])
    calibrate.main()
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 4 and {row["fastest"] for row in rows} <= {"exact", "faiss"}
    monkeypatch.setattr(choice, "OWN_TABLE", path)
    for row, name in zip(rows, ("exact", "faiss", "faiss", "exact"), strict=True):
        row["fastest"] = name
    path.write_text(json.dumps({"rows": rows}))
    choice.table.cache_clear()
    assert choice.fastest(2, 500, 16, torch.float32, "cpu") == "exact"
    assert choice.fastest(64, 500, 16, torch.float32, "cpu") == "faiss"
    assert choice.fastest(1, 10, 90, torch.bfloat16, "cpu") == "faiss"
    assert choice.fastest(64, 500, 16, torch.float32, "cuda") == "exact"
    queries, entries = torch.randn(30, 16), Entries((torch.randn(400, 16),))
    hits = get_search("auto")(queries, entries, 8, "l2")[1]
    assert torch.equal(hits, get_search("exact")(queries, entries, 8, "l2")[1])
    choice.table.cache_clear()
