"""Stop a run between two steps: when its time is up, or when it is asked to by Ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """While it is entered, a first signal is only noted; a second one interrupts as usual.

    Args:
        minutes: after which to stop; None for never.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, self._before[number])

    @property
    def wanted(self) -> bool:
        """Whether this process has been asked to stop."""
        return self.signal is not None or (self.deadline is not None and time.monotonic() >= self.deadline)
