"""Pushing what a recipe trained to the Hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheformers.hub.card import is_local
from cacheformers.hub.push import HubError, check_repo, create_repo, push_to_hub
from cacheformers.training.options import option


@dataclass
class HubOptions:
    """Where the result is pushed."""

    push_to_hub: str | None = option(
        None,
        help="Hub repository, owner/name, for the result, its tokenizer, card and plots. Created before training.",
    )
    hub_private: bool = option(False, help="Create the repository as a private one.")
    hub_base_model: str | None = option(
        None, help="Hub id of the base, to be named in the adapter and its card where --base is a local folder."
    )
    hub_allow_mixed: bool = option(
        False, help="Push an adapter into a repository that holds a model, or a model into one that holds an adapter."
    )


HubOptions._argument_group_name = "the Hub"  # type: ignore[attr-defined]


def check_hub(options: HubOptions, base: str | None) -> None:
    """Find out before the training whether its result can be pushed, by creating the repository.

    Raises:
        HubError, ValueError: it cannot; the repository holds the other kind; or nobody else could load it.
    """
    if options.push_to_hub is None:
        return
    if base is not None and options.hub_base_model is None and is_local(base):
        raise ValueError(
            f"--push_to_hub: nobody else can load an adapter whose base is the local folder {base}. Name the base's "
            "Hub id: --hub_base_model owner/name (push the base first, if it is not there)."
        )
    repo_id = create_repo(options.push_to_hub, options.hub_private)
    if not options.hub_allow_mixed:
        check_repo("model" if base is None else "adapter", repo_id)


def publish(folder: Path, options: HubOptions) -> str:
    """Push a finished run.

    Returns:
        The commit's address.

    Raises:
        HubError: says how to push later what lies in the folder.
    """
    assert options.push_to_hub is not None
    named = {"base_model": options.hub_base_model, "allow_mixed": options.hub_allow_mixed or None}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    try:
        return push_to_hub(folder, options.push_to_hub, private=options.hub_private, **given)
    except HubError as error:
        written = "".join(f", {name}={value!r}" for name, value in given.items())
        raise HubError(
            f"{error}\nThe result is finished and lies in {folder}. To push it from Python: "
            f"cacheformers.push_to_hub({str(folder)!r}, {options.push_to_hub!r}{written})"
        ) from error
