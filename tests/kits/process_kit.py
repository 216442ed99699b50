"""The end of a process that need not be a child of this one."""

from __future__ import annotations

import os
import select
import time


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
