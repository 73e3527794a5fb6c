"""Models of this package that are not a memory on a base: their own attention is their memory."""

from __future__ import annotations

from torch import nn

from cacheformers.modeling.memory import BaseShape
from cacheformers.modeling.shim import ShimConfig


class WholeConfig(ShimConfig):
    """The configuration of such a model. Its base model class has `new_cache(rows)`, an empty cache for documents."""

    segment_tokens: int  # of a row when it is trained from scratch and evaluated in rows

    @property
    def causal(self) -> bool:
        """Whether no token depends on later ones; otherwise the model is for study and cannot generate."""
        raise NotImplementedError

    def base_shape(self) -> BaseShape:
        """The model as a decoder that is shown at most a row at a time.

        Raises:
            ValueError: options that contradict each other.
        """
        raise NotImplementedError


def is_whole(model: nn.Module) -> bool:
    """Whether a model's own attention is its memory."""
    return isinstance(model.config, WholeConfig)
