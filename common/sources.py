"""Where texts come from: files, folders and datasets of the Hub, loaded whole or streamed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from datasets import IterableDataset, Json, List, Value, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError

# Suffix -> how `datasets` calls the format.
FORMATS = {".jsonl": "json", ".jsonl.gz": "json", ".parquet": "parquet", ".txt": "text", ".md": "text"}
# NAME[@REVISION][:CONFIG[:SPLIT]]; a split may be a slice, such as train[:1%].
DATASET = re.compile(r"(?P<name>[^:@]+)(@(?P<revision>[^:]+))?(:(?P<config>[^:]*))?(:(?P<split>.+))?")
# The words for splits in names of files and folders, as `datasets` knows them.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
SPLIT = re.compile(rf"(?:^|[-._])({'|'.join(SPLITS)})(?=[-._\d]|$)")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
PLACES = List(List(Value("int64")))  # pairs of a start and an end, in characters
TEXT, CHATS = "text", "messages"  # what data sets call their fields
# What `datasets` raises for data that it cannot read or reach (ConnectionError: OSError; ArrowInvalid: ValueError).
UNREADABLE = (DatasetGenerationError, StopIteration, EOFError, OSError, ValueError)


@dataclass(frozen=True)
class Source:
    """Arguments of one call of `load_dataset`: files of one format, or a dataset.

    Attributes:
        name: a format, a Hub id or a dataset folder.
        files: none for a dataset.
    """

    name: str
    files: tuple[str, ...] = ()
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    @property
    def title(self) -> str:
        """Its name in errors."""
        return shortened(self.files) if self.files else self.name

    def load(self, text_field: str, streaming: bool = False) -> Any:
        """Load a dataset, or an iterable one, with the text field as its only column.

        Raises:
            ValueError: it cannot be read or reached, or has no such field of text.
        """
        loaded, fields = self._opened(streaming)
        if text_field not in fields:
            raise ValueError(
                f"{self.title}: no field {text_field!r}, only {', '.join(fields) or 'nothing'}. Name the one that "
                "holds the text with text_field."
            )
        kind = getattr(fields[text_field], "dtype", fields[text_field])
        if kind not in ("string", "large_string", "null") and not isinstance(fields[text_field], str | None):
            raise ValueError(f"{self.title}: the field {text_field!r} holds {kind}, not text.")
        return loaded.select_columns([text_field])

    def load_places(self, field: str) -> Any:
        """Load a dataset with one column, lists of pairs of integers; raise ValueError if there is none to read."""
        loaded, fields = self._opened(streaming=False)
        found = fields.get(field, "nothing")
        if found != PLACES:
            raise ValueError(f"{self.title}: the field {field!r} must hold lists of [start, end], but holds {found}.")
        return loaded.select_columns([field])

    def load_chats(self, field: str) -> Any:
        """Load a dataset with one column, lists of messages; raise ValueError if there is none to read."""
        loaded, fields = self._opened(streaming=False)
        found = fields.get(field, "nothing")
        message = found.feature if isinstance(found, List) else None
        known = isinstance(message, dict) and {"role", "content"} <= set(message)
        if not (known or isinstance(message, Json)):  # messages that differ in their fields
            raise ValueError(
                f"{self.title}: the field {field!r} must hold lists of messages (role, content), but holds {found}."
            )
        return loaded.select_columns([field])

    def has_chats_alone(self, streaming: bool) -> bool:
        """Whether there is no field `text`, but one of chats, `messages`."""
        fields = {TEXT} if self.name == "text" else self._opened(streaming)[1]
        return TEXT not in fields and CHATS in fields

    def _opened(self, streaming: bool) -> tuple[Any, Any]:
        """Return what `load_dataset` loads, and its fields: their types, or the first row where none are known."""
        try:
            loaded = self._load(self.files, streaming)
            return loaded, loaded.features or next(iter(loaded))
        except UNREADABLE as error:
            raise ValueError(self._unreadable(error)) from error

    def _load(self, files: Sequence[str], streaming: bool) -> Any:
        options: dict[str, Any] = {"data_files": list(files)} if files else {"revision": self.revision}
        options |= {"sample_by": "document"} if self.name == "text" and files else {}
        return load_dataset(self.name, self.config, split=self.split, streaming=streaming, **options)

    def _unreadable(self, error: Exception) -> str:
        """Return the error for a failed `load_dataset`, naming the file among several."""
        if not self.files:
            return (
                f"The dataset {self.title} cannot be read: {error}\nDatasets of the Hub are named owner/name, "
                "owner/name:config or owner/name:config:split; of files and folders give a path that exists."
            )
        for file in self.files:
            try:
                for _ in self._load([file], streaming=True):
                    pass
            except UNREADABLE as cause:
                return f"{file} cannot be read as {self.name}: {str(cause) or 'there is nothing in it'}"
        return f"{self.title}: cannot be read as {self.name}: {error.__cause__ or error}"


def load_texts(paths: Sequence[str], text_field: str = TEXT, split: str | None = None) -> Sequence[str | None]:
    """Load the texts of all documents in the order of the paths; each is read when it is asked for.

    Args:
        paths, split: see `find_sources`.

    Raises:
        FileNotFoundError, ValueError: a source is not there, cannot be read, or lacks the field.
    """
    return joined([source.load(text_field) for source in find_sources(paths, split)], text_field)[text_field]


def chats_instead(paths: Sequence[str], split: str | None = None, streaming: bool = False) -> str | None:
    """Name the field of chats, `messages`, if the first source has it and no field `text`."""
    return CHATS if find_sources(paths, split)[0].has_chats_alone(streaming) else None


def load_places(paths: Sequence[str], field: str, split: str | None = None) -> Sequence[list[list[int]] | None]:
    """Load the places `[start, end]` that a field names in each document's text, in the form of `load_texts`."""
    return joined([source.load_places(field) for source in find_sources(paths, split)], field)[field]


