"""Write stories of bAbI, the pool's and invented ones, with questions about everybody and everything.

python recipes/make_babi.py ../shared/data/longqa/train/babi.jsonl.gz data/babi/train.jsonl --tasks qa1 qa2 qa3

The pools ask one question at a time, and have few stories of qa3. Where somebody (qa1) or something (qa2) is, and where
it was before (qa3), follows from the facts: all of it is asked for, so that one reading teaches more, and `supports`
names the facts about it and those who carried it. Questions of other tasks are copied.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

from cacheformers.common.files import write_text
from cacheformers.evaluation.longbench.records import file_rows

MOVES, TAKES, DROPS = (
    ("moved", "went", "went back", "travelled", "journeyed"),
    ("took", "grabbed", "got", "picked up"),
    ("dropped", "discarded", "put down", "left"),
)
MOVE = re.compile(rf"(\w+) (?:{'|'.join(MOVES)}) to the (\w+)\.")
TAKE, DROP = (re.compile(rf"(\w+) (?:{'|'.join(verbs)}) the (\w+)(?: there)?\.") for verbs in (TAKES, DROPS))
PEOPLE = ("Mary", "John", "Daniel", "Sandra")
ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("football", "apple", "milk")
FOLLOW = ("qa1", "qa2", "qa3")  # whose answers follow from the rules of `World`
# Of invented stories: the fewest and the most facts; and how many of a hundred are moves, takes and drops.
FACTS = {"qa2": (6, 48), "qa3": (14, 96)}
OFTEN = {"qa2": (65, 20, 15), "qa3": (63, 19, 18)}
ENDS = 5  # after how many facts an invented story is asked about: so many numbers of them
LATEST = 0.8  # how often qa3 asks about the room where a thing came last


class World:
    """Who and what is where, as far as the facts of a story say it."""

    def __init__(self) -> None:
        self.facts = 0
        self.room: dict[str, str] = {}  # of a person
        self.carried: dict[str, str] = {}  # thing -> person
        self.rooms: dict[str, list[str]] = {}  # thing -> those where it is known to have been, in order
        self.about: dict[str, list[int]] = {}  # person or thing -> numbers of the facts that name it
        self.carriers: dict[str, set[str]] = {}  # thing -> people

    def tell(self, fact: str) -> None:
        """Take in the next fact; raise ValueError for one of another kind."""
        move, take, drop = (kind.fullmatch(fact) for kind in (MOVE, TAKE, DROP))
        found = move or take or drop
        if found is None:
            raise ValueError(f"This fact does not say who went where, or who took or left something: {fact!r}.")
        person, other = found.groups()
        for name in (person,) if move else (person, other):
            self.about.setdefault(name, []).append(self.facts)
        self.facts += 1
        if move:
            self.room[person] = other
            self._seen(*(thing for thing, carrier in self.carried.items() if carrier == person))
            return
        self.carriers.setdefault(other, set()).add(person)
        self.rooms.setdefault(other, [])
        self.carried[other] = person
        self._seen(other)
        if drop:
            del self.carried[other]

    def _seen(self, *things: str) -> None:
        """Note that things are where those are who carry them."""
        for thing in things:
            room, rooms = self.room.get(self.carried[thing]), self.rooms[thing]
            if room and rooms[-1:] != [room]:
                rooms.append(room)

    def questions(self, task: str, rng: random.Random) -> list[dict[str, Any]]:
        """Ask all that a task can ask now, with answers and the facts that give them."""
        if task == "qa1":
            return [self._question(f"Where is {name}?", room, self.about[name]) for name, room in self.room.items()]
        asked = []
        for thing, rooms in self.rooms.items():
            known = {fact for name in (thing, *self.carriers[thing]) for fact in self.about[name]}
            if task == "qa2" and rooms:
                asked.append(self._question(f"Where is the {thing}?", rooms[-1], known))
            if task == "qa3" and len(rooms) > 1:
                earlier = [place for place in range(1, len(rooms) - 1) if rooms[place] not in rooms[place + 1 :]]
                place = rng.choice(earlier) if earlier and rng.random() > LATEST else len(rooms) - 1
                question = f"Where was the {thing} before the {rooms[place]}?"
                asked.append(self._question(question, rooms[place - 1], known))
        return asked

    def _question(self, text: str, answer: str, supports: Any) -> dict[str, Any]:
        return {"input": text, "answers": [answer], "lines": self.facts, "supports": sorted(supports)}

    def happens(self, task: str, rng: random.Random) -> str:
        """Invent the next fact, and take it in."""
        moves = [(person, room) for person in PEOPLE for room in ROOMS if room != self.room.get(person)]
        takes = [
            (person, thing)
            for thing in THINGS
            for person, room in self.room.items()
            if thing not in self.carried and self.rooms.get(thing, [room])[-1] == room
        ]
        drops = [(person, thing) for thing, person in self.carried.items()]
        can = ((MOVES, moves), (TAKES, takes), (DROPS, drops))
        weights = [often * bool(pairs) for often, (_, pairs) in zip(OFTEN[task], can, strict=True)]
        ((verbs, pairs),) = rng.choices(can, weights)
        person, other = rng.choice(pairs)
        verb, there = rng.choice(verbs), rng.choice(("", "", " there"))
        fact = f"{person} {verb} to the {other}." if verbs is MOVES else f"{person} {verb} the {other}{there}."
        self.tell(fact)
        return fact


def asked(facts: list[str], task: str, ends: set[int], rng: random.Random) -> list[dict[str, Any]]:
    """Ask all that a task can ask of a story after each of the numbers of facts in `ends`."""
    world, questions = World(), []
    for fact in facts:
        world.tell(fact)
        if world.facts in ends:
            questions += world.questions(task, rng)
    return questions


def invented(task: str, number: int, seed: int) -> dict[str, Any]:
    """Invent a story of qa2 or qa3, the same one for the same number and seed."""
    rng, world = random.Random(f"{seed} {task} {number}"), World()
    fewest, most = FACTS[task]
    facts = [world.happens(task, rng) for _ in range(rng.randint(fewest, most))]
    ends = rng.sample(range(2, len(facts) + 1), min(ENDS, len(facts) - 1))
    return {
        "doc_id": f"invented/{task}-{seed}-{number}",
        "task": "babi",
        "source": f"babi_{task}",
        "title": task,
        "context": "\n".join(facts),
        "questions": asked(facts, task, {*ends, len(facts)}, rng),
    }


def main() -> None:
    """Write the pool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pool", type=Path, help="stories of the task 'babi', as train_adapt.py --questions takes them")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--tasks", nargs="+", default=["qa1"], help="(default: %(default)s)")
    parser.add_argument(
        "--invent", type=int, default=0, help="stories to invent of each of qa2 and qa3 (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is invented (default: %(default)s)")
    options = parser.parse_args()
    written, rng = [], random.Random(options.seed)
    for _, story in file_rows(options.pool):
        task = story["source"].removeprefix("babi_")
        if task not in options.tasks:
            continue
        if task in FOLLOW:
            facts = story["context"].split("\n")
            ends = {question["lines"] for question in story["questions"]} or {*range(2, len(facts) + 1, 2)}
            story["questions"] = asked(facts, task, ends, rng)
        written.append(story)
    for task in sorted({*options.tasks} & {*FACTS}):
        written += [invented(task, number, options.seed) for number in range(options.invent)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(options.out, "".join(f"{json.dumps(story)}\n" for story in written))
    print(f"{len(written):,} stories, {sum(len(story['questions']) for story in written):,} questions: {options.out}")


if __name__ == "__main__":
    main()
