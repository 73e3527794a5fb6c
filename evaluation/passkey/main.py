"""Hide a key in a long text and ask for it: by length of the text and depth of the key.

cacheformers passkey --base data/smollm2-135m-instruct --lengths 1K 2K 4K
cacheformers passkey --base BASE --adapter ADAPTER --lengths 4K 16K 64K --cache_size 65536
torchrun --nproc_per_node 8 -m cacheformers passkey passkey.yaml
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import PartialState
from torch import nn
from transformers import PretrainedConfig

from cacheformers.common.base_model import ModelOptions, short_name
from cacheformers.common.documents import fingerprint
from cacheformers.common.environment import environment, origin_lines
from cacheformers.common.files import write_json, write_text
from cacheformers.common.plots import heat_map, save_figures
from cacheformers.common.recipe import RecipeParser, option
from cacheformers.evaluation.lengths.options import parse_length
from cacheformers.evaluation.loading import counted_positions, load, memory_config, peak_bytes, prepare, progress
from cacheformers.evaluation.longbench.answers import answer
from cacheformers.evaluation.longbench.methods import model_settings
from cacheformers.evaluation.longbench.predictions import Predictions
from cacheformers.evaluation.longbench.tasks import SYNTHETIC, Task
from cacheformers.evaluation.longbench.work import checked, ending
from cacheformers.evaluation.passkey.prompts import NEEDLES, REPEAT, Case, PromptMaker, Wording, load_filler, make_cases
from cacheformers.evaluation.run import short
from cacheformers.hub.card import cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class PasskeyOptions:
    """Options of the prompts and of the model that answers; a wrong number or needle raises ValueError."""

    _argument_group_name = "passkey"
    adapter: str | None = option(
        None,
        help="Adapter folder or Hub id. With a memory: the text is read into it, segment by segment, and the question "
        "is a segment of its own. Without one, or without adapter (base model alone): all is one prompt, which must "
        "fit the model's positions.",
    )
    output: str = option("runs/passkey", help="Folder for answers, result.json, table.md and heatmap.png.")
    lengths: list[str] = field(
        default_factory=lambda: ["1K", "2K", "4K"],
        metadata={"help": "Tokens of prompts, exactly: 5000, 4K (4096), 1M (1048576)."},
    )
    depths: list[float] = field(
        default_factory=lambda: [0.0, 25.0, 50.0, 75.0, 100.0],
        metadata={"help": "Where the key is hidden: per cent of the text before it. 0 is the beginning."},
    )
    trials: int = option(1, help="Keys for each length and depth.")
    needle: str = option(
        "passkey",
        help="What is hidden: 'passkey' (the papers' sentences), 'number' (said once, about something), 'word' (no "
        "digits that stand out).",
    )
    filler: str = option(
        REPEAT,
        help="The text around it: 'repeat' (the papers' sentences about grass, over and over) or a file of real text, "
        "such as books (.txt, .jsonl, .jsonl.gz, .parquet), of which each case takes another part.",
    )
    text_field: str = option("text", help="The field of a JSON line of the filler, or the column, that holds its text.")
    cache_size: int | None = option(
        None, help="Entries that the memory holds. Default: as many as the adapter was trained with."
    )
    forget: bool = option(
        False, help="Let the memory forget the beginning of texts that it cannot hold. Default: that is an error."
    )
    limit: int | None = option(None, help="Only N cases of each length, for a try.")
    seed: int = option(0, help="Fixes the keys, and which parts of the filler are taken.")
    overwrite: bool = option(False, help="Delete all answers that are there, and start again.")
    plots: bool = option(True, help="Draw the heat map (needs matplotlib).")

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("lengths is empty: give one or more, such as --lengths 1K 4K.")
        if self.needle not in NEEDLES:
            raise ValueError(f"needle {self.needle!r} is not one of {', '.join(NEEDLES)}.")
        if not self.depths or any(not 0 <= depth <= 100 for depth in self.depths):
            raise ValueError(f"depths are per cent, 0 to 100, got {self.depths}.")
        if len({f"{depth:g}" for depth in self.depths}) < len(self.depths):  # as cases are named
            raise ValueError(f"depths names one twice (six digits count), got {self.depths}.")
        for name in ("trials", "limit", "cache_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}.")

    @property
    def tokens(self) -> list[int]:
        """Return the lengths as numbers, the shortest first."""
        return sorted({parse_length(length) for length in self.lengths})


COMMAND = "cacheformers passkey"
DESCRIPTION = (
    "The passkey task: a key is hidden in a long text and asked for at its end; greedy answer, exact score. Try the "
    "base model alone first (--base BASE --lengths 1K 2K), then a memory at lengths that the base cannot read "
    "(--adapter ADAPTER --lengths 16K 64K). Each answer is saved at once: a run that was "
    "stopped continues when it is started again."
)


@dataclass
class Plan:
    """A checked run without the model's weights; `cases` are by length."""

    model: ModelOptions
    options: PasskeyOptions
    state: PartialState
    maker: PromptMaker
    cases: dict[str, list[Case]]
    predictions: Predictions
    remembers: bool


