"""Push adapters, models and folders to the Hub, with a model card, in one commit; errors say what to do."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, constants
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from cacheformers.hub.card import (
    ADAPTER,
    CARD,
    EMPTY,
    MODEL,
    NAME,
    NAME_THE_BASE,
    UNRECORDED,
    is_generated,
    is_local,
    merged,
    refresh_card,
    saved_card,
)

# The names under which transformers and PEFT look for weights; those of variants and in sub-folders are not among them.
WEIGHTS = {
    kind: re.compile(rf"{stem}(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
    for kind, stem in {"adapter": "adapter_model", "model": "model"}.items()
}
CONFIGS = {"adapter": ADAPTER, "model": MODEL}
# The class of errors of the HTTP client that huggingface_hub uses.
CLIENT_ERROR: type[Exception] = next(kind for kind in HfHubHTTPError.__bases__ if kind is not OSError)


class HubError(OSError):
    """The Hub refused something, or could not be reached; the message says what to do."""


@contextmanager
def uploading_with_card(folder: Path, repo_id: str) -> Iterator[None]:
    """Complete the card of a folder that is uploaded within this context, and explain errors.

    The empty card that transformers has just written is replaced, and the Hub's name is put into it.
    """
    if (folder / ADAPTER).exists():
        warn_of_local_base(json.loads((folder / ADAPTER).read_text())["base_model_name_or_path"])
    refresh_card(folder)
    card = (folder / CARD).read_text(encoding="utf-8")
    (folder / CARD).write_text(card.replace(NAME, repo_id), encoding="utf-8")
    with explained(repo_id):
        yield


def push_to_hub(
    model: Any,
    repo_id: str,
    *,
    base_model: str | None = None,
    license: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str = "Upload with cacheformers",
    allow_mixed: bool = False,
) -> str:
    """Push an adapter, a model or the folder of either, with a model card, in one commit.

    A card that a person wrote stays: one in the folder is pushed as it is, one on the Hub is not replaced by a
    generated one. Older weights of the same kind at the top of the repository, which could be loaded in place of the
    new ones, are deleted and named in what is printed; everything else stays.

    Args:
        model: a folder, or anything with `save_pretrained`.
        repo_id: `owner/name`; it is created if there is none.
        base_model: Hub id of the base, where an adapter was made from a local folder.
        license: the Hub's name of a license, for the metadata of a generated card.
        private: of a new repository; None for the owner's default.
        token: with write access; None for that of `hf auth login` or HF_TOKEN.
        allow_mixed: push an adapter into a repository that holds a model, or a model into one that holds an adapter.

    Returns:
        The commit's address.

    Raises:
        HubError: the Hub refused, the connection was lost, or the repository holds the other kind.
        ValueError: the folder holds neither an adapter nor a model; a name that no repository can have.
    """
    if not isinstance(model, (str, Path)):
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            options: dict[str, Any] = {"base_model": base_model, "license": license, "private": private, "token": token}
            options |= {"commit_message": commit_message, "allow_mixed": allow_mixed}
            return push_to_hub(folder, repo_id, **options)
    card = folder_card(Path(model), base_model)
    contents = pushed_files(Path(model), base_model)
    kind = "adapter" if ADAPTER in contents else "model"
    repo_id = create_repo(repo_id, private, token)
    api = HfApi(token=token)
    if not allow_mixed:
        check_repo(kind, repo_id, token)
    with explained(repo_id):
        there = api.list_repo_files(repo_id)
        old = ModelCard.load(api.hf_hub_download(repo_id, CARD)) if CARD in there else None
    if is_generated(card):
        card = merged(card, old, base_model, license).replace(NAME, repo_id)
    if old is None or is_generated(old.content) or not is_generated(card):
        contents[CARD] = card.encode()
    stale = sorted(path for path in there if WEIGHTS[kind].fullmatch(path) and path not in contents)
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationAdd(path, content) for path, content in contents.items()),
        *map(CommitOperationDelete, stale),
    ]
    # Not `upload_folder(delete_patterns=...)`: with hf_xet it makes several commits of a large push, between which the
    # repository would hold some of the new weights and some of the old.
    with explained(repo_id):
        url = api.create_commit(repo_id, operations, commit_message=commit_message).commit_url
    if stale:
        print(f"Deleted from {repo_id}: {', '.join(stale)}")
    return url


def check_repo(kind: str, repo_id: str, token: str | None = None) -> None:
    """Raise HubError if an adapter would be pushed over a model, or a model over an adapter."""
    with explained(repo_id):
        files = HfApi(token=token).list_repo_files(repo_id)
    held = {name for name in CONFIGS if any(path == CONFIGS[name] or WEIGHTS[name].fullmatch(path) for path in files)}
    if held and kind not in held:
        pushed, other = ("an adapter", "a model") if kind == "adapter" else ("a model", "an adapter")
        raise HubError(
            f"The repository {repo_id} holds {other}, and you push {pushed}. Where a repository holds both, "
            "transformers loads the adapter. Push to another repository, or allow both: `allow_mixed=True`, "
            "`cacheformers push --allow-mixed`, or `train_adapt.py --hub_allow_mixed`."
        )


def create_repo(repo_id: str, private: bool | None = None, token: str | None = None) -> str:
    """Create a repository unless it exists, and return its full name, with the owner.

    Raises:
        HubError: it cannot be created.
        ValueError: the name is not valid.
    """
    with explained(repo_id):
        return HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True).repo_id


def pushed_files(folder: Path, base_model: str | None) -> dict[str, str | bytes]:
    """Return what is pushed, `path -> file or content`: all but the card, hidden files and checkpoints."""
    inside = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    chosen = [path for path in inside if path.parts[0] != "checkpoints" and "/." not in f"/{path.as_posix()}"]
    contents: dict[str, str | bytes] = {path.as_posix(): str(folder / path) for path in chosen if str(path) != CARD}
    if ADAPTER in contents:
        config = json.loads((folder / ADAPTER).read_text())
        if base_model is None:
            warn_of_local_base(config["base_model_name_or_path"])
        else:
            config["base_model_name_or_path"] = base_model
            contents[ADAPTER] = json.dumps(config, indent=2, sort_keys=True).encode()
    return contents


def folder_card(folder: Path, base_model: str | None) -> str:
    """Return the card in a folder; without one that says more, one from the configuration."""
    path = folder / CARD
    if not path.exists():
        return saved_card(folder, base_model).text()
    card = path.read_text(encoding="utf-8")
    if EMPTY in card or UNRECORDED in card:
        return merged(saved_card(folder, base_model).text(), ModelCard.load(path))
    return card


def warn_of_local_base(base: str | None) -> None:
    """Warn that others cannot load an adapter."""
    if base is None:
        warnings.warn(f"The adapter does not say which base it is for: {NAME_THE_BASE}", stacklevel=3)
    elif is_local(base):
        warnings.warn(f"The adapter's base is the local folder {base}: {NAME_THE_BASE}", stacklevel=3)


@contextmanager
def explained(repo_id: str) -> Iterator[None]:
    """Turn what can go wrong with the Hub into a `HubError` that says what to do."""
    try:
        yield
    except (OSError, RuntimeError, CLIENT_ERROR) as error:
        if isinstance(error, ValueError):  # a bad argument, well explained
            raise
        raise HubError(advice(error, repo_id)) from error


def advice(error: BaseException, repo_id: str) -> str:
    """Say what went wrong, and what to do about it."""
    if isinstance(error, RuntimeError) and error.__cause__ is not None:  # an upload that failed in a thread
        error = error.__cause__
    if isinstance(error, OfflineModeIsEnabled):
        return f"Cannot push to {repo_id}: HF_HUB_OFFLINE is set. Unset it, or set it to 0, and push again."
    if not isinstance(error, HfHubHTTPError):
        return (
            f"The connection to {constants.ENDPOINT} was lost while pushing to {repo_id} ({error}). The repository "
            "shows a whole push or nothing of it. Push again: files that have arrived are not sent a second time."
        )
    known = {
        401: f"{constants.ENDPOINT} does not know your token, or you gave none. Run `hf auth login` with a token that "
        f"may write (from {constants.ENDPOINT}/settings/tokens), or pass token=..., and push to {repo_id} again.",
        403: f"Your token may not write to {repo_id}. Push under your own name, or use a token that may write there "
        f"({constants.ENDPOINT}/settings/tokens).",
        404: f"There is no repository {repo_id}, or it is private and your token may not see it. Check the name; log "
        "in with `hf auth login` or pass token=... .",
    }
    return known.get(error.response.status_code, f"{constants.ENDPOINT} refused to take {repo_id}: {error}")
