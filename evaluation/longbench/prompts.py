"""From a record to token ids: template, middle truncation, chat template, and where the question begins."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from cacheformers.evaluation.longbench.records import Record


@dataclass(frozen=True)
class Prompt:
    """A text for the model.

    Attributes:
        question: place of the first character after the context.
        special: the tokenizer is to add its special tokens (a chat template has its own).
    """

    text: str
    question: int
    special: bool = True


@dataclass(frozen=True)
class Encoded:
    """A prompt as token ids.

    Attributes:
        question: how many ids belong to the context and what stands before it.
        cut: the smaller limit of a prompt that was cut again because it had not fitted.
    """

    ids: list[int]
    question: int
    cut: int | None = None


def fill(template: str, record: Record, context: str | None = None) -> Prompt:
    """The template with a record's fields.

    Args:
        context: in place of the record's own.
    """
    text = template.format(context=record.context if context is None else context, input=record.input)
    return Prompt(text, len(text) - len(after_context(template, record)))


def after_context(template: str, record: Record) -> str:
    """What the prompt says once the context has ended."""
    return template.partition("{context}")[2].format(input=record.input)


def cut_middle(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Prompt:
    """The official truncation: the decoded first and last `max_length // 2` tokens of a longer prompt.

    The result may have some tokens more or fewer: the two halves are joined as text.
    """
    ids = tokenizer(prompt.text, verbose=False).input_ids
    if len(ids) <= max_length:
        return prompt
    half = max_length // 2
    text = "".join(str(tokenizer.decode(part, skip_special_tokens=True)) for part in (ids[:half], ids[-half:]))
    kept = os.path.commonprefix([text[::-1], prompt.text[prompt.question :][::-1]])
    return Prompt(text, len(text) - len(kept))


def in_chat(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The prompt as the user's turn in the tokenizer's chat template, ready for the model's turn.

    Raises:
        ValueError: the template changes the text beyond stripping it.
    """
    turns = [{"role": "user", "content": prompt.text}]
    text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    body = prompt.text.strip()
    start = text.find(body)
    if start < 0:
        raise ValueError("The chat template changes the prompt's text: run without --chat.")
    stripped = len(prompt.text) - len(prompt.text.lstrip())
    return Prompt(text, start + min(prompt.question - stripped, len(body)), special=False)


def encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, split: bool = False) -> Encoded:
    """The whole prompt, tokenised once.

    Args:
        split: find where the question begins (takes a fast tokenizer): at the first token that lies wholly in it.
    """
    encoded: Any = tokenizer(
        prompt.text, add_special_tokens=prompt.special, return_offsets_mapping=split, verbose=False
    )
    ids: list[int] = encoded.input_ids
    if not split:
        return Encoded(ids, 0)
    inside = (place for place, (start, _) in enumerate(encoded.offset_mapping) if start >= prompt.question)
    return Encoded(ids, min(next(inside, len(ids)), len(ids) - 1))
