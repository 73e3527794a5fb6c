r"""Call the people of books by other names, so that a name says less about where a fact stands.

python recipes/rename_people.py ../shared/data/books/train.jsonl.gz data/renamed/train.jsonl \
    --names John Mary Sandra Daniel

BABILong's facts are about people whom most books never name. In long texts some do, and a model that has not read of
such namesakes answers from what they did. Here the people of every book who speak most often, one for each of --names,
are called by them; who gets which name is random. Books in which fewer people speak are left out.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from pathlib import Path

from cacheformers.common.files import write_text
from cacheformers.evaluation.longbench.records import file_rows

SPEECH = "said|asked|cried|replied|answered|exclaimed|returned|whispered|thought"
SPEAKERS = re.compile(rf"\b(?:{SPEECH}) ([A-Z][a-z]+)\b"), re.compile(rf"\b([A-Z][a-z]+) (?:{SPEECH})\b")
TITLES = {"Mr", "Mrs", "Miss", "Dr", "Sir", "Lord", "Lady", "Captain", "Monsieur", "Madame"}
LEAST = 3  # times that somebody speaks


def main() -> None:
    """Write the books."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, help="JSON lines with 'text'")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--names", nargs="+", required=True, help="what people are called")
    parser.add_argument("--seed", type=int, default=0, help="of who gets which name (default: %(default)s)")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    written, total = [], 0
    for where, book in file_rows(options.books):
        if not isinstance(book, dict) or not isinstance(book.get("text"), str):
            parser.error(f"{where} has no text.")
        total += 1
        people = speakers(book["text"], len(options.names))
        if len(people) == len(options.names):
            names = dict(zip(people, rng.sample(options.names, len(people)), strict=True))
            written.append({**book, "text": renamed(book["text"], names)})
    if not written:
        parser.error(f"In none of {options.books}'s {total} books do as many people speak as --names has.")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(options.out, "".join(f"{json.dumps(book)}\n" for book in written))
    print(f"{len(written)} of {total} books: {options.out}")


def speakers(text: str, count: int) -> list[str]:
    """Return the `count` people who speak most often, the most frequent first; fewer if fewer speak."""
    spoken = Counter(name for pattern in SPEAKERS for name in pattern.findall(text))
    lower = set(re.findall(r"\b[a-z]+\b", text))  # She, Everybody and Uncle are no names
    often = [name for name, times in spoken.most_common() if times >= LEAST and name not in TITLES]
    return [name for name in often if name.lower() not in lower][:count]


def renamed(text: str, names: dict[str, str]) -> str:
    """Replace whole words by what `names` has for them."""
    return re.sub(r"\b(?:" + "|".join(names) + r")\b", lambda word: names[word[0]], text)


if __name__ == "__main__":
    main()
