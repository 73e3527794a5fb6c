"""Exercises: long contexts with questions, put together from a pool of short documents; a seed decides everything.

A pool is JSON lines, one document each: `task`, `context`, `title` (may be empty) and `questions`, a list of
`{"input": ..., "answers": [...]}` whose first answer is learned. The task decides the layout (`LAYOUTS`). Where the
answers' passages are is known, so that retrieval can be trained and measured.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cacheformers.evaluation.babilong.tasks import ANSWERS
from cacheformers.evaluation.longbench.records import check_surrogates, file_rows
from cacheformers.evaluation.longbench.retrieval import UNIT, load_bm25s
from cacheformers.evaluation.longbench.tasks import QUOTE

Span = tuple[int, int]
HARD = 24  # passages most like the question that are drawn into its context at most
ROOM = 0.96  # of the wanted tokens that pieces may fill
ABSTAIN = "unanswerable"
TRIES = 1000  # at an exercise, before its pools are given up


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Attributes:
        gold: where in the context the answer's passages are, in characters; empty where there are none.
    """

    input: str
    answer: str
    gold: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Exercise:
    """A context and the questions that are asked once it was read.

    Attributes:
        template: the task of LongBench or BABILong whose prompt is used.
    """

    template: str
    context: str
    questions: list[Question]


@dataclass(frozen=True)
class Wanted:
    """What an exercise should be like: tokens of its context, number of questions, share that cannot be answered."""

    tokens: int
    questions: int
    unanswerable: float


