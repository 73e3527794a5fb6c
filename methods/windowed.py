"""No memory: text is read in segments, and self-attention sees what the local window keeps of it.

    segment    the open segment alone
    sliding    also the last window_tokens tokens before it (Transformer-XL, Dai et al. 2019, arXiv 1901.02860)
    either     also the first sink_tokens tokens of the document (attention sinks, Xiao et al. 2023, arXiv 2309.17453)

These are what memories are measured against. Keys and values that stay are as they were computed: what is before the
window still shows in them, one layer further back a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.adapters.registration import register
from cacheformers.modeling.composite import CompositeConfig, CompositeForCausalLM, CompositeModel
from cacheformers.modeling.memory import MemoryState
from cacheformers.modeling.method import MemoryMethod
from cacheformers.modeling.settings import LocalWindowOptions, LocalWindowSettings


@dataclass(repr=False)  # transformers prints a configuration
class WindowedSettings(LocalWindowSettings):
    """Fields of `WindowedAdapterConfig` and `WindowedConfig`."""


@dataclass(kw_only=True)
class WindowedOptions(WindowedSettings, LocalWindowOptions):
    """`WindowedSettings` resolved against a base model.

    Raises:
        ValueError: an option that does not fit the base model.
    """

    @property
    def near_tokens(self) -> None:
        """Nothing is trained."""
        return None

    @property
    def layers(self) -> tuple[int, ...]:
        """The layer on which the options are found: the window is the same in all."""
        return (0,)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers whose output the method changes: all."""
        return tuple(range(self.base.layers))


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


def new_state(
    options: WindowedOptions,
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


@dataclass
class WindowedAdapterConfig(WindowedSettings, MemoryAdapterConfig):
    """LoRA on a base that sees only a local window, to compare memories with."""


class WindowedConfig(WindowedSettings, CompositeConfig):
    """A base model that sees only a local window, to compare memories with."""

    model_type = "windowed"


class WindowedModel(CompositeModel):
    """A base model with a local window, without a head."""

    config_class = WindowedConfig


class WindowedForCausalLM(CompositeForCausalLM):
    """A base language model with a local window."""

    config_class = WindowedConfig
    model_class = WindowedModel


register(
    MemoryMethod(
        adapter_config=WindowedAdapterConfig,
        causal_lm=WindowedForCausalLM,
        options=WindowedOptions,
        new_state=new_state,
        parts=WindowedParts,
        make_parts=make_parts,
        title="Local window",
        paper="[Dai et al. 2019](https://arxiv.org/abs/1901.02860)",
        citation="""@inproceedings{dai2019transformerxl,
  title = {Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context},
  author = {Dai, Zihang and Yang, Zhilin and Yang, Yiming and Carbonell, Jaime and Le, Quoc and Salakhutdinov, Ruslan},
  booktitle = {ACL},
  year = {2019}
}""",
        summary=(
            "Text is read in segments of {segment_tokens:,} tokens; self-attention sees the open segment and what the "
            "local window ({local_window}) keeps of what was before. There is no memory: it is what memories are "
            "compared with."
        ),
        limits=("What the local window does not keep is forgotten.",),
        grows="nothing",
        starts_as="the base model within its window",
        stores="nothing",
    )
)
