"""Put records of each length into a folder of their own, so that each length is one run of eval_longbench.py.

python recipes/split_by_length.py ../shared/data/longqa/assembled/test data/sets

`target_tokens` of a record names the folder: data/sets/4096/wiki_qa.jsonl. Records without it, or with 0, have lengths
of their own and go to `own`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cacheformers.common.files import write_text
from cacheformers.evaluation.longbench.records import file_rows, own_tasks, task_file


def main() -> None:
    """Write a file for each length and task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="folder with TASK.jsonl, .jsonl.gz or .parquet")
    parser.add_argument("out", type=Path, help="folder for LENGTH/TASK.jsonl")
    parser.add_argument("--tasks", nargs="+", help="tasks by name (default: all)")
    options = parser.parse_args()
    for task in options.tasks or own_tasks(str(options.records)):
        lengths: dict[str, list[str]] = {}
        for _, row in file_rows(task_file(options.records, task)):
            lengths.setdefault(str(row.get("target_tokens") or "own"), []).append(f"{json.dumps(row)}\n")
        for length, lines in lengths.items():
            (options.out / length).mkdir(parents=True, exist_ok=True)
            write_text(options.out / length / f"{task}.jsonl", "".join(lines))
        print(f"{task}: " + ", ".join(f"{len(lines)} of {length}" for length, lines in lengths.items()))


if __name__ == "__main__":
    main()