def stream_texts(paths: Sequence[str], text_field: str = TEXT, split: str | None = None) -> IterableDataset:
    """Stream what `load_texts` loads, as rows with one column; what is broken further on shows only when it is read."""
    return joined([source.load(text_field, streaming=True) for source in find_sources(paths, split)], text_field)


def joined(parts: list[Any], text_field: str) -> Any:
    """Datasets as one."""
    if len(parts) == 1:
        return parts[0]
    # Parquet files may hold large_string, which goes together with no other type.
    large, text = Value("large_string"), Value("string")
    kinds = [(part, (part.features or {}).get(text_field)) for part in parts]
    return concatenate_datasets([part.cast_column(text_field, text) if kind == large else part for part, kind in kinds])


def find_sources(paths: Sequence[str], split: str | None = None) -> list[Source]:
    """Find what there is to read, in the order of the paths; neighboring files of one format go together.

    Args:
        paths: files, and folders that are searched for files of the formats above. What is no existing path names a
            dataset of the Hub: `owner/name`, `owner/name:config` or `owner/name:config:split`, the name with
            `@revision` if need be. The default is the split `train`. A local folder laid out like such a dataset can
            stand for the name: `folder::split`.
        split: which files of a folder are read whose names say that they belong to several splits.

    Raises:
        FileNotFoundError: a path that does not exist, or a folder without a file of these formats.
        ValueError: another kind of file, nothing but empty files, or a folder that does not say which file belongs to
            the split.
    """
    found: list[Source] = []
    for path in paths:
        if Path(path).exists():
            kinds = [(file_format(file), file) for file in find_files(Path(path), split)]
            found += [Source(kind, (str(file),)) for kind, file in kinds if file.stat().st_size > 0]
        else:
            found.append(dataset_source(path))
    if not found:
        raise ValueError(f"There is no document in {', '.join(paths)}: the files are empty.")
    sources: list[Source] = []
    for kind, group in groupby(found, key=lambda source: source.name if source.files else None):
        same = list(group)
        sources += same if kind is None else [Source(kind, tuple(source.files[0] for source in same))]
    return sources


def dataset_source(text: str) -> Source:
    """Make the source of a dataset from its name, config and split."""
    match = DATASET.fullmatch(text)
    is_id = match and HUB_ID.fullmatch(match["name"]) and not text.endswith(tuple(FORMATS))
    if not match or not (is_id or Path(match["name"]).is_dir()):
        raise FileNotFoundError(f"{text} does not exist.")
    return Source(match["name"], (), match["config"] or None, match["split"] or "train", match["revision"])


def find_files(path: Path, split: str | None = None) -> list[Path]:
    """Return the path itself, or a folder's files of a known format, sorted by name."""
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(tuple(FORMATS)))
    if not files:
        raise FileNotFoundError(f"The folder {path} holds no documents ({', '.join(FORMATS)}).")
    return files_of_split(path, files, split)


def files_of_split(folder: Path, files: list[Path], split: str | None) -> list[Path]:
    """Return the files of one split if names of files or folders name several; raise ValueError if that is unclear."""
    found = {file: split_of(file.relative_to(folder)) for file in files}
    there = sorted({name for name in found.values() if name is not None})
    if len(there) < 2:
        return files
    example = next(file for file, name in found.items() if name is not None)
    remedy = f"Give the files or the sub-folder to read instead of the folder, such as {example}."
    if split is None:
        raise ValueError(f"The folder {folder} has several splits ({', '.join(there)}). {remedy}")
    if split not in there:
        raise ValueError(f"The folder {folder} has no split {split!r}, only {', '.join(there)}. {remedy}")
    unclear = [str(file) for file, name in found.items() if name is None and file.name != "README.md"]
    if unclear:
        raise ValueError(
            f"{shortened(unclear)}: belongs to none of the splits of the folder {folder} ({', '.join(there)}). {remedy}"
        )
    return [file for file, name in found.items() if name == split]


def split_of(path: Path) -> str | None:
    """Return the split that a relative path names, looking at its outermost folder first."""
    matches = map(SPLIT.search, path.parts)
    return next((SPLITS[match[1]] for match in matches if match), None)


def file_format(file: Path) -> str:
    for suffix, kind in FORMATS.items():
        if file.name.endswith(suffix):
            return kind
    raise ValueError(f"{file} is none of {', '.join(FORMATS)}.")


def shortened(files: Sequence[str]) -> str:
    return ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
