"""What a memory does while it is trained: how far its gates have opened, its shares, and what it retrieves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.memories.gated_state import GatedState
from cacheformers.modeling.memories.method import Share
from cacheformers.modeling.memories.neurocache import Gate

GATE_BINS = 10  # of the histograms, from 0 to 1


def gate_statistics(model: nn.Module) -> dict[str, Any]:
    """Size of the gates, |tanh(gate)| of every head: mean, largest, and how many fall into each tenth.

    Under FSDP every process must call this.
    """
    gates = [whole(module.weight) for module in model.modules() if isinstance(module, Gate)]
    if not gates:
        return {}
    size = torch.tanh(torch.cat(gates).float()).abs().cpu()
    histogram = torch.histc(size, GATE_BINS, 0.0, 1.0).int().tolist()
    return {"gate_mean": float(size.mean()), "gate_max": float(size.max()), "gate_histogram": histogram}


def share_statistics(model: nn.Module) -> dict[str, Any]:
    """Count the memory's share in every head that has one (`Share`): mean, range, and how many are in each tenth.

    Under FSDP every process must call this.
    """
    learned = [whole(module.weight) for module in model.modules() if isinstance(module, Share)]
    if not learned:
        return {}
    shares = torch.sigmoid(torch.cat(learned).float()).cpu()
    return {
        "share_mean": float(shares.mean()),
        "share_min": float(shares.min()),
        "share_max": float(shares.max()),
        "share_histogram": torch.histc(shares, GATE_BINS, 0.0, 1.0).int().tolist(),
    }


def token_gate_statistics(memories: list[MemoryCache]) -> dict[str, Any]:
    """The gates of gated attention in the last step, over tokens that have something far, in the lanes of this process.

    Returns:
        `token_gate_mean`; `token_gate_layers`, the mean of each layer with gates; `token_gate_closed`, the share below
        the threshold, or below 0.5 where there is none. Empty without such tokens.
    """
    found: dict[int, list[Tensor]] = {}
    threshold = 0.0
    for memory in memories:
        state = memory.state
        if not isinstance(state, GatedState) or state.last is None:
            continue
        threshold = state.options.threshold
        for layer, gates in state.last.gates.items():
            counted = state.last.counted.to(gates.device)
            found.setdefault(layer, []).append(gates.transpose(1, 2)[counted].float().flatten().cpu())
    layers = [torch.cat(parts) for _, parts in sorted(found.items())]
    if not layers or not len(layers[0]):
        return {}
    gates = torch.cat(layers)
    return {
        "token_gate_mean": float(gates.mean()),
        "token_gate_layers": [float(layer.mean()) for layer in layers],
        "token_gate_closed": float((gates < (threshold or 0.5)).float().mean()),
    }


def retrieval_statistics(memories: list[MemoryCache]) -> dict[str, float]:
    """What the tokens of each lane's last segment retrieved, in the lanes of this process.

    Returns:
        `retrieved_age`: median number of tokens from a retrieved entry to the token that retrieved it;
        `retrieved_age_90`: nine of ten are at most this old; `retrieved_none`: share of the k places that found
        nothing, over all retrieving layers (and heads, where each searches by itself). Empty for memories that do not
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
    all_ages = torch.cat(ages).float().sort().values
    statistics = {"retrieved_none": none / places}
    if len(all_ages):
        statistics["retrieved_age"] = float(all_ages[len(all_ages) // 2])
        statistics["retrieved_age_90"] = float(all_ages[int(0.9 * (len(all_ages) - 1))])
    return statistics


def whole(parameter: Tensor) -> Tensor:
    """A parameter's numbers, gathered where they are divided among processes."""
    gather = getattr(parameter.detach(), "full_tensor", None)
    return parameter.detach() if gather is None else gather()
