"""Questions with a part of the text before them, for example the passages that the memory itself recalls."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from cacheformers.modeling.architectures import find_decoder, unwrap
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.conversation import Answer, Conversation, opening
from cacheformers.modeling.method import required_options

CHUNK_WORDS, CHUNK_TOKENS = 100, 130  # of what is retrieved or recalled
PROMPT_TOKENS = 896
PROMPTS = ("recalled", "retrieved", "hybrid", "tail", "cut")
GAP = "\n\n"  # between the texts of memories that are asked together


class PassageConversation(Conversation):
    """Questions, each of them asked by itself with a part of what the memory has read before it.

    Self-attention sees question and text whole, whatever the window, and the memory as always.

        talk = cacheformers.PassageConversation(model, tokenizer, memory)
        answer = talk.ask(question, max_new_tokens=60)

    Args:
        memory: of one document, or of several that are searched together; it holds its text, as `read_text` makes it.
        prompt: "recalled": the passages nearest the question, as the memory finds them; "retrieved": as BM25 finds
            them; "hybrid": by both ranks; "tail", "cut": the end of the text, or its beginning and its end.
        prompt_tokens: of the text, about.

    Raises:
        ValueError: an unknown prompt, the memory has read nothing or was saved without its text; from `ask`, prompt and
            answer do not fit the base's positions, or the method has no window for a prompt of its own.
        ImportError: BM25 takes bm25s, of the extra `eval`.

    Attributes:
        turns: the answers so far.
        ids: what was read and answered in all turns, one after the other.
        cache: the memory; no question changes it.
    """

    follows = False

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        memory: MemoryCache,
        prompt: str = "recalled",
        prompt_tokens: int = PROMPT_TOKENS,
    ) -> None:
        if prompt not in PROMPTS:
            raise ValueError(f"prompt must be one of {', '.join(PROMPTS)}, got {prompt!r}.")
        known_text(memory)
        if prompt in ("retrieved", "hybrid"):
            # It imports datasets, which takes a second.
            from cacheformers.evaluation.longbench.retrieval import check_retriever

            check_retriever("bm25")
        super().__init__(model, tokenizer, memory)
        self.read, self.show, self.show_tokens = memory, prompt, prompt_tokens
        self.positions = required_options(find_decoder(unwrap(model))).base.max_positions

    def passages(self, question: str) -> str:
        """Return the part of the text that a question is asked with; ValueError for one longer than the positions."""
        self.check(len(opening(self.tokenizer, question)))
        return shown_text(self.model, self.tokenizer, self.read, question, self.show, self.show_tokens)

    def prompt(self, question: str) -> list[int]:
        """Return the ids of a question with its part of the text."""
        return opening(self.tokenizer, question, shown=self.passages(question))

    def check(self, needed: int) -> None:
        """Raise ValueError if prompt and answer need more positions than there are."""
        if needed > self.positions:
            raise ValueError(
                f"Question, text and answer take {needed:,} positions, and the base has {self.positions:,}: ask for a "
                "shorter answer, or show less of the text (prompt_tokens)."
            )

    def _generate(self, question: str, explain: bool, options: dict[str, Any]) -> Answer:
        shown = self.passages(question)
        ids = opening(self.tokenizer, question, shown=shown)
        needed = len(ids) + options["max_new_tokens"]
        self.check(needed)
        alone = Conversation(self.model, self.tokenizer, self.read.with_window(needed), shown=shown)
        alone.asking = same_end(ids, opening(self.tokenizer, question)) + 1  # its first token may join what is before
        answer = alone._generate(question, explain, options)
        self.ids += alone.ids
        self.turns.append(answer)
        return answer


def same_end(one: list[int], other: list[int]) -> int:
    """Return how many of their last items two lists share."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def shown_text(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    memory: MemoryCache,
    question: str,
    prompt: str,
    prompt_tokens: int,
) -> str:
    """Return the part of the text that is put before the question; see `PassageConversation`."""
    # They import datasets, which takes a second.
    from cacheformers.evaluation.longbench.prompts import Prompt, cut_beginning, cut_middle
    from cacheformers.evaluation.longbench.retrieval import BM25, Hybrid, Recalling, Retriever, retrieved

    text, places = known_text(memory)
    if prompt in ("retrieved", "recalled", "hybrid"):
        by_memory = Recalling(model, tokenizer, memory, text, places)
        retriever: Retriever = by_memory if prompt == "recalled" else BM25()
        if prompt == "hybrid":
            retriever = Hybrid(by_memory, retriever)
        return retrieved(text, question, retriever, CHUNK_WORDS, max(1, prompt_tokens // CHUNK_TOKENS))
    cut = cut_beginning if prompt == "tail" else cut_middle
    return cut(Prompt(text, len(text)), tokenizer, prompt_tokens).text


def known_text(memory: MemoryCache) -> tuple[str, list[tuple[int, int]]]:
    """Return what a memory has read, and start and end of each of its tokens.

    Raises:
        ValueError: it has read nothing, or does not hold its text.
    """
    parts, text = memory.origin.texts(0), ""
    places: list[tuple[int, int]] = []
    ends = [*(first for first, _ in parts[1:]), memory.tokens_read[0]]  # reading may have been interrupted
    for (first, source), last in zip(parts, ends, strict=True):
        if source is None:
            raise ValueError("The memory was saved without its text, so nothing can be shown: read the text again.")
        text += GAP if text else ""
        own = source.offsets[: last - first].tolist()
        places += [(start + len(text), end + len(text)) for start, end in own]
        text += source.text[: own[-1][1] if own else 0]
    if not places:
        raise ValueError("The memory has read nothing yet, so nothing can be shown.")
    return text, places
