"""`tests/README.md` names folders and tests that exist, and a test for every rule."""

import ast
import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS / "README.md").read_text(encoding="utf-8")


def test_every_folder_of_tests_is_on_the_map():
    named = re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE)
    assert sorted(named) == sorted({path.parent.name for path in TESTS.rglob("test_*.py")})


def test_every_rule_has_tests_that_exist():
    rows = re.findall(r"^\| (?:(\d)\.|\.\.\.) .* \| (.*) \|$", PAGE, re.MULTILINE)
    assert {rule for rule, _ in rows if rule} == set("123456789")
    for _, tests in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named, tests
        for file, name in named:
            tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_names_of_files_occur_once():
    """A helper or test of the same name elsewhere would hide one of them from imports, or from a reader."""
    names = Counter(path.name for path in TESTS.rglob("*.py") if "fixtures" not in path.parts)
    assert [name for name, count in names.items() if count > 1] == []
