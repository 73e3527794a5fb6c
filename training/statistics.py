"""Numbers that are logged of a memory while it is trained: its method's own, and what it retrieves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.memory import MemoryState, all_numbers
from cacheformers.modeling.method import MethodOnLayer


def memory_statistics(model: nn.Module, memories: Sequence[MemoryCache]) -> dict[str, Any]:
    """Return what the method of a model's memory logs (`MemoryMethod.statistics`), and what it retrieved.

    Under FSDP2 every process must call this.
    """
    layers = [module for module in model.modules() if isinstance(module, MethodOnLayer) and module.options is not None]
    own = layers[0].method.statistics([layer.active_parts for layer in layers], memories) if layers else {}
    return {**own, **retrieval_statistics(memories)}


def in_brief(entry: Mapping[str, Any]) -> str:
    """Write the gates or shares and the age of what was retrieved, of an entry of the log, for the progress bar."""
    names = {"gate_mean": "gates", "share_mean": "shares", "token_gate_mean": "gates"}
    parts = [f", {word} {entry[name]:.3f}" for name, word in names.items() if name in entry]
    if "retrieved_age" in entry:
        parts.append(f", retrieved {entry['retrieved_age']:,.0f} tokens ago")
    return "".join(parts)


def retrieval_statistics(memories: Sequence[MemoryCache]) -> dict[str, float]:
    """Summarize what the tokens of each lane's last segment retrieved, in the lanes of this process.

    Returns:
        `retrieved_age`: median number of tokens from a retrieved entry to the token that retrieved it;
        `retrieved_age_90`: nine of ten are at most this old; `retrieved_none`: share of the k places that found
        nothing, over all retrieving layers (and heads, if each searches by itself); `gold_hits`: where the last segment
        asked, the share of its asking tokens that retrieved the answer's passage. Empty for memories that do not
        retrieve.
    """
    ages, none, places = [], 0, 0
    for memory in memories:
        real = memory.timeline.open
        stored = torch.tensor(memory.tokens_read) - real.sum(1)
        numbers = stored[:, None] + real.cumsum(1) - 1  # of each open token in its document
        for retrieved in memory.state.retrieved().values():
            columns = retrieved.shape[1]
            asking, found = real[:, -columns:, None], retrieved.cpu()
            hit = (found >= 0) & asking
            ages.append((numbers[:, -columns:, None] - found)[hit])
            places += int(asking.sum()) * found.shape[-1]
            none += int(asking.sum()) * found.shape[-1] - int(hit.sum())
    if not places:
        return {}
    hits = [share for memory in memories if (share := gold_share(memory.state)) is not None]
    all_ages = torch.cat(ages).float().sort().values
    statistics = {"retrieved_none": none / places}
    if hits:
        statistics["gold_hits"] = sum(hits) / len(hits)
    if len(all_ages):
        statistics["retrieved_age"] = float(all_ages[len(all_ages) // 2])
        statistics["retrieved_age_90"] = float(all_ages[int(0.9 * (len(all_ages) - 1))])
    return statistics


def gold_share(state: MemoryState) -> float | None:
    """The share of asking tokens that retrieved a token of the passages that answer; None where nothing was asked."""
    if state.gold is None:
        return None
    found: list[torch.Tensor] = []
    for numbers in state.retrieved().values():
        for row, asking in enumerate(state.gold.asking):
            time = min(len(asking), numbers.shape[1])  # a forward in pieces has the last one's columns
            asked = all_numbers(numbers[row, -time:][asking[-time:]].cpu(), state.retrieved_tokens)
            found.append(torch.isin(asked, state.gold.numbers(row)).any(-1))
    return float(torch.cat(found).float().mean()) if found else None
