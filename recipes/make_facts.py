"""Write invented facts about people, for `make demo`: a pool to train with, and a play that hides ten of them.

python recipes/make_facts.py data/facts --play data/plays/valid/hamlet.md

`train.jsonl` is a pool for `train_adapt.py --questions`. `hidden.txt` is the beginning of the play with ten facts between
its lines, `questions.jsonl` has the ten questions, and `other.txt` is the second half of the play, which tells other
things about the same people. No person and no value of these is in the pool: nothing can have been learned by heart.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import accumulate
from pathlib import Path

from cacheformers.common.files import write_text

# What is said, what is asked, and the values: the first half of each for training, the second for the play.
KINDS = (
    (
        "{name} keeps a {value} at home.",
        "Which animal does {name} keep?",
        "dog cat horse goat parrot rabbit snake donkey falcon monkey turtle lizard".split(),
    ),
    (
        "{name} was born in {value}.",
        "In which town was {name} born?",
        "Paris London Vienna Lisbon Prague Oslo Madrid Athens Dublin Geneva Warsaw Naples".split(),
    ),
    (
        "{name} plays the {value} every evening.",
        "Which instrument does {name} play?",
        "piano violin flute drum harp trumpet guitar organ cello banjo clarinet accordion".split(),
    ),
    (
        "{name} always wears a {value} coat.",
        "What color is the coat of {name}?",
        "red blue green yellow black white orange purple gray brown pink golden".split(),
    ),
    (
        "{name} works as a {value}.",
        "What is the profession of {name}?",
        "baker teacher doctor farmer sailor painter lawyer miller tailor butcher gardener carpenter".split(),
    ),
)
NAMES = (
    "Anna Boris Clara David Elena Frank Greta Henry Irene James Karen Louis Martha Nadia Oscar Paula Quentin Ruth Simon "
    "Tessa Urban Vera Walter Xenia Yusuf Zelda Alice Bruno Cecil Diana Edgar Fiona Gustav Helga Ivan Julia Klaus Laura"
).split()
PEOPLE = "Winifred Tobias Prudence Leopold Rosamund Ignatius Millicent Barnaby Ottilie Crispin".split()


def main() -> None:
    """Write the four files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the files")
    parser.add_argument("--play", type=Path, required=True, help="a text, to hide facts in")
    parser.add_argument("--words", type=int, default=10_000, help="words of the play (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=200, help="documents of the pool (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    documents = [facts(rng, rng.sample(NAMES, 8), slice(0, 6)) for _ in range(options.documents)]
    pool = [{"task": "facts", "context": "\n".join(told), "questions": asked} for told, asked in documents]
    write_text(options.out / "train.jsonl", "".join(f"{json.dumps(document)}\n" for document in pool))
    lines = options.play.read_text(encoding="utf-8").splitlines()
    told, asked = facts(rng, PEOPLE, slice(6, 12))
    write_text(options.out / "hidden.txt", hidden(rng, lines, told, options.words))
    write_text(options.out / "questions.jsonl", "".join(f"{json.dumps(question)}\n" for question in asked))
    told, _ = facts(rng, PEOPLE, slice(6, 12))
    write_text(options.out / "other.txt", hidden(rng, lines[len(lines) // 2 :], told, options.words))


def facts(rng: random.Random, names: list[str], values: slice) -> tuple[list[str], list[dict[str, object]]]:
    """Tell one fact about each person, and ask for it."""
    told, asked = [], []
    for number, name in enumerate(names):
        fact, question, known = rng.choice(KINDS)
        value = rng.choice(known[values])
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
