"""Lanes: each row of a batch follows one document, segment by segment, and then the next.

Documents stand in an endless row (`Documents.at`). The document at position p belongs to lane p modulo the number of
lanes of the whole run, so who reads what depends on nothing but the seed and that number: not on how lanes are divided
among processes and batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cacheformers.common.documents import DocumentRow
from cacheformers.common.loss import IGNORED


@dataclass
class Step:
    """What lanes read in one step.

    Attributes:
        input_ids: `[lanes, segment_tokens]`, padded on the right where a document ends.
        labels: the token that follows each position, also across segments, `[lanes, segment_tokens]`; -100 in padding
            and where it is not to be learned.
        attention_mask: 1 for tokens, `[lanes, segment_tokens]`.
        reset: where a document begins: forget what this row has read before, `[lanes]`.
        documents: which document each lane reads.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor
    reset: Tensor
    documents: list[int]

    @property
    def targets(self) -> int:
        """How many positions have a label."""
        return int((self.labels != IGNORED).sum())

    @property
    def tokens(self) -> int:
        """How many positions are no padding."""
        return int(self.attention_mask.sum())


class Lanes:
    """An endless iterator over steps.

    A document of n tokens gives n - 1 inputs: its last token is only ever a label.

    Args:
        count: number of lanes of the whole run.
        segment_tokens: tokens a step.
        pad_id: fills up last segments; its value does not matter.
        own: the lanes that this instance reads (rows of its batch). Default: all.
    """

    def __init__(
        self,
        documents: DocumentRow,
        count: int,
        segment_tokens: int,
        seed: int,
        pad_id: int = 0,
        own: Sequence[int] | None = None,
    ) -> None:
        self.documents, self.count, self.segment_tokens = documents, count, segment_tokens
        self.seed, self.pad_id = seed, pad_id
        self.position = list(range(count) if own is None else own)  # each lane's place in the endless row
        self.offset = [0] * len(self.position)  # inputs of its document that a lane has read
        self._tokens: list[Tensor | None] = [None] * len(self.position)
        self._learnt: list[Tensor | None] = [None] * len(self.position)

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
            learned = self._learnt[lane]
            if learned is not None:
                targets = targets.where(learned[start + 1 : start + 1 + length], IGNORED)
            labels[lane, :length] = targets
            mask[lane, :length] = 1
            begins.append(start == 0)
            documents.append(self._document(lane))
            self.offset[lane] += length
            if self.offset[lane] + 1 >= len(tokens):
                self._advance(lane)
        return Step(ids, labels, mask, torch.tensor(begins), documents)

    def _document(self, lane: int) -> int:
        return self.documents.at(self.position[lane], self.seed)

    def _current(self, lane: int) -> Tensor:
        """The tokens of a lane's document; documents that are left out are passed over."""
        tokens = self._tokens[lane]
        while tokens is None or not len(tokens):
            if tokens is not None:
                self._advance(lane)
            tokens = self.documents.tokens(self._document(lane))
        if self._tokens[lane] is None:
            self._learnt[lane] = self.documents.learned(self._document(lane))
        self._tokens[lane] = tokens
        return tokens

    def _advance(self, lane: int) -> None:
        self.position[lane] += self.count
        self.offset[lane] = 0
        self._tokens[lane] = None

    def state_dict(self) -> dict[str, Any]:
        """Where every lane stands: enough to go on exactly here, with the same documents."""
        return {"position": list(self.position), "offset": list(self.offset)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another instance with the same arguments stood."""
        self.position, self.offset = list(state["position"]), list(state["offset"])
        self._tokens = [None] * len(self.position)
