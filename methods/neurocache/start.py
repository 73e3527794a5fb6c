"""An initialization of a new memory from the base's states.

Copied weights read the first d numbers of a state, but an entry has its own coordinates. Here W_p takes the d - 1
directions in which states are largest, and W_k and W_v of layer j become the base's own, applied to the state that can
be reconstructed from an entry:

    x_j ~ M_j e,   W_k = W_k(base, j) M_j,   W_v = W_v(base, j) M_j

So cache attention starts as the layer's own attention, without positions, to a compressed past. Measured in
docs/results/neurocache_recipe.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from cacheformers.adapters.model import projection_weights
from cacheformers.methods.neurocache.options import NeurocacheOptions
from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap
from cacheformers.modeling.method import active_memories, required_options

RIDGE = 1e-3  # of the mean square of an entry's numbers

States = dict[int, Tensor]  # layer -> x, the input of its self-attention, [tokens, h], float32


@torch.no_grad()
def start_from_states(model: PeftModel, segments: Sequence[Tensor]) -> None:
    """Set W_p, W_k and W_v of the active adapter in place, from the base's states on a few thousand tokens.

    Args:
        model: the base with a new Neurocache adapter; gates may have any value.
        segments: ids `[tokens]`, which the base reads twice.

    Raises:
        ValueError: no memory is active, there are fewer tokens than numbers in an entry, or the base's states are not
            finite.
    """
    decoder = find_decoder(unwrap(model))
    attentions, options = attention_modules(decoder), required_options(decoder)
    parts_of = {memory.layer: memory.active_parts for memory in active_memories(decoder)}
    tokens = sum(len(ids) for ids in segments)
    if tokens < options.width:
        raise ValueError(f"{tokens} tokens are too few: an entry has {options.width} numbers. Give more segments.")

    encoder = parts_of[options.first_layer]
    searched = {layer for pair in options.retrieval_map for layer in pair}
    if encoder.down is not None:
        moments = sum(
            states[layer].T @ states[layer] for states in base_states(model, searched, segments) for layer in searched
        )
        encoder.down.weight.copy_(principal_projection(moments, options.width, tokens * len(searched)))  # type: ignore[arg-type]  # a Linear

    fit = Fit(options)
    for states in base_states(model, {*options.attention_layers, *searched}, segments):
        fit.add(states, encoder.encode)
    for layer in options.attention_layers:
        parts = parts_of[layer]
        _, keys, values, _ = projection_weights(attentions[layer], unwrap(model).config)  # type: ignore[arg-type]  # its configuration
        back = fit.map(layer)
        parts.k.weight.copy_(keys.float() @ back)
        parts.v.weight.copy_(values.float() @ back)


def base_states(model: PeftModel, layers: Iterable[int], segments: Sequence[Tensor]) -> Iterator[States]:
    """Yield x of the given layers in the base alone, segment by segment; raise ValueError if it is not finite."""
    attentions = attention_modules(find_decoder(unwrap(model)))
    found: States = {}

    def keep(layer: int, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        found[layer] = hidden[0].float()

    with ExitStack() as stack:
        for layer in layers:
            hook = attentions[layer].register_forward_pre_hook(partial(keep, layer), with_kwargs=True)
            stack.callback(hook.remove)
        stack.callback(model.train, model.training)
        stack.enter_context(model.disable_adapter())
        model.eval()
        for ids in segments:
            model(ids[None].to(next(model.parameters()).device), use_cache=False)
            if not all(bool(torch.isfinite(states).all()) for states in found.values()):
                raise ValueError("The base's states are not finite: check its weights and dtype.")
            yield found


def principal_projection(moments: Tensor, width: int, tokens: int) -> Tensor:
    """Compute W_p `[width, h]`: the width - 1 largest directions of states, scaled to numbers of size 1.

    They are rotated away from (1, ..., 1), because the LayerNorm after W_p removes an entry's part along it, its mean.

    Args:
        moments: X^T X of states `[tokens, h]`, not centered: their mean is a direction like any other.
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
    """Fits M_j `[h, d]`, which maps entries to states of layer j, for every attention layer by least squares."""

    def __init__(self, options: NeurocacheOptions) -> None:
        storing = dict(options.retrieval_map)
        self.stored_at = {layer: storing[options.source(layer)] for layer in options.attention_layers}
        self.entries: dict[int, Tensor] = {}  # storing layer -> E^T E
        self.products: dict[int, Tensor] = {}  # attention layer -> E^T X

    def add(self, states: States, encode: Callable[[Tensor], Tensor]) -> None:
        """Add the states of one segment."""
        entries = {layer: encode(states[layer]) for layer in set(self.stored_at.values())}
        for layer, stored in entries.items():
            self.entries[layer] = self.entries.get(layer, 0) + stored.T @ stored
        for layer, storing in self.stored_at.items():
            product = entries[storing].T @ states[layer].to(entries[storing].device)
            self.products[layer] = self.products.get(layer, 0) + product

    def map(self, layer: int) -> Tensor:
        """Return M_j, by ridge regression."""
        moments = self.entries[self.stored_at[layer]]
        ridge = RIDGE * moments.diagonal().mean() * torch.eye(len(moments), device=moments.device)
        return torch.linalg.solve(moments + ridge, self.products[layer]).T
