"""Texts of associative recall: pairs of a key and a value, and later queries, each a key whose value must follow.

    filler filler  K V V V  filler ...  K' V' V' V'  filler ...  K V V V  filler
                   a pair               another pair             the query of the first

After multi-query associative recall (Arora et al. 2023, arXiv 2312.04927): every key is asked at most once, and only
the values of queries are learned and scored. Pairs, queries and filler stand in cells of one pair's length, behind a
few tokens of filler, so that pairs fall anywhere in a model's segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cacheformers.common.loss import IGNORED

FILLER, KEYS, VALUES = range(0, 16), range(16, 80), range(80, 208)
VOCABULARY = VALUES.stop


@dataclass(frozen=True)
class Layout:
    """Where pairs and queries stand in a text.

    Attributes:
        tokens: of a text.
        pairs: number of pairs.
        value_tokens: of each value. No two values of a text share a token, so one token of a value tells the next.
        order: "first": pairs, then their queries at random places; "mixed": pairs and queries anywhere, each query
            after its pair; "one": a single query at the end, `distance` tokens after its pair, the other pairs anywhere
            before it.
        distance: from a pair to its query, in tokens, a multiple of a pair's length; only with "one".
    """

    tokens: int
    pairs: int
    value_tokens: int = 1
    order: str = "first"
    distance: int | None = None

    def __post_init__(self) -> None:
        most = {"first": self.cells // 2, "mixed": self.cells // 2, "one": self.cells - 1}.get(self.order)
        if most is None:
            raise ValueError(f"order must be 'first', 'mixed' or 'one', got {self.order!r}.")
        most = min(most, len(KEYS), len(VALUES) // self.value_tokens)
        if not 1 <= self.pairs <= most:
            raise ValueError(f"{self.tokens} tokens take 1 to {most} pairs of {self.cell} tokens, got {self.pairs}.")
        if (self.order == "one") != (self.distance is not None):
            raise ValueError("distance is for order='one', which needs it.")
        if self.distance is not None and (
            self.distance % self.cell or not self.cell <= self.distance < self.cells * self.cell
        ):
            raise ValueError(
                f"distance must be a multiple of a pair's {self.cell} tokens and less than {self.cells * self.cell}, "
                f"got {self.distance}."
            )

    @property
    def cell(self) -> int:
        """Tokens of a pair."""
        return 1 + self.value_tokens

    @property
    def cells(self) -> int:
        """Cells of a text. Less than one cell of filler stands before them."""
        return (self.tokens - self.cell + 1) // self.cell


@dataclass(frozen=True)
class Texts:
    """Texts, `[rows, tokens]`, and their queries, `[rows, queries]`.

    Attributes:
        labels: the token after each position where that is the value of a query, elsewhere `IGNORED`.
        query_at, pair_at: positions of the keys of a query and of its pair.
    """

    ids: Tensor
    labels: Tensor
    query_at: Tensor
    pair_at: Tensor

    def right(self, predicted: Tensor) -> Tensor:
        """Return which queries are answered with all of their value, from predicted tokens `[rows, tokens]`."""
        wrong = (predicted != self.labels) & (self.labels != IGNORED)
        before = torch.nn.functional.pad(wrong.cumsum(1), (1, 0))
        value_tokens = int((self.labels[0] != IGNORED).sum()) // self.query_at.shape[1]
        return before.gather(1, self.query_at + value_tokens) == before.gather(1, self.query_at)


def draw(layout: Layout, rows: int, random: torch.Generator) -> Texts:
    """Draw texts of one layout."""

    def chosen(count: int, values: range | int) -> Tensor:
        """Draw different numbers, `[rows, count]`."""
        values = range(values) if isinstance(values, int) else values
        return values.start + torch.rand(rows, len(values), generator=random).argsort(1)[:, :count]

    pairs, size, cells = layout.pairs, layout.cell, layout.cells
    if layout.order == "first":
        pair_cells = torch.arange(pairs).expand(rows, -1)
        query_cells = pairs + chosen(pairs, cells - pairs)
    elif layout.order == "mixed":
        both = chosen(2 * pairs, cells).unflatten(1, (2, pairs)).sort(1).values
        pair_cells, query_cells = both.unbind(1)
    else:
        assert layout.distance is not None
        asked, last = cells - 1 - layout.distance // size, cells - 1
        others = chosen(pairs - 1, last - 1)
        pair_cells = torch.cat([torch.full((rows, 1), asked), others + (others >= asked)], 1)
        query_cells = torch.full((rows, 1), last)
    start = torch.randint(layout.tokens - cells * size + 1, (rows, 1), generator=random)
    pair_at, query_at = start + pair_cells * size, start + query_cells * size

    keys = chosen(pairs, KEYS)
    values = chosen(pairs * layout.value_tokens, VALUES).unflatten(1, (pairs, -1))
    tokens = torch.cat([keys[..., None], values], 2)  # [rows, pairs, size]
    ids = torch.randint(FILLER.start, FILLER.stop, (rows, layout.tokens), generator=random)
    labels = torch.full_like(ids, IGNORED)
    place = torch.arange(size)
    queries = query_at.shape[1]
    ids.scatter_(1, (pair_at[..., None] + place).flatten(1), tokens.flatten(1))
    asked_at = query_at[..., None] + place
    ids.scatter_(1, asked_at.flatten(1), tokens[:, :queries].flatten(1))
    labels.scatter_(1, asked_at[..., :-1].flatten(1), tokens[:, :queries, 1:].flatten(1))
    return Texts(ids, labels, query_at, pair_at[:, :queries])
