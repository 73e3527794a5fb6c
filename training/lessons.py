"""Lessons: exercises as tokens. A context is read into the memory, then its questions are asked one after another.

A question is asked as in the evaluation (`eval_longbench.py --memory_prompt`): the same templates, chat form and cut.
Only its answer is learned, and it is forgotten before the next one.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from cacheformers.common.documents import DocumentRow, Piece, fingerprint
from cacheformers.common.recipe import option
from cacheformers.evaluation.babilong.records import Story
from cacheformers.evaluation.babilong.tasks import ANSWERS, load_prompts
from cacheformers.evaluation.longbench.answers import recalled
from cacheformers.evaluation.longbench.methods import MEMORY_PROMPTS, RECALLING, LongBenchOptions, Method, PromptMaker
from cacheformers.evaluation.longbench.prompts import Encoded, continued, lead_of_answers
from cacheformers.evaluation.longbench.records import Record
from cacheformers.evaluation.longbench.retrieval import make_retriever
from cacheformers.evaluation.longbench.tasks import CODE, FORMS, load_templates
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.method import retrieving_methods
from cacheformers.training.exercises import LAYOUTS, Exercise, Exercises, load_pools, source_task, warn_of_short

LEAST_ANSWER = 64  # tokens that the chat template and an answer have at least, after a prompt; half are the answer's
ANSWER = 512  # ... and after a prompt that does not fit into a segment


@dataclass
class LessonOptions:
    """Questions to learn from, and a teacher; without --questions only the teacher matters."""

    _argument_group_name = "questions (recipes that teach to answer)"
    questions: list[str] | None = option(
        None,
        help="Pools of short documents with questions: files of JSON lines, or folders of them. Long contexts are put "
        "together from them as training goes on, read into the memory, and then asked about; only answers are "
        f"learned. Fields: task (one of {', '.join(LAYOUTS)}), context, title, questions with input and answers.",
    )
    shortest_context: int = option(
        2048, help="Tokens of the shortest context; lengths up to the longest are drawn on a logarithmic scale."
    )
    longest_context: int = option(
        32768, help="Tokens of the longest context; a document that is longer by itself is a context, too."
    )
    questions_per_context: int = option(4, help="Questions that are asked after a context was read.")
    questions_per_step: int = option(
        1,
        help="Questions of a context that are asked side by side in a step, each in a row that has read that context. "
        "More than 1 takes one lane in each batch (lanes = processes x accumulation).",
    )
    backprop_context: int = option(
        0,
        help="Segments at a context's end through which gradients of the first questions about it go back, so that the "
        "memory learns what to store (backpropagation through time). Takes one lane, and the memory of a step of as "
        "many segments. Stored pairs of memorizing and retrieval_heads take no gradient. 0: only what asks and answers "
        "is learned from.",
    )
    books_share: float = option(
        0.2,
        help="Share of documents that are --train's instead, so as not to forget: learned as without --questions, "
        "whole, or of chats and with --label_field their answers.",
    )
    unanswerable: float = option(
        0.0, help="Share of questions about passages that were not read; 'unanswerable' is learned as their answer."
    )
    prompt: str = option(
        "cut",
        help="What self-attention sees when a question is asked: 'cut', 'tail', 'retrieved', 'recalled', 'hybrid' or "
        "'question', as with eval_longbench.py --memory_prompt. With 'recalled' and 'hybrid' the memory, as it is at "
        "that step, has a say in which passages of the context that it has just read are shown: answers are learned "
        "from what it finds, beside what it finds wrongly.",
    )
    prompt_tokens: int = option(
        896,
        help="Length to which that prompt is cut. Prompt and answer are one segment, longer than the memory's where "
        "they do not fit into one.",
    )
    chunk_words: int = option(200, help="Passages in the prompt: words (Chinese: characters) of a chunk.")
    chunks: int = option(7, help="Passages in the prompt: how many chunks the prompt gets.")
    fewest_chunks: int | None = option(
        None,
        help="Passages in the prompt: draw the number of chunks of each context from this one to --chunks, on a "
        "logarithmic scale. Default: always --chunks.",
    )
    text_order: bool = option(
        False, help="Passages in the prompt: chunks in the order of the text. Default: nearest first."
    )
    chat: bool = option(False, help="Put prompts into the tokenizer's chat template, as eval_longbench.py --chat does.")
    distill: float = option(
        0.0,
        help="Share of the loss that is the KL divergence from the base without the adapter, which sees the whole "
        "prompt with full attention, as far as its positions go (self-distillation). The rest is cross entropy.",
    )
    distill_all: bool = option(
        False, help="With distill: not only on answers, but on the books' tokens, too (a second pass over them)."
    )


def check_lessons(options: LessonOptions, memory: Any, rows: int = 1, remembers: bool = True, lanes: int = 1) -> None:
    """Raise ValueError for numbers out of range, and contexts or prompts too long for the options of a memory.

    Args:
        rows: lanes that go through the model together.
        remembers: the memory is trained. Without it, LoRA is trained that is compared with it.
        lanes: of the whole run.
    """
    if not 0 <= options.distill <= 1:
        raise ValueError(f"distill must be between 0 and 1, got {options.distill}.")
    if options.questions is None:
        if options.distill and not options.distill_all:
            raise ValueError("distill without --questions has no answers to learn: add --distill_all, or questions.")
        return
    low, high = options.shortest_context, options.longest_context
    if not 0 < low <= high:
        raise ValueError(f"shortest_context {low} must be greater than 0, and at most longest_context {high}.")
    if options.prompt not in MEMORY_PROMPTS:
        raise ValueError(f"prompt must be one of {', '.join(MEMORY_PROMPTS)}, got {options.prompt!r}.")
    least = {"questions_per_context": 1, "questions_per_step": 1, "prompt_tokens": 2, "chunk_words": 1, "chunks": 1}
    for name, number in least.items():
        if getattr(options, name) < number:
            raise ValueError(f"{name} must be at least {number}, got {getattr(options, name)}.")
    if options.fewest_chunks is not None and not 1 <= options.fewest_chunks <= options.chunks:
        raise ValueError(f"fewest_chunks must be from 1 to chunks {options.chunks}, got {options.fewest_chunks}.")
    if options.questions_per_step > 1 and rows > 1:
        raise ValueError(
            f"questions_per_step {options.questions_per_step} asks about one context, but {rows} lanes go through the "
            "model together: choose lanes = processes x accumulation."
        )
    if options.backprop_context < 0:
        raise ValueError(f"backprop_context must be at least 0, got {options.backprop_context}.")
    if options.backprop_context and not remembers:
        raise ValueError("backprop_context: LoRA alone stores nothing, so no gradient goes back through a context.")
    if options.backprop_context and lanes > 1:
        raise ValueError(
            f"backprop_context {options.backprop_context} goes back from questions to all of a context, but of {lanes} "
            "lanes some ask while others are in the middle of theirs: choose lanes 1 (and one process)."
        )
    if options.prompt in RECALLING:
        if not (remembers and memory.retrieves):
            raise ValueError(
                f"prompt {options.prompt!r}: {'this memory' if remembers else 'LoRA alone'} retrieves nothing, so "
                f"nothing is recalled: train with --prompt retrieved. {retrieving_methods()} can recall."
            )
        if rows > 1:
            raise ValueError(
                f"prompt {options.prompt!r} asks about one context, but {rows} lanes go through the model together: "
                "choose lanes = processes x accumulation."
            )
    for name in ("books_share", "unanswerable"):
        if not 0 <= getattr(options, name) < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(options, name)}.")
    positions = memory.base.max_positions
    if memory.window.unbounded:
        most = positions - memory.segment_tokens
        if options.prompt != "question":
            raise ValueError("Self-attention of this method sees all of a context: ask with --prompt question.")
        if memory.positions > positions and options.longest_context > most:
            raise ValueError(
                "Self-attention of this method sees all of a context, so that questions must fit the base's "
                f"{positions} positions, too: choose a --longest_context of at most {most}."
            )
    if options.distill and teacher_room(options, memory) < LEAST_ANSWER:
        raise ValueError(
            f"The teacher reads prompts of the base's {positions} positions less a segment or an answer, "
            f"{positions - teacher_room(options, memory)}, which leaves it nothing: choose smaller segments, or no "
            "--distill."
        )
    if options.prompt_tokens + LEAST_ANSWER > positions:
        raise ValueError(
            f"prompt_tokens {options.prompt_tokens} leaves fewer than {LEAST_ANSWER} of {positions} positions "
            "of the base for chat template and answer: choose smaller prompts."
        )
    if rows > 1 and (room := question_room(options, memory)) > memory.segment_tokens:
        raise ValueError(
            f"With prompt_tokens {options.prompt_tokens} questions take segments of {room} tokens, contexts those of "
            f"{memory.segment_tokens}, but {rows} lanes go through the model together: choose lanes = processes x "
            f"accumulation, or prompt_tokens of at most {memory.segment_tokens - LEAST_ANSWER}."
        )


def more_forwards(options: LessonOptions) -> str | None:
    """Return the option by which the model runs once more for rows that ask; None without one."""
    if options.distill:
        return "--distill"
    return f"--prompt {options.prompt}" if options.questions and options.prompt in RECALLING else None


def question_room(options: LessonOptions, memory: Any) -> int:
    """Return the most tokens of a question's prompt and answer: a segment, or more where the prompt does not fit."""
    if options.prompt == "question" or options.prompt_tokens + LEAST_ANSWER <= memory.segment_tokens:
        return int(memory.segment_tokens)
    return int(min(options.prompt_tokens + ANSWER, memory.base.max_positions))


