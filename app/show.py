"""What the page shows, as HTML. Every text of a user, a file or a model goes through `escape` here."""

from __future__ import annotations

from collections import Counter
from html import escape
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from cacheformers.app.desk import LARGEST_TEXT, Reading
from cacheformers.modeling.conversation import Answer, Conversation

STRETCH, SHOWN = 8, 5  # tokens of the document that are marked together, and how many such stretches for a turn


def notice(text: str, kind: str = "hint") -> str:
    """Return a line for people; `kind` is `hint`, `error` or `legend` (of what is marked in the text)."""
    role = ' role="alert"' if kind == "error" else ""
    return f'<p class="{kind}"{role}>{escape(text)}</p>'


EMPTY = "Drop a text, or all files of a saved memory, to begin."
NOTHING_YET = notice(f"There is nothing to ask about yet. {EMPTY}", "error")
GREETING = notice("Ask about the text. None of it is in the prompt: answers come out of the memory.")
WITH_PASSAGES = notice(
    "Ask about the text. Each question is asked by itself, with the passages before it that the memory recalls."
)
BLANK = f'<div class="blank">{notice("The text stands here once it has been read.")}</div>'
COMING = "…"  # the rest of an answer


def title(described: str) -> str:
    """Return the head of the page, with the model that it uses."""
    return f"<h1>cacheformers</h1>{notice(described)}"


def figures(values: dict[str, str]) -> str:
    """Return numbers with what they count."""
    cells = "".join(
        f'<div class="figure"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in values.items()
    )
    return f'<div class="figures">{cells}</div>'


def progress(reading: Reading) -> str:
    """Return how far a text has been read, how fast, and what its memory takes."""
    read, kept = reading.read, reading.memory.tokens_kept[0]
    done = read == reading.tokens
    bar = "" if done else f'<progress value="{read}" max="{reading.tokens}"></progress>'
    values = {"tokens read": f"{read:,}" if done else f"{read:,} of {reading.tokens:,}"}
    if reading.seconds:
        values["tokens per second"] = f"{read / reading.seconds:,.0f}"
    if read:
        values["size of the memory"] = size(reading.memory.nbytes)
        values["tokens it keeps"] = "all" if kept == read else f"the newest {kept:,}"
    return f'<h3 class="name">{escape(reading.name)}</h3>{bar}{figures(values)}'


