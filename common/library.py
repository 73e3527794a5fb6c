"""A library: a folder of memory files, which are asked one by one or together, and thinned."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from cacheformers.common.texts import load_text
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.conversation import Answer, Conversation
from cacheformers.modeling.files.index import INDEX, MemoryFileError, Reader, read_index
from cacheformers.modeling.files.load import load_memory
from cacheformers.modeling.files.save import check_place
from cacheformers.modeling.reading import read_text
from cacheformers.modeling.thinning import retrievals, thin, together

SUFFIX = ".memory"
NOTHING = "?"  # a question about nothing


@dataclass(frozen=True)
class Held:
    """A memory of a library.

    Attributes:
        source: name of its text; empty if it was not saved.
        tokens: that it has read; of a thinned memory the entries.
        bytes: on disk.
        reader: the model that read it.
    """

    name: str
    source: str
    tokens: int
    bytes: int
    reader: Reader


class Library:
    """Memory files in a folder, `NAME.memory` each, all read by one model if they are to be asked together.

    Args:
        folder: it is made when the first memory is added.
        model: it reads and answers; listing, removing and most thinning need none.
        tokenizer: the model's.
        base: its folder or Hub id, which the memories remember so that the command line finds it.
        adapter: the same of its adapter.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        base: str = "",
        adapter: str = "",
    ) -> None:
        self.folder, self.model, self.tokenizer = Path(folder), model, tokenizer
        self.base, self.adapter = base, adapter
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{folder} is a file, but a library is a folder: choose another name.")

    def contents(self) -> list[Held]:
        """Describe all memories, by name; raise MemoryFileError for a damaged one."""
        return [self.describe(name) for name in self.names]

    def describe(self, name: str) -> Held:
        """Describe one memory; raise MemoryFileError if it is damaged."""
        index = read_index(self.path(name))
        row = index.rows[0]
        size = sum(path.stat().st_size for path in self.path(name).iterdir())
        return Held(name, row.source or "", row.tokens_read, size, index.reader)

    @property
    def names(self) -> list[str]:
        """The names of all memories, sorted."""
        return sorted(path.parent.name.removesuffix(SUFFIX) for path in self.folder.glob(f"*{SUFFIX}/{INDEX}"))

    def path(self, name: str) -> Path:
        """Return the folder of a memory; raise ValueError for a name that leads elsewhere."""
        if not name or Path(name).name != name or name == "..":
            raise ValueError(f"{name!r} cannot be the name of a memory: leave out slashes.")
        return self.folder / f"{name}{SUFFIX}"

    def add(
        self,
        path: str,
        name: str = "",
        *,
        text: str | None = None,
        overwrite: bool = False,
        cache_size: int | None = None,
        progress: bool = True,
        encoding: str | None = None,
    ) -> Held:
        """Read a document into a memory of the library.

        Args:
            path: a file (`common.texts.load_text`), or only the name of `text`.
            name: of the memory; by default the file's without its ending.
            overwrite: replace a memory of that name.
            cache_size: most entries; None for the adapter's.

        Raises:
            ValueError: there is a memory of that name, or the text cannot be read.
        """
        model, tokenizer = self._required()
        name = name or Path(path).stem
        if not overwrite:
            self.check_new(name)
        check_place(self.path(name))
        source, found = (path, text) if text is not None else load_text(path, encoding=encoding)
        memory = read_text(model, tokenizer, found, name=source, progress=progress, cache_size=cache_size)
        memory.origin.base, memory.origin.adapter = self.base, self.adapter
        memory.save(self.path(name))
        return self.describe(name)

    def remove(self, name: str) -> None:
        """Delete a memory; raise ValueError if there is none of that name."""
        self.check([name])
        shutil.rmtree(self.path(name))

    def memory(self, name: str) -> MemoryCache:
        """Load one memory, for the model if there is one."""
        self.check([name])
        return load_memory(self.path(name), self.model, tokenizer=self.tokenizer)

    def memories(self, names: Sequence[str] = ()) -> MemoryCache:
        """Load the memories of the given names, all by default; several become one that is searched as a whole.

        Raises:
            ValueError: there is none, or several are of a method or of models that cannot be searched together.
        """
        names = self.check(names)
        loaded = [self.memory(name) for name in names]
        return loaded[0] if len(loaded) == 1 else together(loaded)

    def conversation(self, names: Sequence[str] = ()) -> Conversation:
        """Begin a conversation about the memories of the given names, all by default.

        Raises:
            ValueError: attention does not see such memories (retrieval heads); see also `memories`.
        """
        model, tokenizer = self._required()
        memory = self.memories(names)
        if not memory.state.attends:
            raise ValueError(
                "Attention does not see this memory, which finds passages: answer with them, by "
                "cacheformers.PassageConversation(library.model, library.tokenizer, library.memories(names))."
            )
        return Conversation(model, tokenizer, memory)

    def choose(self, question: str, names: Sequence[str] = ()) -> str:
        """Return the name of the memory in which a question retrieves most, when all are searched together.

        What an empty question retrieves, by the words around it, does not count.
        """
        names = self.check(names)
        if len(names) == 1:
            return names[0]
        model, tokenizer = self._required()
        memory = self.memories(names)
        counts = []
        for asked in (question, NOTHING):
            answer = Conversation(model, tokenizer, memory).ask(asked, max_new_tokens=1, explain=True)
            counts.append(retrievals([*answer.asked, *answer.retrieved], memory.tokens_read[0]))
        votes = (counts[0] - counts[1]).clamp(min=0)
        starts = [start for start, _ in memory.origin.parts]
        by_memory = [int(part.sum()) for part in votes.tensor_split(starts[1:])]
        return names[by_memory.index(max(by_memory))]

    def ask(self, question: str, names: Sequence[str] = (), choose: bool = False, **options: Any) -> Answer:
        """Answer one question from the memories of the given names, all by default.

        If their method retrieves, `answer.retrieved_most` and `answer.passages` name the files and the passages.

        Args:
            choose: ask the one memory alone in which the question retrieves most.
            options: of `Conversation.ask`.
        """
        conversation = self.conversation([self.choose(question, names)] if choose else names)
        answer: Answer = conversation.ask(question, **{"explain": conversation.retrieves, **options})
        return answer

    def compress(
        self, name: str, most_bytes: int, rule: str = "oldest", int8: bool = True, questions: Sequence[str] = ()
    ) -> Held:
        """Thin a memory to a number of bytes on disk, in place (`modeling.thinning.thin`).

        Args:
            questions: with the rule "unused", what is asked to see which entries are used.

        Raises:
            ValueError: questions with another rule, which would not look at their answers; or see `thin`.
        """
        if questions and rule != "unused":
            raise ValueError(f"Questions are for the rule 'unused', not {rule!r}: leave them out, or choose that rule.")
        memory = self.memory(name)
        used = None
        if questions:
            model, tokenizer = self._required()
            answers = [
                Conversation(model, tokenizer, memory).ask(question, max_new_tokens=32, explain=True)
                for question in questions
            ]
            retrieved = [numbers for answer in answers for numbers in (*answer.asked, *answer.retrieved)]
            used = retrievals(retrieved, memory.tokens_read[0])
        thin(memory, most_bytes, rule, int8, used).save(self.path(name), int8=int8)
        return self.describe(name)

    def check_new(self, name: str) -> None:
        """Raise ValueError if there is a memory of this name."""
        if (self.path(name) / INDEX).exists():  # a killed save leaves a folder without one
            raise ValueError(f"{self.folder} has a memory {name} already: choose another name, or overwrite it.")

    def check(self, names: Sequence[str] = ()) -> list[str]:
        """Return the names, or all if there are none; raise ValueError for one that is not there."""
        there = self.names
        if not there:
            raise ValueError(f"{self.folder} holds no memory yet: add a document first.")
        missing = [name for name in names if name not in there]
        if missing:
            raise ValueError(f"{self.folder} has no memory {missing[0]!r}, only {', '.join(there)}.")
        return list(names) or there

    def _required(self) -> tuple[nn.Module, PreTrainedTokenizerBase]:
        if self.model is None or self.tokenizer is None:
            raise ValueError("This library was opened without a model and its tokenizer, which read and answer.")
        return self.model, self.tokenizer


def reader_of(library: Library, names: Sequence[str] = ()) -> Reader:
    """Return the model that read the memories of these names (default: all), as the first that is not damaged says.

    Raises:
        MemoryFileError: there is none.
    """
    fault = MemoryFileError(f"{library.folder} holds no memory yet: add a document first.")
    for name in names or library.names:
        try:
            return library.describe(name).reader
        except MemoryFileError as error:
            fault = error
    raise fault
