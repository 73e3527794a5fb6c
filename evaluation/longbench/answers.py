"""Greedy answers to prompts, as the official code generates them: one batch, then all batches of a method."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer

from cacheformers.evaluation.loading import peak_bytes, progress
from cacheformers.evaluation.longbench.gold import GoldHits, in_sight
from cacheformers.evaluation.longbench.methods import PromptMaker
from cacheformers.evaluation.longbench.predictions import Predictions, prediction_line
from cacheformers.evaluation.longbench.prompts import Encoded
from cacheformers.evaluation.longbench.records import Record
from cacheformers.evaluation.longbench.retrieval import Hybrid, Recalling, Retriever
from cacheformers.evaluation.longbench.tasks import Task
from cacheformers.modeling.architectures import find_decoder, is_whole, unwrap
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.files.index import INDEX
from cacheformers.modeling.files.load import load_memory
from cacheformers.modeling.method import required_options
from cacheformers.modeling.reading import read
from cacheformers.modeling.segments import identity, new_memory

Batch = list[Record]


@dataclass(frozen=True)
class Answers:
    """What answers a batch of prompts.

    Attributes:
        ids: of each answer, up to and including the end token.
        state_bytes: keys, values and memory held for all of them in the end, with padding; 0 if the model has no cache.
    """

    ids: list[list[int]]
    state_bytes: int


class ReservedLayer(DynamicLayer):
    """Keys and values of a layer, with space for the whole answer: a new token copies only itself.

    Args:
        like: keys or values, for their type and sizes, `[., heads, ., head_dim]`.
        rows, length: the number of sequences, and of known tokens in each.
        room: tokens that may follow.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, like: Tensor, rows: int, length: int, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it without types
        self.lazy_initialization(like, like)
        self.space = [like.new_zeros(rows, like.shape[1], length + room, like.shape[3]) for _ in ("keys", "values")]
        self.show(length)

    def show(self, length: int) -> None:
        self.keys, self.values = (held[:, :, :length] for held in self.space)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        self.show(start + key_states.shape[2])
        self.keys[:, :, start:] = key_states
        self.values[:, :, start:] = value_states
        return self.keys, self.values


def prefill(model: Any, rows: Sequence[Sequence[int]], room: int, spare: int = 0) -> DynamicCache | None:
    """Read prompts, except for their last tokens, one by one, as if they were padded on the left in a batch.

    A padded batch has a mask, which keeps attention from its fastest kernels and from skipping the future. On a CPU,
    prompts of 3,500 tokens take less than half the time one by one, and less memory.

    Args:
        rows: ids of each prompt.
        room: tokens that each answer may take.
        spare: columns of padding before the longest prompt.

    Returns:
        The cache of the batch; None where a layer does not keep all tokens (sliding windows, state spaces), or a prompt
        is too short.
    """
    if min(map(len, rows)) < 2:
        return None
    device, longest = next(model.parameters()).device, spare + max(map(len, rows)) - 1
    layers: list[ReservedLayer] = []
    for place, row in enumerate(rows):
        ids = torch.tensor([row[:-1]], device=device)
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        if type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers):
            return None
        read: Any = cache.layers
        if not layers:
            layers = [ReservedLayer(layer.keys, len(rows), longest, room + 1) for layer in read]
        for whole, own in zip(layers, read, strict=True):
            whole.keys[place, :, 1 - len(row) :] = own.keys[0]
            whole.values[place, :, 1 - len(row) :] = own.values[0]
    batch = DynamicCache()
    batch.layers = list(layers)
    return batch


@torch.no_grad()
def answer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Encoded],
    task: Task,
    remembers: bool,
    cache_size: int | None = None,
) -> Answers:
    """Generate the answer to each prompt.

    Args:
        remembers: read the contexts into a memory, close its last segment, then answer from the questions. Otherwise
            everything is one prompt, as always for a model whose own attention is its memory.
        cache_size: number of entries, instead of the memory's configured one.
    """
    if remembers and not is_whole(unwrap(model)):
        memory = ready(remembered(model, prompts, cache_size=cache_size), prompts, task)
        return generated(model, tokenizer, [prompt.asked for prompt in prompts], task, memory)
    rows, spare = [prompt.ids for prompt in prompts], 0
    cache: Cache | None = None
    if not is_whole(unwrap(model)):
        # On a CPU and in half precision, SDPA serves new tokens much faster with a mask: a column of padding makes one.
        spare = int(next(model.parameters()).device.type == "cpu" and unwrap(model).dtype.itemsize == 2)
        cache = prefill(model, rows, room=task.new_tokens, spare=spare)
    return generated(model, tokenizer, rows, task, cache, spare)


