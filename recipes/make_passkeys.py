"""Write documents to train for the passkey task, in other words than `cacheformers passkey` uses.

python recipes/make_passkeys.py data/passkeys/train.jsonl --tokens 1024 2048 5120
python recipes/make_passkeys.py data/passkeys/books.jsonl --books ../shared/data/books/train.jsonl.gz
python recipes/make_passkeys.py data/passkeys/own.jsonl --needle passkey       # the evaluation's words, other keys
python train_adapt.py recipes/passkey.yaml

Each document hides several codes and asks for all of them at its end, after --tokens tokens; with several numbers, each
document takes one. (A few more or fewer, where a book's text is cut within a word.) With multiples of the segment, the
questions begin a segment of their own, as in the evaluation. The field `answers` says where the answers are, for
`train_adapt.py --label_field answers`.

Held out, so in none of the documents, are the introduction, needles, questions and filler of the evaluation, and the
words "pass key", "magic number" and "secret word". With --needle only the keys and their places are held out:
documents are then the evaluation's prompts with their answers, for a model from scratch, which knows no other words.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cacheformers.common.base_model import load_tokenizer
from cacheformers.common.files import write_text
from cacheformers.common.sources import load_texts
from cacheformers.evaluation.passkey.prompts import NEEDLES, REPEAT, Case, Filler, PromptMaker, joined, load_filler

INTROS = (
    "Read these notes with care. Among much that does not matter they name some codes, which are needed at the end.",
    "Below is a long report. Somewhere in it codes are mentioned. Keep them in mind.",
    "What follows is mostly chatter, but it tells codes that will be wanted afterwards.",
)
# What is said, and how it is asked for.
CODES = (
    ("The code of {name} is {key}. Do not lose it: {key} opens {name}.", "Which code opens {name}? It is"),
    ("Write this down: {name} has the code {key}.", "What code does {name} have? The code is"),
    ("To open {name}, enter {key}.", "What must be entered to open {name}? Enter"),
    ("{key} is the number for {name}.", "Which number is for {name}? The number for {name} is"),
)
NAMES = (
    *("the red box", "the north gate", "the old safe", "the boat house", "the wine cellar", "the attic", "the garage"),
    *("the library", "the green door", "the tool shed", "the lift", "the archive", "the tower", "the mail room"),
)
SENTENCES = (
    *("A dog slept by the door.", "The train left at noon.", "Rain fell on the roof.", "Nobody said a word."),
    *("The tea was cold.", "Two boys played chess.", "The road turned left.", "Leaves lay in the yard."),
    *("She closed the book.", "The market was full.", "A clock struck four.", "Birds sat on the wire."),
    *("He paid for the bread.", "The river was low.", "They walked for an hour.", "The lamp went out."),
)
DEFAULT_BASE = "data/smollm2-135m-instruct"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON lines to write")
    parser.add_argument("--base", default=DEFAULT_BASE, help="whose tokenizer counts (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=400, help="how many (default: %(default)s)")
    tokens = "tokens before the questions (default: %(default)s)"
    parser.add_argument("--tokens", type=int, nargs="+", default=[5120], help=tokens)
    parser.add_argument("--keys", type=int, default=4, help="codes in each document (default: %(default)s)")
    parser.add_argument("--needle", choices=sorted(NEEDLES), help="write the evaluation's own prompts with this needle")
    asked = "with --needle: ask N times, from the needle to the end"
    parser.add_argument("--asked", type=int, default=1, help=asked)
    deepest = "with --needle: per cent of the filler before it (default: %(default)s)"
    parser.add_argument("--deepest", type=float, default=100, help=deepest)
    parser.add_argument("--books", nargs="+", default=[], help="every other document has text of these files as filler")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.out.exists():
        parser.error(f"{options.out} exists already: remove it, or write another file.")
    if options.asked < 1 or (options.asked > 1 and not options.needle):
        parser.error("--asked is how often a document asks the question of --needle: 1 or more.")
    if options.needle and options.books:
        parser.error("--needle takes the evaluation's own filler: leave --books out.")
    if not 1 <= options.keys <= len(NAMES):
        parser.error(f"--keys must be 1 to {len(NAMES)}.")
    try:
        tokenizer = load_tokenizer(options.base)
        rows = list((own_prompts if options.needle else documents)(tokenizer, options))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(options.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"Wrote {len(rows)} documents to {options.out}.")


def documents(tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield all documents."""
    books = load_texts(options.books) if options.books else []
    for number in range(options.documents):
        random = np.random.default_rng((options.seed, number))
        tokens = int(random.choice(options.tokens))
        start = 0
        if len(books) and number % 2:
            text = books[number // 2 % len(books)] or ""
            start = int(random.integers(max(1, len(text) - 8 * tokens)))
        else:
            text = " ".join(random.choice(SENTENCES, 5, replace=False).tolist() * tokens)
        filler = joined([text[start : start + 8 * tokens]], tokenizer, tokens, varied=False)
        yield document(filler, tokenizer, tokens, options.keys, random)


def own_prompts(tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield prompts of the evaluation with their answers, asked and answered --asked times."""
    filler = load_filler(REPEAT, "text", tokenizer, max(options.tokens))
    wording = NEEDLES[options.needle]
    maker = PromptMaker(wording, filler, tokenizer, options.seed)
    random = np.random.default_rng(options.seed)
    special = len(tokenizer("").input_ids)  # whoever reads the text puts them there again
    for number in range(options.documents):
        length, depth = int(random.choice(options.tokens)), random.uniform(0, options.deepest)
        case = Case(length, depth, number, wording.draw(random))
        intro, needle, question = maker.parts(case)
        room, answer = maker.room(case), f" {case.key}."
        place = filler.split(0, room, case.depth / 100)
        answered = [*question, *maker.encode(f"{answer}\n")]
        ids = [*intro[special:], *filler.ids[:place].tolist(), *needle]
        for later in sorted(filler.split(place, room, share) for share in random.random(options.asked - 1)):
            ids += [*filler.ids[place:later].tolist(), *answered]
            place = later
        ids += [*filler.ids[place:room].tolist(), *question]
        text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) + answer
        ends = [found.end() for found in re.finditer(re.escape(wording.question), text)]
        yield {"text": text, "answers": [[end, end + len(answer)] for end in ends]}


def document(
    filler: Filler, tokenizer: PreTrainedTokenizerBase, tokens: int, keys: int, random: np.random.Generator
) -> dict[str, Any]:
    """Return a document's text and where its answers are; raise ValueError for too few tokens or too little filler."""

    def encode(text: str) -> list[int]:
        found: Any = tokenizer(text, add_special_tokens=False).input_ids
        return list(found)

    names = random.choice(NAMES, keys, replace=False).tolist()
    codes = [str(code) for code in random.choice(90_000, keys, replace=False) + 10_000]
    wordings = [CODES[place] for place in random.integers(len(CODES), size=keys)]
    intro = encode(f"{random.choice(INTROS)}\n")
    needles = [
        encode("\n" + needle.format(name=name, key=code) + "\n")
        for (needle, _), name, code in zip(wordings, names, codes, strict=True)
    ]
    room = tokens - len(tokenizer("").input_ids) - len(intro) - sum(map(len, needles))
    if not 0 <= room <= len(filler.ids):
        raise ValueError(f"--tokens {tokens} is too little for {keys} codes, or a book is too short for it.")
    places = sorted(filler.split(0, room, share) for share in random.random(keys))
    ids, last = intro, 0
    for place, needle in zip(places, needles, strict=True):
        ids += [*filler.ids[last:place].tolist(), *needle]
        last = place
    ids += filler.ids[last:room].tolist()
    text, answers = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)), []
    for place in random.permutation(keys):
        text += "\n" + wordings[place][1].format(name=names[place])
        answer = f" {codes[place]}."
        answers.append([len(text), len(text) + len(answer)])
        text += answer
    return {"text": text, "answers": answers}


if __name__ == "__main__":
    main()
