"""Write parts of books as a pool of the task 'quote': a sentence begins, and its next ten words are asked for.

python recipes/make_quotes.py ../shared/data/books/train.jsonl.gz data/quotes/train.jsonl

Where in a part a context begins, and which of its sentences are asked about, is drawn anew with every exercise.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cacheformers.common.files import write_text
from cacheformers.evaluation.longbench.records import file_rows


def main() -> None:
    """Write the pool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, help="JSON lines with the fields text and title")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--characters", type=int, default=60_000, help="of a part (default: %(default)s)")
    parser.add_argument("--parts", type=int, default=6, help="most parts of a book (default: %(default)s)")
    options = parser.parse_args()
    lines = []
    for where, book in file_rows(options.books):
        if not isinstance(book, dict) or not isinstance(book.get("text"), str):
            parser.error(f"{where} has no text.")
        text = " ".join(book["text"].split())
        for start in range(0, len(text), options.characters)[: options.parts]:
            part = {"task": "quote", "title": book.get("title", ""), "questions": []}
            lines.append(json.dumps({**part, "context": text[start : start + options.characters]}) + "\n")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(options.out, "".join(lines))
    print(f"{len(lines):,} parts of books: {options.out}")


if __name__ == "__main__":
    main()
