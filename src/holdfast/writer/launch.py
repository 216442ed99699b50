"""Starting the other side: a plain interpreter in a session of its own, or a thread."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.storage.base import Storage

from .arena import Arena, can_share_memory
from .frames import Channel, Message

__all__ = ["Shared", "can_run_process", "launch_process", "launch_thread", "own_paths"]

_BOOT = (
    "import sys,json;a=json.loads(sys.argv[1]);sys.path.extend(a['paths']);"
    "from holdfast.writer.server import main;main(a['socket'],a['trainer'])"
)


# Held while the writer's end of the socket is open here: a child forked in between by another thread would keep it, and
# the death of that writer would never be noticed.
_launching = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_launching.acquire, after_in_parent=_launching.release, after_in_child=_launching.release
    )


def can_run_process() -> bool:
    """Tell whether this platform gives what the process needs: memfd, descriptor passing, a plain interpreter."""
    return (
        sys.platform.startswith("linux")
        and can_share_memory()
        and hasattr(socket, "send_fds")
        and bool(sys.executable)
        and not getattr(sys, "frozen", False)
    )


def own_paths() -> list[str]:
    """Return what the writer needs behind the standard library: not the user's working directory, not PYTHONPATH."""
    paths = [str(Path(__file__).resolve().parents[2])]
    for package in ("xxhash", "obstore"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            paths.append(str(Path(spec.origin).parents[1]))
    paths += [sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    return list(dict.fromkeys(paths))


def _own_pidfd() -> int:
    """Open ourselves for the writer to watch; -1 where the system has no such thing: it goes by our socket then."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return -1


def launch_process() -> tuple[Channel, subprocess.Popen[bytes]]:
    """Start the writer process and return our end of the channel; it is ready about 0.03 s later.

    Raises:
        HoldfastError: the interpreter could not be started.
    """
    with _launching:
        ours, theirs = socket.socketpair()
        # A descriptor of the trainer itself, opened by the trainer, cannot point to a recycled process id.
        trainer = _own_pidfd()
        options = {"socket": theirs.fileno(), "trainer": trainer, "paths": own_paths()}
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                pass_fds=[fd for fd in (theirs.fileno(), trainer) if fd >= 0],
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise HoldfastError(
                f"cannot start the writer process with {sys.executable}: {error}; "
                "check the limits on processes and open files"
            ) from error
        finally:
            theirs.close()
            if trainer >= 0:
                os.close(trainer)
    return Channel(ours), process


class Shared:
    """What a writer thread takes from its trainer directly instead of through the socket."""

    def __init__(self) -> None:
        self.storages: dict[int, Storage] = {}
        self.views: dict[int, memoryview] = {}

    def share(self, arena: Arena) -> None:
        """Keep a view of our own, so that the memory outlives `Arena.close` in the middle of a save."""
        self.views[arena.number] = arena.view[:]

    def storage(self, message: Message) -> Storage:
        """Find the storage a message tells of."""
        return self.storages[message.header["key"]]

    def arena(self, message: Message) -> memoryview:
        """Find the memory a message hands over."""
        return self.views[message.header["number"]]

    def drop(self, number: int) -> None:
        """Let go of an arena."""
        view = self.views.pop(number, None)
        if view is not None:
            view.release()


def launch_thread(shared: Shared) -> tuple[Channel, threading.Thread]:
    """Start the same loop in a thread of this process."""
    from .server import WriterLoop

    ours, theirs = socket.socketpair()
    loop = WriterLoop(Channel(theirs), shared, in_trainer=True)
    thread = threading.Thread(target=loop.serve, name="holdfast-writer", daemon=True)
    thread.start()
    return Channel(ours), thread
