"""Hide bAbI's facts in books and ask about them: by task and by length of the text.

cacheformers babilong --base BASE --chat --questions BABI --books BOOKS --methods full --lengths 0K 1K 4K --records 20
cacheformers babilong --base BASE --adapter ADAPTER --questions BABI --books BOOKS --methods memory --lengths 4K 128K 1M
torchrun --nproc_per_node 8 -m cacheformers babilong babilong.yaml
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

from cacheformers.common.base_model import ModelOptions
from cacheformers.common.environment import environment
from cacheformers.common.files import write_json, write_text
from cacheformers.common.plots import save_figures
from cacheformers.common.recipe import RecipeParser, option
from cacheformers.evaluation.babilong.records import Cell, cell_name, load_official
from cacheformers.evaluation.babilong.report import draw, make_result, table
from cacheformers.evaluation.babilong.stories import StoryMaker, load_books, load_questions
from cacheformers.evaluation.babilong.tasks import ANSWERS, load_prompts
from cacheformers.evaluation.loading import prepare, progress
from cacheformers.evaluation.longbench.methods import AnsweringOptions, PromptMaker
from cacheformers.evaluation.longbench.predictions import PredictionError, Predictions
from cacheformers.evaluation.longbench.work import Records, make_work, run_method
from cacheformers.evaluation.passkey.main import parse_length


@dataclass
class BabilongOptions(AnsweringOptions):
    """Options of the stories, and of how they are answered; ValueError for a wrong name or number."""

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
    text_field: str = option("text", help="The field of a JSON line of the books, or the column, that holds the text.")
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
    records: int = option(50, help="Questions for each task and length (the paper: 100). More may be asked later.")
    seed: int = option(0, help="Fixes which questions are asked, and where in the books their facts are hidden.")
    output: str = option("runs/babilong", help="Folder for answers, results, tables and heat maps.")

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [task for task in self.tasks if task not in ANSWERS]
        if unknown or not self.tasks or not self.tokens:
            raise ValueError(
                f"tasks: {', '.join(unknown) or 'none'}; give some of {', '.join(ANSWERS)}, and --lengths."
            )
        if self.records < 1 or self.seed < 0:
            raise ValueError(f"records {self.records} must be at least 1, and seed {self.seed} not negative.")
        if (self.data is None) == (self.questions is None):
            raise ValueError("Give either --questions (and --books), or the official records with --data.")
        if self.questions is not None and self.books is None and any(self.tokens):
            raise ValueError("Facts are hidden in --books: give some, or ask with the facts alone (--lengths 0K).")

    @property
    def tokens(self) -> list[int]:
        """Return the lengths as numbers, the shortest first."""
        return sorted({0 if text.upper() in ("0", "0K") else parse_length(text) for text in self.lengths})

    @property
    def common(self) -> dict[str, Any]:
        return {**super().common, "seed": self.seed}


COMMAND = "cacheformers babilong"
DESCRIPTION = (
    "BABILong: facts are hidden, in order, between the sentences of real books, and a question is asked that takes one "
    "to three of them; greedy, exactly scored. Look first at what the base answers from the facts alone (--base BASE "
    "--chat --questions BABI --books BOOKS --methods full --lengths 0K 1K), then at a memory where the base cannot "
    "read all (--adapter ADAPTER --methods memory truncation retrieval --lengths 16K 128K). Answers are saved at "
    "once: a run that was stopped continues when it is started again."
)


@dataclass
class Plan:
    """A checked run without the model's weights; `stories` are by cell: a task and a length."""

    model: ModelOptions
    options: BabilongOptions
    state: PartialState
    stories: Records
    work: list[tuple[PromptMaker, Predictions]]


def main(arguments: list[str] | None = None) -> None:
    """Ask as the options say."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = RecipeParser([ModelOptions, BabilongOptions], DESCRIPTION)
    parser.prog = COMMAND
    model, options = parser.parse(arguments)
    try:
        plan = make_plan(model, options)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    results, failure = [], ""
    try:
        for maker, predictions in plan.work:
            results.append(evaluate(plan, maker, predictions, arguments))
    except (PredictionError, OSError) as error:
        failure = str(error)
    if plan.state.is_main_process and len(results) > 1 and not failure:
        report(Path(options.output), results, options.plots)
    plan.state.destroy_process_group()
    if failure:
        sys.exit(f"\n{failure}")


def make_plan(model: ModelOptions, options: BabilongOptions) -> Plan:
    """Check everything before a model is loaded; raise OSError, ValueError or ImportError that says what to do."""
    templates = load_prompts()
    state, config, tokenizer, adapter = prepare(model, options.adapter)
    made = make_cells(options, tokenizer)
    stories = {name: own for name, (own, _) in made.items()}
    work = make_work(
        model,
        options,
        config,
        tokenizer,
        adapter,
        templates=templates,
        records=stories,
        everything=stories,
        data={name: identity for name, (_, identity) in made.items()},
        folder=Path(options.output) / "pred",
    )
    return Plan(model, options, state, stories, work)


def make_cells(options: BabilongOptions, tokenizer: PreTrainedTokenizerBase) -> dict[str, Cell]:
    """Make or load the stories of every task and length."""
    wanted = [(task, tokens) for tokens in options.tokens for task in options.tasks]
    if options.data is not None:
        folder = Path(options.data)
        return {cell_name(*cell): load_official(folder, *cell, options.records) for cell in wanted}
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
    return cells


def evaluate(plan: Plan, maker: PromptMaker, predictions: Predictions, arguments: list[str]) -> dict[str, Any]:
    """Run one method to its end, or go on with it; score it and write down what came out."""
    method, options, state = maker.method, plan.options, plan.state
    found = run_method(plan.model, maker, predictions, plan.stories, state.device)
    if not state.is_main_process:
        return {}
    result = make_result(
        method.title,
        options.tasks,
        options.tokens,
        plan.stories,
        found,
        predictions.times(plan.stories),
        settings=predictions.settings,
        command=[COMMAND, *arguments],
        options={**asdict(plan.model), **asdict(options)},
        environment=environment(state.device, state.num_processes, plan.model.base),
    )
    folder = Path(options.output) / method.title
    write_json(folder / "result.json", result, indent=1)
    report(folder, [result], options.plots)
    return result


def report(folder: Path, results: list[dict[str, Any]], plots: bool) -> None:
    """Print the tables; write them and the heat map."""
    text = table(results)
    print(f"\n{text}")
    write_text(folder / "table.md", text)
    if plots:
        save_figures({folder / "heatmap.png": lambda: draw(results)})
    print(f"The tables and the heat map are in {folder}")


if __name__ == "__main__":
    main()
