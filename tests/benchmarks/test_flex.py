"""The mask that FlexAttention gets shows the columns that CacheFormer's tiles read."""

import importlib
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def by_blocks(q, k, v, block_mask, enable_gqa):
    """What the compiled kernel returns: it reads the blocks of the mask. (Without a compiler blocks are ignored.)"""
    rows, columns = block_mask.BLOCK_SIZE
    seen = block_mask.to_dense().bool().repeat_interleave(rows, 2).repeat_interleave(columns, 3)
    return F.scaled_dot_product_attention(q, k, v, seen & torch.ones(seen.shape[-2:]).tril().bool(), enable_gqa=True)


def test_both_read_the_same(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    flex = importlib.import_module("flex")
    found = flex.compare(1536, 64, "cpu", 1, by_blocks)
    assert found["difference"] < 1e-5 and found["FlexAttention"]["ratio"] > 0
    mask = flex.block_mask
    monkeypatch.setattr(flex, "block_mask", lambda options, chosen, tokens: mask(options, chosen - 1, tokens))
    assert flex.compare(1536, 64, "cpu", 1, by_blocks)["difference"] > 1e-3
