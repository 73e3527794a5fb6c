"""Perplexity of held-out documents, each read from its beginning, segment by segment, with a memory of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from cacheformers.modeling.attach import active_options, find_decoder, new_memory, unwrap
from cacheformers.training.documents import Documents
from cacheformers.training.loss import token_losses


@dataclass(frozen=True)
class HeldOut:
    """A document to evaluate on.

    Attributes:
        ids: `[tokens]`.
        characters: how many characters the predicted tokens (all but the first) stand for.
    """

    ids: Tensor
    characters: int


@dataclass(frozen=True)
class Score:
    """How well documents were predicted.

    Attributes:
        nats: sum of the losses of all predicted tokens.
    """

    nats: float
    tokens: int
    characters: int

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_character(self) -> float:
        return self.nats / math.log(2) / self.characters

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "perplexity": self.perplexity, "bits_per_character": self.bits_per_character}


def held_out(documents: Documents, count: int | None = None, tokens: int | None = None) -> list[HeldOut]:
    """The first `count` documents that are not left out, each cut after `tokens` predicted tokens.

    Raises:
        ValueError: there is none.
    """
    chosen: list[HeldOut] = []
    for index in range(len(documents)):
        if len(chosen) == count:
            break
        ids = documents.tokens(index)
        ids = ids if tokens is None else ids[: tokens + 1]
        if len(ids):
            text = documents.tokenizer.decode(ids[1:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            chosen.append(HeldOut(ids, len(text)))
    if not chosen:
        raise ValueError("There is no document to evaluate on.")
    return chosen


def evaluate(
    model: nn.Module,
    documents: list[HeldOut],
    segment_tokens: int,
    cache_size: int | None = None,
    title: str = "Evaluating",
) -> Score:
    """Perplexity over whole documents.

    Args:
        segment_tokens: tokens a forward; without an active memory adapter this is all that the model sees.
        cache_size: entries that the memory may hold, instead of the configured number; 0 switches it off.
        title: shown before the progress bar.
    """
    nats, tokens = 0.0, sum(len(document.ids) - 1 for document in documents)
    with evaluating(model), tqdm(total=tokens, unit=" tokens", unit_scale=True, desc=title) as bar:
        for document in documents:
            for losses in document_losses(model, document.ids, segment_tokens, cache_size):
                nats += float(losses.double().sum())
                bar.update(losses.numel())
    return Score(nats, tokens, sum(document.characters for document in documents))


def document_losses(
    model: nn.Module, ids: Tensor, segment_tokens: int, cache_size: int | None = None
) -> Iterator[Tensor]:
    """The losses of one document's tokens from the second on, in order, a segment `[tokens]` at a time."""
    remembers = active_options(find_decoder(unwrap(model))) is not None
    memory = new_memory(model, 1, cache_size) if remembers else None
    continues = memory is not None and not memory.state.forward_is_segment
    device = next(model.parameters()).device
    for start in range(0, len(ids) - 1, segment_tokens):
        labels = ids[None, start + 1 : start + 1 + segment_tokens].to(device)
        inputs = ids[None, start : start + labels.shape[1]].to(device)
        output = model(input_ids=inputs, past_key_values=memory, use_cache=continues)
        yield token_losses(output.logits, labels)[0]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards the mode is what it was."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
