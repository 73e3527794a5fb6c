"""Text retrieval, the papers' baseline: of a context cut into chunks, the prompt gets those nearest the question."""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerBase

from cacheformers.evaluation.longbench.prompts import continued
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.recall import recall

# What chunks are measured in: a Chinese character, or a word of any other script.
UNIT = re.compile(r"[\u4e00-\u9fff]|[^\W\u4e00-\u9fff]+")
SENTENCE = re.compile(r"[^。？！；\n.!?;]*[。？！；\n.!?;]*\s*")
EMBEDDED_TOGETHER = 32
ASKING = "Question:"  # before a query to a memory


def retrieved(
    context: str, query: str, retriever: Retriever, chunk_words: int, count: int, text_order: bool = False
) -> str:
    """Join the `count` chunks of a context that are nearest the query, nearest first, as in the official baseline.

    With `text_order` they follow one another as in the context.
    """
    texts = chunks(context, chunk_words)
    nearest = np.argsort(-np.asarray(retriever.scores(query, texts)), kind="stable")[:count]
    if text_order:
        nearest = np.sort(nearest)
    return "\n\n".join(texts[place].strip() for place in nearest)


def chunks(text: str, words: int) -> list[str]:
    """Cut a text into chunks of whole sentences, at most `words` words (Chinese: characters), or parts of long ones."""
    found, size = [""], 0
    for piece in (piece for sentence in SENTENCE.findall(text) for piece in pieces(sentence, words)):
        length = len(UNIT.findall(piece))
        if size and size + length > words:
            found.append("")
            size = 0
        found[-1] += piece
        size += length
    return [chunk for chunk in found if chunk.strip()]


def pieces(sentence: str, words: int) -> list[str]:
    """Cut a sentence after every `words` words."""
    starts = [match.start() for match in UNIT.finditer(sentence)][words::words]
    return [sentence[start:end] for start, end in zip([0, *starts], [*starts, len(sentence)], strict=True)]


@cache
def load_bm25s() -> Any:
    """Import bm25s without JAX: where JAX is installed bm25s calls it at once, and it reserves 75 % of a GPU's memory.

    What bm25s would use it for, taking the best of the scores, is not called here.
    """
    known = sys.modules.get("jax")
    sys.modules["jax"] = None  # type: ignore[assignment]  # `import jax` then says that there is none
    try:
        return import_module("bm25s")
    finally:
        if known is None:
            del sys.modules["jax"]
        else:
            sys.modules["jax"] = known


class BM25:
    """Words in common, weighed by how rare they are (bm25s). `scores` says how near each text is, `[texts]`."""

    def __init__(self) -> None:
        if find_spec("bm25s") is None:
            raise ImportError('The retriever bm25 takes bm25s. Run: pip install "cacheformers[eval]"')

    def scores(self, query: str, texts: Sequence[str]) -> Any:
        asked, *found = (UNIT.findall(text.lower()) for text in (query, *texts))
        if not asked or not any(found):  # bm25s fails without any word
            return np.zeros(len(texts))
        index = load_bm25s().BM25()
        index.index(found, show_progress=False)
        return index.get_scores(asked)


class Embeddings:
    """Cosine of mean-pooled hidden states of an encoder, a model folder or a Hub id."""

    def __init__(self, encoder: str, device: torch.device) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(encoder)
        self.model: Any = AutoModel.from_pretrained(encoder).to(device).eval()
        self.longest = min(self.tokenizer.model_max_length, self.model.config.max_position_embeddings)

    def scores(self, query: str, texts: Sequence[str]) -> Any:
        vectors = self.embed([query, *texts])
        return (vectors[1:] @ vectors[0]).cpu().numpy()

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """Return unit vectors, `[texts, dim]`."""
        found = []
        for start in range(0, len(texts), EMBEDDED_TOGETHER):
            own, form = list(texts[start : start + EMBEDDED_TOGETHER]), {"padding": True, "truncation": True}
            batch = self.tokenizer(own, max_length=self.longest, return_tensors="pt", **form).to(self.model.device)
            states = self.model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None].to(states.dtype)
            found.append((states * mask).sum(1) / mask.sum(1))
        return torch.nn.functional.normalize(torch.cat(found), dim=-1)


class Recalling:
    """The entries of a memory that has read the text (`cacheformers.modeling.recall`).

    Args:
        memory: it holds what each of the tokens of `row` left behind.
        text: what was read.
        places: start and end of each token that was read, in characters of `text`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        memory: MemoryCache,
        text: str,
        places: Sequence[Sequence[int]],
        row: int = 0,
    ) -> None:
        self.model, self.tokenizer, self.memory, self.row, self.text = model, tokenizer, memory, row, text
        self.ends = [end for _, end in places]

    def scores(self, query: str, texts: Sequence[str]) -> Any:
        spans = token_spans(found_in(self.text, texts), self.ends)
        before, ids = asking(self.tokenizer, query)
        return recall(self.model, self.memory, [*before, *ids], spans, self.row, skip=len(before)).numpy()


def found_in(text: str, parts: Sequence[str]) -> list[tuple[int, int]]:
    """Return start and end, in characters, of parts of a text that follow one another."""
    places, end = [], 0
    for part in parts:
        start = text.index(part, end)
        end = start + len(part)
        places.append((start, end))
    return places


def token_spans(places: Sequence[tuple[int, int]], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Turn places in characters into first and last + 1 of the tokens that end there, before the characters `ends`.

    A token may begin with the space before its word, which is still the passage's before it.
    """
    return [(bisect_right(ends, start), bisect_right(ends, end)) for start, end in places]


def asking(tokenizer: PreTrainedTokenizerBase, query: str) -> tuple[list[int], list[int]]:
    """Return the ids that come before a query to a memory, and the query's."""
    before: list[int] = tokenizer(ASKING, add_special_tokens=False, verbose=False).input_ids
    return before, continued(tokenizer, ASKING, f" {query}")


class Hybrid:
    """Reciprocal rank fusion (Cormack et al. 2009): a text scores the sum over retrievers of 1 / (60 + its rank)."""

    def __init__(self, *retrievers: Retriever) -> None:
        self.retrievers = retrievers

    def scores(self, query: str, texts: Sequence[str]) -> Any:
        fused = np.zeros(len(texts))
        for retriever in self.retrievers:
            order = np.argsort(-np.asarray(retriever.scores(query, texts)), kind="stable")
            fused[order] += 1 / (60 + np.arange(1, len(texts) + 1))
        return fused


Retriever = BM25 | Embeddings | Recalling | Hybrid


def check_retriever(name: str) -> None:
    """Raise ImportError, OSError or ValueError, before any work, unless there is such a retriever."""
    if name == "bm25":
        BM25()
    else:
        AutoConfig.from_pretrained(name)


def make_retriever(name: str, device: torch.device) -> Retriever:
    """Make `bm25`, or an encoder by its folder or Hub id."""
    return BM25() if name == "bm25" else Embeddings(name, device)
