"""The page: a document and its memory on the left, questions and answers on the right, a comparison below."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from cacheformers.app import show
from cacheformers.app.desk import MEMORIES, TEXTS, Desk, Reading
from cacheformers.modeling.conversation import Conversation

HERE = Path(__file__).parent
LARGEST_UPLOAD = "256mb"
EMPTY = "Drop a text, or all files of a saved memory, to begin."
SHOW_LAST = "() => [...document.querySelectorAll('#conversation .everything [data-retrieved]')].at(-1)?.click()"
FAULTS = (OSError, ValueError, RuntimeError, ModuleNotFoundError)


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
    """Lay the page out, and connect it to the desk."""
    with gr.Blocks(title="cacheformers", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        reading, other, talk = gr.State(), gr.State(), gr.State()
        gr.HTML(f"<h1>cacheformers</h1>{show.notice(described)}", elem_id="title")
        with gr.Row():
            with gr.Column(scale=5):
                dropped = dropzone("The document", "drop")
                figures = gr.HTML(show.notice(EMPTY), elem_id="reading")
                text = gr.HTML(elem_id="document")
            with gr.Column(scale=4):
                said = gr.HTML(show.GREETING, elem_id="conversation", autoscroll=True)
                with gr.Row():
                    question = textbox("Ask about the document", "question")
                    ask = gr.Button("Ask", variant="primary", elem_id="ask", scale=1, min_width=80)
                    again = gr.Button("Start over", elem_id="again", scale=1, min_width=110)
        gr.HTML("<h2>One question, three memories: this document's, none, and another document's</h2>")
        with gr.Row():
            with gr.Column(scale=3):
                second = dropzone("Another document", "drop-other")
                other_figures = gr.HTML(elem_id="reading-other")
            with gr.Column(scale=6):
                with gr.Row():
                    compared = textbox("A question for all three", "compared")
                    compare = gr.Button("Compare", variant="primary", elem_id="compare", scale=1, min_width=100)
                comparison = gr.HTML(elem_id="comparison")

        def open_document(files: list[str] | None) -> Iterator[tuple[Any, ...]]:
            for now, shown in opened(desk, files):
                if now is None or now.read < now.tokens:
                    yield None, None, shown, "", show.GREETING
                else:
                    yield now, desk.talk(now), shown, show.document(now), show.GREETING

        def open_other(files: list[str] | None) -> Iterator[tuple[Any, ...]]:
            for now, shown in opened(desk, files):
                yield now if now and now.read == now.tokens else None, shown

        def answer(talk: Conversation | None, asked: str) -> Iterator[tuple[str, str]]:
            if talk is None:
                yield show.notice(f"There is nothing to ask about yet. {EMPTY}", "error"), asked
                return
            try:
                for said in desk.ask(talk, asked):
                    yield show.conversation(talk, desk.tokenizer, asked, said), ""
                yield show.conversation(talk, desk.tokenizer), ""
            except FAULTS as error:
                yield show.conversation(talk, desk.tokenizer) + show.notice(str(error), "error"), asked

        def answer_all(now: Reading | None, another: Reading | None, asked: str) -> Iterator[str]:
            if now is None:
                yield show.notice(f"There is nothing to ask about yet. {EMPTY}", "error")
                return
            columns = {
                "Memory on": (f"{now.name}, {now.read:,} tokens", desk.talk(now)),
                "Memory off": ("nothing is remembered", desk.talk(None)),
            }
            if another is not None:
                columns["Another document's"] = (f"{another.name}, {another.read:,} tokens", desk.talk(another))
            shown = {title: (holds, "…") for title, (holds, _) in columns.items()}
            try:
                for title, (holds, talk) in columns.items():
                    for said in desk.ask(talk, asked):
                        shown[title] = (holds, said)
                        yield show.comparison(shown)
                    shown[title] = (holds, talk.turns[-1].text or "(an empty answer)")
                    yield show.comparison(shown)
            except FAULTS as error:
                yield show.notice(str(error), "error")

        def start_again(talk: Conversation | None) -> str:
            if talk is not None:
                talk.reset()
            return show.GREETING

        # One at a time: all of them use the model.
        model: dict[str, Any] = {"concurrency_id": "model", "api_visibility": "private", "show_progress": "hidden"}
        dropped.change(open_document, dropped, [reading, talk, figures, text, said], **model)
        second.change(open_other, second, [other, other_figures], **model)
        for event in (ask.click, question.submit):
            event(answer, [talk, question], [said, question], **model).then(None, js=SHOW_LAST)
        for event in (compare.click, compared.submit):
            event(answer_all, [reading, other, compared], comparison, **model)
        again.click(start_again, talk, said, **model)
    return page


def dropzone(label: str, name: str) -> gr.File:
    """Make a place for a text or the files of a memory."""
    return gr.File(
        label=label, file_count="multiple", file_types=[*TEXTS, *MEMORIES], type="filepath", elem_id=name, height=120
    )


def textbox(hint: str, name: str) -> gr.Textbox:
    """Make a place for a question."""
    return gr.Textbox(placeholder=hint, elem_id=name, max_length=2000, show_label=False, container=False, scale=5)


def opened(desk: Desk, files: list[str] | None) -> Iterator[tuple[Reading | None, str]]:
    """Open what was dropped; yield it with what to show, or None with what is wrong."""
    if not files:
        yield None, show.notice(EMPTY)
        return
    try:
        for now in desk.open(files):
            yield now, show.progress(now)
    except FAULTS as error:
        yield None, show.notice(str(error), "error")
