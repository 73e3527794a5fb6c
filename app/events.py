"""What happens on the page: each method gets what stands there, and yields what is to stand there next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from cacheformers.app import show
from cacheformers.app.desk import Desk, Reading
from cacheformers.modeling.conversation import Conversation

FAULTS = (OSError, ValueError, RuntimeError, ImportError)


class Events:
    """The page's events at a desk."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    def open_document(self, files: list[str], before: Reading | None) -> Iterator[tuple[Any, ...]]:
        """Open what was dropped; what cannot be opened leaves everything as it was `before`, and says why.

        Yields:
            None for the empty dropzone, the reading, a conversation about it, the figures, the text, what was said.
        """
        for now, figures in self.opened(files, before):
            if now is before:
                yield None, gr.skip(), gr.skip(), figures, gr.skip(), gr.skip()
            elif now is None or now.read < now.tokens:
                yield None, None, None, figures, show.BLANK, show.GREETING
            else:
                talk = self.desk.talk(now)
                yield None, now, talk, figures, show.document(now), show.greeting(talk)

    def open_other(self, files: list[str], before: Reading | None) -> Iterator[tuple[Any, ...]]:
        """Open a document to compare with; yield None for the empty dropzone, the reading and the figures."""
        for now, figures in self.opened(files, before):
            yield None, now if now and now.read == now.tokens else None, figures

    def opened(self, files: list[str], before: Reading | None) -> Iterator[tuple[Reading | None, str]]:
        """Open files; yield the reading with its figures.

        When something is wrong it yields that, with `before` where nothing has been read yet, and None otherwise.
        """
        kept = before
        try:
            for now in self.desk.open(files):
                kept = None
                yield now, show.progress(now)
        except FAULTS as error:
            yield kept, show.notice(str(error), "error") + (show.progress(kept) if kept else "")

    def answer(self, talk: Conversation | None, asked: str) -> Iterator[tuple[str, str]]:
        """Answer a question; yield the conversation, and what is left in the question's box."""
        if talk is None:
            yield show.NOTHING_YET, asked
            return
        try:
            for said in self.desk.ask(talk, asked):
                yield show.conversation(talk, self.desk.tokenizer, asked, said), ""
            yield show.conversation(talk, self.desk.tokenizer), ""
        except FAULTS as error:
            yield show.conversation(talk, self.desk.tokenizer) + show.notice(str(error), "error"), asked

    def start_over(self, talk: Conversation | None) -> str:
        """Forget the conversation; what was read stays."""
        if talk is not None:
            talk.reset()
        return show.greeting(talk)

    def compare(self, now: Reading | None, another: Reading | None, asked: str) -> Iterator[str]:
        """Ask two memories, or three; yield their answers side by side."""
        if now is None:
            yield show.NOTHING_YET
            return
        columns = {
            "Memory on": (f"{now.name}, {now.read:,} tokens", now),
            "Memory off": ("nothing is remembered", None),
        }
        if another is not None:
            columns["Another document's"] = (f"{another.name}, {another.read:,} tokens", another)
        shown = {title: (holds, show.COMING) for title, (holds, _) in columns.items()}
        try:
            for title, (holds, reading) in columns.items():
                talk = self.desk.talk(reading)
                for said in self.desk.ask(talk, asked):
                    shown[title] = (holds, said + show.COMING)
                    yield show.comparison(shown)
                shown[title] = (holds, talk.turns[-1].text or "(an empty answer)")
                yield show.comparison(shown)
        except FAULTS as error:
            yield show.notice(str(error), "error")
