"""Short records made of pools by recipes/make_short.py."""

import json

from recipe import script

from cacheformers.evaluation.longbench.records import load_records, own_tasks


def test_short_documents_become_records(tmp_path, monkeypatch, capsys):
    make_short = script("recipes/make_short.py")
    pools, out = tmp_path / "pools", tmp_path / "short"
    pools.mkdir()
    for task in make_short.TEMPLATES:
        documents = [
            {
                **{"doc_id": f"{task}-{number}", "context": f"Ada owns {number} boats.", "length": length},
                "questions": [{"input": "How many?", "answers": [str(number)]}, {"input": "Who?", "answers": ["Ada"]}],
            }
            for number, length in enumerate((4, 900, 400, 4, 4))
        ]
        (pools / f"{task}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in documents))
    monkeypatch.setattr("sys.argv", ["make_short.py", str(pools), str(out), "--records", "3"])
    make_short.main()
    assert "wiki_qa: 3 records" in capsys.readouterr().out
    assert sorted(own_tasks(str(out))) == sorted(make_short.TEMPLATES)
    for task, template in make_short.TEMPLATES.items():
        records = load_records(str(out), task)
        assert [record.id for record in records] == [f"{task}-0", f"{task}-2", f"{task}-3"]  # the second is too long
        assert {record.template for record in records} == {template}
        assert (records[1].input, records[1].context, records[1].answers) == (
            "How many?",
            "Ada owns 2 boats.",
            ["2"],
        )


def test_records_of_each_length_get_a_folder(tmp_path, monkeypatch, capsys):
    records, out = tmp_path / "records", tmp_path / "sets"
    records.mkdir()
    rows = [
        {
            **{"_id": f"q{number}", "context": "Ada owns é boats.", "input": "Who?", "answers": ["Ada"]},
            "length": 4,
            **more,
        }
        for number, more in enumerate([{"target_tokens": 4096}, {"target_tokens": 0}, {"target_tokens": 4096}, {}])
    ]
    for task in ("wiki_qa", "zh_qa"):
        (records / f"{task}.jsonl").write_text("".join(f"{json.dumps({**row, 'template': task})}\n" for row in rows))
    monkeypatch.setattr("sys.argv", ["split_by_length.py", str(records), str(out), "--tasks", "wiki_qa"])
    script("recipes/split_by_length.py").main()
    assert "wiki_qa: 2 of 4096, 2 of own" in capsys.readouterr().out
    found = {str(path.relative_to(out)): path.read_text().splitlines() for path in out.rglob("*.jsonl")}
    assert {name: [json.loads(line)["_id"] for line in lines] for name, lines in found.items()} == {
        "4096/wiki_qa.jsonl": ["q0", "q2"],
        "own/wiki_qa.jsonl": ["q1", "q3"],
    }
    assert json.loads(found["4096/wiki_qa.jsonl"][0]) == {**rows[0], "template": "wiki_qa"}
