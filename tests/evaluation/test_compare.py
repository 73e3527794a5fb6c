"""Results side by side: several in a column, differences of parts, perplexities."""

import json
import math

import numpy as np
import pytest
from conftest import save_adapter
from recipe import make_text

from cacheformers.cli.main import comparison
from cacheformers.cli.main import main as command_line
from cacheformers.evaluation.compare import load_result, main, parts
from cacheformers.evaluation.longbench.report import joined, paired_difference
from cacheformers.evaluation.run import by_last_occurrence
from cacheformers.evaluation.text_perplexity import main as measure

# Scores


def scored(values):
    """What `task_scores` returns, of records that are 1,000, 2,000, 3,000 ... words long."""
    lengths = [1000 * place for place in range(1, len(values) + 1)]
    places = ["0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+" for length in lengths]
    buckets = {}
    for name in ("0-4k", "4-8k", "8k+"):
        own = [value for value, place in zip(values, places, strict=True) if place == name]
        buckets[name] = {"score": 100 * sum(own) / len(own) if own else None, "records": len(own)}
    return {
        "score": 100 * sum(values) / len(values),
        "buckets": buckets,
        "records": [
            {"_id": str(place), "length": length, "score": value}
            for place, (length, value) in enumerate(zip(lengths, values, strict=True))
        ],
    }


def result(tasks, name="model", **more):
    costs = {"seconds_per_record": 1.0, "state_bytes_per_record": 100.0, "gold_in_sight": 0.5, "peak_bytes": 7}
    return {"name": name, "average": 0.0, "tasks": {task: scored(own) for task, own in tasks.items()}, **costs, **more}


def test_a_column_of_several_results_has_the_tasks_of_all():
    """A task counts once for each result; costs are means of records."""
    short, long = result({"trec": [1, 0], "qasper": [0.5]}), result({"trec": [1] * 5}, "other", seconds_per_record=3)
    both = joined([short, long])
    assert list(both["tasks"]) == ["trec (1)", "qasper (1)", "trec (2)"]
    assert both["average"] == pytest.approx((50 + 50 + 100) / 3) and both["Few-shot learning"] == pytest.approx(75)
    assert both["seconds_per_record"] == pytest.approx((3 * 1 + 5 * 3) / 8) and both["name"] == "model+other"
    assert joined([short]) is short
    assert joined([short, {**long, "gold_in_sight": None}])["gold_in_sight"] is None


def test_a_difference_of_a_length_is_of_its_records():
    """Tasks without records of that length do not count."""
    one, other = result({"trec": [0] * 5, "qasper": [0]}), result({"trec": [0, 0, 0, 1, 0.5], "qasper": [1]})
    points, _ = paired_difference(other["tasks"], one["tasks"], "4-8k")
    assert points == pytest.approx(75)
    points, interval = paired_difference(other["tasks"], one["tasks"], "0-4k")
    assert points == pytest.approx((0 + 100) / 2) and interval == pytest.approx((50, 50))


