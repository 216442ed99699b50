"""Identity of this machine, and whether a process named in a file runs on it and is still alive.

"The same machine" has three meanings, by what two processes share: pids (`machine`), memory (`memory_name`), loopback
(`network_name`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any


def boot_id() -> str:
    """Identify this start of the kernel, which all containers of a machine share.

    Raises:
        OSError: this system has no such id.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@cache
def machine() -> dict[str, str]:
    """Name this machine, its boot and the pid namespace: a pid means something only where all of them agree."""
    try:
        boot = boot_id()
        namespace = str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        boot = namespace = ""
    return {"host": socket.gethostname(), "boot": boot, "pid_namespace": namespace}


def memory_name() -> str:
    """Name this machine so that two processes name it alike only if one can open descriptors of the other."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return socket.gethostname()


def network_name() -> str:
    """Name this machine so that two processes name it alike if, and only if, loopback connects them."""
    parts = [socket.gethostname()]
    for part in (boot_id, lambda: os.readlink("/proc/self/ns/net")):
        with contextlib.suppress(OSError):
            parts.append(part())
    return " ".join(parts)


def birth(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot, to recognize a reused pid; "" if unknown."""
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else ""


def this_process() -> dict[str, Any]:
    """Name this process so that `is_dead` can tell whether it is gone."""
    pid = os.getpid()
    return {**machine(), "pid": pid, "pid_birth": birth(pid)}


def is_pid(value: object) -> bool:
    """Tell whether a value that was read from a file can be the id of a process."""
    return type(value) is int and 0 < value < 1 << 31


def same_machine(owner: Mapping[str, Any]) -> bool:
    """Tell whether the owner runs (or ran) under this very kernel; containers of one machine count as one machine."""
    here = machine()
    if here["boot"] and owner.get("boot"):
        return bool(owner["boot"] == here["boot"])
    return bool(owner.get("host") == here["host"])


def is_dead(owner: Mapping[str, Any], key: str = "pid") -> bool:
    """Tell whether the process ``owner[key]`` is known to be gone. False also means "cannot tell from here"."""
    here, pid = machine(), owner.get(key)
    if pid is None or not is_pid(pid) or not same_machine(owner):
        return False
    if owner.get("pid_namespace", here["pid_namespace"]) != here["pid_namespace"]:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    noted, now = owner.get(f"{key}_birth"), birth(pid)
    if noted and now and noted != now:
        return True
    return is_zombie(pid)


def is_running(owner: Mapping[str, Any]) -> bool:
    """Tell whether the process ``owner["pid"]`` is known to run here: a signal to its id reaches it and no other."""
    here, pid, noted = machine(), owner.get("pid"), owner.get("pid_birth")
    if pid is None or not is_pid(pid) or not noted or any(owner.get(name) != value for name, value in here.items()):
        return False
    return birth(pid) == noted and not is_zombie(pid)


def _stat(pid: int) -> list[str]:
    """Read the fields of /proc/PID/stat after the name (proc(5)), the state first; [] where there is no such file."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name in parentheses may hold spaces and parentheses itself.
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Tell whether the system has stopped a process (SIGSTOP, a debugger)."""
    return _stat(pid)[:1] in (["T"], ["t"])


def is_zombie(pid: int) -> bool:
    """Tell whether a process has ended and is not reaped yet."""
    return _stat(pid)[:1] in (["Z"], ["X"])


def how_it_ended(pid: int) -> str:
    """Return how a dead process that is not yet reaped has ended, for messages; "" when that is not known any more."""
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
