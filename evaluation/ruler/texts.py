"""The texts of RULER's tasks, of any number of units: sentences, needles, lines, words or documents."""

from __future__ import annotations

import math
import random
import re
import string
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np

from cacheformers.evaluation.lengths.books import SPARE, Books
from cacheformers.evaluation.passkey.prompts import REPEATED
from cacheformers.evaluation.ruler.tasks import HOPS, Needles
from cacheformers.training.exercises import Span, joined, load_pools

DEPTHS = tuple(round(100 * step / 39) for step in range(40))  # per cent of a book's sentences
COMMON = 10
FREQUENT = 3


@dataclass(frozen=True)
class Text:
    """A text and what is asked about it.

    Attributes:
        gold: where what tells the answer stands in the context, in characters; empty where that is everywhere.
    """

    context: str
    answers: list[str]
    input: str = ""
    gold: tuple[Span, ...] = ()


class Texts(Protocol):
    """The texts of a task. A longer one, drawn alike, has the same answers or is of the same kind.

    Attributes:
        least, most: units that a text can have.
    """

    @property
    def least(self) -> int: ...

    @property
    def most(self) -> int: ...

    def __call__(self, units: int, draw: random.Random) -> Text: ...


def longest(texts: Texts, draw: Callable[[], random.Random], cost: Callable[[Text], int], room: int) -> Text | None:
    """Return the text of the most units that fits; None if none does. Costs should grow evenly.

    Args:
        draw: makes the same numbers each time.
    """
    best = texts(texts.least, draw())
    spent = cost(best)
    if spent > room:
        return None
    fits, fails, trial = texts.least, texts.most + 1, 2 * texts.least + 16
    while fails - fits > 1:
        trial = min(max(trial, fits + 1), fails - 1)
        text = texts(trial, draw())
        needed = cost(text)
        if needed <= room:
            fits, best = trial, text
        else:
            fails = trial
        trial = texts.least + int((room - spent) * (trial - texts.least) / max(1, needed - spent))
    return best


def distinct(make: Callable[[], str], count: int, known: set[str]) -> list[str]:
    """Make texts of which none is known yet; now they are."""
    found: list[str] = []
    while len(found) < count:
        text = make()
        if text not in known:
            known.add(text)
            found.append(text)
    return found


def inserted(
    parts: Sequence[str], places: Sequence[int], among: Sequence[str], separator: str
) -> tuple[str, list[Span]]:
    """Put parts, in order, before the texts of these numbers; return all joined, and where the parts are."""
    mixed: list[str] = []
    for place, (first, end) in enumerate(zip((0, *places), (*places, len(among)), strict=True)):
        mixed += among[first:end]
        mixed += parts[place : place + 1]
    text, spans = joined(mixed, separator)
    return text, [spans[place + number] for number, place in enumerate(places)]


WORD = re.compile(r"\b[a-z]{4,10}\b")


def words_of(books: Books) -> list[str]:
    """Return the words that books have more than once, in the order of the alphabet."""
    counts = Counter(chain.from_iterable(WORD.findall(sentence) for sentence in books.sentences))
    return sorted(word for word, count in counts.items() if count > 1)


