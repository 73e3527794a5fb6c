"""The page: a document and its memory on the left, questions and answers on the right, a comparison below."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr

from cacheformers.app import show
from cacheformers.app.desk import MEMORIES, TEXTS, Desk
from cacheformers.app.events import Events

HERE = Path(__file__).parent
LARGEST_UPLOAD = "256mb"


def launch(desk: Desk, described: str, port: int | None) -> None:
    """Serve the page to this machine alone, until the process is stopped."""
    page = make_page(desk, described)
    page.queue(default_concurrency_limit=1)
    plain = ["system-ui", "sans-serif"]
    _, address, _ = page.launch(
        prevent_thread_lock=True,
        server_name="127.0.0.1",
        server_port=port,
        share=False,
        max_file_size=LARGEST_UPLOAD,
        state_session_capacity=8,
        footer_links=[],
        quiet=True,
        theme=gr.themes.Default(font=plain, font_mono=["ui-monospace", "monospace"]),
        css_paths=HERE / "page.css",
        head=f"<script>{(HERE / 'page.js').read_text(encoding='utf-8')}</script>",
    )
    print(f"The page is at {address} for browsers on this machine; Ctrl-C stops it.", flush=True)
    page.block_thread()


def make_page(desk: Desk, described: str) -> gr.Blocks:
    """Lay the page out, row by row, and connect it to the desk."""
    with gr.Blocks(title="cacheformers", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gr.HTML(show.title(described), elem_id="title")
        with gr.Row(equal_height=True):
            document = document_column()
            talk = talk_column()
        gr.HTML("<h2>One question, three memories: this document's, none, and another document's</h2>")
        with gr.Row():
            other = other_column()
            comparison = comparison_column()
        connect(Events(desk), document, talk, other, comparison)
    return page


class Document(NamedTuple):
    """The document that is asked: where it is dropped, what was read of it, its figures and its text."""

    dropped: gr.File
    reading: gr.State
    figures: gr.HTML
    text: gr.HTML


class Talk(NamedTuple):
    """The conversation about the document, as HTML and as it is, and what goes on with it."""

    said: gr.HTML
    conversation: gr.State
    question: gr.Textbox
    ask: gr.Button
    again: gr.Button


class Other(NamedTuple):
    """The document to compare with."""

    dropped: gr.File
    reading: gr.State
    figures: gr.HTML


class Comparison(NamedTuple):
    """One question and its answers."""

    question: gr.Textbox
    compare: gr.Button
    answers: gr.HTML


def document_column() -> Document:
    with gr.Column(scale=5):
        return Document(
            dropzone("The document", "drop"),
            gr.State(),
            gr.HTML(show.notice(show.EMPTY), elem_id="reading"),
            gr.HTML(show.BLANK, elem_id="document"),
        )


def talk_column() -> Talk:
    with gr.Column(scale=4, elem_id="talk"):
        said = gr.HTML(show.GREETING, elem_id="conversation", autoscroll=True)
        with gr.Row():
            question = textbox("Ask about the document", "question")
            ask = gr.Button("Ask", variant="primary", elem_id="ask", scale=1, min_width=80)
            again = gr.Button("Start over", elem_id="again", scale=1, min_width=110)
    return Talk(said, gr.State(), question, ask, again)


def other_column() -> Other:
    with gr.Column(scale=3):
        return Other(dropzone("Another document", "drop-other"), gr.State(), gr.HTML(elem_id="reading-other"))


def comparison_column() -> Comparison:
    with gr.Column(scale=6):
        with gr.Row():
            question = textbox("A question for all three", "compared")
            compare = gr.Button("Compare", variant="primary", elem_id="compare", scale=1, min_width=100)
        return Comparison(question, compare, gr.HTML(elem_id="comparison"))


def dropzone(label: str, name: str) -> gr.File:
    """Make a place for a text or the files of a memory."""
    return gr.File(
        label=label, file_count="multiple", file_types=[*TEXTS, *MEMORIES], type="filepath", elem_id=name, height=80
    )


def textbox(hint: str, name: str) -> gr.Textbox:
    """Make a place for a question."""
    return gr.Textbox(
        label=hint, placeholder=hint, elem_id=name, max_length=2000, show_label=False, container=False, scale=5
    )


def connect(events: Events, document: Document, talk: Talk, other: Other, comparison: Comparison) -> None:
    """Say what happens when; one event at a time, because all of them use the model."""
    model: dict[str, Any] = {"concurrency_id": "model", "api_visibility": "private", "show_progress": "hidden"}
    dropped, reading, figures, text = document
    document.dropped.upload(
        events.open_document,
        [dropped, reading],
        [dropped, reading, talk.conversation, figures, text, talk.said],
        **model,
    )
    other.dropped.upload(
        events.open_other, [other.dropped, other.reading], [other.dropped, other.reading, other.figures], **model
    )
    for asked in (talk.ask.click, talk.question.submit):
        asked(events.answer, [talk.conversation, talk.question], [talk.said, talk.question], **model)
    talk.again.click(events.start_over, talk.conversation, talk.said, **model)
    for asked in (comparison.compare.click, comparison.question.submit):
        asked(events.compare, [reading, other.reading, comparison.question], comparison.answers, **model)
