"""Write stories of bAbI with a question for everybody and after every second fact, so that one reading teaches more.

python recipes/make_babi.py ../shared/data/longqa/train/babi.jsonl.gz data/babi/train.jsonl

The pools ask one question after every second fact of a story. Where everybody is (qa1) follows from the facts, so all
of them are asked for; `supports` names the facts about the person. Questions of the other --tasks are copied.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from cacheformers.common.files import write_text
from cacheformers.evaluation.longbench.records import file_rows
from cacheformers.training.exercises import check_document

MOVE = re.compile(r"(\w+) (?:moved|went|went back|travelled|journeyed) to the (\w+)\.")


def main() -> None:
    """Write the pool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pool", type=Path, help="stories of the task 'babi', as train_adapt.py --questions takes them")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--tasks", nargs="+", default=["qa1"], help="(default: %(default)s)")
    options = parser.parse_args()
    written = []
    for where, story in file_rows(options.pool):
        check_document(story, where)
        task = story.get("source", "").removeprefix("babi_")
        if task == "qa1":
            story["questions"] = whereabouts(story["context"].split("\n"))
        if task in options.tasks:
            written.append(story)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(options.out, "".join(f"{json.dumps(story)}\n" for story in written))
    print(f"{len(written):,} stories, {sum(len(story['questions']) for story in written):,} questions: {options.out}")


def whereabouts(facts: list[str]) -> list[dict[str, Any]]:
    """Ask, after every second fact, where everybody is; raise ValueError for a fact that does not say it."""
    moves = [MOVE.fullmatch(fact) for fact in facts]
    asked: list[dict[str, Any]] = []
    for lines in range(2, len(facts) + 1, 2):
        places: dict[str, str] = {}
        supports: dict[str, list[int]] = {}
        for number, move in enumerate(moves[:lines]):
            if move is None:
                raise ValueError(f"This fact of qa1 does not say who went where: {facts[number]!r}.")
            places[move[1]] = move[2]
            supports.setdefault(move[1], []).append(number)
        for name, place in places.items():
            asked.append({"input": f"Where is {name}?", "answers": [place], "lines": lines, "supports": supports[name]})
    return asked


if __name__ == "__main__":
    main()
