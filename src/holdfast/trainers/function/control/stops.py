"""Ctrl-C and SIGTERM while a run of workers goes on: it ends in order, and the signal means what it always means."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Stops"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ENOUGH = 3


class Stops:
    """Tells ``stop`` of signals in place of what they did before; a third one is let through.

    Only where signals can be handled at all: in the main thread.

    Args:
        stop: called with the name of the signal.

    Attributes:
        received: the first signal that came.
    """

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop = stop
        self._count = 0
        self._before: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> Stops:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN and before is not None:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def raise_again(self) -> None:
        """Do what the signal that came would have done.

        Raises:
            KeyboardInterrupt: it was Ctrl-C.
            SystemExit: it was SIGTERM.
        """
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        self._count += 1
        if self._count < _ENOUGH:
            self._stop(signal.Signals(number).name)
        else:
            self._restore()
            self.raise_again()
