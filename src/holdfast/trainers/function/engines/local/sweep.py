"""Ending everything that belongs to the session of one process."""

from __future__ import annotations

import contextlib
import os
import signal

__all__ = ["end_session"]

_ROUNDS = 5


def end_session(leader: int) -> None:
    """Send SIGKILL to every process of a session but its leader, which has ended.

    Call it while the leader is a zombie or members of the session live: only then is the number not free for others.
    """
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)
    known: set[int] = set()
    for _ in range(_ROUNDS):  # what forks while it is being looked for is found in the next round
        found = _members(leader) - known
        if not found:
            return
        known |= found
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _members(leader: int) -> set[int]:
    found: set[int] = set()
    try:
        names = os.listdir("/proc")
    except OSError:  # other systems: the process group has to do
        return found
    for name in names:
        if not name.isdigit():
            continue
        try:
            # Plain calls: this runs between a death and the restart, over every process of the machine.
            fd = os.open(f"/proc/{name}/stat", os.O_RDONLY)
            try:
                told = os.read(fd, 512)
            finally:
                os.close(fd)
            # The command name in parentheses may hold spaces and parentheses itself.
            state, _, _, session = told[told.rindex(b")") + 1 :].split(None, 4)[:4]
        except (OSError, ValueError):  # it has just ended
            continue
        if int(session) != leader or state in (b"Z", b"X"):
            continue
        if int(name) == leader:  # our leader has ended: this one only has its number
            return set()
        found.add(int(name))
    return found
