"""Chats as documents: written in the tokenizer's chat template, and the places in them where an assistant speaks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from datasets import Features, Value
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from cacheformers.common.sources import PLACES, find_sources, joined

MARKS = re.compile(r"{%-?\s*generation\b")


def load_chats(
    paths: Sequence[str], field: str, tokenizer: PreTrainedTokenizerBase, split: str | None = None
) -> tuple[Sequence[str], Sequence[list[list[int]]]]:
    """Load chats as texts, and for each the places `[start, end]` of its answers, in characters.

    Args:
        paths, split: see `find_sources`.
        field: holds a chat in each row, a list of messages with `role` and `content`.

    Raises:
        FileNotFoundError, ValueError: a source is not there, lacks the field, or a chat cannot be written.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"The field {field!r} holds chats: they take a tokenizer with a chat template, and this base has none."
        )

    def written(row: dict[str, Any], number: int) -> dict[str, Any]:
        try:
            text, places = write_chat(tokenizer, row[field])
        except ValueError as error:
            raise ValueError(f"Chat {number + 1} of {', '.join(paths)}: {error}") from error
        return {"text": text, "places": places}

    rows = joined([source.load_chats(field) for source in find_sources(paths, split)], field)
    features = Features({"text": Value("string"), "places": PLACES})
    chats = rows.map(written, with_indices=True, remove_columns=[field], features=features, desc="Writing chats")
    return chats["text"], chats["places"]


def write_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]) -> tuple[str, list[list[int]]]:
    """Write one chat, and find its answers: what the template marks as generated, or else all that it writes for an
    assistant after the generation prompt, the token that ends an answer included.

    Raises:
        ValueError: a message is no text; the template refuses the chat, or without marks writes an answer otherwise
            once more turns follow.
    """
    check_messages(messages)
    turns = [{name: value for name, value in turn.items() if value is not None} for turn in messages]  # of Arrow

    def write(count: int, prompt: bool = False) -> str:
        return str(tokenizer.apply_chat_template(turns[:count], tokenize=False, add_generation_prompt=prompt))

    try:
        text = write(len(turns))
        if MARKS.search(str(tokenizer.chat_template)):
            return text, marked(tokenizer, turns, text)
        answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        spans = [(write(number, prompt=True) if number else "", write(number + 1)) for number in answers]
        if answers[:1] == [0]:  # nothing asks for it, so it begins with its own words
            first = spans[0][1]
            spans[0] = first[: max(first.find(turns[0]["content"].strip()), 0)], first
    except (TemplateError, KeyError, TypeError) as error:
        raise ValueError(f"The chat template cannot write a chat that begins {str(turns)[:80]}: {error}") from error
    if not all(text.startswith(until) and until.startswith(before) for before, until in spans):
        raise ValueError(
            "The chat template writes an answer otherwise once more turns follow, so answers cannot be found in a chat "
            f"that begins {text[:80]!r}. Put {{% generation %}} ... {{% endgeneration %}} around them in the template."
        )
    return text, [[len(before), len(until.rstrip())] for before, until in spans if len(until.rstrip()) > len(before)]


def check_messages(messages: Any) -> None:
    """Raise ValueError unless these are messages of texts."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("a chat must be a list of messages, and hold at least one.")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"a message must have a role and a content, got {str(message)[:80]}.")
        if not isinstance(message.get("content") or "", str):
            raise ValueError(
                f"the content of a message must be a text, got {str(message['content'])[:80]}. Images and other parts "
                "cannot be learned from; join parts of text before."
            )


def marked(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, Any]], text: str) -> list[list[int]]:
    """Return the places of the tokens that the template marks as generated."""
    chat: Any = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    answered = zip(offsets, chat["assistant_masks"], strict=True)
    return [[start, end] for (start, end), generated in answered if generated and end > start]
