"""Hide bAbI's facts in books and ask about them: by task and by length of the text.

cacheformers babilong --base BASE --chat --questions BABI --books BOOKS --methods full --lengths 0K 1K 4K --records 20
cacheformers babilong --base BASE --adapter ADAPTER --questions BABI --books BOOKS --methods memory --lengths 4K 128K 1M
torchrun --nproc_per_node 8 -m cacheformers babilong babilong.yaml
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cacheformers.common.recipe import option
from cacheformers.evaluation.babilong.records import load_official
from cacheformers.evaluation.babilong.stories import StoryMaker, load_questions
from cacheformers.evaluation.babilong.tasks import ANSWERS, load_prompts, score
from cacheformers.evaluation.lengths.books import load_books
from cacheformers.evaluation.lengths.options import Cell, LengthOptions, cell_name, parse_length
from cacheformers.evaluation.lengths.run import Benchmark, run
from cacheformers.evaluation.loading import progress
from cacheformers.evaluation.longbench.records import Record


@dataclass
class BabilongOptions(LengthOptions):
    """Options of the stories, and of how they are answered; ValueError for a wrong name or number."""

    known = tuple(ANSWERS)
    _argument_group_name = "BABILong"
    questions: list[str] | None = option(
        None,
        help="bAbI's stories with their questions: pools of the task 'babi', as train_adapt.py --questions takes them "
        "(files of JSON lines, or folders of them). The source of a story names its task, such as babi_qa1.",
    )
    books: list[str] | None = option(
        None,
        help="Real text to hide the facts in (.txt, .jsonl, .jsonl.gz, .parquet); books are joined where one is too "
        "short. Not needed for --lengths 0K.",
    )
    data: str | None = option(
        None,
        help="The official records instead of --questions and --books: a folder of JSON or parquet files whose paths "
        "name task and length, such as qa1/4k.json, with the fields input, question and target.",
    )
    tasks: list[str] = field(
        default_factory=lambda: ["qa1", "qa2", "qa3", "qa4", "qa5"],
        metadata={"help": f"Tasks of bAbI: {', '.join(ANSWERS)}. The paper's figures are of qa1 to qa5."},
    )
    lengths: list[str] = field(
        default_factory=lambda: ["0K", "1K", "2K", "4K"],
        metadata={"help": "Tokens of contexts, exactly: 0K (the facts alone), 5000, 4K (4096), 1M (1048576)."},
    )
    output: str = option("runs/babilong", help="Folder for answers, results, tables and heat maps.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.data is None) == (self.questions is None):
            raise ValueError("Give either --questions (and --books), or the official records with --data.")
        if self.questions is not None and self.books is None and any(self.tokens):
            raise ValueError("Facts are hidden in --books: give some, or ask with the facts alone (--lengths 0K).")

    @property
    def tokens(self) -> list[int]:
        """Return the lengths as numbers, the shortest first."""
        return sorted({0 if text.upper() in ("0", "0K") else parse_length(text) for text in self.lengths})


def make_cells(options: BabilongOptions, tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, Cell], dict[str, str]]:
    """Make or load the stories of every task and length; return them, and the prompt of each task."""
    prompts = load_prompts()
    wanted = [(task, tokens) for tokens in options.tokens for task in options.tasks]
    if options.data is not None:
        folder = Path(options.data)
        return {cell_name(*cell): load_official(folder, *cell, options.records) for cell in wanted}, prompts
    if not tokenizer.is_fast:
        raise ValueError("Sentences of books are found with a fast tokenizer, which this base does not have.")
    assert options.questions is not None
    questions = load_questions(options.questions, options.tasks, options.seed)
    longest = options.tokens[-1]
    books = load_books(options.books or [], options.text_field, tokenizer, longest) if longest else None
    maker = StoryMaker(tokenizer, options.seed, options.records)
    cells: dict[str, Cell] = {}
    with progress("Hiding facts", options.records * sum(tokens for _, tokens in wanted)) as bar:
        for task, tokens in wanted:
            cells[cell_name(task, tokens)] = maker.cell(task, tokens, questions[task], books)
            bar.update(options.records * tokens)
    return cells, prompts


def score_story(story: Record, prediction: str) -> dict[str, float]:
    return {"score": score(story.template, prediction, story.answers[0], story.input)}


DESCRIPTION = (
    "BABILong: facts are hidden, in order, between the sentences of real books, and a question is asked that takes one "
    "to three of them; greedy, exactly scored. Look first at what the base answers from the facts alone (--base BASE "
    "--chat --questions BABI --books BOOKS --methods full --lengths 0K 1K), then at a memory where the base cannot "
    "read all (--adapter ADAPTER --methods memory truncation retrieval --lengths 16K 128K). Answers are saved at "
    "once: a run that was stopped continues when it is started again."
)
BENCHMARK = Benchmark("cacheformers babilong", DESCRIPTION, BabilongOptions, make_cells, score_story)


def main(arguments: list[str] | None = None) -> None:
    """Ask as the options say."""
    run(BENCHMARK, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    main()
