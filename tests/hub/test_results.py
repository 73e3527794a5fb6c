"""`cacheformers results`: results in a model card's metadata, and what stays of a card; the cards in model_cards/."""

import json
import runpy
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load
from recipe import arguments

from cacheformers import train_adapt
from cacheformers.evaluation.longbench.records import Record
from cacheformers.evaluation.longbench.report import make_result, task_scores
from cacheformers.evaluation.text_perplexity import main as perplexity
from cacheformers.hub.results import main

ROOT = Path(__file__).resolve().parents[2]
OWN = """---
license_note: "mine"
tags:
- whales
model-index:
- name: Ahab
  results:
  - task:
      type: text-generation
    dataset:
      name: Moby Dick
      type: moby
    metrics:
    - type: accuracy
      value: 12.5
---
# My own card

Call me   Ishmael.
"""
PASSKEY = {  # a passkey result's form
    "name": "remembering",
    "score": 75.0,
    "lengths": [1024, 4096],
    "depths": [0.0, 100.0],
    "scores": [[100.0, 100.0], [100.0, 0.0]],
    "cases": [],
}


@pytest.fixture
def adapter(folder, make_model):
    """A saved adapter, with the card that its saving wrote."""
    make_model("llama_gqa").save_pretrained(folder / "remembering")
    return folder / "remembering"


def trained(folder, *more):
    train_adapt.main(arguments(folder, "--steps=2", "--plots=false", "--device=cpu", *more))
    return folder / "adapter"


@pytest.fixture
def measured(folder):
    """The result of a real run."""
    given = {"base": folder / "base", "texts": folder / "valid.jsonl", "output": folder / "measured", "mode": "segment"}
    perplexity([*(f"--{key}={value}" for key, value in given.items()), "--window=20", "--device=cpu", "--plots=false"])
    return folder / "measured"


def longbench(path, method="memory", right=1, **more):
    """A result of eval_longbench.py with `right` of four correct records of qasper, and half a point for lcc.

    Args:
        more: scores of further tasks.
    """
    records = [Record("qasper", f"q{number}", "", "-", ["mill"], 100, None) for number in range(4)]
    tasks = {
        "qasper": task_scores(records, ["mill"] * right + ["sea"] * (4 - right)),
        "lcc": task_scores([Record("lcc", "l", "", "-", ["ab"], 100, None)], ["cb"]),
        **more,
    }
    settings = {"longbench_e": False, "method": method, "max_length": 3500}
    times = [{"seconds": 1.0, "prompt_tokens": 10, "cut_again_to": None, "peak_bytes": 100}]
    path.write_text(json.dumps(make_result("remembering", settings, tasks, times)))
    return path


def found(folder):
    """What the card has: (dataset, configuration, name of the metric) -> value."""
    card = ModelCard.load(folder / "README.md")
    return {
        (each.dataset_name, each.dataset_config, each.metric_name): each.metric_value for each in card.data.eval_results
    }


def test_results_of_every_kind(adapter, folder, measured, capsys):
    (folder / "passkey.json").write_text(json.dumps(PASSKEY))
    before = ModelCard.load(adapter / "README.md")
    files = [str(longbench(folder / "lb.json")), str(folder / "passkey.json"), str(measured)]
    main([*files, "--card", str(adapter)])
    assert "10 results are in" in capsys.readouterr().out
    real = json.loads((measured / "result.json").read_text())
    how = "(windows of 20, stride 20)"
    assert found(adapter) == {
        ("LongBench", "qasper", "qa_f1_score (memory)"): 25.0,
        ("LongBench", "lcc", "code_sim_score (memory)"): 50.0,
        ("LongBench", None, "average of 2 tasks (memory)"): 37.5,
        ("Passkey retrieval", None, "keys found (%)"): 75.0,
        ("Passkey retrieval", "1024", "keys found (%) in 1,024 tokens"): 100.0,
        ("Passkey retrieval", "4096", "keys found (%) in 4,096 tokens"): 50.0,
        ("valid.jsonl", None, f"perplexity per token {how}"): round(real["perplexity"], 4),
        ("valid.jsonl", None, f"perplexity per word {how}"): round(real["word_perplexity"], 4),
        ("valid.jsonl", None, f"bits per character {how}"): round(real["bits_per_character"], 4),
        ("valid.jsonl", None, f"bits per byte {how}"): round(real["bits_per_byte"], 4),
    }
    after = ModelCard.load(adapter / "README.md")
    assert after.text == before.text and after.data.tags == before.data.tags
    (index,) = metadata_load(adapter / "README.md")["model-index"]
    assert index["name"] == "remembering"
    assert index["results"][0]["metrics"][0]["args"] == {"records": 4, "max_length": 3500}


def test_own_tasks_are_not_published_as_longbench(adapter, folder, capsys):
    own = {"wiki_qa": task_scores([Record("wiki_qa", "w", "", "-", ["ab"], 100, None, "hotpotqa")], ["ab"])}
    main([str(longbench(folder / "both.json", **own)), "--card", str(adapter)])
    assert found(adapter) == {
        ("LongBench", "qasper", "qa_f1_score (memory)"): 25.0,
        ("LongBench", "lcc", "code_sim_score (memory)"): 50.0,
        ("LongBench", None, "average of 2 tasks (memory)"): 37.5,
    }
    result = json.loads((folder / "both.json").read_text())
    (folder / "own.json").write_text(json.dumps({**result, "tasks": own}))
    with pytest.raises(SystemExit, match="wiki_qa: a card takes LongBench's own tasks, not sets of one's own"):
        main([str(folder / "own.json"), "--card", str(adapter)])


