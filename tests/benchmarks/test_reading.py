"""The costs of reading: each method reads texts in a process of its own, and what it holds is written and drawn."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_window_stays_as_small_where_full_attention_grows(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "reading.py"), "--output", str(tmp_path)]
    subprocess.run([*command, "--longest", "8192", "--methods", "full attention", "window"], check=True)
    rows = json.loads((tmp_path / "reading.json").read_text())["rows"]
    assert [row["tokens"] for row in rows["window"]] == [1024, 2048, 4096, 8192]
    grown = {name: found[-1]["bytes"] - found[1]["bytes"] for name, found in rows.items()}
    keys_and_values = (8192 - 2048) * 2 * 4 * 256 * 4  # bytes: 4 layers of 256 in float32
    assert grown["full attention"] > 0.9 * keys_and_values and grown["window"] < 0.3 * keys_and_values
    assert (tmp_path / "reading.png").stat().st_size > 10_000