@dataclass(frozen=True)
class NeedleTexts:
    """Sentences that give keys their values, hidden in others. A unit is a sentence.

    Attributes:
        form: see `Wordings.needle`.
        tokens: of the whole text, at most.
    """

    settings: Needles
    form: str
    words: Sequence[str]
    books: Books
    tokens: int

    @property
    def least(self) -> int:
        return self.settings.keys * self.settings.values

    @property
    def most(self) -> int:
        return len(self.books.sentences) if self.settings.haystack == "books" else self.tokens

    @property
    def last_start(self) -> int:
        """The last sentence after which there is enough of the books."""
        return int(np.searchsorted(self.books.ends, self.books.ends[-1] - self.tokens - SPARE))

    def __call__(self, units: int, draw: random.Random) -> Text:
        own, known = self.settings, set[str]()
        keys = distinct(lambda: self.new(own.key, draw), own.keys, known)
        values = [distinct(lambda: self.new(own.value, draw), own.values, known) for _ in keys]
        told = [(key, value) for key, row in zip(keys, values, strict=True) for value in row]
        draw.shuffle(told)
        asked = draw.sample(range(own.keys), own.queries)
        where = random.Random(draw.random())
        if own.haystack == "books":
            start = draw.randrange(self.last_start + 1)
            among: list[str] = self.books.sentences[start : start + units]
            places = [len(among) * depth // 100 for depth in sorted(where.sample(DEPTHS, len(told)))]
        else:
            places = sorted(where.sample(range(units), len(told)))
            among = [REPEATED.strip()] * units
            if own.haystack == "needles":
                others = distinct(lambda: self.new(own.key, draw), units, known)
                among = [self.sentence(key, *distinct(lambda: self.new(own.value, draw), 1, known)) for key in others]
        separator = " " if own.haystack == "books" else "\n"
        context, spans = inserted([self.sentence(*each) for each in told], places, among, separator)
        queries = [keys[place] for place in asked]
        gold = tuple(span for (key, _), span in zip(told, spans, strict=True) if key in queries)
        return Text(context, [value for place in asked for value in values[place]], listed(queries), gold)

    def sentence(self, key: str, value: str) -> str:
        return self.form.format(type_needle_v=self.settings.value, key=key, value=value)

    def new(self, kind: str, draw: random.Random) -> str:
        if kind == "words":
            return f"{draw.choice(self.words)}-{draw.choice(self.words)}"
        if kind == "numbers":
            return str(draw.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def listed(names: Sequence[str]) -> str:
    """List names as in English: a, b, and c."""
    return ", and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


@dataclass(frozen=True)
class ChainTexts:
    """Variables that get a value from one another, between sentences about grass. A unit is a line of these."""

    tokens: int
    letters: int = 5
    least: int = HOPS + 1

    @property
    def most(self) -> int:
        return self.tokens

    def __call__(self, units: int, draw: random.Random) -> Text:
        names = distinct(lambda: "".join(draw.choices(string.ascii_uppercase, k=self.letters)), HOPS + 1, set())
        value = str(draw.randint(10_000, 99_999))
        told = [f"VAR {names[0]} = {value}"]
        told += [f"VAR {name} = VAR {before}" for before, name in zip(names, names[1:], strict=False)]
        places = sorted(draw.sample(range(units), len(told)))
        context, spans = inserted(told, places, [f"{REPEATED.strip()}\n"] * units, " ")
        return Text(context, names, value, tuple(spans))


@dataclass(frozen=True)
class CommonWords:
    """A numbered list of words, ten of which come more often. A unit is a word that does not.

    Attributes:
        often, seldom: how many times a word comes.
    """

    words: Sequence[str]
    often: int
    seldom: int
    least: int = COMMON

    @property
    def most(self) -> int:
        return len(self.words) - COMMON

    def __call__(self, units: int, draw: random.Random) -> Text:
        drawn = draw.sample(self.words, len(self.words))
        common, others = drawn[:COMMON], drawn[COMMON : COMMON + units]
        said = common * self.often + others * self.seldom
        draw.shuffle(said)
        return Text(numbered(said), common)


def numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


@dataclass(frozen=True)
class FrequentWords:
    """Invented words whose k-th comes in proportion to 1 / k**2; dots come most often. A unit is a word."""

    tokens: int
    least: int = 100  # the third and the fourth word differ in their number from 74 on

    @property
    def most(self) -> int:
        return self.tokens

    def __call__(self, units: int, draw: random.Random) -> Text:
        vocabulary = max(FREQUENT + 2, self.tokens // 50)
        codes = distinct(lambda: "".join(draw.choices(string.ascii_lowercase, k=6)), vocabulary - 1, set())
        share = 6 / math.pi**2  # of the first one: 1 / zeta(2)
        said = [[code] * int(units * share / rank**2) for rank, code in enumerate(["...", *codes], 1)]
        order = list(chain(*said))
        draw.shuffle(order)
        return Text(" ".join(order), codes[:FREQUENT])


@dataclass(frozen=True)
class Question:
    """A question about some of the documents.

    Attributes:
        id: unique within the task.
        shown: numbers of the documents that must be there; `telling` those that tell the answer.
        related: numbers of those that are shown next.
    """

    id: str
    input: str
    answers: list[str]
    shown: list[int]
    telling: list[int]
    related: list[int]


@dataclass(frozen=True)
class QuestionTexts:
    """A question's documents among others. A unit is a document.

    Attributes:
        form: see `Wordings.document`.
    """

    question: Question
    documents: Sequence[str]
    form: str

    @property
    def least(self) -> int:
        return len(self.question.shown)

    @property
    def most(self) -> int:
        return len(self.documents)

    def __call__(self, units: int, draw: random.Random) -> Text:
        own = self.question
        related = draw.sample(own.related, len(own.related))
        first = [*own.shown, *related]
        others = draw.sample(range(len(self.documents)), len(self.documents))
        chosen = list(dict.fromkeys([*first, *others]))[:units]
        draw.shuffle(chosen)
        parts = [self.form.format(i=i, document=self.documents[number]) for i, number in enumerate(chosen, 1)]
        context, spans = joined(parts, "\n\n")
        gold = tuple(span for number, span in zip(chosen, spans, strict=True) if number in own.telling)
        return Text(context, own.answers, own.input, gold)


def load_questions(paths: Sequence[str], task: str, seed: int) -> tuple[list[Question], list[str]]:
    """Load the questions of a task, in an order that the seed decides, and the documents.

    qa_1 asks those of the pool `wiki_qa` whose source is one of SQuAD's relatives (xquad, squadshifts); passages of
    their article come first among the others. qa_2 asks those of `multihop_qa`, whose ten passages are always there.

    Raises:
        FileNotFoundError, ValueError: there are no pools, or none of the task.
    """
    name, needed = ("wiki_qa", "quad") if task == "qa_1" else ("multihop_qa", "")
    pool = load_pools(paths, len).get(name)
    rows: list[dict[str, Any]] = pool.documents if pool else []
    parts = [[row["context"]] if task == "qa_1" else row["context"].split("\n\n") for row in rows]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(chain(*parts)))}
    titles: dict[str, list[int]] = {}
    for row, own in zip(rows, parts, strict=True):
        titles.setdefault(row["title"], []).append(numbers[own[0]])
    questions = []
    for place, (row, own) in enumerate(zip(rows, parts, strict=True)):
        shown = list(dict.fromkeys(numbers[text] for text in own))
        related = titles[row["title"]] if row["title"] and task == "qa_1" else []
        for number, asked in enumerate(row["questions"] if needed in row["source"] else []):
            telling = [numbers[own[passage]] for passage in asked.get("passages", range(len(own)))]
            found = [other for other in related if other not in shown]
            questions.append(Question(f"{place}-{number}", asked["input"], asked["answers"], shown, telling, found))
    if not questions:
        raise ValueError(
            f"{', '.join(paths)}: no question of {task}. It takes documents of the task '{name}'"
            + (f" whose source names '{needed}'" if needed else "")
            + "; leave the task out with --tasks, or give other --questions."
        )
    random.Random(f"{seed}/{task}").shuffle(questions)
    return questions, list(numbers)
