"""An addition to Neurocache's paper: cache attention knows how near hits were, and which is newest."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

# Initial values: a pointer of six numbers, fitted with SmolLM2-135M, gave the same values on two books
# (docs/results/neurocache_recipe.md, 1d).
NEARNESS, BESIDE, FOLLOWING, NOTHING = 15.0, -2.6, 3.8, 22.0
NOTHING_STEP = 3.0  # of the score of nothing, for a parameter that moves by one


class Found(NamedTuple):
    """How good the hits of tokens are.

    Attributes:
        cosines: between each hit and the token that found it, `[..., k]`.
        newer: how many of the token's hits are newer, `[..., k]`.
    """

    cosines: Tensor
    newer: Tensor


def newer_hits(hits: Tensor) -> Tensor:
    """Count, for each hit of `[..., k]`, the hits of the same token that are newer."""
    return (hits[..., None, :] > hits[..., None]).sum(-1)


class HitScores(nn.Module):
    """Numbers that each query head adds to the scores of retrieved states, and its score of nothing.

        score(t, s) = q_t . k_s / sqrt(d_head) + 15 exp(nearness) cos(e_t', e_hit) + beside[t - t', place of s]
                      - order log2(1 + newer)
        score(t, nothing) = 22 + 3 nothing, with the value 0

    t' is the token whose search retrieved s, `hit` the entry that it found, 0 ... w-1 places from s, and `newer` how
    many hits of t' are newer than that one: the same at any distance, so that the latest of several facts can be told
    from the earlier ones in a text of any length. `order` is there with `hit_order`. Like all retrieved numbers,
    cosines carry a gradient to W_p through the entry only. In float32 or better.
    """

    def __init__(self, heads: int, context: int, neighborhood: int, order: bool = False) -> None:
        super().__init__()
        self.nearness = nn.Parameter(torch.zeros(heads))
        self.beside = nn.Parameter(torch.full((heads, context, neighborhood), BESIDE))
        self.nothing = nn.Parameter(torch.zeros(heads))
        self.order = nn.Parameter(torch.zeros(heads)) if order else None
        if neighborhood > 1:
            self.beside.data[:, 0, neighborhood // 2] = FOLLOWING  # the entry after the token's own hit

    def forward(self, found: list[Found]) -> Tensor:
        """Return what to add, `[tokens, heads, N*c]`, from hits, `[tokens, k]`, by how many tokens ago."""
        slope = NEARNESS * torch.exp(self.nearness)[:, None]
        added = []
        for back, (cosines, newer) in enumerate(found):
            of_hit = slope * cosines[:, None]  # [tokens, heads, k]
            if self.order is not None:
                of_hit = of_hit - self.order[:, None] * torch.log2(1 + newer.to(of_hit.dtype))[:, None]
            added.append((of_hit[..., None] + self.beside[:, back, None, :]).flatten(2))
        return torch.cat(added, -1)

    def score_of_nothing(self) -> Tensor:
        """Return the score of nothing, `[heads]`."""
        return NOTHING + NOTHING_STEP * self.nothing
