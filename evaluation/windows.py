"""Reading by self-attention alone, in windows: each knows nothing of what stands before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn
from tqdm.auto import tqdm

from cacheformers.evaluation.held_out import Losses, evaluating
from cacheformers.evaluation.readers import losses


@dataclass(frozen=True)
class Window:
    """Tokens `[start, end)` of a document, of which those from `first` on are scored."""

    document: int
    start: int
    first: int
    end: int

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens read, and tokens scored."""
        return self.end - self.start - 1, self.end - self.first


def windows(lengths: Sequence[int], window_tokens: int, stride: int) -> Iterator[Window]:
    """Windows over documents, each `stride` tokens after the one before; the last one of a document ends with it.

    A token is scored in the first window that holds it, if some token of the window stands before it: with a stride of
    a whole window the first token of each is not scored.

    Args:
        lengths: of the documents, in tokens.
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
    """The losses in nats of each document's tokens from the second on, `[tokens - 1]`; NaN where one is not scored.

    Processes divide the windows among them and get the same losses.

    Args:
        documents: the ids of each, `[tokens]`.
        rows: windows read side by side. They are of one length: nothing is padded.
        stepwise: see `step_losses`.

    Raises:
        FloatingPointError: a loss is not finite; names the document and the position.
    """
    state = PartialState()
    work = batches(list(windows([len(ids) for ids in documents], window_tokens, stride)), rows)
    own = work[state.process_index :: state.num_processes]
    found: list[tuple[Window, Losses]] = []
    total = sum(window.shape[1] for batch in own for window in batch)
    bar = tqdm(total=total, unit=" tokens", unit_scale=True, desc=title, disable=not state.is_main_process)
    with evaluating(model), bar:
        for batch in own:
            inputs = torch.stack([documents[window.document][window.start : window.end - 1] for window in batch])
            labels = torch.stack([documents[window.document][window.first : window.end] for window in batch])
            read = step_losses if stepwise else losses
            found += zip(batch, read(model, inputs, labels, use_cache=False).cpu().numpy(), strict=True)
            bar.update(labels.numel())
    nats = [np.full(len(ids) - 1, np.nan, np.float32) for ids in documents]
    for window, values in gather_object(found):
        check_finite(window, values)
        nats[window.document][window.first - 1 : window.end - 1] = values
    return nats


def step_losses(model: nn.Module, inputs: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """As `losses`, but each token has a forward of its own that ends just before it: it sees nothing after itself."""
    before = inputs.shape[1] - labels.shape[1]
    steps = [
        losses(model, inputs[:, : before + step + 1], labels[:, step : step + 1], **options)
        for step in range(labels.shape[1])
    ]
    return torch.cat(steps, 1)


def batches(work: Sequence[Window], rows: int) -> list[list[Window]]:
    """Windows of one shape together, the longest first."""
    found: list[list[Window]] = []
    for _, group in groupby(sorted(work, key=lambda window: window.shape, reverse=True), lambda window: window.shape):
        same = list(group)
        found += [same[start : start + rows] for start in range(0, len(same), rows)]
    return found


def check_finite(window: Window, values: Losses) -> None:
    """Raise FloatingPointError if a loss is not finite."""
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise FloatingPointError(
            f"The loss of document {window.document} at token {window.first + wrong[0]:,} is {values[wrong[0]]}. Check "
            "the model's weights and dtype: float16 overflows in many models, bfloat16 does not."
        )
