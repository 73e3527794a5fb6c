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

    def written(row: dict[str, Any]) -> dict[str, Any]:
        text, places = write_chat(tokenizer, row[field])
        return {"text": text, "places": places}

    rows = joined([source.load_chats(field) for source in find_sources(paths, split)], field)
    features = Features({"text": Value("string"), "places": PLACES})
    chats = rows.map(written, remove_columns=[field], features=features, desc="Writing chats")
    return chats["text"], chats["places"]


def write_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]) -> tuple[str, list[list[int]]]:
    """Write one chat, and find its answers: what the template marks as generated, or else all that it writes for an
    assistant after the generation prompt, the token that ends an answer included.

    Raises:
        ValueError: the template refuses the chat, or without marks writes an answer otherwise once more turns follow.
    """
    turns = [{name: value for name, value in turn.items() if value is not None} for turn in messages]  # of Arrow

    def write(count: int, prompt: bool = False) -> str:
        return str(tokenizer.apply_chat_template(turns[:count], tokenize=False, add_generation_prompt=prompt))

    try:
        text = write(len(turns))
        if MARKS.search(str(tokenizer.chat_template)):
            return text, marked(tokenizer, turns, text)
        answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        spans = [(write(number, prompt=True), write(number + 1)) for number in answers]
    except (TemplateError, KeyError) as error:
        raise ValueError(f"The chat template cannot write a chat that begins {str(turns)[:80]}: {error}") from error
    if not all(text.startswith(until) and until.startswith(before) for before, until in spans):
        raise ValueError(
            "The chat template writes an answer otherwise once more turns follow, so answers cannot be found in a chat "
            f"that begins {text[:80]!r}. Put {{% generation %}} ... {{% endgeneration %}} around them in the template."
        )
    return text, [[len(before), len(until.rstrip())] for before, until in spans if len(until.rstrip()) > len(before)]


def marked(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, Any]], text: str) -> list[list[int]]:
    """Return the places of the tokens that the template marks as generated."""
    chat: Any = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    answered = zip(offsets, chat["assistant_masks"], strict=True)
    return [[start, end] for (start, end), generated in answered if generated and end > start]
