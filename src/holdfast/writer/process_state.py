"""What the system tells of another process: whether it is stopped, and how it ended."""

from __future__ import annotations

import time
from contextlib import suppress

__all__ = ["how_it_ended", "is_stopped"]


def _stat(pid: int) -> list[str]:
    """Read the fields of a process after its name; empty where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Tell whether the system has stopped a process (SIGSTOP, a debugger)."""
    return _stat(pid)[:1] in (["T"], ["t"])


def how_it_ended(pid: int) -> str:
    """Say how a process that is dead and not yet reaped has ended; "" when that is not known any more."""
    fields = _stat(pid)
    for _ in range(50):  # its connections close a moment before its end is complete
        if not fields or fields[0] in "ZX":
            break
        time.sleep(0.002)
        fields = _stat(pid)
    if len(fields) < 50 or fields[0] != "Z":
        return ""
    status = int(fields[49])
    if status & 0x7F:
        import signal  # not above: every writer start would wait for it

        with suppress(ValueError):
            return f" (killed by {signal.Signals(status & 0x7F).name})"
        return f" (killed by signal {status & 0x7F})"
    return f" (exit status {status >> 8})"
