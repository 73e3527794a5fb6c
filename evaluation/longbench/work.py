"""Methods at work, for LongBench and its like: all is checked before a model is loaded, then one by one they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from peft import PeftConfig
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from cacheformers.common.base_model import ModelOptions
from cacheformers.common.recipe import RecipeParser
from cacheformers.evaluation.longbench.answers import batches, check_prompts, predict
from cacheformers.evaluation.longbench.methods import (
    AnsweringOptions,
    PromptMaker,
    check_limit,
    load_model,
    make_method,
    method_settings,
    model_settings,
)
from cacheformers.evaluation.longbench.predictions import PredictionError, Predictions
from cacheformers.evaluation.longbench.records import Record
from cacheformers.evaluation.longbench.retrieval import make_retriever

Records = dict[str, list[Record]]  # by task
Checked = TypeVar("Checked")


@dataclass
class Plan:
    """A checked run: everything that it needs but the models' weights.

    Attributes:
        records: by task (or by cell: a task and a length).
        work: a method's prompts, and where its predictions go.
    """

    model: ModelOptions
    options: Any
    state: PartialState
    records: Records
    work: list[tuple[PromptMaker, Predictions]]


def checked(parser: RecipeParser, arguments: list[str], make_plan: Callable[..., Checked]) -> Checked:
    """Parse the options and make a plan of them; what is wrong ends the command with a message."""
    options = parser.parse(arguments)
    try:
        return make_plan(*options)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))


@contextmanager
def ending(state: PartialState) -> Iterator[None]:
    """End the processes of a run; an error that a user can mend ends them with a message and status 1."""
    failure = ""
    try:
        yield
    except (PredictionError, OSError, ValueError, ImportError) as error:
        failure = str(error)
    state.destroy_process_group()
    if failure:
        sys.exit(f"\n{failure}")


def make_work(
    model: ModelOptions,
    options: AnsweringOptions,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    adapter: PeftConfig | None,
    *,
    templates: Mapping[str, str],
    records: Records,
    everything: Records,
    data: dict[str, str],
    folder: Path,
) -> list[tuple[PromptMaker, Predictions]]:
    """Return for each method its prompts, and where its predictions go.

    Args:
        templates: by the names of the records' forms.
        records: what is asked, of `everything`.
        data: see `Predictions`.
        folder: gets a folder for the predictions of each method.

    Raises:
        ImportError, OSError, ValueError: a method is not possible here, a prompt does not fit, or the folder holds
            predictions of other settings.
    """
    if options.chat and tokenizer.chat_template is None:
        raise ValueError(f"{model.base} has no chat template: leave out --chat, or give a chat model.")
    if "memory" in options.methods and not tokenizer.is_fast:
        raise ValueError(f"The method memory needs a fast tokenizer to find the question, which {model.base} has not.")
    methods = [make_method(name, options, model.base, config, adapter) for name in options.methods]
    answering = model_settings(model, config, options.adapter, tokenizer)
    forms = {record.form.name: record.form for own in everything.values() for record in own}
    work = []
    for method in methods:
        predictions = Predictions(folder / method.title, method_settings(method, answering, options), data)
        if not options.overwrite:
            predictions.check()
        maker = PromptMaker(method, options, tokenizer, templates, records=everything)
        check_limit(maker, list(forms.values()))
        check_prompts(maker, records)
        work.append((maker, predictions))
    return work


def run_method(
    model: ModelOptions, maker: PromptMaker, predictions: Predictions, records: Records, device: torch.device
) -> dict[str, list[str]]:
    """Run one method to its end, or go on with it; return its predictions (see `Predictions.finish`)."""
    method, options = maker.method, maker.options
    predictions.start(options.overwrite)
    loaded = load_model(method, model, options, device)
    retriever = make_retriever(options.retriever, device) if method.retrieves else None
    predict(loaded, replace(maker, retriever=retriever), batches(records, options.batch), predictions)
    return predictions.finish(records)
