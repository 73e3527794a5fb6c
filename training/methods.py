"""The memory methods as options of a recipe: which one it chooses, and the fields that this one has."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, get_type_hints

from peft import LoraConfig

from cacheformers.adapters import METHODS
from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.training.options import given_options

# Not trained: the published package's errors are for its checkpoints. The others are not chosen.
WITHOUT = ("compatibility", "task_type", "made_for")

PAIRS = dict[int, int] | None
HEADS = dict[int, list[int]] | None
# What a map from layers becomes on the command line, a list of strings, is explained in its help.
NOTATION = {
    PAIRS: " On the command line: 22, or 6:8 for 'search at 6, store at 8'.",
    HEADS: " On the command line: 22:0,2 for 'heads 0 and 2 of layer 22', and 23: for none of layer 23.",
}


class MethodOptions:
    """The fields that a method's adapter config has beyond LoRA's or sets anew.

    Attributes:
        method: its name.
        config: the adapter config.
    """

    method: ClassVar[str]
    config: ClassVar[type[MemoryAdapterConfig]]

    def values(self) -> dict[str, Any]:
        """The fields as the config takes them.

        Raises:
            ValueError: a map from layers that cannot be read.
        """
        chosen = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        for name, read in (("retrieval_map", layer_map), ("far_heads", head_map)):
            if chosen.get(name) is not None:
                chosen[name] = read(chosen[name])
        return chosen


def method_options(config: type[MemoryAdapterConfig]) -> type[MethodOptions]:
    """A dataclass of a method's options."""
    hints, inherited = get_type_hints(config), {field.name for field in dataclasses.fields(LoraConfig)}
    own = {name for kind in config.__mro__[: config.__mro__.index(LoraConfig)] for name in kind.__annotations__}
    fields: list[Any] = []
    for field in dataclasses.fields(config):
        if (field.name in inherited and field.name not in own) or field.name in WITHOUT:
            continue
        kind, metadata = hints[field.name], dict(field.metadata)
        if kind in NOTATION:
            metadata["help"] += NOTATION[kind]
            kind = list[str] | None
        fields.append((field.name, kind, dataclasses.field(default=field.default, metadata=metadata)))
    facts = {
        "method": config.kind.lower(),
        "config": config,
        "_argument_group_name": f"memory (fields of {config.__name__})",
    }
    return dataclasses.make_dataclass("MethodOptions", fields, bases=(MethodOptions,), namespace=facts)


OPTIONS = {kind.lower(): method_options(config) for kind, config in METHODS.items()}


def names(options: type[MethodOptions]) -> set[str]:
    """The names of a method's options."""
    return {field.name for field in dataclasses.fields(options)}  # type: ignore[arg-type]


def chosen_options(arguments: Sequence[str]) -> type[MethodOptions]:
    """The options of the memory that a recipe and its command line choose.

    For LoRA alone they are those of the method that the recipe names, or of the first that has all that are given: the
    memory with which it shares layers and segments.
    """
    given = given_options(arguments)
    named = [value for name, value in reversed(given) if name == "method"]
    if named and named[0] in OPTIONS:
        return OPTIONS[named[0]]
    wanted = {name for name, _ in given} & set().union(*map(names, OPTIONS.values()))
    candidates = [*(name for name in named if name in OPTIONS), *OPTIONS]
    fitting = (name for name in candidates if wanted <= names(OPTIONS[name]))
    return OPTIONS[next(fitting, candidates[0])]


def of_other_methods(options: type[MethodOptions]) -> dict[str, str]:
    """What to say of options that other methods have, by their names."""
    owners: dict[str, list[str]] = {}
    for method, others in OPTIONS.items():
        for name in names(others) - names(options):
            owners.setdefault(name, []).append(method)
    return {
        name: f"{name} is an option of --method {' and '.join(methods)}, and the memory here is {options.method}'s: "
        "leave it out, or choose another method."
        for name, methods in owners.items()
    }


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


def head_map(entries: Sequence[str]) -> dict[int, list[int]]:
    """`["22:0,2", "23:"]` as `{22: [0, 2], 23: []}`.

    Raises:
        ValueError: an entry of another form.
    """
    layers = {}
    for entry in entries:
        layer, colon, heads = entry.partition(":")
        numbers = heads.split(",") if heads else []
        if not colon or not all(number.isdigit() for number in (layer, *numbers)):
            raise ValueError(f"far_heads: {entry!r} is not a layer and its heads (22:0,2, or 23: for none).")
        layers[int(layer)] = [int(number) for number in numbers]
    return layers
