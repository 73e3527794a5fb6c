"""Print the table of base models in docs/bases.md, from the rows of `ARCHITECTURES` and from what the methods refuse.

python scripts/bases_table.py          # the table
python scripts/bases_table.py --write  # put it into docs/bases.md
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

import cacheformers  # noqa: F401  # registers the methods
from cacheformers.modeling.architectures import ARCHITECTURES, base_shape
from cacheformers.modeling.memory import BaseShape
from cacheformers.modeling.method import METHODS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "bases.md"
HEAD = "| family | `model_type` | memories | `sliding` | |\n|---|---|---|---|---|\n"
TABLE = re.compile(re.escape(HEAD) + r"(\|.*\n)*")


def fits(config: type[Any], base: BaseShape, **options: Any) -> bool:
    """Whether a method's settings can be resolved against a base."""
    try:
        config(**options).resolve(base)
    except ValueError:
        return False
    return True


def row(model_type: str) -> str:
    """What works on a family as its configuration is by default, in Markdown."""
    known = ARCHITECTURES[model_type]
    base = replace(base_shape(AutoConfig.for_model(model_type)), max_positions=2**17)
    own = [method for method in METHODS.values() if method.adapter_config.__module__.startswith("cacheformers.")]
    refused = [method.title for method in own if not fits(method.adapter_config, base)]
    memories = f"all but {' and '.join(refused)}" if refused else "all"
    windows = [method.adapter_config for method in own if hasattr(method.adapter_config, "local_window")]
    sliding = "yes" if all(fits(config, base, local_window="sliding") for config in windows) else "no"
    return f"| {known.title} | `{model_type}` | {memories} | {sliding} | {known.note} |\n"


def table() -> str:
    """A row for each family that this package knows."""
    return HEAD + "".join(row(model_type) for model_type, known in ARCHITECTURES.items() if known.title)


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(TABLE.sub(lambda found: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
