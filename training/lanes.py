"""Lanes: each row of a batch follows one document, segment by segment, and then the next.

Documents stand in an endless row: one permutation an epoch, drawn from the seed. The document at position p belongs to
lane p modulo the number of lanes, so who reads what depends on nothing but the seed and that number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cacheformers.training.documents import Documents

IGNORED = -100  # the label of a position without a target


@dataclass
class Step:
    """What all lanes read in one step.

    Attributes:
        input_ids: `[lanes, segment_tokens]`, padded on the right where a document ends.
        labels: the token that follows each position, also across segments, `[lanes, segment_tokens]`; -100 in padding.
        attention_mask: 1 for tokens, `[lanes, segment_tokens]`.
        reset: where a document begins: forget what this row has read before, `[lanes]`.
        documents: which document each lane reads.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor
    reset: Tensor
    documents: list[int]


class Lanes:
    """An endless iterator over steps.

    A document of n tokens gives n - 1 inputs: its last token is only ever a label.

    Args:
        count: number of lanes (rows of the batch).
        segment_tokens: tokens a step.
        pad_id: fills up last segments; its value does not matter.
    """

    def __init__(self, documents: Documents, count: int, segment_tokens: int, seed: int, pad_id: int = 0) -> None:
        self.documents, self.segment_tokens, self.seed, self.pad_id = documents, segment_tokens, seed, pad_id
        self.position = list(range(count))  # each lane's place in the endless row
        self.offset = [0] * count  # inputs of its document that a lane has read
        self._tokens: list[Tensor | None] = [None] * count

    def __iter__(self) -> Iterator[Step]:
        while True:
            yield self.step()

    def step(self) -> Step:
        """The next segment of every lane."""
        shape = (len(self.position), self.segment_tokens)
        ids = torch.full(shape, self.pad_id)
        labels, mask = torch.full(shape, IGNORED), torch.zeros(shape, dtype=torch.long)
        begins, documents = [], []
        for lane in range(len(self.position)):
            tokens = self._current(lane)
            start = self.offset[lane]
            targets = tokens[start + 1 : start + 1 + self.segment_tokens]
            length = len(targets)
            ids[lane, :length] = tokens[start : start + length]
            labels[lane, :length] = targets
            mask[lane, :length] = 1
            begins.append(start == 0)
            documents.append(self._document(self.position[lane]))
            self.offset[lane] += length
            if self.offset[lane] + 1 >= len(tokens):
                self._advance(lane)
        return Step(ids, labels, mask, torch.tensor(begins), documents)

    def _document(self, position: int) -> int:
        """Which document stands at a position of the endless row."""
        epoch, place = divmod(position, len(self.documents))
        return int(np.random.default_rng((self.seed, epoch)).permutation(len(self.documents))[place])

    def _current(self, lane: int) -> Tensor:
        """The tokens of a lane's document; documents that are left out are passed over."""
        tokens = self._tokens[lane]
        while tokens is None or not len(tokens):
            if tokens is not None:
                self._advance(lane)
            tokens = self.documents.tokens(self._document(self.position[lane]))
        self._tokens[lane] = tokens
        return tokens

    def _advance(self, lane: int) -> None:
        self.position[lane] += len(self.position)
        self.offset[lane] = 0
        self._tokens[lane] = None

    def state_dict(self) -> dict[str, Any]:
        """Where every lane stands: enough to go on exactly here, with the same documents."""
        return {**self._identity(), "position": list(self.position), "offset": list(self.offset)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another instance stood.

        Raises:
            ValueError: it had other documents, lanes, segments or another seed.
        """
        own = self._identity()
        differing = [f"{key} ({state[key]} saved, {own[key]} here)" for key in own if state[key] != own[key]]
        if differing:
            raise ValueError(f"These lanes cannot go on from the saved state: they differ in {', '.join(differing)}.")
        self.position, self.offset = list(state["position"]), list(state["offset"])
        self._tokens = [None] * len(self.position)

    def _identity(self) -> dict[str, int]:
        return {
            "documents": len(self.documents),
            "lanes": len(self.position),
            "segment_tokens": self.segment_tokens,
            "seed": self.seed,
        }
