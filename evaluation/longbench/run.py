"""One method over all records: batches, shared among processes, longest first."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import nn
from tqdm.auto import tqdm

from cacheformers.evaluation.longbench.answers import answer
from cacheformers.evaluation.longbench.methods import PromptMaker
from cacheformers.evaluation.longbench.predictions import Predictions, prediction_line
from cacheformers.evaluation.longbench.records import Record
from cacheformers.evaluation.longbench.tasks import TASKS
from cacheformers.evaluation.processes import peak_bytes

Batch = list[Record]
CHARACTERS_PER_TOKEN = 4  # of English


def batches(records: dict[str, list[Record]], rows: int) -> list[Batch]:
    """Records of one task and of like length together; batches with the longest records first.

    Args:
        records: task -> its records.
    """
    found: list[Batch] = []
    for own in records.values():
        longest_first = sorted(own, key=lambda record: -record.characters)
        found += [longest_first[start : start + rows] for start in range(0, len(own), rows)]
    return sorted(found, key=lambda batch: -characters(batch))


def characters(batch: Batch) -> int:
    return sum(record.characters for record in batch)


def characters_read(batch: Batch, max_length: int | None) -> int:
    """About how much of a batch is read, for the bar: where prompts are cut, the rest of them takes no time."""
    limit = math.inf if max_length is None else CHARACTERS_PER_TOKEN * max_length
    return int(sum(min(record.characters, limit) for record in batch))


def check_prompts(maker: PromptMaker, records: dict[str, list[Record]]) -> None:
    """Tokenise prompts of any length before the model is loaded, and see whether they fit. Processes share the work.

    Raises:
        ValueError: one does not.
    """
    state = PartialState()
    if maker.method.positions is None and maker.method.capacity is None:
        return
    own = [record for task in records.values() for record in task][state.process_index :: state.num_processes]
    problems: list[str] = []
    for record in tqdm(own, desc="Checking prompts", disable=not state.is_main_process):
        try:
            maker.check(record)
        except ValueError as error:
            problems.append(str(error))
            break
    problems = gather_object(problems)
    if problems:
        raise ValueError(problems[0])


def predict(model: nn.Module, maker: PromptMaker, work: Sequence[Batch], predictions: Predictions) -> None:
    """Answer all batches that are not done, in this process its share of them.

    A batch of which some records are done is answered as a whole, so that it is the batch that it would have been.
    """
    state = PartialState()
    if state.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(state.device)
    left = [batch for batch in work if any(record.id not in predictions.done[record.task] for record in batch)]
    own = left[state.process_index :: state.num_processes]
    bar = tqdm(
        total=sum(characters_read(batch, maker.method.max_length) for batch in own),
        unit=" characters",
        unit_scale=True,
        desc=maker.method.title,
        disable=not state.is_main_process,
    )
    with bar:
        for batch, answers, times in answered(model, maker, own):
            new = [place for place, record in enumerate(batch) if record.id not in predictions.done[record.task]]
            lines = [prediction_line(batch[place], answers[place]) for place in new]
            predictions.append(batch[0].task, lines, [times[place] for place in new])
            bar.update(characters_read(batch, maker.method.max_length))


def answered(
    model: nn.Module, maker: PromptMaker, work: Sequence[Batch]
) -> Iterator[tuple[Batch, list[str], list[dict[str, Any]]]]:
    """Each batch with its answers, and what it cost by record."""
    for batch in work:
        start = time.perf_counter()
        prompts = [maker(record) for record in batch]
        rows = answer(model, maker.tokenizer, prompts, TASKS[batch[0].task], maker.method.remembers)
        texts = [str(maker.tokenizer.decode(row, skip_special_tokens=True)) for row in rows]
        cost = {"seconds": (time.perf_counter() - start) / len(batch), "peak_bytes": peak_bytes(model)}
        yield (
            batch,
            texts,
            [
                {
                    "task": record.task,
                    "_id": record.id,
                    "prompt_tokens": len(prompt.ids),
                    "new_tokens": len(row),
                    "cut_again_to": prompt.cut,
                    **cost,
                }
                for record, prompt, row in zip(batch, prompts, rows, strict=True)
            ],
        )
