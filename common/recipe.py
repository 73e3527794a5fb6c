"""A recipe's options: dataclasses filled from a YAML file and from the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from argparse import Action, ArgumentDefaultsHelpFormatter
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser


def option(default: Any = dataclasses.MISSING, *, help: str) -> Any:
    """Make a dataclass field with a help text; it is required if it has no default."""
    return dataclasses.field(default=default, metadata={"help": help})


def read_recipe(path: Path) -> dict[Any, Any]:
    """Read the lines of a recipe file; raise FileNotFoundError, or ValueError if it is not a YAML mapping."""
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"{path} is no recipe: the first argument must be a .yaml file or an option like --base.")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist.")
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} must hold lines of the form 'key: value'.")
    return recipe


def given_options(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Names of the options that a recipe and its command line set, each with its first value, in their order.

    What cannot be read is left out, for the parser to find.
    """
    given, found = list(arguments), []
    if given and not given[0].startswith("-"):
        with contextlib.suppress(OSError, ValueError):
            found = [(str(name), str(value)) for name, value in read_recipe(Path(given[0])).items()]
    for word, after in pairwise([*given, ""]):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found.append((name.replace("-", "_"), value if equals else after))
    return found


class Formatter(ArgumentDefaultsHelpFormatter):
    """Shows defaults, except None, whose meaning the help texts give, and one spelling of each option.

    HfArgumentParser takes `--max-length` for `--max_length`, too; recipe files know the latter alone.
    """

    def _format_action_invocation(self, action: Action) -> str:
        """Format an option and its values for the help."""
        shown = copy(action)
        shown.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
        return super()._format_action_invocation(shown if shown.option_strings else action)

    def _get_help_string(self, action: Action) -> str | None:
        name = next(iter(action.option_strings), "")
        if name.startswith("--no_"):  # made by HfArgumentParser, with the help of what it turns off
            return f"Turn --{name.removeprefix('--no_')} off."
        return action.help if action.default is None else super()._get_help_string(action)


class RecipeParser(HfArgumentParser):
    """Parses `[RECIPE.yaml] [--key value ...]`; the command line overrides the file.

    Args:
        elsewhere: what to say of options that exist, but not here, by their names.

    Attributes:
        given: names of the options that the last recipe and its command line set, whatever to.
    """

    given: set[str]

    def __init__(self, kinds: Sequence[Any], description: str, elsewhere: Mapping[str, str] | None = None) -> None:
        self.elsewhere = elsewhere or {}
        super().__init__(
            kinds,
            description=f"{description} RECIPE.yaml holds lines 'key: value' with the options below.",
            usage="%(prog)s [RECIPE.yaml] [--key value ...]",
            allow_abbrev=False,
            formatter_class=Formatter,
        )

    def parse(self, arguments: Sequence[str]) -> tuple[Any, ...]:
        """Return one instance of each dataclass; exit with a message on bad input."""
        given = list(arguments)
        try:
            if given and not given[0].startswith("-"):
                given = [*self.recipe_arguments(Path(given[0])), *given[1:]]
            self.given = {name for name, _ in given_options(given)} & set(self.known())
            *options, rest = self.parse_args_into_dataclasses(
                given, return_remaining_strings=True, look_for_args_file=False
            )
        except (OSError, ValueError) as error:
            self.error(str(error))
        if rest:
            self.error(self.unknown(rest[0].partition("=")[0]))
        return tuple(options)

    def recipe_arguments(self, path: Path) -> list[str]:
        """Turn a recipe file into command-line arguments, so that both are checked alike.

        Raises:
            FileNotFoundError, ValueError: no such file; not a YAML mapping; a key that is no option; an empty list.
        """
        arguments: list[str] = []
        for key, value in read_recipe(path).items():
            if key not in self.known():
                raise ValueError(f"{path}: {self.unknown(str(key))}")
            if value == []:
                raise ValueError(f"{path}: {key} has no values: give some, or leave the line out.")
            if isinstance(value, list):
                arguments += [f"--{key}", *(str(item) for item in value)]
            elif value is not None:
                arguments.append(f"--{key}={value}")
        return arguments

    def known(self) -> list[str]:
        return [action.dest for action in self._actions if action.dest != "help"]

    def unknown(self, name: str) -> str:
        """Return the error for an option that does not exist."""
        plain = name.lstrip("-").replace("-", "_")
        if plain in self.elsewhere:
            return self.elsewhere[plain]
        near = difflib.get_close_matches(plain, self.known(), n=1)
        return f"unknown option {name!r}" + (f": did you mean {near[0]!r}?" if near else "; --help lists all options.")