def main(arguments: list[str] | None = None) -> None:
    """Ask as the options say."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = RecipeParser([ModelOptions, PasskeyOptions], DESCRIPTION)
    parser.prog = COMMAND
    plan = checked(parser, arguments, make_plan)
    with ending(plan.state):
        evaluate(plan, arguments)


def make_plan(model: ModelOptions, options: PasskeyOptions) -> Plan:
    """Check everything that can be checked before the model is loaded; raise OSError, ValueError or ImportError."""
    state, config, tokenizer, adapter = prepare(model, options.adapter)
    if not tokenizer.is_fast:
        raise ValueError(f"The filler's sentences are found with a fast tokenizer, which {model.base} does not have.")
    memory = memory_config(config, adapter)
    filler = load_filler(options.filler, options.text_field, tokenizer, options.tokens[-1])
    wording, how = NEEDLES[options.needle], (options.depths, options.trials, options.seed)
    maker = PromptMaker(wording, filler, tokenizer, options.seed)
    everything = {str(length): make_cases(wording, [length], *how) for length in options.tokens}
    cases = {length: own[: options.limit] for length, own in everything.items()}
    check_cases(maker, [case for own in cases.values() for case in own], config, memory, options)
    settings = {
        **model_settings(model, config, options.adapter, tokenizer),
        **{name: getattr(options, name) for name in ("needle", "cache_size", "seed")},
        "filler": filler.identity(),
    }
    data = {length: fingerprint([[case.id, case.key] for case in own]) for length, own in everything.items()}
    predictions = Predictions(Path(options.output) / "answers", settings, data)
    if not options.overwrite:
        predictions.check()
    return Plan(model, options, state, maker, cases, predictions, memory is not None)


def evaluate(plan: Plan, arguments: list[str]) -> None:
    """Ask to the end, or go on; write the result."""
    options, predictions = plan.options, plan.predictions
    predictions.start(options.overwrite)
    model = load(plan.model, options.adapter, plan.state.device)
    cases = [case for own in plan.cases.values() for case in own]
    answer_cases(model, plan, cases)
    answers = predictions.finish(plan.cases)
    if not plan.state.is_main_process:
        return
    result: dict[str, Any] = make_result(
        cases,
        [answer for length in plan.cases for answer in answers[length]],
        predictions.times(plan.cases),
        plan.maker.wording,
        name=short_name(options.adapter or plan.model.base),
        command=[COMMAND, *arguments],
        settings=predictions.settings,
        options={**asdict(plan.model), **asdict(options)},
        environment=environment(plan.state.device, plan.state.num_processes, plan.model.base),
    )
    folder, text = Path(options.output), table(result)
    write_json(folder / "result.json", result, indent=1)
    write_text(folder / "table.md", text)
    if options.plots:
        save_figures({folder / "heatmap.png": lambda: draw(result)})
    print(f"\n{text}\nAnswers, result.json, table and heat map are in {folder}")


def check_cases(
    maker: PromptMaker, cases: Sequence[Case], base: PretrainedConfig, memory: Any, options: PasskeyOptions
) -> None:
    """Raise ValueError if a prompt is too short for its needle, or too long for the model.

    Args:
        memory: see `memory_config`.
    """
    size = getattr(memory, "cache_size", None)
    if size is None and (options.cache_size is not None or options.forget):
        raise ValueError("--cache_size and --forget are for a memory of limited size, which this model does not have.")
    size = options.cache_size or size
    positions = base.get_text_config().max_position_embeddings if memory is None else counted_positions(base, memory)
    remedy = " and no memory. Give shorter --lengths, or an --adapter with a memory."
    if memory is not None:
        remedy = ", through which this memory counts on. Give shorter --lengths, or an --adapter of another method."
    for case in cases:
        maker.room(case)
        context, needed = case.length - len(maker.parts(case)[2]), case.length + maker.new_tokens(case)
        if positions is not None and needed > positions:
            raise ValueError(
                f"A prompt of {case.length:,} tokens and its answer take {needed:,} positions, but the model has "
                f"{positions:,}{remedy}"
            )
        if size is not None and context > size and not options.forget:
            raise ValueError(
                f"A prompt of {case.length:,} tokens has {context:,} before its question, but the memory holds "
                f"{size:,}. Give a larger --cache_size or shorter --lengths, or let it forget the beginning with "
                "--forget."
            )


def answer_cases(model: nn.Module, plan: Plan, cases: Sequence[Case]) -> None:
    """Answer the cases that are not done, in this process its share of them."""
    state, maker, predictions = plan.state, plan.maker, plan.predictions
    left = [case for case in cases if case.id not in predictions.done[str(case.length)]]
    own = left[state.process_index :: state.num_processes]
    with progress("Passkeys", sum(case.length for case in own)) as bar:
        for case in own:
            if state.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(state.device)
            start, length = time.perf_counter(), str(case.length)
            prompt, task = maker(case), Task("passkey", SYNTHETIC, "exact", maker.new_tokens(case))
            [row] = answer(model, maker.tokenizer, [prompt], task, plan.remembers, plan.options.cache_size).ids
            text = str(maker.tokenizer.decode(row, skip_special_tokens=True))
            line = {"pred": text, "key": case.key, "score": maker.wording.score(text, case.key), "_id": case.id}
            cost = {"seconds": time.perf_counter() - start, "peak_bytes": peak_bytes(model)}
            predictions.append(length, [line], [{"task": length, "_id": case.id, **cost}])
            bar.update(case.length)


def make_result(
    cases: Sequence[Case], answers: Sequence[str], times: Sequence[dict[str, Any]], wording: Wording, **more: Any
) -> dict[str, Any]:
    """Collect everything about a run, for JSON; `scores` is in percent by depth, then by length, None without a case.

    Args:
        times: the costs of the cases (`Predictions.times`).
        more: name, settings, command, options, environment.
    """
    cost = {line["_id"]: line for line in times}
    asked = [
        {
            **{"_id": case.id, "length": case.length, "depth": case.depth, "key": case.key, "answer": answer},
            "score": wording.score(answer, case.key),
            **{name: cost[case.id][name] for name in ("seconds", "peak_bytes")},
        }
        for case, answer in zip(cases, answers, strict=True)
    ]
    lengths, depths = (sorted({row[name] for row in asked}) for name in ("length", "depth"))
    by_length = [[row for row in asked if row["length"] == length] for length in lengths]
    return {
        **more,
        "score": percent(asked),
        "lengths": lengths,
        "depths": depths,
        "scores": [[percent([row for row in own if row["depth"] == depth]) for own in by_length] for depth in depths],
        "seconds_per_case": [mean(row["seconds"] for row in own) for own in by_length],
        "peak_bytes": [max(row["peak_bytes"] for row in own) for own in by_length],
        "cases": asked,
    }


def percent(asked: Sequence[dict[str, Any]]) -> float | None:
    return round(100 * mean(row["score"] for row in asked), 2) if asked else None


def table(result: dict[str, Any]) -> str:
    """Format the percentage of keys found, a row for each depth, a column for each length, as Markdown."""
    names = [short(length) for length in result["lengths"]]
    lines = [cells("depth", *names), cells("---:", *["---:"] * len(names))]
    for depth, row in zip(result["depths"], result["scores"], strict=True):
        lines.append(cells(f"{depth:g} %", *("-" if score is None else f"{score:.0f}" for score in row)))
    lines.append(cells("seconds a case", *(f"{seconds:.1f}" for seconds in result["seconds_per_case"])))
    lines.append(cells("peak memory (GiB)", *(f"{size / 2**30:.2f}" for size in result["peak_bytes"])))
    found = sum(case["score"] for case in result["cases"])
    total = f"{result['name']}: {found:.0f} of {len(result['cases'])} found"
    return "\n".join([*lines, "", total, *origin_lines([result])]) + "\n"


def draw(result: dict[str, Any]) -> Figure:
    """Draw a heat map of depth by length; numbers say the same as colors."""
    scores = np.array(result["scores"], dtype=float)
    figure, (axes,) = heat_map(
        {f"{result['name']}: keys found (%)": scores},
        ("tokens of the prompt", "depth (% of the text before the key)"),
        "",
        (max(5, 0.8 * scores.shape[1] + 3), max(3, 0.45 * scores.shape[0] + 2)),
        [f"{depth:g}" for depth in result["depths"]],
        [short(length) for length in result["lengths"]],
        vmin=0,
        vmax=100,
    )
    for (row, column), score in np.ndenumerate(scores):
        if not np.isnan(score):
            axes.text(column, row, f"{score:.0f}", ha="center", va="center", color="white" if score < 50 else "black")
    return figure
