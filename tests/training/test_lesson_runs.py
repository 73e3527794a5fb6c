"""Lessons as whole runs: in two processes, where they cannot go on, and what a resumed run notices."""

import json
import math
from collections import Counter

import pytest
import torch
from recipe import Recipe, largest_difference, make_text, run, write_documents
from transformers import AutoModelForCausalLM

from cacheformers import train_adapt
from cacheformers.common.documents import DataOptions, open_documents
from cacheformers.training.exercises import Exercises, load_pools
from cacheformers.training.lessons import LessonOptions, Lessons

GIVEN = {
    "segment_tokens": 256,
    "cache_size": 800,
    "topk": 4,
    "retrieval_map": 1,
    "r": 4,
    "steps": 4,
    "books_share": 0.0,
}
TAUGHT = {"shortest_context": 300, "longest_context": 600, "questions_per_context": 2, "prompt_tokens": 150}


@pytest.fixture
def pool(byte_folder):
    """A base that reads bytes, a book, and passages of which every fourth has a question."""
    write_documents(byte_folder / "train.jsonl", 300, 400)
    write_pool(byte_folder / "pool.jsonl", passages(12, 4))
    return byte_folder


def passages(count, every):
    found = []
    for number in range(count):
        words = make_text(20, number).split()
        asked = [{"input": f"which word is at {number}?", "answers": [words[3]]}] if number % every == 0 else []
        found.append({"task": "wiki_qa", "title": f"passage {number}", "context": " ".join(words), "questions": asked})
    return found


def write_pool(path, documents):
    path.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    return [str(path)]


def given(pool, **more):
    options = {"base": pool / "base", "train": pool / "train.jsonl", "output": pool / "run", **GIVEN, **TAUGHT, **more}
    return [*(f"--{name}={value}" for name, value in options.items()), "--questions", str(pool / "pool.jsonl")]


def lessons(pool, tokenizer, **more):
    options = LessonOptions(**{"questions": [str(pool / "pool.jsonl")], **TAUGHT, "books_share": 0.0, **more})
    books = open_documents([str(pool / "train.jsonl")], tokenizer, DataOptions(train=[]))
    return Lessons(options, books, tokenizer, 700, 700, 0)


RECALLED = {"prompt": "recalled", "distill": 0.5, "retrieval_weight": 0.1}