def remembered(
    model: Any,
    prompts: Sequence[Encoded],
    content: str = "own",
    cache_size: int | None = None,
    folder: Path | None = None,
) -> MemoryCache:
    """Read what comes before the questions of prompts.

    Args:
        content: 'none' reads nothing.
        cache_size: number of entries, instead of the memory's configured one.
        folder: keeps what is read, so that other runs need not read it again.
    """
    if content == "none":
        return new_memory(model, len(prompts), cache_size)
    texts = list({tuple(prompt.read): prompt.read for prompt in prompts}.values())  # the same one is read once
    if folder is None:
        memory = read(model, texts, progress=False, cache_size=cache_size)
    else:
        memory, *others = (read_once(model, ids, cache_size, folder) for ids in texts)
        memory.join(others)
    if len(texts) < len(prompts):
        memory.select([texts.index(prompt.read) for prompt in prompts])
    return memory


def read_once(model: Any, ids: list[int], cache_size: int | None, folder: Path) -> MemoryCache:
    """Read a text into a memory that is saved, or load it where a run has read it before."""
    decoder: Any = find_decoder(unwrap(model))
    reader = [identity(decoder), asdict(required_options(decoder)), str(decoder.dtype), cache_size, ids]
    path = folder / sha256(json.dumps(reader, sort_keys=True, default=str).encode()).hexdigest()[:32]
    if (path / INDEX).exists():  # otherwise another process may be saving it now
        return load_memory(path, model)
    memory = read(model, [ids], progress=False, cache_size=cache_size)
    memory.save(path)
    return memory


def recalled(
    model: nn.Module, maker: PromptMaker, memory: MemoryCache, batch: Batch, prompts: Sequence[Encoded]
) -> list[Encoded]:
    """Make the prompts again, now that the memory can say which chunks of its text are near the questions."""
    found = []
    for row, (record, prompt) in enumerate(zip(batch, prompts, strict=True)):
        text = maker.source(record)
        places = [(start + len(text), end + len(text)) for start, end in prompt.places]
        own: Retriever = Recalling(model, maker.tokenizer, memory, text, places, row)
        if maker.retriever is not None:
            own = Hybrid(own, maker.retriever)
        found.append(replace(maker, retriever=own)(record))
    return found


def ready(memory: MemoryCache, prompts: Sequence[Encoded], task: Task) -> MemoryCache:
    """Make room for prompts that show more than their questions, and for the answers."""
    if prompts[0].shown is None:
        return memory
    return memory.with_window(max(len(prompt.asked) for prompt in prompts) + task.new_tokens)


class NoNaN(LogitsProcessor):
    """Raises ValueError for scores that are NaN, of which the first token would be chosen."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if bool(scores.isnan().any()):
            raise ValueError("The model's scores are NaN, so it cannot answer: check its weights and --dtype.")
        return scores


def generated(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Sequence[int]],
    task: Task,
    memory: Cache | None,
    spare: int = 0,
    watch: LogitsProcessor | None = None,
) -> Answers:
    """Generate what follows each row.

    Args:
        memory: what was read before; it goes on in place.
        spare: columns of padding before the longest row.
        watch: is called before each token is chosen.
    """
    config = generation_config(model, tokenizer, task)
    device = next(model.parameters()).device
    ids, mask = left_padded(rows, config.pad_token_id, 0 if memory is None else spare)
    output = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        past_key_values=memory,
        generation_config=config,
        logits_processor=LogitsProcessorList([NoNaN()] if watch is None else [NoNaN(), watch]),
        return_dict_in_generate=True,
    )
    answers = output.sequences[:, ids.shape[1] :].tolist()
    return Answers([up_to_end(row, config.eos_token_id) for row in answers], state_bytes(output.past_key_values))


def state_bytes(cache: Any) -> int:
    """Return the bytes of a cache's keys and values, with those of a memory; 0 for none, or for one that does not say.

    Space that answers have reserved but not filled does not count.
    """
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    layers = getattr(cache, "layers", [])
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if getattr(layer, "keys", None) is not None)


def generation_config(model: nn.Module, tokenizer: PreTrainedTokenizerBase, task: Task) -> Any:
    """Return the model's own generation settings, made greedy, with the task's length and end tokens."""
    config: Any = copy.deepcopy(unwrap(model).generation_config or GenerationConfig())
    ends = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    config.eos_token_id = [ends] if isinstance(ends, int) else list(ends or [])
    if task.stops_at_newline:
        newline = tokenizer.encode("\n", add_special_tokens=False)[-1:]
        config.eos_token_id = [end for end in (tokenizer.eos_token_id, *newline) if end is not None]
        config.min_new_tokens = 1
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    config.update(max_new_tokens=task.new_tokens, max_length=None, do_sample=False, num_beams=1)
    config.update(temperature=None, top_p=None, top_k=None)
    return config


def left_padded(rows: Sequence[Sequence[int]], pad: int, spare: int = 0) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask, `[rows, spare + longest]`."""
    longest = spare + max(map(len, rows))
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, longest - len(row) :] = torch.tensor(row)
        mask[place, longest - len(row) :] = 1
    return ids, mask


