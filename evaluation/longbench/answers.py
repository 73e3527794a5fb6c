"""Greedy answers to a batch of prompts, as the official code generates them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, PreTrainedTokenizerBase

from cacheformers.evaluation.longbench.prefill import prefill
from cacheformers.evaluation.longbench.prompts import Encoded
from cacheformers.evaluation.longbench.tasks import Task
from cacheformers.modeling.attach import unwrap
from cacheformers.modeling.reading import read
from cacheformers.modeling.whole import is_whole


@torch.no_grad()
def answer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Encoded],
    task: Task,
    remembers: bool,
    cache_size: int | None = None,
) -> list[list[int]]:
    """The new ids of each prompt, up to and with the end token.

    Args:
        remembers: read what stands before the questions into a memory, close its last segment, then answer from the
            questions. Otherwise everything is one prompt, as always for a model whose own attention is its
            memory.
        cache_size: another number of entries than the memory's configured one.
    """
    memory: Cache | None = None
    device, spare = next(model.parameters()).device, 0
    rows = [prompt.ids for prompt in prompts]
    reads_itself = is_whole(unwrap(model))
    if remembers and not reads_itself:
        contexts = [prompt.ids[: prompt.question] for prompt in prompts]
        memory = read(model, contexts, progress=False, cache_size=cache_size)
        rows = [prompt.ids[prompt.question :] for prompt in prompts]
    elif not reads_itself:
        # On a CPU and in half precision, SDPA serves new tokens much faster with a mask: a column of padding makes one.
        spare = int(device.type == "cpu" and unwrap(model).dtype.itemsize == 2)
        memory = prefill(model, rows, room=task.new_tokens, spare=spare)
    config = generation_config(model, tokenizer, task)
    ids, mask = left_padded(rows, config.pad_token_id, 0 if memory is None else spare)
    output = model.generate(
        input_ids=ids.to(device), attention_mask=mask.to(device), past_key_values=memory, generation_config=config
    )
    return [up_to_end(row, config.eos_token_id) for row in output[:, ids.shape[1] :].tolist()]


def generation_config(model: nn.Module, tokenizer: PreTrainedTokenizerBase, task: Task) -> Any:
    """The model's own settings of generation, made greedy, with the task's length and end tokens."""
    config: Any = copy.deepcopy(unwrap(model).generation_config or GenerationConfig())
    ends = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    config.eos_token_id = [ends] if isinstance(ends, int) else list(ends or [])
    if task.stops_at_newline:
        newline = tokenizer.encode("\n", add_special_tokens=False)[-1:]
        config.eos_token_id = [end for end in (tokenizer.eos_token_id, *newline) if end is not None]
        config.min_new_tokens = 1
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    config.update(
        max_new_tokens=task.new_tokens,
        max_length=None,
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_p=None,
        top_k=None,
    )
    return config


def left_padded(rows: Sequence[Sequence[int]], pad: int, spare: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, `[rows, spare + longest]`."""
    longest = spare + max(map(len, rows))
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, longest - len(row) :] = torch.tensor(row)
        mask[place, longest - len(row) :] = 1
    return ids, mask


def up_to_end(row: list[int], ends: Sequence[int]) -> list[int]:
    """Ids up to the first end token, with it."""
    last = next((place for place, id in enumerate(row) if id in ends), len(row) - 1)
    return row[: last + 1]
