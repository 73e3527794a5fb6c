"""The loss of each token of documents: read from the beginning with a reader's memory, or in windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor, nn

from cacheformers.common.documents import Documents
from cacheformers.evaluation.loading import progress
from cacheformers.evaluation.readers import Reader, losses

Losses = NDArray[np.float32]


@dataclass(frozen=True)
class HeldOut:
    """A document to evaluate on.

    Attributes:
        ids: `[tokens]`.
        characters: length of the text of the predicted tokens (all but the first).
        name: its name in reports.
    """

    ids: Tensor
    characters: int
    name: str


def held_out(documents: Documents, count: int | None = None, tokens: int | None = None) -> list[HeldOut]:
    """Return the first `count` documents that are long enough, each cut after `tokens` predicted tokens."""
    chosen: list[HeldOut] = []
    for index in range(len(documents)):
        if len(chosen) == count:
            break
        ids = documents.tokens(index)[: None if tokens is None else tokens + 1]
        if len(ids):
            text = documents.tokenizer.decode(ids[1:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            chosen.append(HeldOut(ids, len(text), f"document {index}"))
    if not chosen:
        raise ValueError(
            "No document is left to evaluate on: give --valid longer ones, or a smaller --valid_min_tokens."
        )
    return chosen


def token_nats(
    model: nn.Module,
    documents: Sequence[HeldOut],
    reader: Reader,
    segment_tokens: int,
    rows: int = 1,
    title: str = "Evaluating",
) -> list[Losses]:
    """Return the losses in nats of each document's tokens from the second on, `[tokens - 1]`, in every process.

    Processes divide the documents among them. All make the same number of forwards (a process that is done reads one
    token over and over), because the forwards of sharded models and of DDP wait for each other.

    Args:
        reader: reads a group of documents (see `evaluation/readers.py`).
        rows: documents read side by side, unless the reader says how many.
        title: shown before the progress bar.

    Raises:
        FloatingPointError: a loss is not finite; names the document and the position.
    """
    processes = PartialState()
    lengths = [len(document.ids) - 1 for document in documents]
    groups = side_by_side(lengths, reader.together or rows, reader.together)
    forwards = [-(-lengths[group[0]] // segment_tokens) for group in groups]
    shares = divide(forwards, processes.num_processes)
    own = [groups[place] for place in shares[processes.process_index]]
    left = max(sum(forwards[place] for place in share) for share in shares)

    losses = {index: np.zeros(lengths[index], np.float32) for group in own for index in group}
    problems: list[str] = []
    with evaluating(model), progress(title, sum(map(len, losses.values()))) as bar:
        try:
            for group in own:
                start = 0
                for found in reader.read(model, [documents[index].ids for index in group], segment_tokens):
                    left -= 1
                    for index, row in zip(group, found.cpu().numpy(), strict=False):  # those that ended may be left out
                        piece = losses[index][start : start + segment_tokens]
                        piece[:] = row[: len(piece)]
                        check_finite(documents[index].name, start + 1, piece)
                        bar.update(len(piece))
                    start += segment_tokens
        except FloatingPointError as error:
            problems.append(str(error))
        for _ in range(left if processes.num_processes > 1 else 0):
            token = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
            model(input_ids=token, use_cache=False)
    problems = gather_object(problems)
    if problems:
        raise FloatingPointError(problems[0])
    everywhere = dict(gather_object(list(losses.items())))
    return [everywhere[index] for index in range(len(documents))]


def side_by_side(lengths: Sequence[int], rows: int, least: int = 0) -> list[list[int]]:
    """Group documents of similar length by `rows`, longest first, and return their indices.

    The last group may be smaller; with fewer than `least` documents it joins the one before.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    groups = [order[start : start + rows] for start in range(0, len(order), rows)]
    if len(groups) > 1 and len(groups[-1]) < least:
        groups[-2:] = [groups[-2] + groups[-1]]
    return groups


def divide(costs: Sequence[int], shares: int) -> list[list[int]]:
    """Divide costs (largest first) into shares; each goes to the share with the smallest sum so far."""
    divided: list[list[int]] = [[] for _ in range(shares)]
    sums = [0] * shares
    for place, cost in enumerate(costs):
        least = sums.index(min(sums))
        divided[least].append(place)
        sums[least] += cost
    return divided


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients, and restore the mode afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


@dataclass(frozen=True)
class Window:
    """Tokens `[start, end)` of a document, of which those from `first` on are scored."""

    document: int
    start: int
    first: int
    end: int

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of tokens read, and of tokens scored."""
        return self.end - self.start - 1, self.end - self.first


def windows(lengths: Iterable[int], window_tokens: int, stride: int) -> Iterator[Window]:
    """Yield windows over documents of these lengths, each `stride` tokens after the last, to the document's end.

    A token is scored in the first window that holds it, if some token of the window precedes it: with a stride of a
    whole window the first token of each is not scored.
    """
    for document, length in enumerate(lengths):
        scored = 0
        for start in range(0, length, stride):
            first, end = max(scored, start + 1), min(start + window_tokens, length)
            if first < end:
                yield Window(document, start, first, end)
            scored = end
            if end == length:
                break


def window_nats(
    model: nn.Module,
    documents: Sequence[Tensor],
    window_tokens: int,
    stride: int,
    rows: int = 1,
    title: str = "Reading",
    stepwise: bool = False,
) -> list[Losses]:
    """Return the losses in nats of each document's tokens from the second on, `[tokens - 1]`; NaN if not scored.

    Processes divide the windows among them and get the same losses.

    Args:
        documents: the ids of each, `[tokens]`.
        rows: windows read side by side. They are of one length: nothing is padded.
        stepwise: see `step_losses`.

    Raises:
        FloatingPointError: a loss is not finite; names the document and the position.
    """
    state = PartialState()
    work = sorted(windows(map(len, documents), window_tokens, stride), key=attrgetter("shape"), reverse=True)
    same = [list(group) for _, group in groupby(work, attrgetter("shape"))]
    batches = [each[start : start + rows] for each in same for start in range(0, len(each), rows)]
    own = batches[state.process_index :: state.num_processes]
    found: list[tuple[Window, Losses]] = []
    total = sum(window.shape[1] for batch in own for window in batch)
    with evaluating(model), progress(title, total) as bar:
        for batch in own:
            inputs = torch.stack([documents[window.document][window.start : window.end - 1] for window in batch])
            labels = torch.stack([documents[window.document][window.first : window.end] for window in batch])
            read = step_losses if stepwise else losses
            found += zip(batch, read(model, inputs, labels, use_cache=False).cpu().numpy(), strict=True)
            bar.update(labels.numel())
    nats = [np.full(len(ids) - 1, np.nan, np.float32) for ids in documents]
    for window, values in gather_object(found):
        check_finite(f"document {window.document}", window.first, values)
        nats[window.document][window.first - 1 : window.end - 1] = values
    return nats


def step_losses(model: nn.Module, inputs: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Compute `losses` with a forward for each token that ends just before it, so that it sees nothing after itself."""
    first = inputs.shape[1] - labels.shape[1] + 1
    steps = enumerate(labels.split(1, 1))
    return torch.cat([losses(model, inputs[:, : first + step], label, **options) for step, label in steps], 1)


def check_finite(name: str, first: int, values: Losses) -> None:
    """Raise FloatingPointError if a loss is not finite; `first` is the position of the first one in the document."""
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise FloatingPointError(
            f"The loss of {name} at token {first + wrong[0]:,} is {values[wrong[0]]}. Check the model's weights and "
            "dtype: float16 overflows in many models, bfloat16 does not."
        )