def teacher_room(options: LessonOptions, memory: Any) -> int:
    """Return the most tokens of a prompt that the teacher reads, so that its answer fits the base's positions, too."""
    answer = min(question_room(options, memory), ANSWER)
    return int(memory.base.max_positions - max(memory.segment_tokens, answer))


class Lessons(DocumentRow):
    """Exercises in an endless row, among them documents that are learned as they are.

    Args:
        books: documents to learn as they are.
        room: most tokens of a prompt and its answer.
        teacher_tokens: length to which prompts are cut for a teacher with full attention.
        seed: of the exercises. (Their order is the row's; lanes take every n-th.)
        bounded: no context is longer than `longest_context`, also not of one document.
    """

    def __init__(
        self,
        options: LessonOptions,
        books: DocumentRow,
        tokenizer: PreTrainedTokenizerBase,
        room: int,
        teacher_tokens: int,
        seed: int,
        bounded: bool = False,
    ) -> None:
        assert options.questions is not None
        if not tokenizer.is_fast:
            raise ValueError("--questions needs a fast tokenizer, to find the question in a prompt.")
        if tokenizer.eos_token_id is None:
            raise ValueError("--questions needs a tokenizer with an end of text, which ends an answer.")
        if options.chat and tokenizer.chat_template is None:
            raise ValueError("The base has no chat template: leave out --chat.")
        super().__init__(tokenizer, 2, [*books.sources, *options.questions])
        self.options, self.books, self.room = options, books, room
        texts = [text for text in books._first_texts() if text]
        how = options.shortest_context, options.longest_context, options.questions_per_context, options.unanswerable
        fits = (lambda context: self._count(context) <= options.longest_context) if bounded else None
        pools = load_pools(options.questions, self._count, texts)
        warn_of_short(pools, options.shortest_context)
        self.exercises = Exercises(pools, seed, *how, fits)
        in_babilong = any(source_task(each) for pool in pools.values() for each in pool.documents)
        templates = load_templates(FORMS) | (load_prompts() if in_babilong else {})
        form = LongBenchOptions(
            data="",
            methods=["memory"],
            chat=options.chat,
            memory_prompt=options.prompt,
            chunk_words=options.chunk_words,
            chunks=options.chunks,
            text_order=options.text_order,
        )
        self.lead = lead_of_answers(tokenizer) if options.chat else " "
        name = MEMORY_PROMPTS[options.prompt]
        shown = None if name is None else Method(name, name, None, options.prompt_tokens, room - LEAST_ANSWER)
        retriever = make_retriever("bm25", torch.device("cpu")) if name in ("retrieval", "hybrid") else None
        own = Method("memory", "memory", None, None, shown=shown)
        self.maker = PromptMaker(own, form, tokenizer, templates, retriever)
        most = room - self.maker.turn - LEAST_ANSWER // 2
        if shown is not None and options.prompt_tokens > most:
            raise ValueError(
                f"The chat template takes {self.maker.turn} tokens, so that prompts of {options.prompt_tokens} leave "
                f"too few of {room} for an answer: choose prompt_tokens of at most {most}."
            )
        teacher = Method("truncation", "teacher", None, teacher_tokens, teacher_tokens)
        self.teacher = PromptMaker(teacher, form, tokenizer, templates)

    def __str__(self) -> str:
        return f"exercises of {len(self.exercises.pools)} tasks, with {self.books}"

    def at(self, position: int, seed: int) -> int:
        """Return the position: it is the exercise's number."""
        return position

    def text(self, index: int) -> str | None:
        book = self.book(index)
        return self.exercises.make(index).context if book is None else self.books.text(book)

    def release(self, position: int) -> None:
        """Let go of books; exercises are made when their turn comes."""
        self.books.release(position)

    def check(self, segment_tokens: int) -> None:
        """Make the first exercise; raise ValueError if books are not long enough, or nothing is to be learned."""
        if self.options.books_share:
            self.books.check(segment_tokens)
        first = self.pieces(next(index for index in count() if self.book(index) is None))
        if not any(piece.asked and bool(piece.learned.any()) for piece in first if piece.learned is not None):
            raise ValueError(
                f"Questions leave no room for their answers in {self.room} tokens: choose a larger segment_tokens."
            )

    def book(self, index: int) -> int | None:
        """Return which of the books a place of the row holds; None for an exercise."""
        rng = random.Random(f"{self.exercises.seed}/kind/{index}")
        return self.books.at(index, self.exercises.seed) if rng.random() < self.options.books_share else None

    def pieces(self, index: int) -> list[Piece]:
        """Return the context and each question with its answer, if that fits; or a book."""
        book = self.book(index)
        if book is not None:
            tokens, learned, most = self.books.tokens(book), self.books.learned(book), self.options.longest_context
            return [Piece(tokens[:most], None if learned is None else learned[:most])] if len(tokens) else []
        exercise = self.exercises.make(index)
        prompts, asked = zip(*(self.asked(exercise, number) for number in range(len(exercise.questions))), strict=True)
        read = torch.tensor(prompts[0].read)
        fitting = [piece for piece in asked if piece.learned is not None and bool(piece.learned.any())]
        if len(fitting) < len(asked):
            warnings.warn(
                f"Questions that leave no room for their answers in {self.room} tokens are left out: choose a larger "
                "segment_tokens to learn them.",
                stacklevel=2,
            )
        return [Piece(read, learned=torch.zeros(len(read), dtype=torch.bool), context=True), *fitting]

    def asked(self, exercise: Exercise, number: int) -> tuple[Encoded, Piece]:
        """Encode a question as the evaluation asks it, followed by its answer."""
        question = exercise.questions[number]
        asked = (exercise.template, str(number), question.input, exercise.context, [question.answer], 0, None)
        kind = Story if exercise.template in ANSWERS else Record
        record = kind(*asked, template=exercise.template, gold=question.gold)
        maker = self.chosen_maker(exercise)
        prompt = maker(record)
        piece = self.piece(prompt, record)

        def again(model: nn.Module, memory: MemoryCache) -> Piece:
            [found] = recalled(model, maker, memory, [record], [prompt])
            return self.piece(found, record)

        return prompt, replace(piece, recalled=again) if self.options.prompt in RECALLING else piece

    def piece(self, prompt: Encoded, record: Record) -> Piece:
        """Put the answer after a prompt, as far as there is room."""
        answer = self.answer_ids(record.answers[0], record, prompt.asked)[: max(self.room + 1 - len(prompt.asked), 0)]
        ids = torch.tensor([*prompt.asked, *answer])
        return Piece(
            ids,
            learned=torch.arange(len(ids)) >= len(prompt.asked),
            asked=True,
            asking=prompt.asking + len(answer),
            gold=prompt.gold,
            teacher=torch.tensor([*self.teacher(record).ids, *answer]) if self.options.distill else None,
        )

    def chosen_maker(self, exercise: Exercise) -> PromptMaker:
        """Return what makes an exercise's prompts: of as many chunks as are drawn for its context."""
        least, most = self.options.fewest_chunks, self.options.chunks
        if least is None:
            return self.maker
        rng = random.Random(f"{self.exercises.seed}/chunks/{exercise.context}")
        count = int(least * ((most + 1) / least) ** rng.random())
        return replace(self.maker, options=replace(self.maker.options, chunks=count))

    def answer_ids(self, answer: str, record: Record, prompt: list[int]) -> list[int]:
        """Encode the answer as the model is to write it after a prompt, with the token that ends it."""
        form, is_code = record.form, record.form.category == CODE
        lead = self.lead if self.options.chat and form.chat else " "
        before = str(self.tokenizer.decode(prompt[-1:]))
        ids = continued(self.tokenizer, before, answer if is_code else f"{lead}{answer}")
        ends = [self.tokenizer.eos_token_id]
        if form.first_line or is_code:
            ends = self.tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]
        return [*ids[: form.new_tokens - 1], *ends]

    def name(self, index: int) -> str:
        book = self.book(index)
        return f"exercise {index}" if book is None else self.books.name(book)

    def identity(self) -> dict[str, Any]:
        """Describe these lessons, to compare them when a run is resumed."""
        pools = sorted(self.exercises.pools.items())
        found = {task: fingerprint(pool.documents) for task, pool in pools}
        template = fingerprint([self.tokenizer.chat_template]) if self.options.chat else None
        return {**self.books.identity(), "pools": found, "chat_template": template}

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _first_texts(self) -> list[str | None]:
        return [self.text(0)]
