"""`CacheFormerCache`: the decoding state of every layer, in one cache that `generate()` understands."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from cacheformers.methods.cacheformer.cacheformer import CacheFormerOptions
from cacheformers.methods.cacheformer.state import CacheFormerState


class CacheFormerCache(Cache):
    """What a CacheFormer model keeps of a batch of documents while it decodes.

    Made by a forward with `use_cache=True`. It is passed as `past_key_values`, comes back in the output, and is changed
    in place like every transformers cache; `clone()` first to go on from it more than once.

    Attributes:
        states: one for each layer.
        visible: columns of ids that it has seen, padding included.
    """

    def __init__(
        self, options: CacheFormerOptions, rows: int, dtype: torch.dtype, devices: Sequence[torch.device]
    ) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.states = [CacheFormerState(options, rows, dtype, device) for device in devices]
        self.visible = 0

    @property
    def batch_size(self) -> int:
        return self.states[0].rows

    @property
    def tokens_read(self) -> list[int]:
        """Tokens that each row has read."""
        return self.states[0].tokens_read

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(state.nbytes for state in self.states)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.visible > 0

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        read = ", ".join(f"{tokens:,}" for tokens in self.tokens_read)
        return f"CacheFormerCache(tokens_read=[{read}], nbytes={self.nbytes:,})"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of ids seen (what `generate` does not feed again)."""
        return self.visible

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name of older transformers releases

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("A CacheFormerCache was given to another model: only CacheFormer models can use it.")

    def crop(self, tokens_to_remove: int) -> None:
        """Refused."""
        raise ValueError("A CacheFormerCache cannot forget tokens. To go back, clone() it before they are read.")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.expand(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.select(indices.tolist())

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was. Rows may be left out, and taken several times."""
        for state in self.states:
            state.select(rows)

    def expand(self, repeats: int) -> None:
        """Repeat every row `repeats` times in place (row 0, row 0, ..., row 1, ...), as `generate` does with beams."""
        self.select([row for row in range(self.batch_size) for _ in range(repeats)])

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Forget what the given rows (default: all) have read; a new document can begin there."""
        if rows is None:
            self.visible = 0
            rows = range(self.batch_size)
        for state in self.states:
            state.reset(rows)

    def clone(self) -> CacheFormerCache:
        """An independent copy."""
        twin = copy.copy(self)
        twin.states = [state.clone() for state in self.states]
        return twin

    def match_rows(self, rows: int) -> None:
        """Take on the number of rows of a batch; beams expand a cache whose rows divide it.

        Raises:
            ValueError: they do not divide it.
        """
        if rows % self.batch_size:
            raise ValueError(
                f"The cache holds {self.batch_size} documents, the batch has {rows} rows, which it neither equals nor "
                "is a multiple of. Use cache.select(rows) or cache.expand(n)."
            )
        self.expand(rows // self.batch_size)


def is_blank(cache: Cache) -> bool:
    """Whether a cache is the empty plain one that `generate` passes.

    Raises:
        ValueError: it is of another kind, or holds tokens.
    """
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        if isinstance(cache, CacheFormerCache):
            return False
        raise ValueError(
            f"{type(cache).__name__} (static, quantized or offloaded) cannot hold CacheFormer's state: leave "
            "past_key_values and cache_implementation out, or pass a CacheFormerCache."
        )
    if cache.get_seq_length() > 0:
        raise ValueError("A plain cache that holds tokens was passed to a CacheFormer model: start without one.")
    return True
