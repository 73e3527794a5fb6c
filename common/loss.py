"""The language-model loss on labels that are already the next tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label of a position without a target


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in nats of each position, float32, 0 where the label is -100.

    transformers' own loss shifts labels inside a segment, which would lose each segment's last label.

    Args:
        logits: `[rows, time, vocabulary]`.
        labels: the token after each position, `[rows, time]`.
    """
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(labels)
