"""All cases, shared among processes, the shortest first; and whether they can be answered at all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from tqdm.auto import tqdm
from transformers import PretrainedConfig

from cacheformers.evaluation.longbench.answers import answer
from cacheformers.evaluation.longbench.predictions import Predictions
from cacheformers.evaluation.longbench.tasks import SYNTHETIC, Task
from cacheformers.evaluation.passkey.options import PasskeyOptions
from cacheformers.evaluation.passkey.prompts import Case, PromptMaker
from cacheformers.evaluation.processes import peak_bytes
from cacheformers.evaluation.remembering import counted_positions


def check_cases(
    maker: PromptMaker, cases: Sequence[Case], base: PretrainedConfig, memory: Any, options: PasskeyOptions
) -> None:
    """Raise ValueError if a prompt is too short for its needle, or too long for the model.

    Args:
        memory: see `remembering.memory_config`.
    """
    size = getattr(memory, "cache_size", None)
    if size is None and (options.cache_size is not None or options.forget):
        raise ValueError("--cache_size and --forget are for a memory of limited size, which this model has not.")
    size = options.cache_size or size
    if memory is None:
        positions = base.get_text_config().max_position_embeddings
        remedy = " and no memory. Give shorter --lengths, or an --adapter with a memory."
    else:
        positions = counted_positions(base, memory)
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
                f"Before the question of a prompt of {case.length:,} tokens stand {context:,}, but the memory holds "
                f"{size:,}. Give a larger --cache_size or shorter --lengths, or let it forget the beginning with "
                "--forget."
            )


def answer_cases(
    model: nn.Module,
    maker: PromptMaker,
    cases: Sequence[Case],
    predictions: Predictions,
    remembers: bool,
    cache_size: int | None,
) -> None:
    """Answer the cases that are not done, in this process its share of them."""
    state = PartialState()
    left = [case for case in cases if case.id not in predictions.done[str(case.length)]]
    own = left[state.process_index :: state.num_processes]
    bar = tqdm(
        total=sum(case.length for case in own),
        unit=" tokens",
        unit_scale=True,
        desc="Passkeys",
        disable=not state.is_main_process,
    )
    with bar:
        for case in own:
            if state.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(state.device)
            start, length = time.perf_counter(), str(case.length)
            prompt, task = maker(case), Task("passkey", SYNTHETIC, "exact", maker.new_tokens(case))
            [row] = answer(model, maker.tokenizer, [prompt], task, remembers, cache_size)
            text = str(maker.tokenizer.decode(row, skip_special_tokens=True))
            line = {"pred": text, "key": case.key, "score": maker.wording.score(text, case.key), "_id": case.id}
            cost = {"seconds": time.perf_counter() - start, "peak_bytes": peak_bytes(model)}
            predictions.append(length, [line], [{"task": length, "_id": case.id, **cost}])
            bar.update(case.length)
