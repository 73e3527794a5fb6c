"""A short soak: memory stays flat and numbers finite over a long text (`benchmarks/soak.py` runs the long one)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE_MIB = 8.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "dtype", "entries"), [("neurocache", "bfloat16", [4096]), ("infini_attention", "float32", [])]
)
def test_memory_is_flat_and_all_is_finite(tmp_path, method, dtype, entries):
    options = ["--tokens", "40000", "--decode", "600", "--dtype", dtype, "--method", method, "--output", str(tmp_path)]
    subprocess.run([sys.executable, "benchmarks/soak.py", *options], cwd=ROOT, check=True)
    result = json.loads((tmp_path / f"soak_{method}.json").read_text(encoding="utf-8"))["results"][dtype]
    assert result["tokens_read"] == 40_600
    assert result["entries"] == entries
    for phase in ("reading", "decoding"):
        start, highest, _ = result[phase]["process_mib_start_highest_end"]
        assert highest - start < TOLERANCE_MIB, phase
        assert result[phase]["finite"], phase
    assert (tmp_path / f"soak_{method}.md").is_file()
