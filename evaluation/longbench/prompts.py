"""From a record to token ids: template, middle truncation, chat template, and where the question begins."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from cacheformers.evaluation.longbench.records import Record


@dataclass(frozen=True)
class Prompt:
    """A text for the model.

    Attributes:
        question: index of the first character after the context.
        special: the tokenizer adds its special tokens (a chat template has its own).
        begun: how the answer begins, which follows the text and is never cut.
    """

    text: str
    question: int
    special: bool = True
    begun: str = ""


@dataclass(frozen=True)
class Encoded:
    """A prompt as token ids.

    Attributes:
        question: number of ids up to the end of the context.
        cut: the smaller limit of a prompt that was cut again because it did not fit.
        gold: ranges of ids that hold the answer's passages, where they are known and nothing is cut.
        shown: what self-attention sees, after the ids before the question were read into a memory. Default: the rest.
        places: start and end of each id that is read, in characters, counted from the end of the context (negative).
    """

    ids: list[int]
    question: int
    cut: int | None = None
    gold: tuple[range, ...] = ()
    shown: Encoded | None = None
    places: tuple[tuple[int, int], ...] = ()

    @property
    def read(self) -> list[int]:
        """The ids that a memory reads."""
        return self.ids[: self.question]

    @property
    def asked(self) -> list[int]:
        """The ids that follow what a memory has read."""
        return self.ids[self.question :] if self.shown is None else self.shown.ids

    @property
    def asking(self) -> int:
        """Number of ids of `asked` from the end of its context on."""
        shown = self if self.shown is None else self.shown
        return len(shown.ids) - shown.question


def fill(template: str, record: Record, context: str | None = None) -> Prompt:
    """Fill a record's fields, or another context, into the template."""
    text = template.format(context=record.context if context is None else context, input=record.input)
    begun = f" {record.begun}" if record.begun else ""
    return Prompt(text, len(text) - len(after_context(template, record)), begun=begun)


def after_context(template: str, record: Record) -> str:
    """Return what the prompt says after the context."""
    return template.partition("{context}")[2].format(input=record.input)


def cut_middle(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Prompt:
    """Keep the decoded first and last `max_length // 2` tokens of a longer prompt, as the official code does.

    The result may have some tokens more or fewer: the two halves are joined as text.
    """
    ids = tokenizer(prompt.text, verbose=False).input_ids
    if len(ids) <= max_length:
        return prompt
    half = max_length // 2
    ends = ids[:half], ids[len(ids) - half :]
    text = "".join(str(tokenizer.decode(part, skip_special_tokens=True)) for part in ends)
    kept = os.path.commonprefix([text[::-1], prompt.text[prompt.question :][::-1]])
    return replace(prompt, text=text, question=len(text) - len(kept))


def cut_beginning(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Prompt:
    """Keep the decoded last `max_length` tokens of a longer prompt."""
    ids = tokenizer(prompt.text, verbose=False).input_ids
    if len(ids) <= max_length:
        return prompt
    text = str(tokenizer.decode(ids[len(ids) - max_length :], skip_special_tokens=True))
    return replace(prompt, text=text, question=max(0, len(text) - (len(prompt.text) - prompt.question)))


def in_chat(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Put the prompt as the user's turn into the chat template; raise ValueError if that changes more than its ends."""
    turns = [{"role": "user", "content": prompt.text}]
    text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    body = prompt.text.strip()
    start = text.find(body)
    if start < 0:
        raise ValueError("The chat template changes the prompt's text: run without --chat.")
    stripped = len(prompt.text) - len(prompt.text.lstrip())
    question = start + min(prompt.question - stripped, len(body))
    return Prompt(text, question, special=False, begun=prompt.begun.lstrip())


def lead_of_answers(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template writes between its generation prompt and an answer: nothing, or a space."""
    turns, answer = [{"role": "user", "content": "Q"}], "ANSWER"
    before = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    whole = str(tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": answer}], tokenize=False))
    lead = whole[len(before) :].partition(answer)[0]
    return lead if whole.startswith(before) and lead.isspace() else ""


def continued(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Encode a text as it goes on after another one: some tokenizers put a space before what begins.

    It is encoded by itself where the two share a token.
    """
    start, whole, alone = (
        list(tokenizer(part, add_special_tokens=False, verbose=False).input_ids)
        for part in (before, before + text, text)
    )
    return whole[len(start) :] if whole[: len(start)] == start else alone


def encode(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    split: bool = False,
    gold: Iterable[tuple[int, int]] = (),
) -> Encoded:
    """Tokenize the whole prompt.

    Args:
        split: find where the question begins (takes a fast tokenizer): at the first token that is wholly in it.
        gold: `(start, end)` in characters of the prompt, whose tokens are looked up (with `split`).
    """
    text = prompt.text + prompt.begun
    encoded: Any = tokenizer(text, add_special_tokens=prompt.special, return_offsets_mapping=split, verbose=False)
    ids: list[int] = encoded.input_ids
    if not split:
        return Encoded(ids, 0)
    inside = (place for place, (start, _) in enumerate(encoded.offset_mapping) if start >= prompt.question)
    question = min(next(inside, len(ids)), len(ids) - 1)
    found = tuple(tokens_of(encoded.offset_mapping, span) for span in gold)
    places = ((start - prompt.question, end - prompt.question) for start, end in encoded.offset_mapping[:question])
    return Encoded(ids, question, gold=found, places=tuple(places))


def tokens_of(offsets: Sequence[tuple[int, int]], span: tuple[int, int]) -> range:
    """Return the numbers of the tokens that share a character with a span.

    Args:
        offsets: where each token is, `(start, end)` in characters, in order.
    """
    inside = [place for place, (start, end) in enumerate(offsets) if start < span[1] and span[0] < end]
    return range(inside[0], inside[-1] + 1) if inside else range(0)
