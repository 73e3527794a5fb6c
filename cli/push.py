"""Push an adapter or a model to the Hub, with its card.

cacheformers push runs/books me/books --base-model HuggingFaceTB/SmolLM2-135M-Instruct --license mit
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cacheformers.hub import push_to_hub


def main(arguments: Sequence[str] | None = None) -> None:
    """Push as the arguments say, and print the address."""
    parser = argparse.ArgumentParser(
        prog="cacheformers push", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="folder", help="folder of an adapter or a model")
    parser.add_argument("repo_id", metavar="OWNER/NAME", help="where to; created if there is none")
    parser.add_argument("--base-model", metavar="ID", help="Hub id of an adapter's base, if it was a local folder")
    parser.add_argument("--license", metavar="NAME", help="the Hub's name of a license, for the card")
    parser.add_argument("--private", action="store_true", default=None, help="create a private repository")
    parser.add_argument("--token", help="with write access (default: that of `hf auth login` or HF_TOKEN)")
    parser.add_argument("--allow-mixed", action="store_true", help="an adapter and a model may share the repository")
    given = parser.parse_args(arguments)
    try:
        print(push_to_hub(**vars(given)))
    except (OSError, ValueError) as error:
        sys.exit(f"cacheformers push: {error}")
