"""A recipe's options: dataclasses filled from a YAML file and from the command line."""

from __future__ import annotations

import dataclasses
import difflib
from argparse import Action, ArgumentDefaultsHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from peft import LoraConfig
from transformers import HfArgumentParser


def option(default: Any = dataclasses.MISSING, *, help: str) -> Any:
    """A dataclass field with its help text; required without a default."""
    return dataclasses.field(default=default, metadata={"help": help})


def method_options(config: type[LoraConfig], without: Sequence[str] = ()) -> type:
    """A dataclass of the fields that a method's adapter config has beyond LoRA's or sets anew, but for some.

    A map from layers to layers becomes a list of strings, `22` or `6:8` (see `layer_map`).
    """
    hints, inherited = get_type_hints(config), {field.name for field in dataclasses.fields(LoraConfig)}
    own = {name for kind in config.__mro__[: config.__mro__.index(LoraConfig)] for name in kind.__annotations__}
    fields: list[Any] = []
    for field in dataclasses.fields(config):
        if (field.name in inherited and field.name not in own) or field.name in without:
            continue
        kind, metadata = hints[field.name], dict(field.metadata)
        if kind == dict[int, int] | None:
            kind = list[str] | None
            metadata["help"] += " On the command line: 22, or 6:8 for 'search at 6, store at 8'."
        fields.append((field.name, kind, dataclasses.field(default=field.default, metadata=metadata)))
    options = dataclasses.make_dataclass("MethodOptions", fields)
    options._argument_group_name = f"memory (fields of {config.__name__})"  # type: ignore[attr-defined]
    return options


def layer_map(entries: Sequence[str]) -> dict[int, int]:
    """`["6", "12:14"]` as `{6: 6, 12: 14}`.

    Raises:
        ValueError: an entry of another form.
    """
    layers = {}
    for entry in entries:
        first, _, second = entry.partition(":")
        if not first.isdigit() or not (second or first).isdigit():
            raise ValueError(f"retrieval_map: {entry!r} is neither a layer (22) nor a pair of layers (6:8).")
        layers[int(first)] = int(second or first)
    return layers


class Formatter(ArgumentDefaultsHelpFormatter):
    """Shows defaults, except None, whose meaning the help texts give."""

    def _get_help_string(self, action: Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class RecipeParser(HfArgumentParser):
    """Parses `[RECIPE.yaml] [--key value ...]`; what the command line says goes before what the file says.

    Attributes:
        given: names of the options that the last recipe and its command line set, whatever to.
    """

    given: set[str]

    def __init__(self, kinds: Sequence[Any], description: str) -> None:
        super().__init__(
            kinds,
            description=f"{description} RECIPE.yaml holds lines 'key: value' with the options below.",
            usage="%(prog)s [RECIPE.yaml] [--key value ...]",
            allow_abbrev=False,
            formatter_class=Formatter,
        )

    def parse(self, arguments: Sequence[str]) -> tuple[Any, ...]:
        """One instance of each dataclass. Exits with a message on bad input."""
        given = list(arguments)
        try:
            if given and not given[0].startswith("-"):
                given = [*self.recipe_arguments(Path(given[0])), *given[1:]]
            names = {word[2:].partition("=")[0].replace("-", "_") for word in given if word.startswith("--")}
            self.given = names & set(self.known())
            *options, rest = self.parse_args_into_dataclasses(
                given, return_remaining_strings=True, look_for_args_file=False
            )
        except (OSError, ValueError) as error:
            self.error(str(error))
        if rest:
            self.error(self.unknown(rest[0].partition("=")[0]))
        return tuple(options)

    def recipe_arguments(self, path: Path) -> list[str]:
        """A recipe file as command-line arguments, so that both are checked alike.

        Raises:
            FileNotFoundError, ValueError: no such file; not a YAML mapping; a key that is no option.
        """
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
        arguments: list[str] = []
        for key, value in recipe.items():
            if key not in self.known():
                raise ValueError(f"{path}: {self.unknown(str(key))}")
            if isinstance(value, list):
                arguments += [f"--{key}", *(str(item) for item in value)]
            elif value is not None:
                arguments.append(f"--{key}={value}")
        return arguments

    def known(self) -> list[str]:
        return [action.dest for action in self._actions if action.dest != "help"]

    def unknown(self, name: str) -> str:
        """What to say of an option that does not exist."""
        near = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), self.known(), n=1)
        return f"unknown option {name!r}" + (f": did you mean {near[0]!r}?" if near else "; --help lists all options.")
