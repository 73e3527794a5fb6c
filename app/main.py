"""Read a text, ask about it, and see what answers come from, on a page in the browser of this machine.

cacheformers app                                     # with data/answers_facts, which `cacheformers fetch` puts there
cacheformers app --adapter ADAPTER                   # a memory adapter; it names its base model
cacheformers app --model MODEL                       # a model with a memory of its own
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cacheformers.app.desk import Desk
from cacheformers.cli.main import add_model
from cacheformers.cli.model import load_model

DEFAULTS = ("data/answers_facts", "model_cards/answers_facts")  # of `cacheformers fetch`, of a clone


def main(arguments: Sequence[str] | None = None) -> None:
    """Load the model and serve the page; errors that a user can fix end with one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="cacheformers app", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model(parser, "the adapter's own")
    parser.add_argument("--port", type=int, help="of the page on this machine (default: the first free one from 7860)")
    parser.add_argument("--max-new-tokens", type=int, default=60, metavar="N", help="longest answer (default: 60)")
    options = parser.parse_args(arguments)
    there = [name for name in DEFAULTS if Path(name).is_dir()]
    adapter = options.adapter or ("" if options.model or not there else there[0])
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before Gradio is imported: nothing is sent anywhere
    try:
        from cacheformers.app.page import launch
    except ModuleNotFoundError as error:
        sys.exit(f'cacheformers app: {error}. Gradio is in an extra: pip install "cacheformers[app]"')
    try:
        model, tokenizer = load_model(options.model or "", adapter, options.device, options.dtype)
        desk = Desk(model, tokenizer, options.max_new_tokens)
        launch(desk, f"Reads and answers with {adapter or options.model}", options.port)
    except (OSError, ValueError) as error:
        sys.exit(f"cacheformers app: {error}")
