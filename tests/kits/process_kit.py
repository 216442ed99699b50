"""Waits for what other processes do: their end, and what they leave in files; and Ctrl-C, again and again."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator


def wait_gone(pid: int, timeout_s: float = 60.0) -> bool:
    """Wait for the end of any process; False if it runs longer than ``timeout_s``."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # taken away, see tests/test_lacking_calls.py
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.01)
        return False
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0, step_s: float = 0.005) -> bool:
    """Poll ``condition`` until it holds; False when the time is up. Where there is an event, wait for that."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(step_s)
    return True


class Background:
    """Work of two threads, of which the one that is not the main one takes a while, and is interrupted meanwhile.

    Attributes:
        over: that one has done its work.
    """

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()

    def work(self, do: Callable[[], object] = lambda: None) -> None:
        """Called by both; the main thread goes on when the other one is there."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main and not self.begun.is_set():
            self.begun.set()
            time.sleep(0.5)
            do()
            self.over.set()
        else:
            assert self.begun.wait(30)
            do()

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """Send the main thread, which this is, one SIGINT after another while it waits for the other one."""

        def interrupt(*_: object) -> None:
            if not self.over.is_set():  # else one that was late
                raise KeyboardInterrupt

        def send() -> None:
            self.begun.wait(30)
            while not self.over.wait(0.02):
                # Between two waits a Ctrl-C may hit the one line that is not prepared for it.
                if sys._current_frames()[main].f_code in waits:
                    signal.pthread_kill(main, signal.SIGINT)

        join = getattr(threading.Thread, "_wait_for_tstate_lock", threading.Thread.join)
        waits = (threading.Condition.wait.__code__, join.__code__)
        main, before = threading.get_ident(), signal.signal(signal.SIGINT, interrupt)
        sender = threading.Thread(target=send)
        sender.start()
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self.begun.set()
            self.over.set()
            sender.join()
            signal.signal(signal.SIGINT, before)