class Pool:
    """The documents of one task.

    Args:
        count: number of tokens of a text.
        books: texts between whose lines facts are hidden.
    """

    def __init__(self, documents: list[dict[str, Any]], count: Callable[[str], int], books: Sequence[str] = ()) -> None:
        self.documents, self.count, self.books = documents, cache(count), books
        self.asked = [document for document in documents if document["questions"]]

    @cached_property
    def index(self) -> Any:
        index = load_bm25s().BM25()
        index.index([UNIT.findall(document["context"].lower()) for document in self.documents], show_progress=False)
        return index

    def nearest(self, query: str) -> list[dict[str, Any]]:
        """Return the documents most like a query by BM25, nearest first."""
        words = UNIT.findall(query.lower())
        scores = self.index.get_scores(words) if words else np.zeros(len(self.documents))
        return [self.documents[place] for place in (-scores).argsort(kind="stable")[: 2 * HARD]]

    def shuffled(self, rng: random.Random, documents: Sequence[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        chosen = list(self.documents if documents is None else documents)
        rng.shuffle(chosen)
        return chosen

    def filled(self, texts: Sequence[str], tokens: float) -> list[int]:
        """Choose texts that fit into a number of tokens, always the first one; return their places."""
        spent = 0
        chosen: list[int] = []
        for place, text in enumerate(texts):
            need = self.count(text) + 8
            if not chosen or spent + need <= tokens:
                spent += need
                chosen.append(place)
            elif spent > 0.9 * tokens:
                break
        return chosen


Layout = Callable[[Pool, Wanted, random.Random], Exercise]


def joined(parts: Sequence[str], separator: str) -> tuple[str, list[Span]]:
    """Join parts; return the text and where each part is in it."""
    spans, start = [], 0
    for part in parts:
        spans.append((start, start + len(part)))
        start += len(part) + len(separator)
    return separator.join(parts), spans


def documents_among_others(template: str, heading: str = "", ask: str = "{input}", most: int | None = None) -> Layout:
    """Lay out whole documents under headings; with several, questions name the one that is meant.

    Args:
        heading: with the field `{title}`.
        ask: with the fields `{title}` and `{input}`.
        most: how many documents a context has at most.
    """

    def layout(pool: Pool, wanted: Wanted, rng: random.Random) -> Exercise:
        order = pool.shuffled(rng, pool.asked)[: most or len(pool.asked)]
        texts = [f"{heading.format(**document)}\n{document['context']}".lstrip("\n") for document in order]
        chosen = pool.filled(texts, ROOM * wanted.tokens)
        rng.shuffle(chosen)
        context, spans = joined([texts[place] for place in chosen], "\n\n\n")
        pairs = [
            (order[place]["title"] or " ".join(order[place]["context"].split()[:8]), question, span)
            for place, span in zip(chosen, spans, strict=True)
            for question in order[place]["questions"]
        ]
        rng.shuffle(pairs)
        form = ask if len(chosen) > 1 else "{input}"
        questions = [
            Question(form.format(title=title, input=question["input"]), question["answers"][0], (span,))
            for title, question, span in pairs[: wanted.questions]
        ]
        return Exercise(template, context, questions)

    return layout


def passages(template: str, label: str, to_number: bool = False) -> Layout:
    """Lay out numbered passages, among them those most like the first question.

    Args:
        label: with the field `{}` for the number.
        to_number: the answer is the number of the passage that the question describes.
    """

    def layout(pool: Pool, wanted: Wanted, rng: random.Random) -> Exercise:
        document = rng.choice(pool.asked)
        question = rng.choice(document["questions"])
        query = question["answers"][0] if to_number else question["input"]
        hard = [other for other in pool.nearest(query) if other is not document][: rng.randrange(4, HARD + 1)]
        order = list({id(each): each for each in [document, *hard, *pool.shuffled(rng)]}.values())
        bodies = [
            each["context"] if to_number else f"{each['title']}\n{each['context']}".lstrip("\n") for each in order
        ]
        chosen = pool.filled(bodies, ROOM * wanted.tokens)
        left_out = [place for place in range(len(order)) if place not in set(chosen)]
        absent = [place for place in left_out if order[place]["questions"]]
        rng.shuffle(chosen)
        parts = [label.format(number) + bodies[place] for number, place in enumerate(chosen, 1)]
        context, spans = joined(parts, "\n\n")
        asked = [0, *(place for place in rng.sample(chosen, len(chosen)) if place and order[place]["questions"])]
        questions = []
        for place in asked[: wanted.questions]:
            own = question if place == 0 else rng.choice(order[place]["questions"])
            number = chosen.index(place) + 1
            if to_number:
                answer = re.sub(r"\{\}.*", str(number), label, flags=re.DOTALL)
                questions.append(Question(own["answers"][0], answer, (spans[number - 1],)))
            elif left_out and rng.random() < wanted.unanswerable and absent:
                other = absent.pop(rng.randrange(len(absent)))
                questions.append(Question(rng.choice(order[other]["questions"])["input"], ABSTAIN))
            else:
                questions.append(Question(own["input"], own["answers"][0], (spans[number - 1],)))
        return Exercise(template, context, questions)

    return layout


def multihop(pool: Pool, wanted: Wanted, rng: random.Random) -> Exercise:
    """Lay out questions over several passages (`passages` of a question says which), whose contexts are mixed."""
    order = pool.shuffled(rng, pool.asked)
    parts: list[tuple[str, int, int]] = []  # text, the document's place in the order, its place in the document
    spent = 0
    for place, document in enumerate(order):
        own = document["context"].split("\n\n")
        need = sum(pool.count(text) + 8 for text in own)
        if parts and spent + need > ROOM * wanted.tokens:
            break
        parts += [(text, place, number) for number, text in enumerate(own)]
        spent += need
    rng.shuffle(parts)
    context, spans = joined([f"Passage {number}:\n{text}" for number, (text, _, _) in enumerate(parts, 1)], "\n\n")
    where = {(place, number): span for (_, place, number), span in zip(parts, spans, strict=True)}
    inside = sorted({place for _, place, _ in parts})
    questions = []
    for place in inside[: wanted.questions]:
        question = order[place]["questions"][0]
        gold = tuple(sorted(where[place, number] for number in question.get("passages", ())))
        questions.append(Question(question["input"], question["answers"][0], gold))
    return Exercise("hotpotqa", context, questions)


def answered(document: dict[str, Any]) -> str:
    """Return the answer of a document with one question."""
    answer: str = document["questions"][0]["answers"][0]
    return answer


def examples(
    template: str, shot: str, asked: str, separator: str = "\n", longest: int = 60, same: bool = False
) -> Layout:
    """Lay out many solved examples, then some to solve.

    Args:
        shot, asked: with the fields `{context}`, `{input}` and, in `shot`, `{answer}`.
        longest: words of an answer; documents with longer ones are left out.
        same: what helps are the examples with the same answer (classification).
    """

    def layout(pool: Pool, wanted: Wanted, rng: random.Random) -> Exercise:
        sources = sorted({document["source"] for document in pool.asked})
        source = rng.choice(sources)
        fitting = [
            document
            for document in pool.shuffled(rng, pool.asked)
            if (not same or document["source"] == source)
            and len(answered(document).split()) <= longest
            and pool.count(document["context"]) < wanted.tokens // 4
        ]
        if same:  # with few classes each has examples; the longer the context, the more there are
            labels = sorted({answered(document) for document in fitting})
            labels = rng.sample(labels, min(len(labels), max(8, wanted.tokens // 220)))
            fitting = [document for document in fitting if answered(document) in labels]
        solving, shown = fitting[: wanted.questions], fitting[wanted.questions :]
        if same:  # an example of every asked class comes first, so that it is there
            first: dict[str, dict[str, Any]] = {}
            for document in shown:
                first.setdefault(answered(document), document)
            helpful = [first[label] for label in sorted({answered(each) for each in solving}) if label in first]
            shown = helpful + [document for document in shown if all(document is not each for each in helpful)]

        def text(form: str, document: dict[str, Any]) -> str:
            question = document["questions"][0]
            return form.format(context=document["context"], input=question["input"], answer=answered(document))

        shots = [text(shot, document) for document in shown]
        chosen = pool.filled(shots, ROOM * wanted.tokens)
        rng.shuffle(chosen)
        context, spans = joined([shots[place] for place in chosen], separator)
        questions = []
        for document in solving:
            answer = answered(document)
            alike = (span for place, span in zip(chosen, spans, strict=True) if answered(shown[place]) == answer)
            questions.append(Question(text(asked, document), answer, tuple(alike) if same else ()))
        return Exercise(template, context, questions)

    return layout


def completion(pool: Pool, wanted: Wanted, rng: random.Random) -> Exercise:
    """Lay out source files of a package, then the beginning of one whose next line is asked for."""
    document = rng.choice(pool.documents)
    package = document["title"].rpartition("/")[0]
    others = [
        each for each in pool.shuffled(rng) if each is not document and each["title"].rpartition("/")[0] == package
    ]
    lines = document["context"].split("\n")
    places = [place for place, line in enumerate(lines) if place >= 10 and 15 <= len(line.strip()) <= 100]
    place = rng.choice(places) if places else len(lines) - 1
    own = f"# {document['title']}\n" + "\n".join(lines[:place])[-12000:]
    texts = [own, *(f"# {each['title']}\n{each['context']}\n" for each in others)]
    chosen = pool.filled(texts, ROOM * wanted.tokens)
    context = "\n".join([*(texts[number] for number in chosen[1:]), own]) + "\n"
    return Exercise("lcc", context, [Question("", lines[place])])


def facts(pool: Pool, wanted: Wanted, rng: random.Random) -> Exercise:
    """Lay out facts, in order, between the lines of a book (the construction of BABILong, arXiv 2406.10149).

    They are asked about in the words of BABILong where the document's source is a task of bAbI (babi_qa1). A question's
    `lines` says after how many facts it is asked, its `supports` which of them answer it (default: all).
    """
    document = rng.choice(pool.asked)
    lines = document["context"].split("\n")
    ends = [question.get("lines", len(lines)) for question in document["questions"]]
    last = rng.choice(sorted(set(ends))) if len(set(ends)) > 1 else ends[0]
    questions = [question for question, end in zip(document["questions"], ends, strict=True) if end == last]
    questions = rng.sample(questions, min(wanted.questions, len(questions)))
    parts = lines[:last]
    book = rng.choice(pool.books).splitlines() if pool.books else []
    start = rng.randrange(len(book) // 2 + 1)
    noise = [line.strip() for line in book[start : start + wanted.tokens] if line.strip()]
    kept = pool.filled(noise, ROOM * wanted.tokens) if noise else []
    borders = sorted(rng.randrange(len(kept) + 1) for _ in parts)
    mixed = [noise[place] for place in kept]
    places = [border + number for number, border in enumerate(borders)]
    for place, fact in zip(places, parts, strict=True):
        mixed.insert(place, fact)
    context, spans = joined(mixed, " ")
    asked = []
    for each in questions:
        gold = tuple(spans[places[number]] for number in each.get("supports", range(len(parts))))
        asked.append(Question(each["input"], each["answers"][0], gold))
    return Exercise(source_task(document) or "multifieldqa_en", context, asked)


def source_task(document: dict[str, Any]) -> str:
    """Return the task of bAbI that a document comes from; empty for none."""
    source = str(document["source"]).removeprefix("babi_")
    return source if source in ANSWERS else ""


def quotation(pool: Pool, wanted: Wanted, rng: random.Random) -> Exercise:
    """Lay out a part of a book; ten words of a sentence are shown, the next ten are the answer."""
    text = rng.choice(pool.documents)["context"]
    sentences = re.split(r"(?<=[.!?])\s+", text)
    first = rng.randrange(len(sentences))
    chosen = pool.filled(sentences[first:], ROOM * wanted.tokens)
    context, spans = joined([sentences[first + place] for place in chosen], " ")
    long = [place for place in chosen if len(sentences[first + place].split()) >= 2 * QUOTED]
    questions = []
    for place in rng.sample(long, min(wanted.questions, len(long))):
        words = sentences[first + place].split()
        shown, answer = " ".join(words[:QUOTED]), " ".join(words[QUOTED : 2 * QUOTED])
        questions.append(Question(f"{shown} ...", answer, (spans[chosen.index(place)],)))
    return Exercise(QUOTE, context, questions)


QUOTED = 10  # words of a sentence that are shown, and asked for
QA_SHOT = "Passage:\n{context}\nQuestion:\n{input}\nAnswer:\n"
DIALOGUE = "Dialogue: {context}\nSummary: "
LAYOUTS: dict[str, Layout] = {
    "story_qa": documents_among_others("narrativeqa", "Story: {title}", 'In the story "{title}": {input}'),
    "paper_qa": documents_among_others("qasper", "Paper:", 'In the paper that begins "{title}": {input}'),
    "abstract_qa": documents_among_others("qasper", "Paper:", 'In the paper that begins "{title}": {input}'),
    "thread_summary": documents_among_others("qmsum", "Thread: {title}", 'Summarize the e-mail thread "{title}".'),
    "meeting_qa": documents_among_others("qmsum", most=1),
    "story_summary": documents_among_others("qmsum", most=1),
    "visit_note": documents_among_others("gov_report", most=1),
    "wiki_qa": passages("hotpotqa", "Passage {}:\n"),
    "zh_qa": passages("dureader", "文章{}\n"),
    "abstract_tldr": passages("passage_retrieval_en", "Paragraph {}: ", to_number=True),
    "multihop_qa": multihop,
    "fewshot_qa": examples("triviaqa", f"{QA_SHOT}{{answer}}\n\n", QA_SHOT, ""),
    "intent": examples("trec", "Question: {context}\nType: {answer}", "Question: {context}\nType:", same=True),
    "dialogue_summary": examples("samsum", f"{DIALOGUE}{{answer}}\n", DIALOGUE),
    "code": completion,
    "quote": quotation,
    "babi": facts,
    "facts": facts,
}
# Tasks made of another task's documents.
ALSO = {"wiki_qa": ("fewshot_qa",)}
# Tasks that ask about the text itself: their documents need no questions.
UNASKED = ("code", "quote")
IN_BOOKS = ("babi", "facts")  # facts between lines of books


@dataclass
class Exercises:
    """An endless row of exercises.

    Attributes:
        pools: task -> its documents.
        shortest, longest: tokens of contexts, between which lengths are drawn evenly on a logarithmic scale.
        questions: asked after one reading.
        unanswerable: share of questions about passages that were not read, where the task has passages.
        fits: whether a context may be as long as it is. None: a document longer than `longest` is one by itself.
    """

    pools: dict[str, Pool]
    seed: int
    shortest: int
    longest: int
    questions: int
    unanswerable: float = 0.0
    fits: Callable[[str], bool] | None = None

    def make(self, number: int) -> Exercise:
        """Make an exercise; its number and the seed decide everything.

        Raises:
            ValueError: no context with a question comes of these documents.
        """
        rng = random.Random(f"{self.seed}/{number}")
        for _ in range(TRIES):
            task = rng.choice(sorted(self.pools))
            tokens = round(math.exp(rng.uniform(math.log(self.shortest), math.log(self.longest))))
            exercise = LAYOUTS[task](self.pools[task], Wanted(tokens, self.questions, self.unanswerable), rng)
            usable = exercise.context.strip() and exercise.questions
            if usable and (self.fits is None or self.fits(exercise.context)):
                return exercise
        raise ValueError(
            f"{', '.join(sorted(self.pools))}: no context of {self.shortest:,} to {self.longest:,} tokens with a "
            f"question in {TRIES:,} tries. Give more documents, or a larger --longest_context: a solved example takes "
            f"less than a quarter of a context. For quote, give sentences of {2 * QUOTED} words or more."
        )


def warn_of_short(pools: dict[str, Pool], shortest: int) -> None:
    """Warn of tasks whose documents are together shorter than a context is to be; books make up for them in some."""
    for task, pool in pools.items():
        tokens = 0
        for document in pool.documents:
            tokens += pool.count(document["context"])
            if tokens >= shortest or (task in IN_BOOKS and pool.books):
                break
        else:
            warnings.warn(
                f"The documents of the task '{task}' have {tokens:,} tokens in all, so its contexts stay below "
                f"--shortest_context {shortest:,}: add documents, on which nothing needs to be asked.",
                stacklevel=2,
            )


def load_pools(paths: Sequence[str], count: Callable[[str], int], books: Sequence[str] = ()) -> dict[str, Pool]:
    """Load the pools of files.

    Args:
        paths: files of JSON lines, or folders of them.
        count, books: see `Pool`.

    Raises:
        FileNotFoundError, ValueError: there are none; a document is damaged or of an unknown task; a task has no
            question.
    """
    documents: dict[str, list[dict[str, Any]]] = {}
    for path in (file for name in paths for file in pool_files(Path(name))):
        for where, row in file_rows(path):
            check_document(row, where)
            for task in (row["task"], *ALSO.get(row["task"], ())):
                documents.setdefault(task, []).append({"title": "", "source": "", **row})
    if not documents:
        raise ValueError(f"There is no document in {', '.join(paths)}.")
    for task, own in documents.items():
        if task not in UNASKED and not any(document["questions"] for document in own):
            raise ValueError(
                f"{', '.join(paths)}: no document of the task '{task}' has a question. Add questions, or leave these "
                "documents out."
            )
    return {task: Pool(own, count, books) for task, own in documents.items()}


def pool_files(path: Path) -> list[Path]:
    """Return the files of a pool: one, or all of a folder."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist.")
    if path.is_file():
        return [path]
    found = sorted(file for file in path.iterdir() if file.name.endswith((".jsonl", ".jsonl.gz")))
    if not found:
        raise FileNotFoundError(f"{path} holds no .jsonl or .jsonl.gz.")
    return found


def check_document(row: Any, where: str) -> None:
    """Raise ValueError unless a row is a document of a pool."""
    if not isinstance(row, dict) or row.get("task") not in LAYOUTS:
        raise ValueError(f"{where} has no task of {', '.join(LAYOUTS)}, which decides how contexts are put together.")
    if not isinstance(row.get("context"), str) or not row["context"].strip():
        raise ValueError(f"{where} has no context.")
    questions = row.get("questions")
    if not isinstance(questions, list) or not all(is_question(question) for question in questions):
        raise ValueError(
            f'{where} needs questions: a list of {{"input": TEXT, "answers": [TEXT, ...]}}, or an empty one.'
        )
    for name in ("source", "title"):
        if not isinstance(row.get(name, ""), str):
            raise ValueError(f"{where} has a {name} that is not a text.")
    texts = [text for question in questions for text in (question["input"], *question["answers"])]
    check_surrogates({"context": [row["context"], row.get("title", "")], "questions": texts}, where)
    all_lines, parts = (row["context"].count(mark) + 1 for mark in ("\n", "\n\n"))
    for question in questions:
        lines = question.get("lines", all_lines)
        if not isinstance(lines, int) or not 1 <= lines <= all_lines:
            raise ValueError(f"{where} has a question whose lines are not a number from 1 to its {all_lines}.")
        for name, most in (("supports", lines), ("passages", parts)):
            numbers = question.get(name, [])
            if not isinstance(numbers, list) or any(not isinstance(n, int) or not 0 <= n < most for n in numbers):
                raise ValueError(f"{where} has a question whose {name} are not numbers below {most}, from 0 on.")


def is_question(question: Any) -> bool:
    """Return whether this is a question with an answer."""
    if not isinstance(question, dict) or not isinstance(question.get("input"), str):
        return False
    answers = question.get("answers")
    return (
        isinstance(answers, list) and bool(answers) and all(isinstance(text, str) and text.strip() for text in answers)
    )
