"""Lanes: each row of a batch follows one document, segment by segment, and then the next.

Documents come in an endless row (`Documents.at`). The document at position p belongs to lane p modulo the number of
lanes of the whole run, so who reads what depends only on the seed and that number, not on how lanes are divided among
processes and batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cacheformers.common.documents import DocumentRow
from cacheformers.common.loss import IGNORED
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.segments import new_memory


@dataclass
class Step:
    """The next segment of each lane.

    Attributes:
        input_ids: `[lanes, segment_tokens]`, padded on the right where a document ends.
        labels: the token that follows each position, also across segments, `[lanes, segment_tokens]`; -100 in padding
            and where nothing is to be learned.
        attention_mask: 1 for tokens, `[lanes, segment_tokens]`.
        reset: whether the lane begins a document and must forget the one before, `[lanes]`.
        documents: index of the document that each lane reads.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor
    reset: Tensor
    documents: list[int]

    @property
    def targets(self) -> int:
        """Number of positions that have a label."""
        return int((self.labels != IGNORED).sum())

    @property
    def tokens(self) -> int:
        """Number of positions that are not padding."""
        return int(self.attention_mask.sum())


class Lanes:
    """Read documents in lanes, one segment a step.

    A document of n tokens gives n - 1 inputs, because its last token is only a label.

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

    def step(self) -> Step:
        """Read the next segment of every lane."""
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
        """Return the tokens of a lane's document, after passing over documents that are left out."""
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
        """Return the place of every lane, from which another instance with the same documents goes on."""
        return {"position": list(self.position), "offset": list(self.offset)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the place of another instance with the same arguments."""
        self.position, self.offset = list(state["position"]), list(state["offset"])
        self._tokens = [None] * len(self.position)


@dataclass
class Group:
    """Lanes that go through the model together, and the memory of what they have read (None without a memory)."""

    lanes: Lanes
    memory: MemoryCache | None

    def own_loss(self) -> Tensor | float:
        """Return the term that a method adds to the loss (gated attention does), a mean over `own_targets` tokens."""
        loss: Tensor | None = None if self.memory is None else getattr(self.memory.state, "loss", None)
        return 0.0 if loss is None else loss

    def own_targets(self, batch: Step) -> int:
        """Count the tokens of a batch over which a method's own loss is a mean."""
        memory = self.memory
        if memory is None or not hasattr(memory.state, "loss_targets"):
            return 0
        return int(memory.state.loss_targets(memory.tokens_read, batch.attention_mask.sum(1).tolist()))


def make_groups(
    model: nn.Module,
    documents: DocumentRow,
    lanes: int,
    tokens: int,
    seed: int,
    remembers: bool,
    groups: int = 1,
    process: int = 0,
    processes: int = 1,
) -> list[Group]:
    """Divide the lanes of a run among processes, and each process's lanes among `groups` batches.

    Args:
        model: in training mode, so that the memories keep what training needs.
        lanes: of the whole run; a multiple of `processes * groups`.
        tokens: that each lane reads in a step.
        remembers: give each group a memory.
    """
    rows = lanes // (processes * groups)
    first = process * groups * rows
    made = []
    for start in range(first, first + groups * rows, rows):
        own = Lanes(documents, lanes, tokens, seed, own=range(start, start + rows))
        made.append(Group(own, new_memory(model, rows) if remembers else None))
    return made
