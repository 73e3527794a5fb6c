"""Write results into a model card's metadata, where the Hub shows them (`model-index`).

    cacheformers results runs/longbench/NAME/result.json runs/perplexity/result.json --card ADAPTER

Results that the card has already stay, but for those that are measured anew. The card's text stays as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from cacheformers.hub.card import CARD, refresh_card
from cacheformers.hub.model_index import eval_results, joined


def write_results(results: Sequence[str | Path], folder: str | Path) -> list[EvalResult]:
    """Write what result files say into the card of a folder; a folder without a card gets one.

    Args:
        results: result.json files, or their folders.
        folder: of an adapter or a model.

    Returns:
        What was written.

    Raises:
        OSError, ValueError: a file is missing or no result, the folder holds no model, or its card is damaged. Nothing
            has been written then.
    """
    new: list[EvalResult] = []
    for result in results:
        new = joined(new, read(Path(result)))
    path = Path(folder) / CARD
    if not path.exists():
        refresh_card(Path(folder))
    try:
        card = ModelCard.load(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    data: Any = card.data
    data.model_name = data.model_name or Path(folder).resolve().name
    data.eval_results = joined(data.eval_results or [], new)
    card.save(path)
    return new


def read(path: Path) -> list[EvalResult]:
    """The results in a file, or in the result.json of a folder."""
    file = path / "result.json" if path.is_dir() else path
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        return eval_results(result if isinstance(result, dict) else {})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Do so from the command line."""
    parser = argparse.ArgumentParser(
        prog="cacheformers results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", metavar="RESULT", help="result.json, or the folder that holds it")
    parser.add_argument("--card", required=True, metavar="FOLDER", help="of the adapter or the model")
    options = parser.parse_args(arguments)
    try:
        written = write_results(options.results, options.card)
    except (OSError, ValueError) as error:
        sys.exit(f"cacheformers results: {error}")
    print(f"{len(written)} results are in {Path(options.card) / CARD}.")


if __name__ == "__main__":
    main()
