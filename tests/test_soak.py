"""A short soak: memory stays flat and numbers finite over a long text (`benchmarks/soak.py` runs the long one)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE_MIB = 8.0


@pytest.mark.slow
def test_memory_is_flat_and_all_is_finite(tmp_path: Path) -> None:
    options = ["--tokens", "40000", "--decode", "600", "--dtype", "bfloat16", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "benchmarks/soak.py", *options], cwd=ROOT, check=True)
    result = json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))["results"]["bfloat16"]
    assert result["tokens_read"] == 40_600
    assert result["entries"] == [4096]
    for phase in ("reading", "decoding"):
        start, highest, _ = result[phase]["process_mib_start_highest_end"]
        assert highest - start < TOLERANCE_MIB, phase
        assert result[phase]["finite"], phase
    assert (tmp_path / "soak.md").is_file()
