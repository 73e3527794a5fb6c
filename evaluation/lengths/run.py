"""A benchmark of tasks by lengths, as a command: its texts are made, then methods answer one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cacheformers.common.base_model import ModelOptions
from cacheformers.common.environment import environment
from cacheformers.common.files import write_json, write_text
from cacheformers.common.plots import save_figures
from cacheformers.common.recipe import RecipeParser
from cacheformers.evaluation.lengths.options import Cell, LengthOptions
from cacheformers.evaluation.lengths.report import draw, make_result, table
from cacheformers.evaluation.loading import prepare
from cacheformers.evaluation.longbench.methods import PromptMaker
from cacheformers.evaluation.longbench.predictions import Predictions
from cacheformers.evaluation.longbench.work import Plan, checked, ending, make_work, run_method


@dataclass(frozen=True)
class Benchmark:
    """What one of the benchmarks is.

    Attributes:
        make: from the options (an instance of `options`) and the tokenizer, the records of every cell, and the
            templates by the names of their forms.
        score: from a record and its prediction, `score` and whatever else a record's result says.
    """

    command: str
    description: str
    options: type[LengthOptions]
    make: Callable[[Any, PreTrainedTokenizerBase], tuple[dict[str, Cell], dict[str, str]]]
    score: Callable[[Any, str], dict[str, float]]


def run(benchmark: Benchmark, arguments: list[str]) -> None:
    """Ask as the options say."""
    parser = RecipeParser([ModelOptions, benchmark.options], benchmark.description)
    parser.prog = benchmark.command
    plan = checked(parser, arguments, lambda model, options: make_plan(benchmark, model, options))
    with ending(plan.state):
        results = [evaluate(benchmark, plan, *each, arguments) for each in plan.work]
        if plan.state.is_main_process and len(results) > 1:
            report(Path(plan.options.output), results, plan.options.plots)


def make_plan(benchmark: Benchmark, model: ModelOptions, options: LengthOptions) -> Plan:
    """Check everything before a model is loaded; raise OSError, ValueError or ImportError that says what to do."""
    state, config, tokenizer, adapter = prepare(model, options.adapter)
    made, templates = benchmark.make(options, tokenizer)
    records = {name: own for name, (own, _) in made.items()}
    work = make_work(
        model,
        options,
        config,
        tokenizer,
        adapter,
        templates=templates,
        records=records,
        everything=records,
        data={name: identity for name, (_, identity) in made.items()},
        folder=Path(options.output) / "pred",
    )
    return Plan(model, options, state, records, work)


def evaluate(
    benchmark: Benchmark, plan: Plan, maker: PromptMaker, predictions: Predictions, arguments: list[str]
) -> dict[str, Any]:
    """Run one method to its end, or go on with it; score it and write down what came out."""
    method, options, state = maker.method, plan.options, plan.state
    found = run_method(plan.model, maker, predictions, plan.records, state.device)
    if not state.is_main_process:
        return {}
    result = make_result(
        method.title,
        options.tasks,
        options.tokens,
        plan.records,
        found,
        predictions.times(plan.records),
        benchmark.score,
        settings=predictions.settings,
        command=[benchmark.command, *arguments],
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
