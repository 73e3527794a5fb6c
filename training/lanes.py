"""Lanes: each row of a batch follows one document, segment by segment, and then the next.

Documents come in an endless row (`Documents.at`). The document at position p belongs to lane p modulo the number of
lanes of the whole run, so who reads what depends only on the seed and that number, not on how lanes are divided among
processes and batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cacheformers.common.documents import DocumentRow, Piece
from cacheformers.common.loss import IGNORED
from cacheformers.evaluation.held_out import evaluating
from cacheformers.modeling.architectures import find_decoder, unwrap
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.memory import Gold
from cacheformers.modeling.segments import close_segments, new_memory


class Teacher(NamedTuple):
    """What a teacher with full attention reads for a row.

    Attributes:
        ids: a text that ends like what the row reads, `[tokens]`.
        places: which of the ids it predicts: the row's labels, but for the first ones where `ids` begin later.
    """

    ids: Tensor
    places: Tensor


@dataclass
class Step:
    """The next segment of each lane: a row for each, or a row for each of several questions about one lane's context.

    Attributes:
        input_ids: `[rows, longest]`, padded on the right. The longest has at most `segment_tokens`, or is a question.
        labels: the token that follows each position, also across segments, `[rows, longest]`; -100 in padding and where
            nothing is to be learned.
        attention_mask: 1 for tokens, `[rows, longest]`.
        reset: whether the lane begins a document and must forget the one before, `[lanes]`.
        documents: index of the document that each row reads.
        close: lanes whose open segment must enter the memory before this one is read.
        drop: lanes whose open segment must be forgotten before this one is read.
        pieces: what each row reads from.
        teachers: of each row; None without, and where there is no label that one can predict.
        keeps_graph: gradients of the questions that come next go back through this segment of their context.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor
    reset: Tensor
    documents: list[int]
    close: list[int] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    teachers: list[Teacher | None] = field(default_factory=list)
    keeps_graph: bool = False

    @property
    def gold(self) -> Gold | None:
        """Where the answers to what is asked in this segment are; None where nothing is asked."""
        asking = torch.zeros_like(self.attention_mask, dtype=torch.bool)
        for row, piece in enumerate(self.pieces):
            if piece.gold:
                asking[row, len(piece.tokens) - piece.asking : len(piece.inputs)] = True
        return Gold(asking, [piece.gold for piece in self.pieces]) if asking.any() else None

    @property
    def targets(self) -> int:
        """Number of positions that have a label."""
        return int((self.labels != IGNORED).sum())

    @property
    def tokens(self) -> int:
        """Number of positions that are not padding."""
        return int(self.attention_mask.sum())

    def with_questions(self, pieces: Sequence[Piece]) -> Step:
        """Return this step with other questions in its rows, which it reads as a whole."""
        inputs = [piece.inputs for piece in pieces]
        learned = [piece.labels(0, len(ids), IGNORED) for piece, ids in zip(pieces, inputs, strict=True)]
        ids, mask, labels = padded(inputs, learned)
        teachers = [piece_teacher(piece.teacher, own) for piece, own in zip(pieces, learned, strict=True)]
        return replace(self, input_ids=ids, labels=labels, attention_mask=mask, pieces=list(pieces), teachers=teachers)


