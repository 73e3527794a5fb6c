"""Gated attention (Liao & Chang). Read `gated_attention.py` first: equations, gates, and the specification.

Then `near_far.py`, which attends to a window and beyond it; `state.py`, which keeps keys, values and the gates' loss;
and `options.py`, the settings.
"""

from dataclasses import dataclass

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.adapters.registration import register
from cacheformers.methods.gated_attention.gated_attention import GatedParts, attend, make_parts
from cacheformers.methods.gated_attention.options import GatedAttentionOptions, GatedAttentionSettings
from cacheformers.methods.gated_attention.state import GatedState, token_gate_statistics
from cacheformers.modeling.composite import CompositeConfig, CompositeForCausalLM, CompositeModel
from cacheformers.modeling.method import MemoryMethod


@dataclass
class GatedAttentionAdapterConfig(GatedAttentionSettings, MemoryAdapterConfig):
    """Gated attention beside LoRA (Liao & Chang, MIT 6.7960 course report)."""


class GatedAttentionConfig(GatedAttentionSettings, CompositeConfig):
    """A base model with gated attention in it (Liao & Chang, MIT 6.7960 course report)."""

    model_type = "gated_attention"


class GatedAttentionModel(CompositeModel):
    """A base model with gated attention, without a head."""

    config_class = GatedAttentionConfig


class GatedAttentionForCausalLM(CompositeForCausalLM):
    """A base language model with gated attention."""

    config_class = GatedAttentionConfig
    model_class = GatedAttentionModel


register(
    MemoryMethod(
        adapter_config=GatedAttentionAdapterConfig,
        causal_lm=GatedAttentionForCausalLM,
        options=GatedAttentionOptions,
        new_state=GatedState,
        parts=GatedParts,
        make_parts=make_parts,
        attend=attend,
        title="Gated attention",
        paper="Liao & Chang, MIT 6.7960 course report",
        citation="""@misc{liao2024gated,
  title = {Optimizing Long-Context Understanding with Gated Attention Mechanisms},
  author = {Liao and Chang},
  howpublished = {Course report, MIT 6.7960}
}""",
        summary=(
            "Every token decides by a gate whether attention looks beyond the last {window_tokens:,} tokens (gated "
            "attention, after Liao and Chang's course report)."
        ),
        limits=(
            "All keys and values are kept, so memory grows with the text. Closed gates only save reading them; with "
            "the default threshold of 0 they save nothing.",
            "A text can be no longer than the base model's positions, unless far_distance is set and all layers have "
            "gates.",
        ),
        choose_when="the text fits the base's positions, and you want fewer reads of far tokens",
        grows="all keys and values; reads of closed tokens do not",
        starts_as="nearly the base model (gates of 0.98)",
        stores="everything",
        statistics=token_gate_statistics,
        frozen_layers=lambda options: tuple(layer for layer, _ in options.far_heads),
        test_settings={"window_tokens": 6},
    )
)
