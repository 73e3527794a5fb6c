"""bAbI's facts, in order, between the sentences of books, cut to an exact number of tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cacheformers.common.documents import fingerprint
from cacheformers.evaluation.babilong.records import make_story
from cacheformers.evaluation.babilong.tasks import check_answer
from cacheformers.evaluation.lengths.books import SPARE, Books
from cacheformers.evaluation.lengths.options import Cell, label
from cacheformers.evaluation.longbench.records import Record
from cacheformers.training.exercises import Span, joined, load_pools

TRIES = 100


@dataclass(frozen=True)
class Question:
    """A question of bAbI, and the facts that are known when it is asked.

    Attributes:
        text: the first question that is asked of the same facts; both are asked of one text.
        supports: numbers of the facts that answer; empty if nobody knows.
    """

    id: str
    text: str
    input: str
    answer: str
    facts: list[str]
    supports: tuple[int, ...] = ()


def load_questions(paths: Sequence[str], tasks: Sequence[str], seed: int) -> dict[str, list[Question]]:
    """Load each task's questions from pools, in an order that the seed decides; those of the same facts stay together.

    Raises:
        FileNotFoundError, ValueError: there are no pools, or none of a task; an answer is none of the task's.
    """
    found: dict[str, list[list[Question]]] = {task: [] for task in tasks}
    pool = load_pools(paths, len).get("babi")
    for place, document in enumerate(pool.asked if pool else []):
        task = document["source"].rpartition("_")[2]
        if task not in found:
            continue
        by_facts: dict[int, list[Question]] = {}
        for number, asked in enumerate(document["questions"]):
            id = f"{place}-{number}"
            answer = check_answer(task, asked["answers"][0], f"{', '.join(paths)}, question {asked.get('id', id)}")
            facts = document["context"].split("\n")[: asked.get("lines")]
            same = by_facts.setdefault(len(facts), [])
            first = same[0].id if same else id
            same.append(Question(id, first, asked["input"], answer, facts, decisive(task, asked.get("supports", ()))))
        found[task] += by_facts.values()
    for task, own in found.items():
        if not own:
            raise ValueError(
                f"{', '.join(paths)}: no question of {task}. It takes documents of the task 'babi' whose source is "
                f"'babi_{task}'; leave the task out with --tasks, or give other --questions."
            )
        random.Random(f"{seed}/{task}").shuffle(own)
    return {task: [each for same in own for each in same] for task, own in found.items()}


def decisive(task: str, supports: Sequence[int]) -> tuple[int, ...]:
    """Return which of the facts that a question's `supports` names answer it: in qa1 the newest alone."""
    return tuple(supports[-1:] if task == "qa1" else supports)


@dataclass(frozen=True)
class StoryMaker:
    """Hides facts in books."""

    tokenizer: PreTrainedTokenizerBase
    seed: int
    records: int

    def cell(self, task: str, tokens: int, questions: Sequence[Question], books: Books | None) -> Cell:
        """Make the stories of a task and a length; what one is depends on itself, the books and the seed.

        Raises:
            ValueError: there are fewer questions than records whose facts fit into the length.
        """
        fitting = [each for each in questions if not tokens or self.taken(each.facts) <= tokens]
        if len(fitting) < self.records:
            raise ValueError(
                f"{task}: the facts of {len(fitting):,} of {len(questions):,} questions fit into {label(tokens)} "
                f"tokens, which is fewer than {self.records:,} records. Give more --questions, fewer --records, or "
                "leave out the task or the length."
            )
        own = books.part(tokens) if books is not None and tokens else Books([], np.zeros(0, np.int64))
        stories: list[Record] = []
        texts: dict[str, tuple[str, list[Span]]] = {}
        for each in fitting[: self.records]:
            if each.text not in texts:
                draw = random.Random(f"{self.seed}/{task}/{tokens}/{each.text}")
                texts[each.text] = self.hide(each.facts, own, tokens, draw) if tokens else joined(each.facts, " ")
            text, places = texts[each.text]
            gold = tuple(places[number] for number in each.supports)
            stories.append(make_story(task, tokens, each.id, each.input, text, each.answer, gold))
        everything = [[each.input, each.answer, each.facts] for each in fitting]
        return stories, fingerprint([self.seed, tokens, own.sentences, everything])

    def hide(self, facts: Sequence[str], books: Books, tokens: int, draw: random.Random) -> tuple[str, list[Span]]:
        """Return text of exactly this length with the facts at its borders of sentences, as drawn, and their places."""
        last = int(np.searchsorted(books.ends, books.ends[-1] - tokens - SPARE))
        room = tokens - self.taken(facts)
        for _ in range(TRIES):
            start = draw.randrange(last + 1)
            before = books.ends[start - 1] if start else 0
            whole = int(np.searchsorted(books.ends, before + room, side="right"))
            enough = int(np.searchsorted(books.ends, before + tokens + SPARE)) + 1
            borders = sorted(draw.randrange(start, whole + 1) for _ in facts)
            parts: list[str] = []
            numbers = []
            for fact, (first, end) in zip(facts, pairwise([start, *borders]), strict=True):
                parts += [*books.sentences[first:end], fact]
                numbers.append(len(parts) - 1)
            text, spans = joined([*parts, *books.sentences[borders[-1] : enough]], " ")
            places, context = [spans[number] for number in numbers], self.cut(text, tokens)
            if len(context) >= places[-1][1] and self.count(context) == tokens:
                return context, places
        raise ValueError(f"The books cannot be cut to exactly {tokens:,} tokens: give other --books.")

    def taken(self, facts: Sequence[str]) -> int:
        """Return how many tokens facts take at most."""
        return self.count(" ".join(facts)) + len(facts)

    def count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def cut(self, text: str, tokens: int) -> str:
        """Return the text up to the end of a token; alone, it may have some tokens more or fewer."""
        encoded: Any = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return text[: encoded.offset_mapping[tokens - 1][1]]
