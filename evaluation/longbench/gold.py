"""Was the passage that holds the answer retrieved? By layer, for the tokens of the question and of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from cacheformers.evaluation.longbench.prompts import Encoded
from cacheformers.evaluation.longbench.records import Record
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.memory import all_numbers


class GoldHits(LogitsProcessor):
    """Watches what is retrieved while `generate` answers prompts from a memory; it changes nothing.

    Args:
        memory: the one that is given to `generate`, of a method that retrieves.
        prompts: with `gold`, a row each.
    """

    def __init__(self, memory: MemoryCache, prompts: Sequence[Encoded]) -> None:
        self.memory, self.prompts = memory, prompts
        self.retrieved: list[list[dict[int, Tensor]]] = [[] for _ in prompts]  # by row: layer -> [tokens, places]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        first = not self.retrieved[0]
        layers = self.memory.state.retrieved()
        for row, (prompt, steps) in enumerate(zip(self.prompts, self.retrieved, strict=True)):
            newest = prompt.asking if first else 1
            steps.append({layer: numbers[row, -newest:].cpu() for layer, numbers in layers.items()})
        return scores

    def found(self, row: int, answer: int) -> dict[str, dict[str, float]]:
        """Return by layer what a row's question and the `answer` tokens of its answer retrieved.

        Returns:
            tokens: the share of these tokens that retrieved at least one token of the gold passages.
            passage: the share of the gold passages' tokens that at least one of them retrieved.
            Empty where no gold passage is known.
        """
        gold = torch.tensor([number for span in self.prompts[row].gold for number in span])
        together = self.memory.state.retrieved_tokens
        if not len(gold):
            return {}
        by_layer = {}
        for layer in self.retrieved[row][0]:
            numbers = all_numbers(torch.cat([step[layer] for step in self.retrieved[row][:answer]]), together)
            by_layer[str(layer)] = {
                "tokens": float(torch.isin(numbers, gold).any(-1).float().mean()),
                "passage": float(torch.isin(gold, numbers).float().mean()),
            }
        return by_layer


def in_sight(tokenizer: PreTrainedTokenizerBase, record: Record, ids: list[int]) -> dict[str, bool]:
    """Say whether self-attention, which sees these ids, sees a passage that answers, whole and word for word.

    It is empty where no passage is known.
    """
    if not record.gold:
        return {}
    seen = str(tokenizer.decode(ids))
    return {"gold_in_sight": any(record.context[start:end] in seen for start, end in record.gold)}


def gold_summary(times: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize by layer the hits that the records' costs hold; empty without any.

    Returns:
        records: how many have a gold passage.
        layers: layer -> share of the records of which some token retrieved it, and means of `GoldHits.found`.
    """
    found = [line["gold_hits"] for line in times if line.get("gold_hits")]
    if not found:
        return {}
    layers = {}
    for layer in found[0]:
        tokens, passages = ([own[layer][name] for own in found] for name in ("tokens", "passage"))
        hit = mean(float(share > 0) for share in tokens)
        layers[layer] = {"records": hit, "tokens": mean(tokens), "passage": mean(passages)}
    return {"records": len(found), "layers": layers}
