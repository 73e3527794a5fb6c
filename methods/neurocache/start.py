"""A start for a new memory that knows the base's states.

Copied weights look at the first d numbers of a state, while an entry has coordinates of its own. Here W_p takes the
d - 1 directions in which states are largest, and W_k and W_v of layer j become the base's own, applied to the state
that an entry lets one reconstruct:

    x_j ~ M_j e,   W_k = W_k(base, j) M_j,   W_v = W_v(base, j) M_j

So cache attention starts as the layer's own attention, without positions, over what is left of the past. Measured in
docs/results/neurocache_recipe.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from cacheformers.adapters.layer import MemoryLayer
from cacheformers.adapters.model import projection_weights
from cacheformers.methods.neurocache.options import NeurocacheOptions
from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap

RIDGE = 1e-3  # of the mean square of an entry's numbers

States = dict[int, Tensor]  # layer -> what its self-attention is given, [tokens, h], float32


@torch.no_grad()
def start_from_states(model: PeftModel, segments: Sequence[Tensor]) -> None:
    """Set W_p, W_k and W_v of the active adapter from what the base makes of a few thousand tokens, in place.

    Args:
        model: the base with a new Neurocache adapter; gates may have any value.
        segments: ids, `[tokens]` each, that the base reads twice.

    Raises:
        ValueError: no memory is active, the segments hold fewer tokens than an entry has numbers, or the base's states
            are not finite.
    """
    attentions = attention_modules(find_decoder(unwrap(model)))
    memories: dict[int, MemoryLayer] = {
        layer: attention.memory  # type: ignore[misc]
        for layer, attention in enumerate(attentions)
        if getattr(getattr(attention, "memory", None), "options", None) is not None
    }
    if not memories:
        raise ValueError("start_from_states needs a model with an active Neurocache adapter.")
    options = next(iter(memories.values())).options
    assert options is not None
    tokens = sum(len(ids) for ids in segments)
    if tokens < options.width:
        raise ValueError(f"{tokens} tokens are too few: an entry has {options.width} numbers. Give more segments.")

    encoder = memories[options.first_layer].parts(model.active_adapter)
    searched = {layer for pair in options.retrieval_map for layer in pair}
    if encoder.down is not None:
        moments = sum(
            states[layer].T @ states[layer] for states in base_states(model, searched, segments) for layer in searched
        )
        encoder.down.weight.copy_(principal_projection(moments, options.width, tokens * len(searched)))  # type: ignore[arg-type]

    fit = Fit(options)
    for states in base_states(model, {*options.attention_layers, *searched}, segments):
        fit.add(states, encoder.encode)
    for layer in options.attention_layers:
        parts = memories[layer].parts(model.active_adapter)
        assert parts.k is not None and parts.v is not None
        _, keys, values, _ = projection_weights(attentions[layer], unwrap(model).config)  # type: ignore[arg-type]
        back = fit.map(layer)
        parts.k.weight.copy_(keys.float() @ back)
        parts.v.weight.copy_(values.float() @ back)


def base_states(model: PeftModel, layers: Iterable[int], segments: Sequence[Tensor]) -> Iterator[States]:
    """What self-attention of the given layers is given in the base alone, segment by segment.

    Raises:
        ValueError: it is not finite.
    """
    attentions = attention_modules(find_decoder(unwrap(model)))
    found: States = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            found[layer] = hidden[0].float()

        return hook

    keeping = hooks(attentions[layer].register_forward_pre_hook(keep(layer), with_kwargs=True) for layer in layers)
    with keeping, evaluating(model), model.disable_adapter():
        for ids in segments:
            model(ids[None].to(next(model.parameters()).device), use_cache=False)
            if not all(bool(torch.isfinite(states).all()) for states in found.values()):
                raise ValueError("The base's states are not finite: check its weights and dtype.")
            yield found


@contextmanager
def hooks(handles: Iterable[Any]) -> Iterator[None]:
    """Hooks that are taken off in the end."""
    held = list(handles)
    try:
        yield
    finally:
        for handle in held:
            handle.remove()


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """A model in evaluation mode for a while."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def principal_projection(moments: Tensor, width: int, tokens: int) -> Tensor:
    """W_p `[width, h]`: the width - 1 largest directions of states, turned away from (1, ..., 1), to numbers of size 1.

    The LayerNorm after W_p takes away each entry's mean, that is its part along (1, ..., 1); here nothing lies there.

    Args:
        moments: X^T X of states `[tokens, h]`, not centered: their mean is a direction like others.
    """
    _, directions = torch.linalg.eigh(moments)  # smallest first
    largest = directions[:, -(width - 1) :]
    generator = torch.Generator().manual_seed(0)
    ones = torch.full((width, 1), width**-0.5)
    turned, _ = torch.linalg.qr(torch.cat([ones, torch.randn(width, width - 1, generator=generator)], 1))
    weight = turned[:, 1:].to(moments) @ largest.T
    mean_square = torch.einsum("dh,hi,di->", weight, moments, weight) / (width * tokens)
    return weight / mean_square.sqrt()


class Fit:
    """The linear map M_j `[h, d]` from entries to states of layer j, with least squares, for every attention layer."""

    def __init__(self, options: NeurocacheOptions) -> None:
        storing = dict(options.retrieval_map)
        self.stored_at = {layer: storing[options.source(layer)] for layer in options.attention_layers}
        self.entries: dict[int, Tensor] = {}  # storing layer -> E^T E
        self.products: dict[int, Tensor] = {}  # attention layer -> E^T X

    def add(self, states: States, encode: Callable[[Tensor], Tensor]) -> None:
        """Take in the states of one segment."""
        entries = {layer: encode(states[layer]) for layer in set(self.stored_at.values())}
        for layer, stored in entries.items():
            self.entries[layer] = self.entries.get(layer, 0) + stored.T @ stored
        for layer, storing in self.stored_at.items():
            product = entries[storing].T @ states[layer].to(entries[storing].device)
            self.products[layer] = self.products.get(layer, 0) + product

    def map(self, layer: int) -> Tensor:
        """M_j, by ridge regression."""
        moments = self.entries[self.stored_at[layer]]
        ridge = RIDGE * moments.diagonal().mean() * torch.eye(len(moments), device=moments.device)
        return torch.linalg.solve(moments + ridge, self.products[layer]).T
