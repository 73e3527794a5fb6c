"""The command for the day there is a GPU, with toy sizes on a CPU: a part that fails leaves the others."""

import gzip
import json
import sys
from pathlib import Path

import pytest
from recipe import write_documents

from cacheformers.modeling.method import METHODS

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_part_and_one_that_fails(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(folder)
    import gpu

    for name, lengths in (("train", (1500, 1600)), ("valid", (300, 310))):
        write_documents(folder / f"{name}.jsonl", *lengths)
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress((folder / f"{name}.jsonl").read_bytes()))
    given = ["gpu.py", "--device=cpu", "--quick", "--rounds=2", "--output=out", "--smollm2=base", f"--books={folder}"]
    monkeypatch.setattr(sys, "argv", given)
    gpu.main()
    found = json.loads((folder / "out" / "gpu.json").read_text())
    assert found["failed"] == {} and list(found["seconds"]) == list(gpu.PARTS)
    assert {row["method"] for row in found["correct"]} >= set(METHODS) - {"mine"}
    assert all(row["within"] and row["tokens"] for row in found["correct"])
    assert [row["recall"] for row in found["search"]] == [1.0]
    assert all(0 < row["weights_bytes"] < row["peak_bytes"] for row in found["step"])
    assert [row["memory"] for row in found["smollm2"]] == ["cache off", "cache 16,384", "other document"]
    whole = (folder / "out" / "gpu.md").read_text()
    assert all(f"## {title}\n\n| " in whole for title, _ in gpu.TABLES.values())

    monkeypatch.setattr(sys, "argv", [*given, "--smollm2=nowhere", "--parts", "smollm2"])
    with pytest.raises(SystemExit, match="Failed: smollm2"):
        gpu.main()
    page = (folder / "out" / "gpu.md").read_text()
    assert "Failed: FileNotFoundError: nowhere or " in page
    others = [text.partition("## Errors")[2].partition("## SmolLM2")[0] for text in (page, whole)]
    assert others[0] and others[0] == others[1]
