"""Hide a key in a long text and ask for it: by length of the text and depth of the key.

python -m cacheformers.evaluation.passkey --base data/smollm2-135m-instruct --lengths 1K 2K 4K
python -m cacheformers.evaluation.passkey --base BASE --adapter ADAPTER --lengths 4K 16K 64K --cache_size 65536
torchrun --nproc_per_node 8 -m cacheformers.evaluation.passkey passkey.yaml
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from peft import PeftModel
from transformers import PreTrainedModel

from cacheformers.adapters.folders import load_adapter_config
from cacheformers.evaluation.longbench.predictions import PredictionError, Predictions
from cacheformers.evaluation.longbench.settings import adapter_identity, model_settings
from cacheformers.evaluation.passkey.filler import load_filler
from cacheformers.evaluation.passkey.options import PasskeyOptions
from cacheformers.evaluation.passkey.prompts import Case, PromptMaker, make_cases
from cacheformers.evaluation.passkey.report import make_result, save_heat_map, table
from cacheformers.evaluation.passkey.run import answer_cases, check_cases
from cacheformers.evaluation.passkey.wordings import NEEDLES
from cacheformers.evaluation.processes import make_state
from cacheformers.evaluation.remembering import memory_config
from cacheformers.training.base_model import (
    ModelOptions,
    base_config,
    base_folder,
    load_base,
    load_tokenizer,
)
from cacheformers.training.checkpoints import write_text
from cacheformers.training.documents import fingerprint
from cacheformers.training.environment import environment
from cacheformers.training.gguf_base import is_gguf
from cacheformers.training.options import RecipeParser

COMMAND = "python -m cacheformers.evaluation.passkey"
DESCRIPTION = (
    "The passkey task: a key is hidden in a long text and asked for at its end; greedy answer, exact score. Try the "
    "base model alone first (--base BASE --lengths 1K 2K), then a memory at lengths that the base cannot read "
    "(--adapter ADAPTER --lengths 16K 64K). Answers are on the disk one by one: a run that was stopped goes on when it "
    "is started again."
)


@dataclass
class Plan:
    """A checked run: everything that it needs but the model's weights.

    Attributes:
        cases: length -> its cases.
        remembers: the model has a memory.
    """

    model: ModelOptions
    options: PasskeyOptions
    state: PartialState
    maker: PromptMaker
    cases: dict[str, list[Case]]
    predictions: Predictions
    remembers: bool

    @property
    def name(self) -> str:
        """What tables call the model."""
        return Path(self.options.adapter or self.model.base).name


def main(arguments: list[str] | None = None) -> None:
    """Ask as the options say."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = RecipeParser([ModelOptions, PasskeyOptions], DESCRIPTION)
    parser.prog = COMMAND
    model, options = parser.parse(arguments)
    try:
        plan = make_plan(model, options)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    failure = ""
    try:
        evaluate(plan, arguments)
    except (PredictionError, OSError, ValueError, ImportError) as error:
        failure = str(error)
    plan.state.destroy_process_group()
    if failure:
        sys.exit(f"\n{failure}")


def make_plan(model: ModelOptions, options: PasskeyOptions) -> Plan:
    """Look at everything that can be wrong before the model is loaded.

    Raises:
        OSError, ValueError, ImportError: something is; says what to do.
    """
    state = make_state(model.device)
    if is_gguf(model.base):
        with state.main_process_first():  # it is converted once
            base_folder(model.base)
    config, tokenizer = base_config(model.base), load_tokenizer(model.base)
    if not tokenizer.is_fast:
        raise ValueError(f"The filler's sentences are found with a fast tokenizer, which {model.base} has not.")
    memory = memory_config(config, None if options.adapter is None else load_adapter_config(options.adapter))
    filler = load_filler(options.filler, options.text_field, tokenizer, options.tokens[-1])
    wording = NEEDLES[options.needle]
    maker = PromptMaker(wording, filler, tokenizer, options.seed)
    everything = {
        str(length): make_cases(wording, [length], options.depths, options.trials, options.seed)
        for length in options.tokens
    }
    cases = {length: own[: options.limit] for length, own in everything.items()}
    check_cases(maker, [case for own in cases.values() for case in own], config, memory, options)
    settings = {
        **model_settings(model, config, adapter_identity(options.adapter)),
        **{name: getattr(options, name) for name in ("needle", "cache_size", "seed")},
        "filler": filler.identity(),
    }
    data = {length: fingerprint([[case.id, case.key] for case in own]) for length, own in everything.items()}
    predictions = Predictions(Path(options.output) / "answers", settings, data)
    if not options.overwrite:
        predictions.check()
    return Plan(model, options, state, maker, cases, predictions, memory is not None)


def evaluate(plan: Plan, arguments: list[str]) -> None:
    """Ask to the end, or go on; write down what came out."""
    options, predictions = plan.options, plan.predictions
    predictions.start(options.overwrite)
    model: PreTrainedModel | PeftModel = load_base(plan.model, plan.state.device)[0]
    if options.adapter is not None:
        model = PeftModel.from_pretrained(model, options.adapter)
    cases = [case for own in plan.cases.values() for case in own]
    answer_cases(model.eval(), plan.maker, cases, predictions, plan.remembers, options.cache_size)
    answers = predictions.finish(plan.cases)
    if not plan.state.is_main_process:
        return
    result: dict[str, Any] = make_result(
        cases,
        [answer for length in plan.cases for answer in answers[length]],
        predictions.times(plan.cases),
        plan.maker.wording,
        name=plan.name,
        command=[COMMAND, *arguments],
        settings=predictions.settings,
        options={**asdict(plan.model), **asdict(options)},
        environment=environment(plan.state.device, plan.state.num_processes, plan.model.base),
    )
    folder, text = Path(options.output), table(result)
    write_text(folder / "result.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    write_text(folder / "table.md", text)
    if options.plots:
        save_heat_map(folder, result)
    print(f"\n{text}\nAnswers, result.json, table and heat map are in {folder}")
