"""The settings of gated attention, and their values on one base model."""

from __future__ import annotations

from dataclasses import dataclass

from cacheformers.modeling.architectures import check_scores
from cacheformers.modeling.memory import EVERYTHING, LocalWindow
from cacheformers.modeling.method import (
    MethodOptions,
    MethodSettings,
    check_at_least,
    check_choices,
    chosen_layers,
    setting,
)


@dataclass(repr=False)  # transformers prints a configuration
class GatedAttentionSettings(MethodSettings):
    """Fields of `GatedAttentionAdapterConfig` and `GatedAttentionConfig`. Layers count from 0."""

    window_tokens: int = setting(512, "Tokens that a closed gate sees (w), including the token itself.")
    far_distance: int = setting(
        0,
        "Tokens beyond the window are read as if they all stood this many tokens before the query, so that a base "
        "reads texts beyond its positions. 0: at their true distance.",
    )
    layers: list[int] | None = setting(None, "Layers with gates. Default: all.")
    gate_hidden: int | None = setting(None, "Width of the gate's hidden layer. Default: a linear gate.", free=True)
    gate_per: str = setting("layer", "One gate a 'layer', 'head' or 'kv_head'.", free=True)
    gate_bias: float = setting(
        4.0,
        "Initial bias of the gates, before the sigmoid: 4 nearly keeps the base's function, inf keeps it exactly; 0 "
        "suits a model from scratch.",
        free=True,
    )
    gate_choice: str = setting(
        "soft",
        "How gates are made in training: 'soft'; or, for the last phase, 'straight_through' (0 or 1 "
        "forward, soft backward), 'gumbel' (a noisy sigmoid) or 'hard_concrete' (noisy, stretched, clipped).",
        free=True,
    )
    gate_temperature: float = setting(2 / 3, "Temperature of the noisy choices.", free=True)
    sparsity_weight: float = setting(
        0.0, "Weight of mean g(1 - g) in `memory.state.loss`: gates go to 0 or 1.", free=True
    )
    mean_weight: float = setting(0.0, "Weight of mean g in `memory.state.loss`: gates close.", free=True)
    sparsity_sign: str = setting("+", "'+', or for study 'paper', which pushes gates to 0.5 instead.", free=True)
    threshold: float = setting(
        0.0,
        "In inference, gates below it are 0 and read nothing far, and gates above 1 - threshold are 1. 0 "
        "computes what was trained.",
        free=True,
    )
    segment_tokens: int = setting(2048, "Tokens of one forward; bounds activations and changes no result.", free=True)
    far_heads: dict[int, list[int]] | None = setting(
        None,
        "Layer -> its kv heads that see everything; the others see and keep only the window. The gates of such a "
        "layer are not used. Default: gates decide everywhere.",
    )


@dataclass(kw_only=True)
class GatedAttentionOptions(GatedAttentionSettings, MethodOptions):
    """`GatedAttentionSettings` resolved against a base model; ValueError if an option does not fit it."""

    layers: tuple[int, ...]  # type: ignore[assignment]  # resolved
    far_heads: tuple[tuple[int, tuple[int, ...]], ...] = ()  # type: ignore[assignment]  # resolved

    def __post_init__(self) -> None:
        self.layers = chosen_layers(self.layers, self.base)
        if isinstance(self.far_heads, dict) or self.far_heads is None:
            heads = {int(layer): tuple(heads) for layer, heads in (self.far_heads or {}).items()}  # JSON has text keys
            self.far_heads = tuple(sorted(heads.items()))
        check_at_least(1, self, "window_tokens", "segment_tokens")
        if self.gate_hidden is not None and self.gate_hidden < 1:
            raise ValueError(f"gate_hidden must be at least 1, got {self.gate_hidden}: leave it out for a linear gate.")
        check_at_least(0, self, "sparsity_weight", "mean_weight", "far_distance")
        check_choices(
            self,
            gate_per=("layer", "head", "kv_head"),
            gate_choice=("soft", "straight_through", "gumbel", "hard_concrete"),
            sparsity_sign=("+", "paper"),
        )
        if not self.gate_temperature > 0:
            raise ValueError(f"gate_temperature must be positive, got {self.gate_temperature}.")
        if not 0 <= self.threshold <= 0.5:
            raise ValueError(f"threshold must be between 0 and 0.5, got {self.threshold}.")
        if self.far_distance:
            self.check_far_distance()
        check_scores(self.base.model_type)
        if self.base.sliding_window is not None:
            raise ValueError(
                f"This base's layers see only {self.base.sliding_window} tokens back, and gates would open on "
                "everything: load the base with sliding_window=None, or choose another."
            )
        for layer, kv_heads in self.far_heads:
            if layer not in self.layers or not set(kv_heads) <= set(range(self.base.kv_heads)):
                raise ValueError(
                    f"far_heads names layer {layer} with kv heads {list(kv_heads)}: the method's layers are "
                    f"{list(self.layers)}, and this base model has {self.base.kv_heads} kv heads."
                )

    def check_far_distance(self) -> None:
        """Raise ValueError unless far tokens can be moved, and stay beyond the window and in known positions."""
        if not self.base.rotary:
            raise ValueError(
                f"far_distance moves keys to other positions, which {self.base.model_type} cannot do (its positions "
                "are learned embeddings): leave it out."
            )
        most = self.base.max_positions - 1
        if not self.window_tokens <= self.far_distance <= most:
            raise ValueError(
                f"far_distance {self.far_distance} must be at least window_tokens {self.window_tokens}, and fit the "
                f"base's {self.base.max_positions} positions: at most {most}."
            )

    @property
    def positions(self) -> int:
        """Positions that the base model must have."""
        bounded = self.far_distance and len(self.layers) == self.base.layers  # the other layers see everything
        return self.far_distance + 1 if bounded else EVERYTHING

    @property
    def near_tokens(self) -> int:
        """The window: gates matter once it is full."""
        return self.window_tokens

    @property
    def window(self) -> LocalWindow:
        """Everything stays visible; the attention itself tells near from far."""
        return LocalWindow(self.segment_tokens, EVERYTHING)

    @property
    def channels(self) -> int:
        """The number of gates of a token in a layer."""
        return {"layer": 1, "head": self.base.heads, "kv_head": self.base.kv_heads}[self.gate_per]

    def fixed(self, layer: int) -> tuple[int, ...] | None:
        """Return the kv heads of a layer that see everything; None where gates decide."""
        return dict(self.far_heads).get(layer)
