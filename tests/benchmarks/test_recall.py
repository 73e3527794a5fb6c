"""Recall curves: texts of pairs and queries are what they say, and the command writes, resumes and refuses."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = [
    {"tokens": 64, "pairs": 15},
    {"tokens": 65, "pairs": 5, "value_tokens": 3},
    {"tokens": 64, "pairs": 7, "value_tokens": 3, "order": "mixed"},
    {"tokens": 50, "pairs": 12, "order": "mixed"},
    {"tokens": 66, "pairs": 14, "value_tokens": 3, "order": "one", "distance": 48},
    {"tokens": 64, "pairs": 1, "order": "one", "distance": 2},
]


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import recall
    import recall_task

    return recall, recall_task


@pytest.mark.parametrize("wanted", LAYOUTS)
def test_each_query_has_one_answer_which_stands_earlier(benchmarks, wanted):
    task = benchmarks[1]
    layout = task.Layout(**wanted)
    texts = task.draw(layout, 20, torch.Generator().manual_seed(3))
    assert texts.ids.shape == texts.labels.shape == (20, layout.tokens)
    queries = 1 if layout.order == "one" else layout.pairs
    assert texts.query_at.shape == texts.pair_at.shape == (20, queries)
    starts = set()
    for ids, labels, query_at, pair_at in zip(texts.ids, texts.labels, texts.query_at, texts.pair_at, strict=True):
        kinds = {token: [] for token in ids.tolist()}
        for place, token in enumerate(ids.tolist()):
            kinds[token].append(place)
        keys = {token: places for token, places in kinds.items() if token in task.KEYS}
        assert len(keys) == layout.pairs
        asked = [ids[place].item() for place in query_at]
        assert len(set(asked)) == queries
        for key, asking, stands in zip(asked, query_at.tolist(), pair_at.tolist(), strict=True):
            assert keys[key] == [stands, asking] and asking >= stands + layout.cell
            assert layout.distance in (None, asking - stands)
            value = ids[stands + 1 : stands + layout.cell]
            assert all(token in task.VALUES and kinds[token.item()] == [p, p + asking - stands]
                       for p, token in enumerate(value, stands + 1))  # fmt: skip
            assert torch.equal(labels[asking : asking + layout.value_tokens], value)
        assert int((labels != task.IGNORED).sum()) == queries * layout.value_tokens
        starts.add(int(pair_at.min()) % layout.cell)
    assert len(starts) == layout.cell or layout.tokens % layout.cell  # pairs fall anywhere in a segment


@pytest.mark.parametrize("wanted", LAYOUTS)
def test_who_remembers_everything_answers_everything(benchmarks, wanted):
    task = benchmarks[1]
    layout = task.Layout(**wanted)
    texts = task.draw(layout, 10, torch.Generator().manual_seed(4))
    predicted = torch.zeros_like(texts.ids)
    for row, ids in enumerate(texts.ids.tolist()):
        known: dict = {}
        for place, token in enumerate(ids):
            if token in task.KEYS and token in known:
                predicted[row, place : place + layout.value_tokens] = torch.tensor(known[token])
            elif token in task.KEYS:
                known[token] = ids[place + 1 : place + layout.cell]
    assert texts.right(predicted).all()
    last = texts.query_at[0, -1] + layout.value_tokens - 1
    predicted[0, last] += 1  # one wrong token of one value
    right = texts.right(predicted)
    assert not right[0, -1] and int(right.sum()) == right.numel() - 1


def test_texts_follow_their_seed_and_layouts_are_checked(benchmarks):
    task = benchmarks[1]
    layout = task.Layout(64, 8)
    one, same, other = (task.draw(layout, 4, torch.Generator().manual_seed(seed)).ids for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)
    for wrong in (
        {"pairs": 16},
        {"pairs": 0},
        {"pairs": 4, "order": "last"},
        {"pairs": 4, "order": "one"},
        {"pairs": 4, "distance": 8},
        {"pairs": 4, "order": "one", "distance": 7},
        {"pairs": 4, "order": "one", "distance": 64},
    ):
        with pytest.raises(ValueError, match="pairs|order|distance"):
            task.Layout(tokens=64, **{"value_tokens": 1, **wrong, "pairs": wrong["pairs"] * 2})


def test_models_start_alike_and_look_at_the_token_before(benchmarks):
    recall, task = benchmarks
    base = recall.make_model(recall.Contestant(None), 0)
    for name, contestant in recall.CONTESTANTS.items():
        held = dict(recall.make_model(contestant, 0).named_parameters())
        shared = {key: value for key, value in base.named_parameters()}
        found = {key.replace("model.language_model.", "model."): value for key, value in held.items()}
        assert all(torch.equal(found[key], value) for key, value in shared.items()), name
    base.set_attn_implementation("eager")
    ids = task.draw(task.Layout(64, 8), 4, torch.Generator().manual_seed(0)).ids
    before = base(ids, output_attentions=True).attentions[0][:, 0].diagonal(-1, 1, 2)
    assert before.mean() > 0.9


def test_only_the_published_rule_answers_otherwise_where_nothing_later_is_there(benchmarks):
    recall, task = benchmarks
    drawn = task.draw(task.Layout(96, 8, 3, "one", 64), 20, torch.Generator().manual_seed(5))
    asked = drawn.labels != task.IGNORED
    assert int(asked.sum()) == 60
    differ = {}
    for name in ("cache", "cache_previous_block", "cache_paper_block"):
        contestant = recall.CONTESTANTS[name]
        few = recall.replace(contestant, settings={**contestant.settings, "topk": 1})
        with torch.no_grad():
            whole, decoded = (recall.predictions(recall.make_model(few, 0).eval(), drawn, how) for how in (False, True))
        differ[name] = bool((whole != decoded)[asked].any())
    assert differ == {"cache": False, "cache_previous_block": False, "cache_paper_block": True}


def test_the_command_writes_goes_on_and_refuses(benchmarks, tmp_path, monkeypatch, capsys):
    recall = benchmarks[0]

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["recall.py", "--texts", "2", "--output", str(tmp_path), *arguments])
        recall.main()
        return json.loads((tmp_path / "recall.json").read_text(encoding="utf-8"))["rows"]

    first = run("--steps", "2", "--methods", "cache")
    assert {path.name for path in tmp_path.iterdir()} == {"recall.json", "recall.png"}
    assert first["cache"]["settings"] == recall.CONTESTANTS["cache"].settings
    scored = [share for key in ("recall_far", "retrieval_by_distance") for share in first["cache"][key].values()]
    assert all(0 <= share <= 1 for share in scored)
    assert first["cache"]["state_bytes"] > 0 and first["cache"]["time_over_window"] > 0
    capsys.readouterr()
    both = run("--steps", "2", "--methods", "window", "cache")
    assert list(both) == ["window", "cache"] and both["cache"] == first["cache"]
    assert both["window"]["state_bytes"] == 2 * 2 * 2 * 32 * 4 * 64  # layers, keys and values, heads: 64 tokens
    said = capsys.readouterr().out
    assert "recall.json has it" in said and "| window |" in said
    with pytest.raises(SystemExit):
        run("--steps", "3", "--methods", "cache")
    assert "was made with --steps 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--steps", "2", "--methods", "cache", "--tokens", "512")
    assert "was made with --tokens 256" in capsys.readouterr().err


@pytest.mark.parametrize("longest", [256, 512, 1024])
def test_texts_grow_by_doubling_and_distances_with_them(benchmarks, longest):
    recall = benchmarks[0]
    grown = [recall.text_tokens(step, 1000, longest) for step in range(1000)]
    assert sorted(set(grown)) == [2**power for power in range(5, longest.bit_length())] and grown == sorted(grown)
    assert grown.count(32) == 350 and grown.count(longest) == 450
    assert recall.scaled([16, 256], longest) == [longest // 16, longest]
    random = torch.Generator().manual_seed(0)
    assert recall.layout_of(999, 1000, longest, random).tokens == longest
