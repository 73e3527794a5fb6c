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
