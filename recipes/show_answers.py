"""Show what each method answered, question by question, and count who is right: who says every word of an answer.

python recipes/show_answers.py data/facts/records runs/facts_asked

LongBench's F1 also takes off for words beside the answer, which says as much about the form of answers as about memory.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cacheformers.evaluation.longbench.metrics import normalized


def main() -> None:
    """Print the questions and answers, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the records")
    parser.add_argument("output", type=Path, help="output folder of eval_longbench.py, with the answers of its methods")
    options = parser.parse_args()
    records = [row for path in sorted(options.data.glob("*.jsonl")) for row in lines(path)]
    methods = {folder.name: answers(folder) for folder in sorted((options.output / "pred").glob("*/"))}
    if not records or not methods:
        parser.error(f"There are {len(records)} records, and answers of {len(methods)} methods: nothing to show.")
    width = max(map(len, methods))
    right = dict.fromkeys(methods, 0)
    for record in records:
        print(f"\n{record['input']}  ({' or '.join(record['answers'])})")
        for name, said in methods.items():
            answer = said.get(record["_id"], "")
            good = any(holds(answer, wanted) for wanted in record["answers"])
            right[name] += good
            print(f"  {'+' if good else ' '} {name:<{width}}  {' '.join(answer.split())}")
    print(f"\nRight of {len(records)}:")
    for name, count in sorted(right.items(), key=lambda item: -item[1]):
        print(f"    {name:<{width}}  {count}")


def lines(path: Path) -> list[dict[str, str]]:
    """Read JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answers(folder: Path) -> dict[str, str]:
    """Read a method's answers by the id of their record."""
    return {row["_id"]: row["pred"] for path in folder.glob("*.jsonl") for row in lines(path)}


def holds(answer: str, wanted: str) -> bool:
    """Whether an answer holds every word of the one that is wanted."""
    return set(normalized(wanted).split()) <= set(normalized(answer).split())


if __name__ == "__main__":
    main()
