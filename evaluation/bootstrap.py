"""How sure a perplexity is: 95 % intervals from resampled documents (percentile bootstrap).

Documents are drawn with replacement, as many as there are; perplexity is exp(sum of nats / sum of tokens) of the drawn
ones. Tokens of one document depend on each other, so documents, not tokens, are what is drawn.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RESAMPLES = 10_000
LEVEL = 0.95


def perplexity_interval(nats: Floats, tokens: Floats, seed: int = 0) -> tuple[float, float] | None:
    """Lower and upper end for the perplexity per token; None for a single document.

    Args:
        nats, tokens: of each document, `[documents]`; those without tokens do not count.
    """
    nats, tokens = nats[tokens > 0], tokens[tokens > 0]
    if len(nats) < 2:
        return None
    return middle(np.exp(resampled_rates(nats, tokens, seed)))


def ratio_interval(nats: Floats, other_nats: Floats, tokens: Floats, seed: int = 0) -> tuple[float, float] | None:
    """The same for the ratio of two perplexities over the same tokens: both are taken from the same drawn documents."""
    return perplexity_interval(nats - other_nats, tokens, seed)


def resampled_rates(nats: Floats, tokens: Floats, seed: int) -> Floats:
    """Nats per token of each resample, `[RESAMPLES]`."""
    drawn = draws(len(nats), seed)
    return nats[drawn].sum(1) / tokens[drawn].sum(1)


@lru_cache(maxsize=4)  # one set of documents is asked about many times
def draws(documents: int, seed: int) -> NDArray[np.int64]:
    """Which documents each resample consists of, `[RESAMPLES, documents]`."""
    return np.random.default_rng(seed).integers(documents, size=(RESAMPLES, documents))


def middle(values: Floats) -> tuple[float, float]:
    """Between which values the middle 95 % lie."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, (tail, 1 - tail))
    return float(low), float(high)
