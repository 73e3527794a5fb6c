"""Write short records in LongBench's form, to see what training on long texts has cost where all text is in sight.

python recipes/make_short.py ../shared/data/longqa/test data/short

Each record is one document of a pool with its first question. The pools are those of `train_adapt.py --questions`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cacheformers.common.files import write_text
from cacheformers.evaluation.longbench.records import file_rows, task_file

# Whose prompt and metric fit a task.
TEMPLATES = {"wiki_qa": "hotpotqa", "abstract_qa": "qasper", "zh_qa": "dureader", "thread_summary": "qmsum"}


def main() -> None:
    """Write a file for each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pools", type=Path, help="folder with TASK.jsonl or .jsonl.gz")
    parser.add_argument("out", type=Path, help="folder for TASK.jsonl")
    parser.add_argument("--records", type=int, default=60, help="of each task (default: %(default)s)")
    parser.add_argument("--words", type=int, default=400, help="of a document at most (default: %(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for task, template in TEMPLATES.items():
        short = [row for _, row in file_rows(task_file(options.pools, task)) if row["length"] <= options.words]
        lines = [
            {
                **{"_id": row["doc_id"], "context": row["context"], "length": row["length"], "template": template},
                **{"input": row["questions"][0]["input"], "answers": row["questions"][0]["answers"]},
            }
            for row in short[: options.records]
        ]
        write_text(options.out / f"{task}.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
        print(f"{task}: {len(lines)} records")


if __name__ == "__main__":
    main()
