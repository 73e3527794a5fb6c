"""RULER: needles, variables, frequent words and questions in texts of a chosen length, by task and by length.

cacheformers ruler --base BASE --chat --books BOOKS --questions LONGQA --methods full --lengths 4K --records 20
cacheformers ruler --base BASE --adapter ADAPTER --books BOOKS --questions LONGQA --methods memory --lengths 4K 32K 128K
torchrun --nproc_per_node 8 -m cacheformers ruler ruler.yaml
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from transformers import PreTrainedTokenizerBase

from cacheformers.common.documents import fingerprint
from cacheformers.common.recipe import option
from cacheformers.evaluation.lengths.books import Books, load_books
from cacheformers.evaluation.lengths.options import Cell, LengthOptions, cell_name, label
from cacheformers.evaluation.lengths.run import Benchmark, run
from cacheformers.evaluation.loading import progress
from cacheformers.evaluation.longbench.prompts import encode, fill, in_chat
from cacheformers.evaluation.longbench.records import Record
from cacheformers.evaluation.longbench.tasks import SYNTHETIC, Task
from cacheformers.evaluation.ruler.tasks import NEEDLES, NEW_TOKENS, QUESTIONS, Wording, Wordings, load_wordings, score
from cacheformers.evaluation.ruler.texts import (
    COMMON,
    ChainTexts,
    CommonWords,
    FrequentWords,
    NeedleTexts,
    Question,
    QuestionTexts,
    Text,
    Texts,
    load_questions,
    longest,
    numbered,
    words_of,
)

LONG = 4096  # from this length on, common words come thirty times
EXAMPLE = 500  # tokens of the solved example of variables


@dataclass(kw_only=True)
class RulerOptions(LengthOptions):
    """Options of the texts, and of how they are answered; ValueError for a wrong name or number."""

    known = tuple(NEW_TOKENS)
    _argument_group_name = "RULER"
    books: list[str] = option(
        help="Real text to hide needles in, whose words are keys and are counted (.txt, .jsonl, .jsonl.gz, .parquet); "
        "books are joined where one is too short."
    )
    questions: list[str] | None = option(
        None,
        help="Documents with questions for qa_1 and qa_2: pools of the tasks 'wiki_qa' and 'multihop_qa', as "
        "train_adapt.py --questions takes them (files of JSON lines, or folders of them).",
    )
    tasks: list[str] = field(
        default_factory=lambda: list(NEW_TOKENS), metadata={"help": f"Some of {', '.join(NEW_TOKENS)}."}
    )
    lengths: list[str] = field(
        default_factory=lambda: ["4K"],
        metadata={"help": "Tokens of prompts with their answers, at most: 5000, 4K (4096), 128K (131072)."},
    )
    output: str = option("runs/ruler", help="Folder for answers, results, tables and heat maps.")

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = [task for task in self.tasks if task in QUESTIONS]
        if asked and self.questions is None:
            raise ValueError(f"{' and '.join(asked)} need --questions: give pools, or leave them out with --tasks.")


class Sample(Record):
    """A text with what is asked; `template` is the task, `task` the cell: the task and the length."""

    @property
    def form(self) -> Task:
        return Task(self.task, SYNTHETIC, "string_match", NEW_TOKENS[self.template])


@dataclass(frozen=True)
class Maker:
    """Makes the samples of every task and length."""

    options: RulerOptions
    tokenizer: PreTrainedTokenizerBase
    wordings: Wordings
    books: Books
    questions: dict[str, tuple[list[Question], list[str]]]

    def cell(self, task: str, tokens: int) -> tuple[Cell, str]:
        """Make the samples of a task and a length; return them, and their template.

        Raises:
            ValueError: the length is too short, the books have too few words, or there are too few questions.
        """
        options, name = self.options, cell_name(task, tokens)
        books = self.books.part(tokens)
        words = words_of(books)
        if len(words) < max(100, tokens**0.5):
            raise ValueError(
                f"{', '.join(options.books)}: {len(words):,} words that come more than once, too few for "
                f"{label(tokens)} tokens. Give more --books, or shorter --lengths."
            )
        random.Random(f"{options.seed}/{name}").shuffle(words)
        wording = self.with_example(task, tokens, words)
        samples: list[Record] = []
        for id, texts in self.texts(task, tokens, words, books):
            draw = partial(random.Random, f"{options.seed}/{name}/{id}")
            make = partial(self.sample, name, task, id, wording)
            text = longest(texts, draw, lambda text: self.cost(make(text), wording), tokens)  # noqa: B023  # called within the turn
            if text is not None:
                samples.append(make(text))
            elif task not in QUESTIONS:
                raise ValueError(f"{name}: the shortest text is longer than {tokens:,} tokens. Give longer --lengths.")
            if len(samples) == options.records:
                break
        if len(samples) < options.records:
            raise ValueError(
                f"{task}: {len(samples):,} questions whose documents fit into {label(tokens)} tokens, which is fewer "
                f"than {options.records:,} records. Give more --questions, fewer --records, or leave out the task or "
                "the length."
            )
        asked = [[each.input, each.answers] for each in self.questions[task][0]] if task in QUESTIONS else []
        documents = self.questions[task][1] if task in QUESTIONS else []
        identity = fingerprint([options.seed, tokens, wording.template, books.sentences, asked, documents])
        return (samples, identity), wording.template

    def texts(self, task: str, tokens: int, words: list[str], books: Books) -> Iterator[tuple[str, Texts]]:
        """Yield the texts of each sample, with its id."""
        if task in QUESTIONS:
            asked, documents = self.questions[task]
            yield from ((each.id, QuestionTexts(each, documents, self.wordings.document)) for each in asked)
            return
        texts: Texts
        if task == "vt":
            texts = ChainTexts(tokens)
        elif task == "cwe":
            texts = CommonWords(words[40:], *((30, 3) if tokens >= LONG else (6, 1)))
        elif task == "fwe":
            texts = FrequentWords(tokens)
        else:
            texts = NeedleTexts(NEEDLES[task], self.wordings.needle, words, books, tokens)
        yield from ((str(number), texts) for number in range(self.options.records))

    def with_example(self, task: str, tokens: int, words: list[str]) -> Wording:
        """Return the words of a prompt; a solved example comes before those of variables and of common words."""
        wording = self.wordings.tasks[task]
        draw = partial(random.Random, f"{self.options.seed}/{cell_name(task, tokens)}/example")
        if task == "vt":
            make = partial(self.sample, "", task, "", wording)
            texts = ChainTexts(EXAMPLE, letters=3)
            solved = longest(texts, draw, lambda text: self.cost(make(text), wording), EXAMPLE)
            solved = solved or texts(texts.least, draw())
            answer, gap = " ".join(solved.answers), "\n\n"
        elif task == "cwe":
            many = tokens >= LONG
            solved = CommonWords(words[:40], *((10, 3) if many else (3, 1)))(30 if many else COMMON, draw())
            answer, gap = numbered(solved.answers), "\n"
        else:
            return wording
        example = wording.template.format(context=solved.context, input=solved.input)
        begun = wording.begun.format(input=solved.input)
        return Wording(f"{example} {begun} {answer}{gap}{wording.template}", wording.begun)

    def sample(self, name: str, task: str, id: str, wording: Wording, text: Text) -> Sample:
        asked = name, id, text.input, text.context, text.answers
        begun = wording.begun.format(input=text.input)
        return Sample(*asked, len(text.context.split()), None, template=task, gold=text.gold, begun=begun)

    def cost(self, sample: Sample, wording: Wording) -> int:
        """Return how many tokens the prompt, in its chat template, and its answer take."""
        prompt = fill(wording.template, sample)
        if self.options.chat:
            prompt = in_chat(prompt, self.tokenizer)
        return len(encode(prompt, self.tokenizer).ids) + sample.form.new_tokens


def make_cells(options: RulerOptions, tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, Cell], dict[str, str]]:
    """Make the samples of every task and length; return them, and the templates."""
    wordings = load_wordings()
    if not tokenizer.is_fast:
        raise ValueError("Sentences of books are found with a fast tokenizer, which this base does not have.")
    if options.chat and tokenizer.chat_template is None:
        raise ValueError("The base has no chat template: leave out --chat, or give a chat model.")
    asked = [task for task in options.tasks if task in QUESTIONS]
    questions = {task: load_questions(options.questions or [], task, options.seed) for task in asked}
    books = load_books(options.books, options.text_field, tokenizer, options.tokens[-1])
    maker = Maker(options, tokenizer, wordings, books, questions)
    wanted = [(task, tokens) for tokens in options.tokens for task in options.tasks]
    cells: dict[str, Cell] = {}
    templates: dict[str, str] = {}
    with progress("Hiding answers", options.records * sum(tokens for _, tokens in wanted)) as bar:
        for task, tokens in wanted:
            name = cell_name(task, tokens)
            cells[name], templates[name] = maker.cell(task, tokens)
            bar.update(options.records * tokens)
    return cells, templates


def score_sample(sample: Record, prediction: str) -> dict[str, float]:
    return score(sample.template, prediction, sample.answers)


DESCRIPTION = (
    "RULER: thirteen tasks in texts of a chosen length: needles with one or several keys and values, chains of "
    "variables, common and frequent words, questions about documents; greedy, scored by the answers that occur. Look "
    "first at what the base answers (--base BASE --chat --books BOOKS --questions LONGQA --methods full --lengths 4K), "
    "then at a memory where the base cannot read all (--adapter ADAPTER --methods memory truncation retrieval "
    "--lengths 16K 128K). Answers are saved at once: a run that was stopped continues when it is started again."
)
BENCHMARK = Benchmark("cacheformers ruler", DESCRIPTION, RulerOptions, make_cells, score_sample)


def main(arguments: list[str] | None = None) -> None:
    """Ask as the options say."""
    run(BENCHMARK, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
