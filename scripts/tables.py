"""The tables in README.md and docs/bases.md that are made from what methods and base models say of themselves.

python scripts/tables.py          # both tables
python scripts/tables.py --write  # put them into their pages
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

ROOT = Path(__file__).resolve().parents[1]
OWN = [method for method in METHODS.values() if method.adapter_config.__module__.startswith("cacheformers.methods.")]
METHODS_HEAD = "| method | choose it when | grows with what was read | starts as |\n|---|---|---|---|\n"
BASES_HEAD = "| family | `model_type` | memories | `sliding` | |\n|---|---|---|---|---|\n"


def methods_table() -> str:
    """A row for each method of the package, in Markdown."""
    rows = []
    for method in OWN:
        place = "/".join(method.adapter_config.__module__.split(".")[1:])
        code = f"{place}.py" if (ROOT / f"{place}.py").exists() else f"{place}/"
        name = f"[{method.title}]({code}), {method.paper}"
        rows.append(f"| {name} | {method.choose_when} | {method.grows} | {method.starts_as} |\n")
    return METHODS_HEAD + "".join(rows)


def bases_table() -> str:
    """A row for each family that this package knows, in Markdown."""
    return BASES_HEAD + "".join(base_row(model_type) for model_type, known in ARCHITECTURES.items() if known.title)


def base_row(model_type: str) -> str:
    """What works on a family as its configuration is by default."""
    known = ARCHITECTURES[model_type]
    base = replace(base_shape(AutoConfig.for_model(model_type)), max_positions=2**17)
    refused = [method.title for method in OWN if not fits(method.adapter_config, base)]
    memories = f"all but {' and '.join(refused)}" if refused else "all"
    windows = [method.adapter_config for method in OWN if hasattr(method.adapter_config, "local_window")]
    sliding = "yes" if all(fits(config, base, local_window="sliding") for config in windows) else "no"
    return f"| {known.title} | `{model_type}` | {memories} | {sliding} | {known.note} |\n"


def fits(config: type[Any], base: BaseShape, **options: Any) -> bool:
    """Whether a method's settings can be resolved against a base."""
    try:
        config(**options).resolve(base)
    except ValueError:
        return False
    return True


PAGES = {ROOT / "README.md": methods_table, ROOT / "docs" / "bases.md": bases_table}


def main() -> None:
    """Print the tables, or replace those of the pages: each from its first two lines on."""
    for page, make in PAGES.items():
        table = make()
        if sys.argv[1:] == ["--write"]:
            head = "".join(table.splitlines(keepends=True)[:2])
            before, _, rest = page.read_text(encoding="utf-8").partition(head)
            page.write_text(before + table + re.sub(r"\A(\|.*\n)*", "", rest), encoding="utf-8")
        else:
            print(table)


if __name__ == "__main__":
    main()
