"""No memory: text is read in segments, and self-attention sees what the local window keeps of it.

    segment    the open segment alone
    sliding    also the last window_tokens tokens before it (Transformer-XL, Dai et al. 2019, arXiv 1901.02860)
    either     also the first sink_tokens tokens of the document (attention sinks, Xiao et al. 2023, arXiv 2309.17453)

Memories are measured against these. Keys and values that stay are not computed again, so they still carry traces of
text before the window, from one window further back in each higher layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.adapters.registration import register
from cacheformers.modeling.composite import CompositeConfig, CompositeForCausalLM, CompositeModel
from cacheformers.modeling.memory import RingState
from cacheformers.modeling.method import LocalWindowOptions, LocalWindowSettings, MemoryMethod


@dataclass(repr=False)  # transformers prints a configuration
class WindowedSettings(LocalWindowSettings):
    """Fields of `WindowedAdapterConfig` and `WindowedConfig`."""


@dataclass(kw_only=True)
class WindowedOptions(WindowedSettings, LocalWindowOptions):
    """`WindowedSettings` resolved against a base model; ValueError if an option does not fit it."""

    @property
    def near_tokens(self) -> None:
        """None, because nothing is trained."""
        return None

    @property
    def layers(self) -> tuple[int, ...]:
        """The layer that carries the options. The window is the same in every layer."""
        return (0,)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers whose output the method changes: all of them."""
        return tuple(range(self.base.layers))


class WindowedParts(NamedTuple):
    """Nothing is trained."""


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
        new_state=lambda *_: RingState({}),  # the local cache holds all that is kept
        parts=WindowedParts,
        make_parts=lambda *_: {},
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
            "local window ({local_window}) keeps of earlier text. It has no memory; memories are compared with it."
        ),
        limits=("What the local window does not keep is forgotten.",),
        choose_when="you need the baseline: the same window without a memory",
        grows="nothing",
        starts_as="the base model within its window",
        stores="nothing",
    )
)
