"""What a run has done so far; it travels with the checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class History:
    """Counts and curves.

    Attributes:
        losses: nats per token of each step.
        tokens: read so far, but for those that are only labels.
        seconds: of training, those of interrupted runs that went on included.
        log: one entry every `log_every` steps: rates, gradient norm, gates, what was retrieved.
    """

    losses: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.losses)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
