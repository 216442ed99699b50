"""The end of a process that need not be a child of this one."""

from __future__ import annotations

import os
import select


def wait_gone(pid: int, timeout_s: float = 60.0) -> bool:
    """Wait for the end of any process; False if it runs longer than ``timeout_s``."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)
