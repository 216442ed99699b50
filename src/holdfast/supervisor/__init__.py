"""`holdfast run`: starts a script, and starts it again when it ends before it is done.

Start with `supervisor` (the loop: start, watch, look at the end, decide). `processes` are those of one life, `startup`
is the folder that every Python process of the script begins in. What the script says of itself is read from
`holdfast.run.life`. All that a supervisor knows may be lost without losing a step that was durable. Imports no torch.

Here signals are held from the first moment on, before anything else is imported.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

__all__ = ["STOPS", "HeldSignals", "hold"]

STOPS = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")
_PASSED = (*STOPS, "SIGUSR2", "SIGTSTP")


class HeldSignals:
    """Signals that have come and were not passed on yet.

    Attributes:
        waiting: their numbers, in order.
    """

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self._wake_fd = -1

    def install(self) -> None:
        """Hold the signals that are passed to the script; one that is ignored (nohup) stays ignored."""
        for name in _PASSED:
            number = getattr(signal, name)
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # so that the death of a child wakes `wake_by`

    def wake_by(self, fd: int) -> None:
        """Have every signal write a byte to this descriptor, which does not block."""
        signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
        if self.waiting:
            os.write(fd, b"\0")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.waiting.append(number)


_HELD: list[HeldSignals] = []


def hold() -> HeldSignals:
    """Hold signals from now on; a second call returns the first one's."""
    if not _HELD:
        held = HeldSignals()
        held.install()
        _HELD.append(held)
    return _HELD[0]