def test_columns_are_compared_by_task_category_and_length(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name in ("one", "other"):
        for length in ("4K", "16K"):
            (tmp_path / length / name).mkdir(parents=True)
            tasks = {task: rng.random(9) for task in ("trec", "samsum", "qasper")}
            (tmp_path / length / name / "result.json").write_text(json.dumps(result(tasks, name)))
    columns = ["+".join(str(tmp_path / length / name) for length in ("4K", "16K")) for name in ("one", "other")]
    command_line(["compare", *columns, "--output", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert said.strip().startswith((tmp_path / "out" / "table.md").read_text().strip())
    one, other = ({k: load_result(f"{tmp_path}/{k}/{n}")["tasks"] for k in ("4K", "16K")} for n in ("one", "other"))
    gaps = [other[k][task]["score"] - one[k][task]["score"] for k in ("4K", "16K") for task in other[k]]
    few = [other[k][task]["score"] - one[k][task]["score"] for k in ("4K", "16K") for task in ("trec", "samsum")]
    assert f"| **average of tasks** | {np.mean(gaps):+.2f} (" in said
    assert f"| *Few-shot learning* | {np.mean(few):+.2f} (" in said
    assert all(said.count(f"| length {name} |") == 2 for name in ("0-4k", "4-8k", "8k+"))
    assert (tmp_path / "out" / "length.png").stat().st_size > 1000
    command_line(["compare", *columns, "--tasks", "trec", "samsum"])
    said = capsys.readouterr().out
    assert f"| **average of tasks** | {np.mean(few):+.2f} (" in said and "qasper" not in said
    assert all(f"| samsum ({number}) | 9 |" in said for number in (1, 2))


def test_a_path_may_hold_a_plus(tmp_path):
    (tmp_path / "a+b").mkdir()
    assert parts(str(tmp_path / "a+b")) == [str(tmp_path / "a+b")] and parts("a+b") == ["a", "b"]


# Perplexities


def test_tokens_by_their_last_occurrence_are_as_defined():
    """Against a search of each earlier token; a token that was not predicted (NaN) is in no part."""
    rng = np.random.default_rng(1)
    ids = [rng.integers(40, size=200), rng.integers(7, size=60), np.arange(5)]
    losses = [rng.random(len(each) - 1).astype(np.float32) for each in ids]
    losses[0][3] = np.nan
    expected = {}
    for own, nats in zip(ids, losses, strict=True):
        for place in range(1, len(own)):
            earlier = [before for before in range(place) if own[before] == own[place]]
            back = place - earlier[-1] if earlier else None
            name = "first occurrence" if back is None else "0-16"
            for start in (16, 32, 64, 128):
                if back is not None and start <= back < 2 * start:
                    name = f"{start}-{2 * start}"
            if np.isfinite(nats[place - 1]):
                expected.setdefault(name, []).append(float(nats[place - 1]))
    found = by_last_occurrence(losses, ids, 16)
    assert {name: part.tokens for name, part in found.items()} == {name: len(own) for name, own in expected.items()}
    assert {name: part.nats for name, part in found.items()} == pytest.approx({n: sum(v) for n, v in expected.items()})
    assert list(found)[0] == "first occurrence" and len(found) > 3


@pytest.fixture
def measured(folder):
    """The base in two windows, with a memory, and with another text, in folders of `folder`."""
    save_adapter(folder / "base", folder / "remembering")
    (folder / "text.txt").write_text(make_text(70, 5))
    common = [f"--base={folder / 'base'}", "--device=cpu", "--plots=false"]
    for name, more in {
        "whole": ["--mode=segment", "--window=64", f"--texts={folder / 'valid.jsonl'}", "--tokens=60"],
        "narrow": ["--mode=sliding", "--window=20", f"--texts={folder / 'valid.jsonl'}", "--tokens=60"],
        "cut": ["--mode=segment", "--window=20", f"--texts={folder / 'valid.jsonl'}", "--tokens=60"],
        "memory": ["--mode=memory", f"--adapter={folder / 'remembering'}", f"--texts={folder / 'valid.jsonl'}"],
        "text": ["--mode=sliding", "--window=20", f"--texts={folder / 'text.txt'}", "--tokens=60"],
    }.items():
        more = [*more, "--tokens=60"] if name == "memory" else more
        measure([*common, *more, f"--output={folder / name}"])
    return folder


def test_perplexities_are_compared_on_the_same_tokens(measured, capsys):
    one, other, memory = (str(measured / name) for name in ("whole", "narrow", "memory"))
    command_line(["compare", one, other, memory, f"--output={measured / 'compared'}"])
    said = capsys.readouterr().out
    nats = {path: load_result(path)["nats_by_document"] for path in (one, other, memory)}
    tokens = sum(load_result(one)["tokens_by_document"])
    for path in (other, memory):
        assert f"{math.exp((sum(nats[path]) - sum(nats[one])) / tokens):.4f}" in said
    new = [load_result(path)["by_last_occurrence"]["first occurrence"] for path in (other, one)]
    means = [sum(part["nats_by_document"]) / sum(part["tokens_by_document"]) for part in new]
    ratio = math.exp(means[0] - means[1])
    assert f"{ratio:.4f} (" in said
    assert {file.name for file in (measured / "compared").iterdir()} == {"position.png", "token_class.png"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("whole", "cut"), "leave out the first token of each"),
        (("narrow", "text"), "are of different texts"),
        (("narrow+whole",), "a column of perplexities is one result"),
        (("narrow", "scores"), "cannot be compared with each other"),
        (("narrow", "old"), "is of an older version"),
        (("no",), "no"),
    ],
)
def test_what_cannot_be_compared(measured, refused, names, message):
    (measured / "scores").mkdir()
    (measured / "scores" / "result.json").write_text(json.dumps(result({"trec": [1]})))
    (measured / "old").mkdir()
    (measured / "old" / "result.json").write_text(json.dumps({"kind": "perplexity"}))
    given = ["+".join(str(measured / part) for part in name.split("+")) for name in names]
    assert message in refused(main, comparison(given))


def test_tasks_that_are_not_there(measured, refused):
    file = measured / "scores.json"
    file.write_text(json.dumps(result({"trec": [1]})))
    assert "model has no task qasper, but: trec." in refused(main, comparison([str(file), "--tasks", "qasper"]))
    assert "Perplexities have no tasks" in refused(main, comparison([str(measured / "narrow"), "--tasks", "trec"]))