def test_a_control_is_not_published_as_the_score(adapter, folder):
    """Prompts of a memory stand side by side; what it scores without its text, or with another one, is no result."""
    result = json.loads(longbench(folder / "lb.json").read_text())
    for name, more in (
        ("cut", {"memory_prompt": {"method": "truncation"}}),
        ("none", {"memory_content": "none"}),
        ("other", {"memory_prompt": {"method": "recalled"}, "memory_content": "other"}),
    ):
        settings = {**result["settings"], **more}
        (folder / f"{name}.json").write_text(json.dumps({**result, "settings": settings}))
    for name in ("none", "other"):
        with pytest.raises(SystemExit, match=f"a control .memory_content '{name}'., whose scores are not the model's"):
            main([str(folder / f"{name}.json"), "--card", str(adapter)])
    main([str(folder / "lb.json"), str(folder / "cut.json"), "--card", str(adapter)])
    names = {name for _, task, name in found(adapter) if task == "qasper"}
    assert names == {"qa_f1_score (memory)", "qa_f1_score (memory, truncation prompt)"}


def test_evaluating_again_keeps_results_that_were_written_into_the_card(folder):
    adapter, valid = trained(folder), f"--valid={folder / 'valid.jsonl'}"
    assert "model-index" not in metadata_load(adapter / "README.md")
    (folder / "passkey.json").write_text(json.dumps(PASSKEY))
    main([str(folder / "passkey.json"), "--card", str(adapter)])
    before = metadata_load(adapter / "README.md")["model-index"]
    assert before[0]["results"] and "Nothing: the run had no held-out" in (adapter / "README.md").read_text()
    trained(folder, valid, "--resume")
    assert metadata_load(adapter / "README.md")["model-index"] == before
    assert "held-out documents, " in (adapter / "README.md").read_text()  # the rest is new
    own = "---\nlicense: mit\n---\n# My own card\n"
    (adapter / "README.md").write_text(own)
    trained(folder, valid, "--resume")
    assert (adapter / "README.md").read_text() == own  # a person's card stays


def test_committed_cards_are_those_of_the_committed_results():
    """Each is what `python scripts/model_cards.py --write` makes, and says where the weights of its base come from."""
    cards = dict(runpy.run_path(str(ROOT / "scripts" / "model_cards.py"))["cards"]())
    folder = ROOT / "model_cards"
    committed = {path: path.read_text() for path in folder.glob("*.md") if path.stem not in ("README", "template")}
    assert committed == cards
    on_smollm2 = {path for path, text in cards.items() if " on smollm2-135m-instruct\n" in text}
    assert on_smollm2 == {path for path, text in cards.items() if "Base: the Q4_1 weights of SmolLM2" in text}
    listed = (folder / "README.md").read_text()
    assert all(f"({path.name})" in listed for path in cards)


def test_a_second_write_replaces_the_first(adapter, folder):
    main([str(longbench(folder / "one.json")), "--card", str(adapter)])
    once = (adapter / "README.md").read_text()
    main([str(folder / "one.json"), "--card", str(adapter)])
    assert (adapter / "README.md").read_text() == once
    main([str(longbench(folder / "other.json", "truncation", 3)), "--card", str(adapter)])
    main([str(longbench(folder / "one.json", right=2)), "--card", str(adapter)])
    values = {(config, name): value for (_, config, name), value in found(adapter).items()}
    assert values["qasper", "qa_f1_score (memory)"] == 50.0 and values["qasper", "qa_f1_score (truncation)"] == 75.0
    assert len(values) == 6


def test_what_a_person_wrote_stays(adapter, folder):
    (adapter / "README.md").write_text(OWN)
    main([str(longbench(folder / "lb.json")), "--card", str(adapter)])
    text = (adapter / "README.md").read_text()
    assert text.endswith("# My own card\n\nCall me   Ishmael.\n")
    metadata = metadata_load(adapter / "README.md")
    assert metadata["license_note"] == "mine" and metadata["tags"] == ["whales"]
    assert metadata["model-index"][0]["name"] == "Ahab"
    assert found(adapter)["Moby Dick", None, None] == 12.5 and len(found(adapter)) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"loss": 1}', "is not a result of eval_longbench.py"),
        ("[1, 2]", "is not a result of eval_longbench.py"),
        ('{"tasks": {', "bad.json: Expecting"),
        (None, "No such file"),
    ],
)
def test_files_that_are_not_results(adapter, folder, content, message):
    before = (adapter / "README.md").read_text()
    if content is not None:
        (folder / "bad.json").write_text(content)
    with pytest.raises(SystemExit, match=message):
        main([str(longbench(folder / "good.json")), str(folder / "bad.json"), "--card", str(adapter)])
    assert (adapter / "README.md").read_text() == before


def test_cards_that_cannot_be_written(adapter, folder):
    result = str(longbench(folder / "lb.json"))
    with pytest.raises(SystemExit, match="holds neither adapter_config.json nor config.json"):
        main([result, "--card", str(folder)])
    (adapter / "README.md").write_text("---\nmodel-index: 7\n---\n")
    with pytest.raises(SystemExit, match="README.md"):
        main([result, "--card", str(adapter)])
