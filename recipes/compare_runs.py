"""Put the evaluations of several runs over the same held-out documents into one table, and draw them.

python recipes/compare_runs.py runs/demo_lora runs/demo --plots runs/demo/compared
python recipes/compare_runs.py runs/demo_lora runs/demo --against lora
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from cacheformers.evaluation.plots import save_plots
from cacheformers.evaluation.run import Run, print_runs


def main() -> None:
    """Print the table, and draw it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="output folders of train_adapt.py")
    parser.add_argument("--against", metavar="ROW", help="divide by this row, in every part of the tokens")
    parser.add_argument("--plots", type=Path, help="folder for pictures")
    options = parser.parse_args()
    try:
        runs = joined([(folder.name, load(folder)) for folder in options.runs])
        if options.against not in (None, *runs):
            raise ValueError(f"--against: row {options.against!r} does not exist; there are {', '.join(runs)}.")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print_runs(runs, options.against)
    if options.plots:
        save_plots(options.plots, runs)
        print(f"\nPlots are in {options.plots}")


def load(folder: Path) -> dict[str, Run]:
    """Load the evaluation of a run; raise OSError or ValueError if it was not evaluated."""
    scores = json.loads((folder / "train_result.json").read_text(encoding="utf-8"))["scores"]
    if not scores:
        raise ValueError(f"{folder} was not evaluated: resume it with --valid.")
    return {name: Run.from_dict(numbers) for name, numbers in scores.items()}


def joined(found: list[tuple[str, dict[str, Run]]]) -> dict[str, Run]:
    """Return all rows by unique names, base first, controls last; raise ValueError if runs read different documents."""
    first_folder, first = found[0][0], next(iter(found[0][1].values())).total
    names = Counter(name for _, runs in found for name in runs)
    rows: dict[str, Run] = {}
    for folder, runs in found:
        for name, run in runs.items():
            if run.total.tokens_by_document.tolist() != first.tokens_by_document.tolist():
                raise ValueError(
                    f"{folder} and {first_folder} were evaluated on different documents, or parts of them."
                )
            if name == "base":
                rows.setdefault(name, run)
            else:
                rows[f"{name} ({folder})" if names[name] > 1 else name] = run
    return dict(sorted(rows.items(), key=lambda row: (row[1].control, row[0] != "base")))


if __name__ == "__main__":
    main()