@pytest.mark.parametrize(
    ("more", "sharding"),
    [
        pytest.param({}, "none", id="cut"),
        pytest.param(RECALLED, "none", id="recalled"),
        pytest.param({"retrieval_weight": 0.1}, "fsdp2", id="fsdp2", marks=pytest.mark.slow),
    ],
)
def test_two_processes_equal_one_that_accumulates(pool, more, sharding):
    """Also where they learn from the base, from gold passages and from what each one's memory recalls."""
    base = AutoModelForCausalLM.from_pretrained(pool / "base", dtype=torch.float64)
    base.save_pretrained(pool / "base")
    more = {**more, "lanes": 2, "memory_rate": 1e-2, "lora_rate": 1e-2}
    train_adapt.main(given(pool, output=pool / "alone", accumulation=2, **more))
    run(given(pool, output=pool / "two", sharding=sharding, **more), pool / "two.log", 2)
    losses = [json.loads((pool / name / "train_result.json").read_text())["losses"] for name in ("alone", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9) and len(losses[0]) == 4
    assert largest_difference(pool / "alone", pool / "two") <= 1e-9


def test_a_context_that_cannot_be_stored_is_named(pool, capsys):
    """The message comes without a traceback, and says what is left."""
    base = AutoModelForCausalLM.from_pretrained(pool / "base")
    layer = base.model.layers[0].mlp.down_proj.weight.data
    layer[:] = math.nan
    base.save_pretrained(pool / "base")
    with pytest.raises(SystemExit) as stopped:
        train_adapt.main(given(pool))
    said = str(stopped.value)
    assert "Reading exercise 0 before step 1: " in said and "NaN" in said
    assert "Stopped after step 0. There is no checkpoint yet" in said


def test_an_error_late_in_a_run_names_the_checkpoint(pool, monkeypatch):
    make = Exercises.make

    def failing(self, number):
        if number == 1:
            raise ValueError("document 1 is damaged")
        return make(self, number)

    monkeypatch.setattr(Exercises, "make", failing)
    with pytest.raises(SystemExit) as stopped:
        train_adapt.main(given(pool, checkpoint_every=1))
    said = str(stopped.value)
    assert "document 1 is damaged\nStopped after step " in said and "checkpoint is in" in said and "--resume" in said
    monkeypatch.undo()
    train_adapt.main([*given(pool, checkpoint_every=1), "--resume"])
    assert (pool / "run" / "train_result.json").exists()


FAILING = """
from cacheformers.training.exercises import Exercises
make = Exercises.make
def failing(self, number):
    if rank == 1 and number > 2:
        raise ValueError(f"document {number} is damaged")
    return make(self, number)
Exercises.make = failing
"""


def test_an_error_of_one_process_ends_all(pool):
    """None of them waits for ever, and the one that met it says what it was."""
    options = given(pool, lanes=2, steps=8, checkpoint_every=1)
    two = Recipe(options, pool / "two.log", 2, FAILING)
    codes = two.wait()
    assert all(code not in (0, None, -9) for code in codes), codes
    assert "is damaged" in two.output(1) and "Stopped after step " in two.output(1)
    assert "Traceback" not in two.output(1) and "another process is gone" in two.output(0)


def test_other_weights_of_the_base_are_noticed(pool, refused):
    train_adapt.main(given(pool, stop_after=1e-6))
    file = next((pool / "run" / "checkpoints").glob("step-*/checkpoint.json"))
    saved = json.loads(file.read_text())
    base = AutoModelForCausalLM.from_pretrained(pool / "base")
    base.lm_head.weight.data += 0.5
    base.save_pretrained(pool / "base")
    assert "other settings: base_weights (" in refused(train_adapt.main, [*given(pool), "--resume"])
    del saved["contents"]["settings"]["base_weights"]  # as earlier versions wrote it
    file.write_text(json.dumps(saved))
    train_adapt.main([*given(pool), "--resume"])
    assert (pool / "run" / "train_result.json").exists()


def test_documents_without_questions_count_too(pool, byte_tokenizer):
    before = lessons(pool, byte_tokenizer).identity()
    changed = passages(12, 4)
    changed[-1]["context"] += " and more"
    assert not changed[-1]["questions"]
    write_pool(pool / "pool.jsonl", changed)
    assert before != lessons(pool, byte_tokenizer).identity()
    byte_tokenizer.chat_template = "{{ messages[0].content }}"
    one = lessons(pool, byte_tokenizer, chat=True).identity()
    byte_tokenizer.chat_template = "Say: {{ messages[0].content }}"
    assert one != lessons(pool, byte_tokenizer, chat=True).identity()


def test_facts_from_babilong_find_their_prompt(pool, byte_tokenizer):
    """Also where no document is of the task `babi`."""
    asked = {"input": "Where is Mary?", "answers": ["office"]}
    story = {"task": "facts", "source": "babi_qa1", "context": "Mary went to the office.", "questions": [asked]}
    write_pool(pool / "pool.jsonl", [story])
    _, question = lessons(pool, byte_tokenizer, prompt="question").pieces(0)
    assert "Where is Mary?" in byte_tokenizer.decode(question.tokens)


def test_questions_without_room_for_an_answer_are_left_out(pool, byte_tokenizer):
    """They would be read and teach nothing. The first one fits."""
    [document] = passages(1, 1)
    short, [word] = document["questions"][0]["input"], document["questions"][0]["answers"]
    document["questions"] = [{"input": question, "answers": [word]} for question in (short, short * 60)]
    write_pool(pool / "pool.jsonl", [document, *passages(12, 99)[1:]])
    made = lessons(pool, byte_tokenizer, prompt="question", questions_per_context=1)
    counts = Counter()
    with pytest.warns(UserWarning, match="no room for their answers in 700 tokens are left out"):
        for number in range(12):
            context, *asked = made.pieces(number)
            assert context.context and all(bool(piece.learned.any()) for piece in asked)
            counts[len(asked)] += 1
    assert counts[0] and counts[1]


@pytest.mark.parametrize("every", [1, 4, 10])
def test_the_unanswerable_share_is_kept_where_few_passages_have_questions(tmp_path, every):
    """Nothing is asked twice, and nothing is lost."""
    pools = load_pools(write_pool(tmp_path / "pool.jsonl", passages(60, every)), len)
    exercises = Exercises({"wiki_qa": pools["wiki_qa"]}, 0, 600, 1200, questions=4, unanswerable=0.3)
    plain = Exercises({"wiki_qa": pools["wiki_qa"]}, 0, 600, 1200, questions=4, unanswerable=0.0)
    counts = Counter()
    for number in range(60):
        questions = exercises.make(number).questions
        assert len({question.input for question in questions}) == len(questions) == len(plain.make(number).questions)
        counts.update(question.answer == "unanswerable" for question in questions)
    assert 0.2 < counts[True] / counts.total() < 0.4
