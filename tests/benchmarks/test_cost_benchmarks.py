"""The commands that measure costs, at sizes so small that only counts and bytes mean something; a short soak."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_attention_reads_nothing_far_where_gates_are_closed(tmp_path, training):
    name, more = ("attention_training", ["--training"]) if training else ("attention", [])
    command = [sys.executable, "benchmarks/attention.py", "--quick", "--output", str(tmp_path), *more]
    subprocess.run(command, cwd=ROOT, check=True)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.json", f"{name}.md", f"{name}.png"}
    result = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    rows = {(row["attention"], row["tokens"]): row for row in result["rows"]}
    for tokens in (512, 1024):
        kinds = {name for name, length in rows if length == tokens}
        assert kinds > {"full", "Infini", "CacheFormer, s 16, r 4, k 7"}
        every, some, none = (rows[f"gated, {closed}% closed", tokens] for closed in (0, 80, 100))
        assert every["skipped_share"] == 0 and none["skipped_share"] == 1 and none["far_pairs"] == 0
        assert some["skipped_share"] == pytest.approx(0.8, abs=0.1)
        assert some["far_pairs"] < 0.3 * every["far_pairs"]
        assert every["near_pairs"] == some["near_pairs"] == none["near_pairs"]
    assert all(row["ratio"] > 0 for row in rows.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "dtype", "entries"), [("neurocache", "bfloat16", [4096]), ("infini_attention", "float32", [])]
)
def test_memory_is_flat_and_all_is_finite(tmp_path, method, dtype, entries):
    """Over a long text; `benchmarks/soak.py` runs a longer one."""
    options = ["--tokens", "40000", "--decode", "600", "--dtype", dtype, "--method", method, "--output", str(tmp_path)]
    subprocess.run([sys.executable, "benchmarks/soak.py", *options], cwd=ROOT, check=True)
    result = json.loads((tmp_path / f"soak_{method}.json").read_text(encoding="utf-8"))["results"][dtype]
    assert result["tokens_read"] == 40_600
    assert result["entries"] == entries
    for phase in ("reading", "decoding"):
        start, highest, _ = result[phase]["process_mib_start_highest_end"]
        assert highest - start < 8.0, phase
        assert result[phase]["finite"], phase
    assert (tmp_path / f"soak_{method}.md").is_file()
