"""Evaluate a model on LongBench, as the official code does, by one or several methods.

python eval_longbench.py --base data/smollm2-135m-instruct --data LONGBENCH --chat --methods truncation retrieval
python eval_longbench.py --base BASE --adapter ADAPTER --data LONGBENCH --methods truncation memory --tasks qasper trec
torchrun --nproc_per_node 8 eval_longbench.py longbench.yaml
python eval_longbench.py --compare runs/longbench/ONE runs/longbench/OTHER
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cacheformers.common.base_model import ModelOptions
from cacheformers.common.environment import environment
from cacheformers.common.files import write_json
from cacheformers.common.recipe import RecipeParser
from cacheformers.evaluation.compare import main as compare
from cacheformers.evaluation.loading import prepare
from cacheformers.evaluation.longbench.methods import LongBenchOptions, PromptMaker
from cacheformers.evaluation.longbench.metrics import check_scorers
from cacheformers.evaluation.longbench.predictions import Predictions
from cacheformers.evaluation.longbench.records import limited, load_records, own_tasks, records_identity
from cacheformers.evaluation.longbench.report import make_result, task_scores, write_report
from cacheformers.evaluation.longbench.tasks import chosen_tasks, load_templates
from cacheformers.evaluation.longbench.work import Plan, checked, ending, make_work, run_method

DESCRIPTION = (
    "Evaluate a model on LongBench, as the official code does. With --compare RESULT ... (and --output) nothing is "
    "run: results are put side by side."
)


def main(arguments: list[str] | None = None) -> None:
    """Evaluate as the options say."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(argument.partition("=")[0] == "--compare" for argument in arguments):
        compare(arguments)
        return
    parser = RecipeParser([ModelOptions, LongBenchOptions], DESCRIPTION)
    plan = checked(parser, arguments, make_plan)
    with ending(plan.state):
        results = [evaluate(plan, *each, arguments) for each in plan.work]
        if plan.state.is_main_process and len(results) > 1:
            write_report(Path(plan.options.output), results, plan.options.plots)


def make_plan(model: ModelOptions, options: LongBenchOptions) -> Plan:
    """Check everything before a model is loaded; raise OSError, ValueError or ImportError that says what to do."""
    check_scorers()
    tasks = chosen_tasks(options.tasks, options.longbench_e, own_tasks(options.data))
    everything = {task: load_records(options.data, task, options.longbench_e) for task in tasks}
    forms = {record.form.name: record.form for own in everything.values() for record in own}
    templates = load_templates(forms, options.prompts)
    records = {task: limited(own, options.limit, options.seed) for task, own in everything.items()}
    state, config, tokenizer, adapter = prepare(model, options.adapter)
    work = make_work(
        model,
        options,
        config,
        tokenizer,
        adapter,
        templates=templates,
        records=records,
        everything=everything,
        data={task: records_identity(own) for task, own in everything.items()},
        folder=Path(options.output) / ("pred_e" if options.longbench_e else "pred"),
    )
    return Plan(model, options, state, records, work)


def evaluate(plan: Plan, maker: PromptMaker, predictions: Predictions, arguments: list[str]) -> dict[str, Any]:
    """Run one method to its end, or go on with it; score it and write down what came out."""
    method, options, state = maker.method, plan.options, plan.state
    found = run_method(plan.model, maker, predictions, plan.records, state.device)
    if not state.is_main_process:
        return {}
    result = make_result(
        method.title,
        predictions.settings,
        {task: task_scores(plan.records[task], found[task]) for task in plan.records},
        predictions.times(plan.records),
        command=["eval_longbench.py", *arguments],
        options={**asdict(plan.model), **asdict(options)},
        environment=environment(state.device, state.num_processes, plan.model.base),
    )
    folder = Path(options.output) / (f"{method.title}_e" if options.longbench_e else method.title)
    write_json(folder / "result.json", result, indent=1)
    write_report(folder, [result], options.plots)
    return result


if __name__ == "__main__":
    main()
