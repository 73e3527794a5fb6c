"""No memory: text is read in segments, and self-attention sees what the local window keeps of it.

    segment    the open segment alone
    sliding    also the last window_tokens tokens before it (Transformer-XL, Dai et al. 2019, arXiv 1901.02860)
    either     also the first sink_tokens tokens of the document (attention sinks, Xiao et al. 2023, arXiv 2309.17453)

These are what memories are measured against. Keys and values that stay are as they were computed: what is before the
window still shows in them, one layer further back a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cacheformers.modeling.memories.base import BaseShape, MemoryState
from cacheformers.modeling.memories.settings import LocalWindowOptions, LocalWindowSettings


@dataclass(repr=False)  # transformers prints a configuration
class WindowedSettings(LocalWindowSettings):
    """Fields of `WindowedAdapterConfig` and `WindowedConfig`."""

    def resolve(self, base: BaseShape) -> WindowedOptions:
        """The method's options for one base model.

        Raises:
            ValueError: an option that does not fit the base model.
        """
        return WindowedOptions(base=base, **self.chosen(WindowedSettings))


@dataclass(frozen=True, kw_only=True)
class WindowedOptions(LocalWindowOptions):
    """The window, resolved against a base model (see `LocalWindowSettings` for each option's meaning).

    Raises:
        ValueError: an option that does not fit the base model.
    """

    def __post_init__(self) -> None:
        self.check_local_window()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layer on which the options are found: the window is the same in all."""
        return (0,)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers whose output the method changes: all."""
        return tuple(range(self.base.layers))

    @property
    def near_tokens(self) -> None:
        """Nothing is trained."""
        return None

    @property
    def signature(self) -> dict[str, Any]:
        """What two models must share to exchange what they have read."""
        return {"method": "windowed", **asdict(self)}

    def new_state(
        self,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool = False,
        cache_size: int | None = None,
    ) -> WindowedState:
        """A state that holds nothing.

        Raises:
            ValueError: something is to be remembered.
        """
        if cache_size:
            raise ValueError("A local window remembers nothing beside it: leave cache_size out.")
        return WindowedState()


class WindowedParts(NamedTuple):
    """Nothing is trained."""

    @property
    def fingerprint(self) -> tuple[float, ...]:
        return ()


def make_parts(*_: Any) -> dict[str, nn.Module]:
    """Nothing is trained."""
    return {}


class WindowedState(MemoryState):
    """Holds nothing: all that is kept are the keys and values of the local window."""

    def begin(self) -> None:
        """There is nothing to read."""

    def end(self, reading: None) -> None:
        """Nothing is left behind."""

    def check(self, row: int, columns: Tensor) -> None:
        """Nothing is stored."""

    def commit(self, row: int, columns: Tensor) -> None:
        """Nothing is stored."""

    def kept(self, row: int, closed: int) -> int:
        return 0

    def keep(self, columns: Tensor) -> None:
        """There are no columns."""

    def reset(self, rows: Sequence[int]) -> None:
        """There is nothing to forget."""

    def select(self, rows: Sequence[int]) -> None:
        """All rows are alike."""

    def clone(self) -> WindowedState:
        return WindowedState()

    def to(self, device: torch.device | str) -> None:
        """There are no tensors."""

    @property
    def nbytes(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """There are no tensors."""
