"""Pools that recipes make: stories of bAbI with a question for everybody, parts of books to be quoted."""

import json
import re
import sys

import pytest
from recipe import script

from cacheformers.training.exercises import Exercises, load_pools

FACTS = [
    "Mary moved to the bathroom.",
    "John went back to the hallway.",
    "Mary travelled to the office.",
    "John journeyed to the office.",
    "Mary went to the garden.",
]


def test_everybody_is_asked_for_after_every_second_fact(tmp_path, monkeypatch):
    asked_of_all = [{"input": "?", "answers": ["there"]}]
    stories = [
        {"task": "babi", "source": "babi_qa1", "context": "\n".join(FACTS), "questions": []},
        {"task": "babi", "source": "babi_qa2", "context": "Mary got the milk there.", "questions": asked_of_all},
        {"task": "babi", "source": "babi_qa4", "context": "The office is north of the kitchen.", "questions": []},
    ]
    (tmp_path / "pool.jsonl").write_text("".join(f"{json.dumps(story)}\n" for story in stories))
    out = tmp_path / "made" / "train.jsonl"
    monkeypatch.setattr("sys.argv", ["make_babi.py", str(tmp_path / "pool.jsonl"), str(out), "--tasks", "qa1", "qa2"])
    script("recipes/make_babi.py").main()
    first, second = [json.loads(line) for line in out.read_text().splitlines()]
    assert second == stories[1]
    asked = [(each["lines"], each["input"], each["answers"], each["supports"]) for each in first["questions"]]
    assert asked == [
        (2, "Where is Mary?", ["bathroom"], [0]),
        (2, "Where is John?", ["hallway"], [1]),
        (4, "Where is Mary?", ["office"], [0, 2]),
        (4, "Where is John?", ["office"], [1, 3]),
    ]


def test_other_facts_are_refused():
    with pytest.raises(ValueError, match="does not say who went where: 'Mary got the milk there.'"):
        script("recipes/make_babi.py").whereabouts([FACTS[0], "Mary got the milk there."])


def test_rows_of_another_form_are_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "pool.jsonl").write_text("[1]\n")
    monkeypatch.setattr("sys.argv", ["script", str(tmp_path / "pool.jsonl"), str(tmp_path / "made.jsonl")])
    with pytest.raises(ValueError, match="pool.jsonl, line 1 has no task of"):
        script("recipes/make_babi.py").main()
    with pytest.raises(SystemExit):
        script("recipes/make_quotes.py").main()
    assert "pool.jsonl, line 1 has no text" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [*sys.argv, "--names", "John"])
    for text, message in (("[1]", "pool.jsonl, line 1 has no text"), ('{"text": "Anna said no."}', "In none of")):
        (tmp_path / "pool.jsonl").write_text(f"{text}\n")
        with pytest.raises(SystemExit):
            script("recipes/rename_people.py").main()
        assert message in capsys.readouterr().err
    assert not (tmp_path / "made.jsonl").exists()


def test_the_people_who_speak_most_are_called_by_other_names(tmp_path, monkeypatch, capsys):
    lively = (
        'He asked Anna. Anna said no. "Go," said Anna. "Stay," said Bob, as Bob said before, and Bob replied. '
        "She said so, she said it, She replied, She cried, She asked. Mr Hale went to "
        "Annaville with Anna's dog and Carl; Carl cried. Mr said Mr said Mr."
    )
    books = [{"title": "lively", "text": lively}, {"title": "quiet", "text": "Anna said no. Bob said yes."}]
    (tmp_path / "books.jsonl").write_text("".join(f"{json.dumps(book)}\n" for book in books))
    out = tmp_path / "made" / "books.jsonl"
    monkeypatch.setattr("sys.argv", ["x.py", str(tmp_path / "books.jsonl"), str(out), "--names", "John", "Mary"])
    script("recipes/rename_people.py").main()
    assert "1 of 2 books" in capsys.readouterr().out
    (book,) = [json.loads(line) for line in out.read_text().splitlines()]
    called = [
        re.sub(r"\bBob\b", bob, re.sub(r"\bAnna\b", anna, lively)) for anna, bob in (("John", "Mary"), ("Mary", "John"))
    ]
    assert book["title"] == "lively" and book["text"] in called


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
