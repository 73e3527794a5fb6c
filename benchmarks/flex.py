"""CacheFormer's cache by FlexAttention: the same columns in a compiled kernel, over the tiles that this package reads.

    OMP_NUM_THREADS=1 python benchmarks/flex.py
    OMP_NUM_THREADS=1 python benchmarks/flex.py --rows 8  # choose more often

Random queries, keys and values of SmolLM2-135M's layers; a window of 256 tokens, the first segment, and 16 segments of
32 tokens for every block of `--rows` tokens. FlexAttention is given the choice of segments, `tiles` chooses, too, and
so does `one block a tile`, in which no tile has several blocks. All outputs are compared first. Seconds are the
processor's on a CPU, the clock's on a GPU. On a CPU PyTorch compiles with a C++ compiler, and has no gradients (torch
2.13). Results: flex.json.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from measuring import interleaved, parser, ratio, save, shown, table
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import LlamaConfig

import cacheformers
from cacheformers.methods.cacheformer import tiles as tiling
from cacheformers.methods.cacheformer.attention import attend_rows
from cacheformers.methods.cacheformer.cacheformer import CacheFormerOptions, CacheFormerParts, Projected
from cacheformers.modeling.architectures import base_shape

SEGMENT = 32
BASE = LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=1)


def main() -> None:
    """Measure, print, write."""
    given = parser(__doc__)
    given.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    given.add_argument("--rows", type=int, default=64, help="tokens that choose together")
    given.add_argument("--device", default="cpu")
    given.add_argument("--rounds", type=int, default=5)
    options = given.parse_args()
    compiled = torch.compile(flex_attention)
    rows = []
    for length in options.lengths:
        rows.append(compare(length, options.rows, options.device, options.rounds, compiled))
        save("flex", options, {"rows": rows}, indent=None)
    names = ("one block a tile", "FlexAttention", "causal SDPA")
    shown_rows = [[f"{row['tokens']:,}", *(shown(row[name]) for name in names)] for row in rows]
    print("\n".join(table(["tokens", *(f"{name} / tiles" for name in names)], shown_rows)))


@torch.no_grad()
def compare(tokens: int, block: int, device: str, rounds: int, compiled: Any) -> dict[str, Any]:
    """Return times over those of tiles, and the largest difference of the outputs."""
    config = cacheformers.CacheFormerAdapterConfig(
        long=False,
        overlap=False,
        sink=True,
        window_tokens=256,
        pool_tokens=SEGMENT,
        topk=16,
        select_rows=block,
        representatives="mean",
    )
    options = config.resolve(base_shape(BASE))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, 64, generator=generator).to(device) for heads in (9, 3, 3))
    projected = Projected(q, k, v, q, k)

    def tiles() -> Tensor:
        return attend_rows(options, CacheFormerParts(), projected, None)[0]

    def one_block_a_tile() -> Tensor:
        most = tiling.TILE_TOKENS
        tiling.TILE_TOKENS = dict.fromkeys(most, block)
        try:
            return tiles()
        finally:
            tiling.TILE_TOKENS = most

    output, run = attend_rows(options, CacheFormerParts(), projected, None)
    mask = block_mask(options, run.chosen()[0, :, ::block], tokens)

    # On a GPU the kernel's blocks are larger than the mask's, unless it is told.
    kernel = {} if device == "cpu" else {"kernel_options": {"BLOCK_M": block, "BLOCK_N": SEGMENT}}

    def flex() -> Tensor:
        return compiled(q, k, v, block_mask=mask, enable_gqa=True, **kernel)

    difference = max((run() - output).abs().max().item() for run in (flex, one_block_a_tile))
    runs = {
        "tiles": tiles,
        "one block a tile": one_block_a_tile,
        "FlexAttention": flex,
        "causal SDPA": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    }
    times = interleaved(runs, rounds, device, time.process_time if device == "cpu" else time.perf_counter)
    found = {name: ratio(times, name, "tiles") for name in runs if name != "tiles"}
    return {"tokens": tokens, "difference": difference, **found}


def block_mask(options: CacheFormerOptions, chosen: Tensor, tokens: int) -> BlockMask:
    """Return the mask of blocks of rows by segments: windows, and the segments that were chosen.

    Args:
        chosen: segments of each block of rows, `[kv_heads, blocks, segments]`, -1 for none.
    """
    kv_heads, blocks, _ = chosen.shape
    rows, segments, device = options.block_rows, tokens // SEGMENT, chosen.device
    first = torch.arange(blocks, device=device)[:, None] * rows
    begins = torch.arange(segments, device=device)[None] * SEGMENT
    near = (begins >= options.window_start(first)) & (begins < first + rows)
    whole = near & (begins + SEGMENT <= first + 1)
    far = torch.zeros(kv_heads, blocks, segments + 1, dtype=torch.bool, device=device)
    far = far.scatter(-1, chosen.where(chosen >= 0, segments), True)[..., :-1]

    def listed(seen: Tensor) -> tuple[Tensor, Tensor]:
        seen = seen.expand(kv_heads, -1, -1).repeat_interleave(options.heads // kv_heads, 0)[None]
        order = seen.int().argsort(dim=-1, descending=True, stable=True)
        return seen.sum(-1, dtype=torch.int32), order.int()

    return BlockMask.from_kv_blocks(
        *listed(near & ~whole),
        *listed(far | whole),
        BLOCK_SIZE=(rows, SEGMENT),
        mask_mod=causal,
        seq_lengths=(tokens, tokens),
    )


def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Say whether a token is visible in a block on the diagonal."""
    return query >= key


if __name__ == "__main__":
    main()
