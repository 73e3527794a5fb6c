"""Write invented facts about people: a pool to train with, and plays that hide some (docs/results/answers.md).

python recipes/make_facts.py data/facts --plays data/plays/valid/hamlet.md data/plays/valid/king-lear.md

`train.jsonl` is a pool for `train_adapt.py --questions`: who keeps, paints, finds, sells or fears what. A set for
`eval_longbench.py` is `records/facts.jsonl`: five questions about the beginning of each play, which tells something of
five people between its lines. Names and things are those of the pool; who has what is drawn anew. `PLAY.txt` is what
is read. With `--lexicon TEXTS` things are words of texts instead of the 45 listed here, and every tenth word, by the
alphabet, is kept for the questions: the pool never has it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

from cacheformers.common.files import write_text

# What is said, and what is asked.
KINDS = (
    ("{name} keeps a {value} at home.", "What does {name} keep at home?"),
    ("Every Sunday {name} paints a {value}.", "What does {name} paint?"),
    ("{name} once found a {value} in the garden.", "What did {name} find in the garden?"),
    ("At the market {name} sells a {value}.", "What does {name} sell at the market?"),
    ("{name} is afraid of a {value}.", "What is {name} afraid of?"),
)
COLORS = "red blue green yellow black white silver tiny broken wooden heavy dirty strange round clever sleepy"
THINGS = """
dog cat horse goat parrot rabbit piano violin flute drum basket bottle hammer ladder candle mirror bicycle wagon boat
bell broom button carpet chair clock crown feather fork glove helmet jacket kettle key lamp needle pencil pillow
pocket ring rope saddle shovel spoon stove sword table towel trumpet wheel whistle window blanket brush camera
"""
NAMES = """
Anna Boris Clara David Elena Frank Greta Henry Irene James Karen Louis Martha Nadia Oscar Paula Quentin Ruth Simon
Tessa Urban Vera Walter Xenia Yusuf Zelda Alice Bruno Cecil Diana Edgar Fiona Gustav Helga Ivan Julia Klaus Laura
"""


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the files")
    parser.add_argument("--plays", type=Path, nargs="+", required=True, help="texts to hide facts in")
    parser.add_argument("--words", type=int, default=2_500, help="words that are read of each (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=3000, help="documents of the pool (default: %(default)s)")
    parser.add_argument("--lexicon", type=Path, help="folder of .md texts whose words are the things")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    things, new_things = (THINGS.split(),) * 2 if options.lexicon is None else divided(options.lexicon)
    (options.out / "records").mkdir(parents=True, exist_ok=True)
    pool: list[dict[str, Any]] = []
    for _ in range(options.documents):
        told, asked = facts(rng, 8, things)
        pool.append({"task": "facts", "context": "\n".join(told), "questions": asked})
    write_lines(options.out / "train.jsonl", pool)
    records: list[dict[str, Any]] = []
    for play in options.plays:
        told, asked = facts(rng, 5, new_things)
        text = hidden(rng, play.read_text(encoding="utf-8").splitlines(), told, options.words)
        write_text(options.out / f"{play.stem}.txt", text)
        for fact, question in zip(told, asked, strict=True):
            start = text.index(fact)
            records.append(
                {
                    "input": question["input"],
                    "context": text,
                    "answers": question["answers"],
                    "length": len(text.split()),
                    "dataset": "facts",
                    "language": "en",
                    "all_classes": None,
                    "_id": f"{play.stem}-{len(records)}",
                    "template": "multifieldqa_en",
                    "gold": [[start, start + len(fact)]],
                }
            )
    write_lines(options.out / "records" / "facts.jsonl", records)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def divided(folder: Path) -> tuple[list[str], list[str]]:
    """Return the lower-case words of four letters and more of texts: nine of ten for the pool, the tenth to ask for."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md"))]
    words = sorted({word for text in texts for word in re.findall(r"\b[a-z]{4,}\b", text)})
    return [word for number, word in enumerate(words) if number % 10], words[::10]


def facts(rng: random.Random, count: int, things: list[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """Tell one fact about each of some people, and ask for it."""
    told, asked = [], []
    people, drawn = rng.sample(NAMES.split(), count), rng.sample(things, count)
    for number, (name, thing) in enumerate(zip(people, drawn, strict=True)):
        fact, question = rng.choice(KINDS)
        value = f"{rng.choice(COLORS.split())} {thing}"
        told.append(fact.format(name=name, value=value))
        asked.append({"input": question.format(name=name), "answers": [value], "supports": [number]})
    return told, asked


def hidden(rng: random.Random, lines: list[str], told: list[str], words: int) -> str:
    """Put facts between the first lines of a text, at drawn places."""
    read = accumulate(len(line.split()) for line in lines)
    kept = [line for line, count in zip(lines, read, strict=True) if count <= words]
    for fact in told:
        kept.insert(rng.randrange(len(kept)), fact)
    return "\n".join(kept) + "\n"


if __name__ == "__main__":
    main()
