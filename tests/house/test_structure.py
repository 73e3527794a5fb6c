"""The house: no import circle, no import of a floor above, no method named outside `methods/`."""

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from cacheformers.modeling.method import METHODS

ROOT = Path(__file__).resolve().parents[2]
# From the ground up; a module imports its own floor and those below. Longer prefixes are the more exact ones.
FLOORS = (
    ("modeling.search",),
    ("modeling",),
    ("adapters",),
    ("methods",),
    ("common",),
    ("training", "evaluation", "hub"),
    ("", "train_adapt", "eval_longbench", "cli", "app", "__main__", "benchmarks"),
)
OWN = [name for name, method in METHODS.items() if method.options.__module__.startswith("cacheformers.")]
METHOD_NAMES = re.compile(rf'"({"|".join(OWN)})"')


@cache
def modules():
    """Every module of the package, by its name below `cacheformers`; the root is ''."""
    folders = {name for floor in FLOORS for name in floor if (ROOT / name).is_dir() and name}
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    paths += [
        path
        for name in ("__init__", "__main__", "train_adapt", "eval_longbench")
        if (path := ROOT / f"{name}.py").exists()
    ]
    return {module_name(path): path for path in paths}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports():
    """What each module imports of the package, lazily or for type checking too."""
    known = modules()
    found = {name: set() for name in known}
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in targets:
                package, _, inner = target.partition(".")
                if package != "cacheformers":
                    continue
                while inner not in known and "." in inner:
                    inner = inner.rpartition(".")[0]
                found[name].add(inner if inner in known else "")
    return found


def floor(name):
    """The number of a module's floor."""
    fitting = [
        (len(prefix), number)
        for number, prefixes in enumerate(FLOORS)
        for prefix in prefixes
        if name == prefix or (prefix and name.startswith(f"{prefix}."))
    ]
    return max(fitting)[1]


def test_no_import_circle():
    try:
        TopologicalSorter(imports()).prepare()
        circle = []
    except CycleError as error:
        circle = error.args[1]
    assert circle == []


def test_imports_go_down():
    upward = sorted(
        f"{name} imports {target or 'cacheformers'}"
        for name, targets in imports().items()
        for target in targets
        if floor(target) > floor(name)
    )
    assert upward == []


def test_hub_is_imported_by_nobody_below():
    below = [name for name in modules() if floor(name) < floor("hub")]
    assert not [name for name in below if any(target.split(".")[0] == "hub" for target in imports()[name])]


@pytest.mark.parametrize("name", sorted(modules()))
def test_only_methods_name_methods(name):
    if name.split(".")[0] in ("methods", "benchmarks"):
        pytest.skip("methods name themselves")
    assert not METHOD_NAMES.findall(modules()[name].read_text(encoding="utf-8"))


def test_a_circle_would_be_seen():
    """The checks see what they look for."""
    with pytest.raises(CycleError):
        TopologicalSorter({"modeling.cache": {"training.loop"}, "training.loop": {"modeling.cache"}}).prepare()
    assert floor("training.loop") > floor("modeling.cache") > floor("modeling.search.exact")
