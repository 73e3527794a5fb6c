"""Documents from files: found and checked before work starts, tokenised when their turn comes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from datasets import Dataset, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

# Suffix -> how `datasets` calls the format.
FORMATS = {".jsonl": "json", ".jsonl.gz": "json", ".txt": "text", ".md": "text"}


class Documents:
    """Texts with the tokenizer that turns them into ids.

    Args:
        texts: one string a document; None and empty strings count as empty documents.
        min_tokens: documents with fewer tokens are left out.
    """

    def __init__(self, texts: Sequence[str | None], tokenizer: PreTrainedTokenizerBase, min_tokens: int = 2) -> None:
        self.texts, self.tokenizer, self.min_tokens = texts, tokenizer, min_tokens

    def __len__(self) -> int:
        return len(self.texts)

    def tokens(self, index: int) -> Tensor:
        """Ids of one document, `[tokens]`; empty where the document is left out."""
        text = self.texts[index]
        ids = self.tokenizer(text, verbose=False)["input_ids"] if text else []
        kept = ids if len(ids) >= max(self.min_tokens, 2) else []  # one token alone predicts nothing
        return torch.tensor(kept, dtype=torch.long)

    def check(self, segment_tokens: int) -> None:
        """See to it that some document goes beyond a segment (reads on until it finds one).

        Raises:
            ValueError: all documents are empty or left out, or none is longer than a segment.
        """
        longest = 0
        for index in range(len(self)):
            longest = max(longest, len(self.tokens(index)))
            if longest > segment_tokens:
                return
        if not any((text or "").strip() for text in self.texts):
            raise ValueError(f"All {len(self)} documents are empty.")
        if longest == 0:
            raise ValueError(f"All {len(self)} documents have fewer than {max(self.min_tokens, 2)} tokens.")
        raise ValueError(
            f"The longest of {len(self)} documents has {longest} tokens, which is not more than one segment of "
            f"{segment_tokens}: nothing would ever be remembered. Give longer documents or a smaller segment_tokens."
        )


def load_texts(paths: Sequence[str]) -> Sequence[str | None]:
    """The texts of documents, in the order of the paths.

    Args:
        paths: files, or folders that are searched for them: JSON lines (`.jsonl`, `.jsonl.gz`) with a field `text`, one
            document a line; `.txt` and `.md`, one document a file.

    Raises:
        FileNotFoundError: a path that does not exist, or a folder without a file of these kinds.
        ValueError: another kind of file, one that cannot be read as what its name says, no field `text`, no document.
    """
    groups = grouped(paths)
    if not groups:
        raise ValueError(f"There is no document in {', '.join(paths)}: the files are empty.")
    texts = concatenate_datasets([load_file_group(kind, files) for kind, files in groups])
    return texts["text"]  # a lazy column: a text is read when it is asked for


def grouped(paths: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Every file that is not empty with its format; neighbours of one format together, because they load as one."""
    groups: list[tuple[str, list[str]]] = []
    for path in paths:
        for file in find_files(Path(path)):
            kind = file_format(file)
            if file.stat().st_size == 0:
                continue
            if not groups or groups[-1][0] != kind:
                groups.append((kind, []))
            groups[-1][1].append(str(file))
    return groups


def find_files(path: Path) -> list[Path]:
    """The path itself, or a folder's files of a known format, sorted by name."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist.")
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(tuple(FORMATS)))
    if not files:
        raise FileNotFoundError(f"The folder {path} holds no documents ({', '.join(FORMATS)}).")
    return files


def file_format(file: Path) -> str:
    for suffix, kind in FORMATS.items():
        if file.name.endswith(suffix):
            return kind
    raise ValueError(f"{file} is none of {', '.join(FORMATS)}.")


def load_file_group(kind: str, files: list[str]) -> Dataset:
    """Read files of one format; only the field `text` is kept."""
    options = {"sample_by": "document"} if kind == "text" else {}
    try:
        loaded = load_dataset(kind, data_files=files, split="train", **options)
    except (DatasetGenerationError, StopIteration) as error:
        reason = error.__cause__ or error or "nothing in it"
        raise ValueError(f"{', '.join(files)}: cannot be read as {kind}: {reason}") from error
    if "text" not in loaded.column_names:
        raise ValueError(f"{', '.join(files)}: no field 'text', only {', '.join(loaded.column_names) or 'nothing'}.")
    return loaded.select_columns(["text"])
