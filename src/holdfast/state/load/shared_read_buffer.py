"""Memory that a rank shows to the other ranks of its machine while all of them read one checkpoint.

Each rank writes to its own buffer only and maps the buffers of the others for reading, so no rank can overwrite what
another rank uses. A buffer is a memfd: no file system, no limit of /dev/shm, and a crash leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import secrets
import select
import time
from collections.abc import Iterator
from typing import Any

from holdfast.storage.local.local_io import address_of
from holdfast.writer.arena import can_share_memory

__all__ = ["PeerReadBuffer", "SharedReadBuffer", "can_share", "pauses"]

_PAGE = 4096
_NAME = "holdfast-reads"
_TOKEN_BYTES = 16
_CONSUMED, _PUBLISHED, _GONE, _OPENED, _ENDED = range(_TOKEN_BYTES // 8, _TOKEN_BYTES // 8 + 5)
_PAUSE_S = (50e-6, 2e-3)


def can_share() -> bool:
    """Tell whether this platform has memfd, pidfd and /proc, which these buffers need."""
    return can_share_memory() and _can_watch() and os.path.isdir("/proc/self/fd")


@functools.cache
def _can_watch() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except AttributeError:
        return False
    except OSError as error:
        return error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES)
    return True


class SharedReadBuffer:
    """The buffer of this rank: its progress, the chunks it needs, and the blocks it has read for others.

    Args:
        wanted: one byte for each chunk of the checkpoint, not zero where this rank needs it.
        slots_bytes: bytes of memory for blocks that this rank reads for others.

    Attributes:
        wanted: the argument, in shared memory.
        slots: memory for blocks that this rank reads for others.
    """

    def __init__(self, wanted: memoryview, slots_bytes: int) -> None:
        start = _PAGE + -(-len(wanted) // _PAGE) * _PAGE
        size = start + slots_bytes
        self._token = secrets.token_hex(_TOKEN_BYTES)[:_TOKEN_BYTES]
        self._shape = (len(wanted), start, size)
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size)
            # The size is fixed: a file that shrinks kills every process that has it mapped (SIGBUS).
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        view = memoryview(self._memory)
        view[:_TOKEN_BYTES] = self._token.encode()
        view[_PAGE : _PAGE + len(wanted)] = wanted
        self._words = view[:_PAGE].cast("q")
        self.wanted = view[_PAGE : _PAGE + len(wanted)]
        self.slots = view[start:]

    def describe(self) -> dict[str, Any]:
        """Return what `PeerReadBuffer` needs to find this buffer from another process."""
        return {"pid": os.getpid(), "fd": self._fd, "token": self._token, "shape": self._shape}

    @property
    def published(self) -> int:
        """How many blocks this rank has read for others."""
        return self._words[_PUBLISHED]

    def publish(self, count: int) -> None:
        """Show that ``count`` blocks have been read for others."""
        self._words[_PUBLISHED] = count

    @property
    def consumed(self) -> int:
        """The shared block that this rank has reached: it needs none of those before it any more."""
        return self._words[_CONSUMED]

    def consume(self, number: int) -> None:
        """Show that this rank has reached a shared block."""
        self._words[_CONSUMED] = number

    def open_others(self) -> None:
        """Show that this rank has mapped the buffers of the others."""
        self._words[_OPENED] = 1

    def end(self) -> None:
        """Show that this rank reads no more for others; it may still copy what they read."""
        self._words[_ENDED] = 1

    def leave(self) -> None:
        """Show that this rank reads no more for others, and needs nothing from them."""
        self._words[_GONE] = 1

    def close(self) -> None:
        """Close the descriptor; others keep what they have mapped. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            for view in (self._words, self.wanted, self.slots):
                view.release()
            os.close(fd)
            with contextlib.suppress(BufferError):  # unmapped when the last view of it goes
                self._memory.close()


class PeerReadBuffer:
    """The buffer of another rank, for reading.

    Raises:
        OSError, ValueError: the buffer does not exist (any more), or is not the described buffer.
    """

    def __init__(self, described: dict[str, Any]) -> None:
        wanted, start, size = described["shape"]
        self._process = os.pidfd_open(described["pid"])
        try:
            fd = os.open(f"/proc/{described['pid']}/fd/{described['fd']}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_size != size:
                    raise ValueError("the buffer of another rank has another size than it says")
                self._memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
        except BaseException:
            os.close(self._process)
            raise
        view = memoryview(self._memory)
        if bytes(view[:_TOKEN_BYTES]) != described["token"].encode():
            self.close()
            raise ValueError("this is not the buffer that another rank has described")
        self._words = view[:_PAGE].cast("q")
        self.wanted = view[_PAGE : _PAGE + wanted]
        self.slots = view[start:]
        self.address = address_of(self.slots) if len(self.slots) else 0

    @property
    def published(self) -> int:
        """How many blocks that rank has read for others; they stay readable after it ends."""
        return self._words[_PUBLISHED]

    @property
    def consumed(self) -> int:
        """The shared block that the other rank has reached."""
        return self._words[_CONSUMED]

    @property
    def has_opened(self) -> bool:
        """Whether that rank has mapped the buffers of the others."""
        return bool(self._words[_OPENED])

    @property
    def ended(self) -> bool:
        """Whether that rank reads no more for others; it may still copy what others read."""
        return bool(self._words[_ENDED]) or self.gone

    @property
    def gone(self) -> bool:
        """Whether that rank reads and copies no more: it has left, or its process has ended."""
        if self._words[_GONE] or self._process < 0:
            return True
        poll = select.poll()  # a new object for each call: two threads must not use the same at once
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the descriptor of its process; idempotent."""
        if self._process >= 0:
            os.close(self._process)
            self._process = -1


def pauses() -> Iterator[None]:
    """Yield at once, then after pauses that grow up to 2 ms."""
    pause_s = _PAUSE_S[0]
    yield
    while True:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S[1])
        yield
