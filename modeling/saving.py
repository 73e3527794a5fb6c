"""What else is done when something of this package is saved or uploaded. `cacheformers.hub` adds model cards here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from transformers.utils.hub import PushToHubMixin

# Called with the folder in which an adapter or a model was saved.
AFTER_SAVING: list[Callable[[Path], None]] = []


class Uploads(PushToHubMixin):
    """For model classes of this package: what `push_to_hub` does beside uploading.

    `uploading` is a context manager of a folder and the repository's name, within which the folder is uploaded.
    """

    uploading: Callable[[Path, str], AbstractContextManager[None]] = staticmethod(lambda folder, name: nullcontext())

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **options: Any) -> Any:
        with Uploads.uploading(Path(working_dir), repo_id):
            return super()._upload_modified_files(working_dir, repo_id, *args, **options)


def saved(folder: str | Path) -> None:
    """Do what is to be done after saving into a folder."""
    for act in AFTER_SAVING:
        act(Path(folder))
