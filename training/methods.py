"""The memory methods as options of a recipe: which one it chooses, and that method's fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, get_type_hints

from peft import LoraConfig

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.common.recipe import given_options, option
from cacheformers.methods import DEFAULT
from cacheformers.modeling.method import METHODS, is_method, method_named

# The published package's errors are for its checkpoints, not for training; the others are not for users to choose.
WITHOUT = ("compatibility", "task_type", "made_for")

PAIRS = dict[int, int] | None
HEADS = dict[int, list[int]] | None
# Maps from layers are lists of strings on the command line; their help explains the notation.
NOTATION = {
    PAIRS: " On the command line: 22, or 6:8 for 'search at 6, store at 8'.",
    HEADS: " On the command line: 22:0,2 for 'heads 0 and 2 of layer 22', and 23: for none of layer 23.",
}


class MethodOptions:
    """The fields of a method's adapter config that LoRA lacks or that it overrides.

    Attributes:
        method: its name.
        config: the adapter config.
    """

    method: ClassVar[str]
    config: ClassVar[type[MemoryAdapterConfig]]

    def values(self) -> dict[str, Any]:
        """Return the fields as the config takes them; raise ValueError for a map from layers that cannot be read."""
        chosen = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]  # a dataclass at runtime
        hints = get_type_hints(self.config)
        for name, entries in chosen.items():
            if entries is not None and hints[name] in NOTATION:
                chosen[name] = layer_map(entries) if hints[name] == PAIRS else head_map(name, entries)
        return chosen


@cache
def options_of(method: str) -> type[MethodOptions]:
    """Make the dataclass of a registered method's options."""
    config = METHODS[method].adapter_config
    hints, inherited = get_type_hints(config), {field.name for field in dataclasses.fields(LoraConfig)}
    own = {name for kind in config.__mro__[: config.__mro__.index(LoraConfig)] for name in kind.__annotations__}
    fields: list[Any] = []
    for field in dataclasses.fields(config):
        if (field.name in inherited and field.name not in own) or field.name in WITHOUT:
            continue
        kind: Any = hints[field.name]
        text = field.metadata["help"]
        if kind in NOTATION:
            kind, text = list[str] | None, text + NOTATION[kind]
        fields.append((field.name, kind, option(field.default, help=text)))
    facts = {"method": method, "config": config, "_argument_group_name": f"memory (fields of {config.__name__})"}
    return dataclasses.make_dataclass("MethodOptions", fields, bases=(MethodOptions,), namespace=facts)


def names(options: type) -> set[str]:
    """Return the names of a dataclass's options."""
    return {field.name for field in dataclasses.fields(options)}


def chosen_options(arguments: Sequence[str]) -> type[MethodOptions]:
    """Return the options class of the memory that a recipe and its command line choose.

    LoRA alone shares layers and segments with a memory: the method that the recipe names, or the first that has all
    options that are given.
    """
    given = given_options(arguments)
    named = [value for name, value in reversed(given) if name == "method"]
    if named and is_method(named[0]):
        return options_of(method_named(named[0]).name)
    every = {name: names(options_of(name)) for name in METHODS}
    wanted = {name for name, _ in given} & set().union(*every.values())
    candidates = [*(method_named(name).name for name in named if is_method(name)), DEFAULT, *METHODS]
    return options_of(next((name for name in candidates if wanted <= every[name]), candidates[0]))


def of_other_methods(options: type[MethodOptions]) -> dict[str, str]:
    """Return an error message for each option that only other methods have, by its name."""
    owners: dict[str, list[str]] = {}
    for method in METHODS:
        for name in names(options_of(method)) - names(options):
            owners.setdefault(name, []).append(method)
    return {
        name: f"{name} is an option of --method {' and '.join(methods)}, and the memory here is {options.method}'s: "
        "leave it out, or choose another method."
        for name, methods in owners.items()
    }


def layer_map(entries: Sequence[str]) -> dict[int, int]:
    """Read `["6", "12:14"]` as `{6: 6, 12: 14}`; raise ValueError for another form."""
    layers = {}
    for entry in entries:
        first, _, second = entry.partition(":")
        if not first.isdigit() or not (second or first).isdigit():
            raise ValueError(f"retrieval_map: {entry!r} is neither a layer (22) nor a pair of layers (6:8).")
        layers[int(first)] = int(second or first)
    return layers


def head_map(name: str, entries: Sequence[str]) -> dict[int, list[int]]:
    """Read `["22:0,2", "23:"]` as `{22: [0, 2], 23: []}`; raise ValueError for another form."""
    layers = {}
    for entry in entries:
        layer, colon, heads = entry.partition(":")
        numbers = heads.split(",") if heads else []
        if not colon or not all(number.isdigit() for number in (layer, *numbers)):
            raise ValueError(f"{name}: {entry!r} is not a layer and its heads (22:0,2, or 23: for none).")
        layers[int(layer)] = [int(number) for number in numbers]
    return layers
