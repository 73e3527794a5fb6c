"""The commands that measure costs, at sizes so small that only counts and bytes mean something."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]


def measured(name, folder):
    command = [sys.executable, f"benchmarks/{name}.py", "--quick", "--output", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert {path.name for path in folder.iterdir()} == {f"{name}.json", f"{name}.md", f"{name}.png"}
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_nothing_far_is_read_where_gates_are_closed(tmp_path):
    rows = {(row["attention"], row["tokens"]): row for row in measured("attention_memories", tmp_path)["rows"]}
    for tokens in (512, 1024):
        assert {name for name, length in rows if length == tokens} > {"full", "Infini"}
        every, some, none = (rows[f"gated, {closed}% closed", tokens] for closed in (0, 80, 100))
        assert every["skipped_share"] == 0 and none["skipped_share"] == 1 and none["far_pairs"] == 0
        assert some["skipped_share"] == pytest.approx(0.8, abs=0.1)
        assert some["far_pairs"] < 0.3 * every["far_pairs"]
        assert every["near_pairs"] == some["near_pairs"] == none["near_pairs"]


@pytest.mark.slow
def test_what_cacheformers_steps_read_is_counted(tmp_path):
    """A step reads one compressed vector more for every 128 tokens, or four for every 16, and full attention all."""
    result = measured("attention_cacheformer", tmp_path)
    grown = {}
    for row in result["decode"]:
        grown.setdefault(row["shape"], []).append(row["bytes"])
    vector = 12 * 64 * 4
    assert {name: last - first for name, (first, last) in grown.items()} == {
        "s 128, r 1, k 2": 1536 / 128 * vector,
        "s 16, r 4, k 7": 1536 / 4 * vector,
        "s 16, r 4, k 7, overlap": 2 * 1536 / 4 * vector,
        "sdpa": 2 * 1536 * vector,
    }
    paper = [row["model"] for row in result["forward"] if row["shape"] == "s 16, r 4, k 7"]
    assert paper == [(1.5 * 128 + n * 4 / 32 + 112) / (n / 2) for n in (512, 1024, 2048)]
    assert {row["tokens"] for row in result["forward"]} == {512, 1024, 2048} and len(result["forward"]) == 9
    assert all(row["ratio"] > 0 and row["of_model"] > 0 for row in result["forward"] + result["training"])
    assert len(result["branches"]) == 7 and len(result["memory"]) == 8
    assert all(row["bytes_with_inputs"] > row["bytes"] > 0 for row in result["memory"])
