"""Answers as tokens: as they follow their prompt, within a teacher's positions, and what tells pools apart."""

import json
import string

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

import cacheformers
from cacheformers.common.documents import DataOptions, open_documents
from cacheformers.evaluation.longbench.prompts import continued, lead_of_answers
from cacheformers.evaluation.longbench.retrieval import asking
from cacheformers.modeling.memory import BaseShape
from cacheformers.training.lessons import LessonOptions, Lessons, check_lessons, question_room, teacher_room

ROLES = "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<assistant>\n{% endif %}"
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} </s>{% endif %}{% endfor %}"
)
POSITIONS = 1024


def text_of(number, words=300):
    return " ".join(f"w{number}x{place}" for place in range(words))


@pytest.fixture
def begins_with_a_space():
    """A token a character; like Llama-2's, it puts a space before what begins."""
    names = ["<s>", "</s>", *string.printable, "\u2581"]
    made = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, []))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", chat_template=ROLES + PROMPT
    )


@pytest.fixture
def make_lessons(tmp_path):
    def make(tokenizer, documents, room=400, teacher_tokens=700, bounded=False, **options):
        (tmp_path / "book.txt").write_text(text_of(0))
        (tmp_path / "pool.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in documents))
        chosen = {"shortest_context": 300, "longest_context": 900, "prompt_tokens": 150, "books_share": 0.0, **options}
        books = open_documents([str(tmp_path / "book.txt")], tokenizer, DataOptions(train=[]))
        asked = LessonOptions(questions=[str(tmp_path / "pool.jsonl")], **chosen)
        return Lessons(asked, books, tokenizer, room, teacher_tokens, 0, bounded)

    return make


def documents(task, answer=None, words=20):
    code = [f"total = {place} + other" for place in range(20)]
    asked = [{"input": "which?", "answers": [answer or "w3x4 w3x5"]}]
    return [
        {
            **{"task": task, "title": f"a/{number}.py", "source": "made"},
            "context": "\n".join(code) if task == "code" else text_of(number, words),
            "questions": [] if task == "code" else asked,
        }
        for number in range(4)
    ]


def test_an_answer_has_the_tokens_that_it_has_behind_its_prompt(begins_with_a_space, make_lessons):
    tokenizer = begins_with_a_space
    for task, chat in (("code", False), ("wiki_qa", False), ("wiki_qa", True)):
        made = make_lessons(tokenizer, documents(task), chat=chat)
        exercise, piece = made.exercises.make(0), made.pieces(0)[1]
        learned, before = (piece.tokens[side].tolist() for side in (piece.learned, ~piece.learned))
        space = "" if chat or task == "code" else " "
        end = "\n" if task == "code" else "</s>"
        assert tokenizer.decode(learned) == f"{space}{exercise.questions[0].answer}{end}", (task, chat)
        whole = tokenizer(tokenizer.decode(before) + tokenizer.decode(learned), add_special_tokens=False).input_ids
        assert whole[-len(learned) :] == learned and tokenizer.decode(before)[-1] in "\n:"


def test_a_template_says_what_stands_before_an_answer(begins_with_a_space, make_lessons):
    tokenizer = begins_with_a_space
    assert lead_of_answers(tokenizer) == ""
    tokenizer.chat_template = BRACKETS
    assert lead_of_answers(tokenizer) == " "
    piece = make_lessons(tokenizer, documents("wiki_qa"), chat=True).pieces(0)[1]
    assert tokenizer.decode(piece.tokens).endswith("[/INST] w3x4 w3x5</s>")


def test_a_text_goes_on(begins_with_a_space, byte_tokenizer):
    tokenizer = begins_with_a_space
    names = tokenizer.convert_ids_to_tokens
    assert names(continued(tokenizer, "\n", "ab")) == ["a", "b"] and names(tokenizer("ab").input_ids)[0] == "\u2581"
    assert names(asking(tokenizer, "who?")[1]) == ["\u2581", *"who?"]
    for text in ("ab", " ab", "\n ab"):
        assert continued(byte_tokenizer, ":", text) == byte_tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize(("segment", "prompt_tokens"), ((256, 300), (64, 150), (256, 150)))
def test_a_teacher_reads_prompt_and_answer_within_its_positions(byte_tokenizer, make_lessons, segment, prompt_tokens):
    """Notes of 512 tokens, the longest answers that there are."""
    config = cacheformers.NeurocacheAdapterConfig(segment_tokens=segment, retrieval_map={1: 1})
    memory = config.resolve(BaseShape("llama", 32, 4, 4, 8, 2, 300, POSITIONS, True))
    options = {"distill": 0.5, "prompt_tokens": prompt_tokens}
    chosen = LessonOptions(questions=["pool"], **options)
    check_lessons(chosen, memory)
    room, most = question_room(chosen, memory), teacher_room(chosen, memory)
    made = make_lessons(byte_tokenizer, documents("visit_note", text_of(9), 200), room, most, **options)
    made.check(segment)
    pieces = [piece for number in range(4) for piece in made.pieces(number) if piece.asked]
    longest = max(len(piece.teacher) - 1 for piece in pieces)
    assert most < longest <= POSITIONS
    assert max(int(piece.learned.sum()) for piece in pieces) > (256 if room > segment else 64)


def test_where_positions_end_no_document_is_longer_than_the_longest_context(byte_tokenizer, make_lessons):
    rows = documents("story_qa", words=400) + documents("story_qa", words=40)
    for bounded in (False, True):
        made = make_lessons(byte_tokenizer, rows, bounded=bounded)
        contexts = [made.exercises.make(number).context for number in range(12)]
        assert (max(map(len, contexts)) <= 900) is bounded and len(set(contexts)) > 1
    with pytest.raises(ValueError, match="no context of 300 to 900 tokens"):
        make_lessons(byte_tokenizer, rows[:4], bounded=True).exercises.make(0)


def test_pools_are_told_apart(byte_tokenizer, make_lessons):
    """A resumed run asks the same questions, also of documents that come late."""
    pool = documents("wiki_qa") * 10
    same, other, fewer = (
        make_lessons(byte_tokenizer, rows).identity()
        for rows in (
            pool,
            [*pool[:-1], {**pool[-1], "questions": documents("wiki_qa", "wrong")[0]["questions"]}],
            pool[:-1],
        )
    )
    assert same == make_lessons(byte_tokenizer, pool).identity()
    assert len({json.dumps(found["pools"]) for found in (same, other, fewer)}) == 3


def test_an_exercise_is_found_among_many_books_and_an_end_is_needed(byte_tokenizer, make_lessons):
    made = make_lessons(byte_tokenizer, documents("wiki_qa"), books_share=0.9995)
    assert all(made.book(index) is not None for index in range(1000))
    made.check(16)
    byte_tokenizer.eos_token = None
    with pytest.raises(ValueError, match="needs a tokenizer with an end of text"):
        make_lessons(byte_tokenizer, documents("wiki_qa"))