def up_to_end(row: list[int], ends: Sequence[int]) -> list[int]:
    """Cut ids after the first end token."""
    last = next((place for place, id in enumerate(row) if id in ends), len(row) - 1)
    return row[: last + 1]


CHARACTERS_PER_TOKEN = 4  # of English


def batches(records: dict[str, list[Record]], rows: int) -> list[Batch]:
    """Group records of one task and of similar length by `rows`; the longest batches come first."""
    found: list[Batch] = []
    for own in records.values():
        longest_first = sorted(own, key=lambda record: -record.characters)
        found += [longest_first[start : start + rows] for start in range(0, len(own), rows)]
    return sorted(found, key=lambda batch: -sum(record.characters for record in batch))


def characters_read(batch: Batch, max_length: int | None) -> int:
    """Estimate how many characters of a batch are read, for the progress bar: cut prompts take less time."""
    limit = math.inf if max_length is None else CHARACTERS_PER_TOKEN * max_length
    return int(sum(min(record.characters, limit) for record in batch))


def check_prompts(maker: PromptMaker, records: dict[str, list[Record]]) -> None:
    """Raise ValueError if a prompt does not fit, before the model is loaded. Processes share the work."""
    state = PartialState()
    method = maker.method
    if method.always_cuts or method.positions is None and method.capacity is None:
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
    """Answer the batches that are not done, in this process its share of them.

    A batch of which some records are done is answered as a whole, so that it is the batch that it would have been.
    """
    state = PartialState()
    if state.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(state.device)
    left = [batch for batch in work if any(record.id not in predictions.done[record.task] for record in batch)]
    own = left[state.process_index :: state.num_processes]
    total = sum(characters_read(batch, maker.method.max_length) for batch in own)
    with progress(maker.method.title, total, " characters") as bar:
        for batch in own:
            found = zip(batch, *answered(model, maker, batch), strict=True)
            new = [each for each in found if each[0].id not in predictions.done[each[0].task]]
            lines = [prediction_line(record, text) for record, text, _ in new]
            predictions.append(batch[0].task, lines, [cost for _, _, cost in new])
            bar.update(characters_read(batch, maker.method.max_length))


def answered(model: nn.Module, maker: PromptMaker, batch: Batch) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the answers to a batch, and the cost of each record."""
    start, task, prompts = time.perf_counter(), batch[0].form, [maker(record) for record in batch]
    hits: list[dict[str, dict[str, float]]] = [{} for _ in batch]
    if maker.method.remembers and not is_whole(unwrap(model)):
        kept = None if maker.options.memories is None else Path(maker.options.memories)
        memory = remembered(model, prompts, maker.method.content, maker.method.cache_size, kept)
        if maker.method.recalls:
            prompts = recalled(model, maker, memory, batch, prompts)
        memory = ready(memory, prompts, task)
        known = memory.state.retrieves and any(prompt.gold for prompt in prompts)
        watch = GoldHits(memory, prompts) if known else None
        found = generated(model, maker.tokenizer, [prompt.asked for prompt in prompts], task, memory, watch=watch)
        if watch is not None:
            hits = [watch.found(row, len(ids)) for row, ids in enumerate(found.ids)]
    else:
        found = answer(model, maker.tokenizer, prompts, task, maker.method.remembers)
    texts = [str(maker.tokenizer.decode(row, skip_special_tokens=True)) for row in found.ids]
    cost = {"seconds": (time.perf_counter() - start) / len(batch), "peak_bytes": peak_bytes(model)}
    cost["state_bytes"] = found.state_bytes // len(batch)
    return texts, [
        {
            **{"task": record.task, "_id": record.id, "prompt_tokens": len(prompt.ids), "new_tokens": len(row)},
            **{"cut_again_to": prompt.cut, **cost},
            **({"gold_hits": own} if own else {}),
            **in_sight(maker.tokenizer, record, prompt.asked if maker.method.remembers else prompt.ids),
        }
        for record, prompt, row, own in zip(batch, prompts, found.ids, hits, strict=True)
    ]
