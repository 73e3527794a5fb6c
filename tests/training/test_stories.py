"""Pools that recipes make: stories of bAbI with a question for everybody, parts of books to be quoted."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from recipe import script

from cacheformers.evaluation.longbench.records import file_rows
from cacheformers.training.exercises import Exercises, load_pools

FACTS = [
    "Mary moved to the bathroom.",
    "John went back to the hallway.",
    "Mary travelled to the office.",
    "John journeyed to the office.",
    "Mary went to the garden.",
]


CARRIED = ["Mary got the milk there.", "Mary moved to the office.", "John went to the garden.", "Mary left the milk."]


def make(tmp_path, monkeypatch, stories, *options):
    (tmp_path / "pool.jsonl").write_text("".join(f"{json.dumps(story)}\n" for story in stories))
    out = tmp_path / "made" / "train.jsonl"
    monkeypatch.setattr("sys.argv", ["make_babi.py", str(tmp_path / "pool.jsonl"), str(out), *options])
    script("recipes/make_babi.py").main()
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_everybody_and_everything_is_asked_for(tmp_path, monkeypatch):
    stories = [
        {"task": "babi", "source": "babi_qa1", "context": "\n".join(FACTS), "questions": []},
        {"task": "babi", "source": "babi_qa2", "context": "\n".join(CARRIED), "questions": [{"lines": 3}]},
        {"task": "babi", "source": "babi_qa4", "context": "The office is north of the kitchen.", "questions": []},
        {"task": "babi", "source": "babi_qa5", "context": "Mary gave the milk to John.", "questions": [{"input": "?"}]},
    ]
    first, second, third = make(tmp_path, monkeypatch, stories, "--tasks", "qa1", "qa2", "qa5")
    asked = [(each["lines"], each["input"], each["answers"], each["supports"]) for each in first["questions"]]
    assert asked == [
        (2, "Where is Mary?", ["bathroom"], [0]),
        (2, "Where is John?", ["hallway"], [1]),
        (4, "Where is Mary?", ["office"], [0, 2]),
        (4, "Where is John?", ["office"], [1, 3]),
    ]
    assert second["questions"] == [
        {"input": "Where is the milk?", "answers": ["office"], "lines": 3, "supports": [0, 1]}
    ]
    assert third == stories[3]


def test_other_facts_are_refused(tmp_path, monkeypatch):
    story = {"task": "babi", "source": "babi_qa1", "context": "Mary is in the office.", "questions": []}
    with pytest.raises(ValueError, match="does not say who went where, or who took .*: 'Mary is in the office.'"):
        make(tmp_path, monkeypatch, [story])


def replayed(facts, thing):
    """The rooms of a thing, worked out anew after every fact: where the last who had it is, or left it."""
    rooms = []
    for count in range(1, len(facts) + 1):
        named = [number for number in range(count) if f" the {thing}" in facts[number]]
        if named:
            person, *action = facts[named[-1]].split()
            left = action[0] in ("dropped", "discarded", "put", "left")
            moves = [fact for fact in facts[: named[-1] if left else count] if re.match(f"{person} .* to the ", fact)]
            room = moves[-1].split()[-1].rstrip(".")
            rooms += [room] if rooms[-1:] != [room] else []
    return rooms


def test_invented_stories_are_told_and_asked_by_the_rules(tmp_path, monkeypatch):
    first = make(tmp_path, monkeypatch, [], "--tasks", "qa1", "qa2", "qa3", "--invent", "12")
    assert [story["source"] for story in first] == ["babi_qa2"] * 12 + ["babi_qa3"] * 12
    answers = set()
    for story in first:
        facts = story["context"].split("\n")
        assert story["questions"] or len(facts) < 30
        for question in story["questions"]:
            thing = re.search(r"the (football|apple|milk)", question["input"])[1]
            rooms = replayed(facts[: question["lines"]], thing)
            if story["source"] == "babi_qa3":
                before = question["input"].split()[-1].rstrip("?")
                rooms = rooms[: len(rooms) - 1 - rooms[::-1].index(before)]
            assert question["answers"] == [rooms[-1]]
            answers.add(rooms[-1])
            named = [number for number in range(question["lines"]) if f"the {thing}" in facts[number]]
            assert {*named} <= {*question["supports"]} <= {*range(question["lines"])}
    assert len(answers) == 6
    assert make(tmp_path, monkeypatch, [], "--tasks", "qa2", "qa3", "--invent", "12") == first
    assert make(tmp_path, monkeypatch, [], "--tasks", "qa2", "--invent", "3", "--seed", "1") != first[:3]


POOL = Path(__file__).resolve().parents[3] / "shared" / "data" / "longqa" / "test" / "babi.jsonl.gz"


@pytest.mark.skipif(not POOL.exists(), reason="../shared/data/longqa is not here")
def test_the_rules_answer_every_question_of_a_pool():
    make_babi, found = script("recipes/make_babi.py"), Counter()
    for _, story in file_rows(POOL):
        task = story["source"].removeprefix("babi_")
        if task not in make_babi.FOLLOW:
            continue
        facts = story["context"].split("\n")
        for question in story["questions"]:
            for seed in range(400):
                own = make_babi.asked(facts, task, {question["lines"]}, random.Random(seed))
                same = [each["answers"] for each in own if each["input"] == question["input"]]
                if same:
                    break
            found[task] += same == [question["answers"]]
    assert found == {"qa1": 380, "qa2": 420, "qa3": 375}


def test_parts_of_books_are_a_pool_of_quotes(tmp_path, monkeypatch):
    sentences = " ".join(f"{' '.join(f'word{place}x{number}' for number in range(25))}." for place in range(60))
    book = {"title": "A book", "text": sentences.replace(" ", "\n", 7)}
    (tmp_path / "books.jsonl").write_text(json.dumps(book) + "\n")
    out = tmp_path / "made" / "quotes.jsonl"
    monkeypatch.setattr(
        "sys.argv", ["make_quotes.py", str(tmp_path / "books.jsonl"), str(out), "--characters", "4000", "--parts", "2"]
    )
    script("recipes/make_quotes.py").main()
    pool = load_pools([str(out)], lambda text: len(text.split()))["quote"]
    assert [document["context"] for document in pool.documents] == [sentences[:4000], sentences[4000:8000]]
    exercise = Exercises({"quote": pool}, 0, 200, 200, questions=3).make(0)
    assert exercise.template == "quote" and len(exercise.questions) == 3
    for question in exercise.questions:
        assert f"{question.input.removesuffix(' ...')} {question.answer} " in exercise.context