def padded(inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of ids, their attention mask, and their labels, padded on the right, `[rows, longest]` each."""
    shape = (len(inputs), max(map(len, inputs)))
    ids, mask = torch.zeros(2, *shape, dtype=torch.long)
    learned = torch.full(shape, IGNORED)
    for row, (own, own_labels) in enumerate(zip(inputs, labels, strict=True)):
        ids[row, : len(own)], mask[row, : len(own)], learned[row, : len(own)] = own, 1, own_labels
    return ids, mask, learned


def piece_teacher(ids: Tensor | None, labels: Tensor) -> Teacher | None:
    """Return what a teacher predicts of a row's labels from ids that end as the row does; None if that is nothing."""
    if ids is None:
        return None
    places = (labels != IGNORED).nonzero()[:, 0] + len(ids) - len(labels)
    places = places[places > 0]  # before the first one it has read nothing
    return Teacher(ids, places) if len(places) else None


class Part(NamedTuple):
    """A row of a step: a piece from `start` on, and the piece that its lane has just left, if it has left one."""

    lane: int
    document: int
    number: int
    start: int
    piece: Piece
    before: Piece | None


class Lanes:
    """Read documents in lanes, one segment a step.

    A document of n tokens gives n - 1 inputs, because its last token is only a label.

    Args:
        count: number of lanes of the whole run.
        segment_tokens: tokens a step.
        own: the lanes that this instance reads (rows of its batch). Default: all.
        contexts: read the contexts of questions; without a memory that is of no use.
        teacher_tokens: let a teacher read this many tokens of a document up to each segment's end, too.
        questions: of a context in a step, each in a row of its own. More than 1 takes a single lane.
        backprop_context: tokens at a context's end through which gradients of its first questions go back. More than 0
            takes a single lane.
    """

    def __init__(
        self,
        documents: DocumentRow,
        count: int,
        segment_tokens: int,
        seed: int,
        own: Sequence[int] | None = None,
        contexts: bool = True,
        teacher_tokens: int = 0,
        questions: int = 1,
        backprop_context: int = 0,
    ) -> None:
        self.contexts, self.teacher_tokens, self.questions = contexts, teacher_tokens, questions
        self.backprop_context = backprop_context
        self.documents, self.count, self.segment_tokens = documents, count, segment_tokens
        self.seed = seed
        self.position = list(range(count) if own is None else own)  # each lane's place in the endless row
        self.piece = [0] * len(self.position)  # number of the document's piece that a lane reads
        self.offset = [0] * len(self.position)  # inputs of its piece that a lane has read
        self._pieces: list[list[Piece] | None] = [None] * len(self.position)

    def step(self) -> Step:
        """Read the next segment of every lane."""
        lanes = range(len(self.position))
        parts = [part for lane in lanes for part in self._next(lane)]
        inputs = [self._inputs(part) for part in parts]
        learned = [part.piece.labels(part.start, len(own), IGNORED) for part, own in zip(parts, inputs, strict=True)]
        ids, mask, labels = padded(inputs, learned)
        step = Step(ids, labels, mask, torch.zeros(len(lanes), dtype=torch.bool), [])
        for part, own_labels in zip(parts, learned, strict=True):
            if part.number == part.start == 0:
                step.reset[part.lane] = True
            if part.before is not None:
                (step.drop if part.before.asked else step.close).append(part.lane)
            step.keeps_graph |= part.piece.context and len(part.piece.inputs) - part.start <= self.backprop_context
            step.documents.append(part.document)
            step.pieces.append(part.piece)
            step.teachers.append(piece_teacher(self._teacher_ids(part, len(own_labels)), own_labels))
        return step

    def _next(self, lane: int) -> list[Part]:
        """Take a lane's next segment, or its next questions."""
        pieces = self._current(lane)  # it may pass over documents, which moves the place
        first = self.piece[lane]
        found: list[Part] = []
        while not found or self._goes_on(lane, first, len(found)):
            number, start = self.piece[lane], self.offset[lane]
            before = pieces[number - 1] if number and not start and not found else None
            found.append(Part(lane, self._document(lane), number, start, pieces[number], before))
            self.offset[lane] += len(self._inputs(found[-1]))
            if self.offset[lane] >= len(pieces[number].inputs):
                self.piece[lane], self.offset[lane] = number + 1, 0
        if self.piece[lane] == len(pieces):
            self._next_document(lane)
        return found

    def _inputs(self, part: Part) -> Tensor:
        """Return what a part reads: a segment, or a question with its answer, whatever its length."""
        inputs = part.piece.inputs[part.start :]
        return inputs if part.piece.asked else inputs[: self.segment_tokens]

    def _goes_on(self, lane: int, first: int, taken: int) -> bool:
        pieces = self._pieces[lane]
        assert pieces is not None
        left = self.piece[lane] < len(pieces) and not self.offset[lane]
        return left and taken < self.questions and pieces[first].asked and pieces[self.piece[lane]].asked

    def _teacher_ids(self, part: Part, length: int) -> Tensor | None:
        """Return what a teacher reads for `length` inputs of a part, and the token after them."""
        piece, end = part.piece, part.start + length
        if self.teacher_tokens and not (piece.asked or piece.context):
            return piece.tokens[max(0, end - self.teacher_tokens) : end + 1]
        return piece.teacher

    def _document(self, lane: int) -> int:
        return self.documents.at(self.position[lane], self.seed)

    def _current(self, lane: int) -> list[Piece]:
        """Return the pieces of a lane's document, after passing over documents that are left out."""
        pieces = self._pieces[lane]
        while not pieces:
            if pieces is not None:
                self._next_document(lane)
            pieces = self.documents.pieces(self._document(lane))
            if not self.contexts:
                pieces = [piece for piece in pieces if not piece.context]
        self._pieces[lane] = pieces
        return pieces

    def _next_document(self, lane: int) -> None:
        self.position[lane] += self.count
        self.piece[lane] = self.offset[lane] = 0
        self._pieces[lane] = None

    def state_dict(self) -> dict[str, Any]:
        """Return the place of every lane, from which another instance with the same documents goes on."""
        return {"position": list(self.position), "piece": list(self.piece), "offset": list(self.offset)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the place of another instance with the same arguments."""
        self.position, self.offset = list(state["position"]), list(state["offset"])
        self.piece = list(state.get("piece", [0] * len(self.position)))  # checkpoints of earlier versions have none
        self._pieces = [None] * len(self.position)


@dataclass
class Group:
    """Lanes that go through the model together, and the memory of what they have read (None without a memory).

    Attributes:
        asked: the memory that the present batch reads: the lanes' own, or with several questions a row of it for each.
    """

    lanes: Lanes
    memory: MemoryCache | None
    asked: MemoryCache | None = field(init=False)

    def __post_init__(self) -> None:
        self.asked = self.memory

    def begin(self, model: nn.Module, batch: Step) -> Step:
        """Make the memory ready for a batch: forget, close or drop what was read before, and say where answers are.

        Returns:
            The batch, with the passages that the memory recalls in its questions' prompts, where these show such.
        """
        memory = self.memory
        if memory is None:
            return batch
        memory.keeps_graph = batch.keeps_graph
        memory.reset(batch.reset.nonzero()[:, 0].tolist())
        close_segments(find_decoder(unwrap(model)), memory, batch.close)
        memory.drop(batch.drop)
        self.asked = memory
        if all(piece.asked for piece in batch.pieces):
            if any(piece.recalled for piece in batch.pieces):
                with evaluating(model):
                    batch = batch.with_questions(
                        [piece.recalled(model, memory) if piece.recalled else piece for piece in batch.pieces]
                    )
            self.ask(len(batch.pieces), batch.input_ids.shape[1])
        self.asked.state.gold = batch.gold
        return batch

    def ask(self, questions: int, tokens: int) -> None:
        """Make room for questions of up to so many tokens, each of several in a row of the memory, which stays.

        A memory that could not forget the question again is asked in a copy.
        """
        memory = self.memory
        if memory is None:
            return
        if tokens > memory.window.segment_tokens and not memory.window.unbounded:
            self.asked = memory.with_window(tokens)
        elif questions > memory.batch_size or not memory.state.can_crop:
            self.asked = memory.clone()
        if questions > memory.batch_size:
            assert self.asked is not None
            self.asked.select([0] * questions)

    def end(self) -> None:
        """Cut the graph of a context whose questions were learned from: it is gone with their backward."""
        if self.memory is not None:
            self.memory.detach()

    def own_loss(self) -> Tensor | float:
        """Return the term that a method adds to the loss (gated attention does), a mean over `own_targets` tokens."""
        loss = None if self.asked is None else self.asked.state.loss
        return 0.0 if loss is None else loss

    def own_targets(self, batch: Step) -> int:
        """Count the tokens of a batch over which a method's own loss is a mean."""
        if self.asked is None:
            return 0
        return self.asked.state.loss_targets(self.asked.tokens_read, batch.attention_mask.sum(1).tolist())


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
    teacher_tokens: int = 0,
    questions: int = 1,
    backprop_context: int = 0,
) -> list[Group]:
    """Divide the lanes of a run among processes, and each process's lanes among `groups` batches.

    Args:
        model: in training mode, so that the memories keep what training needs.
        lanes: of the whole run; a multiple of `processes * groups`.
        tokens: that each lane reads in a step.
        remembers: give each group a memory.
        teacher_tokens, questions, backprop_context: see `Lanes`.
    """
    rows = lanes // (processes * groups)
    first = process * groups * rows
    made = []
    for start in range(first, first + groups * rows, rows):
        own = range(start, start + rows)
        read = Lanes(documents, lanes, tokens, seed, own, remembers, teacher_tokens, questions, backprop_context)
        made.append(Group(read, new_memory(model, rows) if remembers else None))
    return made
