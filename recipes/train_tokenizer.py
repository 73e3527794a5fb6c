"""Make a byte-level BPE tokenizer for a model that is trained from scratch.

python recipes/train_tokenizer.py ../shared/data/books/train.jsonl.gz --output data/books_bpe4096
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from cacheformers.common.sources import load_texts
from cacheformers.training.tokenizer import train_tokenizer


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, save, and say how many characters a token has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", nargs="+", help="documents, in the forms of train_adapt.py's --train")
    parser.add_argument("--output", type=Path, required=True, help="folder for the tokenizer")
    parser.add_argument("--vocab", type=int, default=4096, help="entries of the vocabulary (default: 4096)")
    parser.add_argument("--megabytes", type=float, default=10, help="learn from the first N megabytes (default: 10)")
    parser.add_argument("--text_field", default="text", help="field that holds a document's text (default: text)")
    options = parser.parse_args(arguments)
    try:
        found = load_texts(options.train, options.text_field, split="train")
        texts = list(beginning(found, int(options.megabytes * 1e6)))
        tokenizer = train_tokenizer(texts, options.vocab)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    tokenizer.save_pretrained(options.output)
    sample = texts[-1][:100_000]
    print(
        f"{len(tokenizer):,} entries from {sum(map(len, texts)):,} characters of {len(texts):,} documents; "
        f"{len(sample) / len(tokenizer(sample).input_ids):.2f} characters a token. Saved in {options.output}"
    )


def beginning(texts: Sequence[str | None], characters: int) -> Iterator[str]:
    """Yield texts until they have this many characters; raise ValueError if all are empty."""
    left = characters
    for found in texts:
        text = (found or "")[: max(left, 0)]
        if text:
            yield text
        left -= len(text)
        if left <= 0:
            return
    if left == characters:
        raise ValueError("All documents are empty: give some with text.")


if __name__ == "__main__":
    main()
