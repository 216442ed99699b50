"""Waits for what other processes do: their end, and what they leave in files."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable


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
