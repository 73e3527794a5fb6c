"""Reading a book and many documents is timed against the bare model, and padding is counted."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from recipe import make_text

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tiny(folder, make_model):
    """A base with a tokenizer of words, an adapter on it, and a book of 240 words."""
    make_model("llama_gqa", cache_size=64).save_pretrained(folder / "adapter")
    with gzip.open(folder / "books.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps({"text": make_text(240)}) + "\n")
    return folder


def measured(folder, script, *more):
    """The results of a benchmark by the names of its files."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *more, f"--output={folder / 'results'}"]
    command += [f"--{name}={folder / path}" for name, path in (("base", "base"), ("adapter", "adapter"))]
    subprocess.run([*command, f"--books={folder / 'books.jsonl.gz'}"], check=True, cwd=ROOT)
    return {path.stem: json.loads(path.read_text()) for path in (folder / "results").iterdir()}


def test_a_book(tiny):
    found = measured(tiny, "read_many.py", "book", "--tokens=160", "--segment=16", "--methods", "infini_attention")
    rows, seconds = (found["read_book_infini_attention"][name] for name in ("rows", "seconds"))
    assert rows.keys() == {"bare", "infini_attention"} and len(seconds["bare"]) == 10
    assert rows["bare"]["ratio"] == 1
    assert rows["infini_attention"]["tokens a second"] == pytest.approx(160 / sum(seconds["infini_attention"]))


def test_documents(tiny):
    options = ("documents", "--tokens=240", "--documents=6", "--batches", "1", "6", "--rounds=1")
    found = measured(tiny, "read_many.py", *options)["read_documents"]
    lengths, rows = found["lengths"], found["rows"]
    assert len(lengths) == 6 and 234 <= sum(lengths) <= 240
    assert rows["1"]["padding"] == rows["1"]["padding to the longest"] == 0
    assert rows["6"]["padding to the longest"] == pytest.approx(1 - sum(lengths) / (6 * max(lengths)))
    assert 0 < rows["6"]["padding"] < rows["6"]["padding to the longest"]


def test_layers(tiny):
    found = measured(tiny, "read_many.py", "layers", "--tokens=160", "--lengths", "64", "160", "--rounds=2")
    rows = found["read_layers"]["rows"]
    assert rows.keys() == {"64", "160"} and all(row["tokens a second"] > 0 for row in rows.values())


@pytest.mark.slow
def test_the_first_answer(tiny):
    options = ("--entries=200", "--rounds=1", f"--memory={tiny / 'a.memory'}")
    found = measured(tiny, "first_answer.py", *options)["first_answer"]
    assert found["seconds"].keys() == {"cold", "warm", "unchecked"}
    for (seconds,) in found["seconds"].values():
        assert seconds["both"] == pytest.approx(seconds["file"] + seconds["answer"])
