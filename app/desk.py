"""What the page does with its model: open what is dropped on it, read it, begin conversations about it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

import cacheformers
from cacheformers.cli.read import read_segments
from cacheformers.common.texts import PLAIN, READERS, load_text
from cacheformers.evaluation.showing import known_text
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.files.index import INDEX
from cacheformers.modeling.origin import tokenized, tokenizer_hash

TEXTS = (*PLAIN, *READERS)
MEMORIES = (".json", ".safetensors")
LARGEST_TEXT = 2_000_000  # characters: the page shows all of it


@dataclass(eq=False)
class Reading:
    """A text that is being read: its memory so far, its length in tokens, and the seconds that reading took."""

    name: str
    memory: MemoryCache
    tokens: int
    seconds: float = 0.0

    @property
    def read(self) -> int:
        return self.memory.tokens_read[0]


class Desk:
    """A model with its memory, which reads and answers for the page.

    Args:
        longest: tokens of an answer.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, longest: int = 60) -> None:
        self.model, self.tokenizer, self.longest = model, tokenizer, longest

    def open(self, files: Sequence[str]) -> Iterator[Reading]:
        """Read a text, or load a memory from the files of its folder; yield it again after each segment.

        Raises:
            ValueError, OSError, ImportError: files of another kind, a text that is too long or in another
                encoding, a damaged memory or that of another model, or an extra is missing.
        """
        paths = [Path(file) for file in files]
        if INDEX in {path.name for path in paths}:
            memory = self.load(paths)
            source = memory.origin.sources[0]
            yield Reading(source.name if source else "A text that was not saved", memory, memory.tokens_read[0])
        elif len(paths) == 1 and paths[0].suffix.lower() in TEXTS:
            yield from self.read(paths[0])
        else:
            raise ValueError(
                f"Drop one text ({', '.join(TEXTS)}), or together all files of a memory's folder: {INDEX} and what "
                f"ends in {MEMORIES[1]}."
            )

    def read(self, path: Path) -> Iterator[Reading]:
        """Read a text segment by segment."""
        try:
            text = load_text(str(path))[1]
        except ValueError as error:
            message = str(error).replace(str(path), path.name)
            raise ValueError(
                f"{message} Options are for `cacheformers read`: drop the memory that it saves."
            ) from error
        if len(text) > LARGEST_TEXT:
            raise ValueError(
                f"{path.name} has {len(text):,} characters, and the page shows texts of at most {LARGEST_TEXT:,}: "
                "read it with `cacheformers read` and ask it with `cacheformers ask`."
            )
        ids, source = tokenized(self.tokenizer, text, path.name)
        memory = cacheformers.new_memory(self.model, 1)
        memory.origin.sources, memory.origin.tokenizer = [source], tokenizer_hash(self.tokenizer)
        reading, start = Reading(path.name, memory, len(ids)), time.perf_counter()
        yield reading
        for _ in read_segments(self.model, memory, ids):
            reading.seconds = time.perf_counter() - start
            yield reading

    def load(self, paths: Sequence[Path]) -> MemoryCache:
        """Load a memory from uploaded files, with its checksums compared; passages of heads need its text."""
        with tempfile.TemporaryDirectory() as folder:
            for path in paths:
                shutil.copy(path, Path(folder) / path.name)
            try:
                memory = cacheformers.load_memory(folder, self.model, tokenizer=self.tokenizer)
            except ValueError as error:
                raise ValueError(str(error).replace(f"{folder}/", "").replace(folder, "The memory")) from error
        if memory.batch_size != 1:
            raise ValueError(f"The memory holds {memory.batch_size} documents, and the page shows one.")
        if not memory.state.attends:
            known_text(memory)  # passages of which are shown
        return memory

    def talk(self, reading: Reading | None) -> cacheformers.Conversation:
        """Begin a conversation about what was read, or with the memory off: one that stays empty."""
        memory = reading.memory if reading else cacheformers.new_memory(self.model, 1, 0)
        if reading and not memory.state.attends:
            return cacheformers.PassageConversation(self.model, self.tokenizer, memory)
        return cacheformers.Conversation(self.model, self.tokenizer, memory)

    def ask(self, conversation: cacheformers.Conversation, question: str) -> Iterator[str]:
        """Answer a question; yield the answer so far. The whole of it is in `conversation.turns` at the end."""
        said = ""
        explain = conversation.retrieves
        for piece in conversation.ask(question, max_new_tokens=self.longest, stream=True, explain=explain):
            said += piece
            yield said