def size(count: float) -> str:
    """Return bytes in the unit that people read."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def document(reading: Reading) -> str:
    """Return the text that was read, a stretch after the other, with what the memory has forgotten in gray."""
    source, read = reading.memory.origin.sources[0], reading.read
    if source is None:
        return notice("This memory was saved without its text, so there is nothing to show here.")
    if len(source.text) > LARGEST_TEXT:
        return notice(
            f"The text has {len(source.text):,} characters, more than this page shows. Answers come all the same."
        )
    gone = read - reading.memory.tokens_kept[0]
    starts = source.offsets[:read:STRETCH, 0].tolist()
    ends = [*starts[1:], int(source.offsets[read - 1, 1])]
    parts = []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        kind = ' class="forgotten"' if (number + 1) * STRETCH <= gone else ""
        parts.append(f'<span id="stretch-{number}"{kind}>{escape(source.text[start:end])}</span>')
    return (
        f'<div id="map" data-stretches="{len(parts)}"></div>{notice("", "legend")}'
        f'<div id="text" tabindex="0">{"".join(parts)}</div>'
    )


def greeting(talk: Conversation | None) -> str:
    """Return what stands where no question has been asked."""
    return GREETING if talk is None or talk.follows else WITH_PASSAGES


def conversation(talk: Conversation, tokenizer: PreTrainedTokenizerBase, asked: str = "", said: str = "") -> str:
    """Return all questions and answers, and the question that is being answered with its answer so far."""
    turns, place = [], 0
    for answer in talk.turns:
        latest = answer is talk.turns[-1] and not asked
        prompt = talk.ids[place : place + answer.prompt_tokens]
        if not talk.follows:
            prompt = prompt[-1 - len(answer.asked) :]  # without the passages
        turns.append(answered(answer, prompt, talk, tokenizer, latest))
        place += answer.prompt_tokens + len(answer.tokens) - answer.finished
    if asked:
        turns.append(f'<p class="question">{escape(asked)}</p><p class="answer">{escape(said)}{COMING}</p>')
    if not turns:
        return greeting(talk)
    hint = "Click a word to see what was retrieved for it."
    if not talk.retrieves:
        hint = "This memory's method retrieves no single passages, so there are none to show."
    return "".join(turns) + notice(hint)


def answered(
    answer: Answer, prompt: list[int], talk: Conversation, tokenizer: PreTrainedTokenizerBase, latest: bool
) -> str:
    """Return a question and its answer, whose words show what they retrieved, and what all of them did together.

    Args:
        prompt: ids of the question, with what the chat template puts around it.
        latest: the page marks what question and answer retrieved most, before anybody clicks.
    """
    read = talk.memory.tokens_read[0] if talk.memory is not None else 0
    # The last token of the prompt retrieved what the answer's first token was chosen with.
    looked_up: list[list[int]] = [[] for _ in prompt] + [found.tolist() for found in answer.asked]
    asked = looked_up[len(looked_up) - len(prompt) + 1 :]
    words = pieces(tokenizer, prompt)
    typed, whole_prompt = answer.question.strip(), "".join(words)  # stripped, as some chat templates do
    start = whole_prompt.rfind(typed) if typed in whole_prompt else len(whole_prompt)  # else nothing of it is marked
    ends = list(accumulate(map(len, words)))
    first = next((place for place, end in enumerate(ends) if end > start), len(words))
    chosen = [found.tolist() for found in answer.retrieved] or [[] for _ in answer.tokens]
    whole = Counter(number // STRETCH for numbers in asked[first:] + chosen for number in numbers if number < read)
    question = ""
    for word, end, numbers in zip(words, ends, asked, strict=False):
        begin = end - len(word)
        shown = word[max(0, start - begin) : max(0, start + len(typed) - begin)]
        question += retrieving(shown, numbers, whole, read)
    said = "".join(
        retrieving(word, numbers, whole, read)
        for word, numbers in zip(pieces(tokenizer, answer.tokens, True), chosen, strict=True)
    )
    most = [number * STRETCH for number, times in whole.most_common(SHOWN) for _ in range(times)]
    everything = retrieving("what question and answer retrieved most", most, whole, read)
    return (
        f'<p class="question">{question or escape(answer.question)}</p><p class="answer">{said}</p>'
        f'<p class="everything{" latest" if latest else ""}">{everything if most else ""}</p>'
    )


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: list[int], plain: bool = False) -> list[str]:
    """Return the text that each token adds to those before it; a part of a character adds nothing.

    Args:
        plain: special tokens add nothing.
    """
    added, before = [], ""
    for count in range(1, len(tokens) + 1):
        text = str(tokenizer.decode(tokens[:count], skip_special_tokens=plain))
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            text = before
        added.append(text[len(before) :])
        before = text
    return added


def retrieving(text: str, numbers: list[int], whole: Counter[int], read: int) -> str:
    """Return a text that shows, when it is clicked, the stretches of the document that it retrieved.

    Args:
        numbers: of the tokens that were retrieved; those from `read` on are not the document's.
        whole: how often the whole turn retrieved each stretch: of two, the page shows the one with more first.
    """
    times = Counter(number // STRETCH for number in numbers if number < read)
    if not times or not text.strip():
        return escape(text)
    ordered = sorted(times, key=lambda stretch: (-times[stretch], -whole[stretch], stretch))
    places = " ".join(f"{stretch}:{times[stretch]}" for stretch in ordered)
    word = text.lstrip()
    shown = f'<span class="token" role="button" tabindex="0" data-retrieved="{places}">{escape(word)}</span>'
    return text[: len(text) - len(word)] + shown


def comparison(columns: dict[str, tuple[str, str]]) -> str:
    """Return answers side by side: by title, what the memory holds, and the answer."""
    cells = "".join(
        f'<section><h4>{escape(title)}</h4><p class="holds">{escape(holds)}</p><p class="answer">{escape(answer)}</p>'
        "</section>"
        for title, (holds, answer) in columns.items()
    )
    return f'<div class="columns">{cells}</div>'
