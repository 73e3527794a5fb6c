"""Configurations of CacheFormer's attention that cover every pair of choices, and random inputs for them."""

import itertools
import random
import warnings

import torch
from cacheformer_golden import rotate_pairs

from cacheformers.methods.cacheformer.cacheformer import CacheFormerOptions, CacheFormerParts, Projected, make_parts

CHOICES = {
    "kv_heads": (4, 2, 1),
    "window_tokens": (8, 6, 4),
    "pool_tokens": (4, 2, 3, 8),
    "pool_vectors": (2, 1, 3),
    "topk": (2, 1, 3),
    "neighbors": (1, 2, 3),
    "select_rows": (None, 3, 5, 16),
    "selection": ("previous_block", "token", "prefix", "paper_block"),
    "magnitude": ("rows", "mean"),
    "aggregation": ("joint", "separate", "gated"),
    "long": (True, False),
    "overlap": (True, False),
    "cache": (True, False),
    "exclude_window": (False, True),
    "sink": (False, True),
    "cache_tokens": (None, 16, 9),
    "cache_int8": (False, True),
    "weights": ("tied", "separate", "pretrained"),
    "local_norm": (True, False),
    "global_norm": (True, False),
    "shared_projection": (True, False),
}


def make_options(choice):
    """Of a choice for each name above.

    Raises:
        ValueError: the choice contradicts itself.
    """
    given = dict(choice)
    weights = given.pop("weights", "tied")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CacheFormerOptions(
            heads=4,
            head_dim=4,
            tied=weights == "tied",
            pretrained=weights == "pretrained",
            wide_blocks=(given.get("select_rows") or 0) > given["window_tokens"],
            **given,
        )


def pairwise(seed=0, **fixed):
    """Valid choices that together hold every pair of values that any of 3,000 valid choices holds."""
    generator = random.Random(seed)
    pool = []
    while len(pool) < 3000:
        choice = {name: generator.choice(values) for name, values in CHOICES.items()} | fixed
        try:
            make_options(choice)
        except ValueError:
            continue
        pool.append((choice, set(itertools.combinations(choice.items(), 2))))
    missing = set().union(*(pairs for _, pairs in pool))
    chosen = []
    while missing:
        choice, pairs = max(pool, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(choice)
        missing -= pairs
    return chosen


def label(choice):
    return " ".join(str(value) for value in choice.values())


def random_parts(options):
    """Parts in float64, none of them neutral."""
    generator = torch.Generator().manual_seed(3)
    modules = make_parts(options)
    for module in modules.values():
        for parameter in module.double().parameters():
            parameter.data += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return CacheFormerParts(**modules)


def random_inputs(options, time, rows=1, seed=4):
    """Queries, keys and values in float64, rotated by the positions 0 to time-1."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads):
        return 1.5 * torch.randn(rows, heads, time, options.head_dim, generator=generator, dtype=torch.float64)

    plain_q, plain_k, v = draw(options.heads), draw(options.kv_heads), draw(options.kv_heads)
    positions = torch.arange(time)[None].expand(rows, -1)
    q, k = rotate_pairs(plain_q, positions), rotate_pairs(plain_k, positions)
    return Projected(q, k, None if options.tied else v, plain_q, plain_k)
