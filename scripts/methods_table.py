"""Print README's table of methods, from what the methods say of themselves.

python scripts/methods_table.py          # the table
python scripts/methods_table.py --write  # put it into README.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import cacheformers  # noqa: F401  # registers the methods
from cacheformers.modeling.method import METHODS

README = Path(__file__).resolve().parents[1] / "README.md"
HEAD = "| method | choose it when | grows with what was read | starts as |\n|---|---|---|---|\n"
TABLE = re.compile(re.escape(HEAD) + r"(\|.*\n)*")


def table() -> str:
    """A row for each method of the package, in Markdown."""
    rows = []
    for method in METHODS.values():
        module = method.adapter_config.__module__.split(".")
        if module[:2] == ["cacheformers", "methods"]:
            place = "/".join(module[1:])
            code = f"{place}.py" if (README.parent / f"{place}.py").exists() else f"{place}/"
            name = f"[{method.title}]({code}), {method.paper}"
            rows.append(f"| {name} | {method.choose_when} | {method.grows} | {method.starts_as} |\n")
    return HEAD + "".join(rows)


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        README.write_text(TABLE.sub(lambda found: table(), README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
