"""Two machines on one: network namespaces with an address each, and a bad line between them.

Each namespace has a TUN device; a thread of ours carries the packets from one to the other (kernels of containers and
small machines have no netem). So what the processes see are the kernel's own TCP connections over a bad network.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time

ADDRESSES = ("10.213.77.1", "10.213.77.2")
DEVICE = "hf0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKET = 65536


def why_not() -> str | None:
    """Return why there can be no such network here, None if there can."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    name = f"hf-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not allowed: {made.stderr.strip()}"
    try:
        os.close(_open_device(name))
    except OSError as error:
        return f"TUN devices are not allowed: {error}"
    finally:
        _ip("netns", "del", name)
    return None


class Network:
    """A context manager; `run` starts a program on one of the two machines.

    Attributes:
        delay_s: of each packet, one way.
        loss: share of packets that are lost.
        cut: nothing goes through.
    """

    def __init__(self, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        self.delay_s, self.loss, self.cut = delay_s, loss, False
        self.num_carried = self.num_lost = 0
        self._names = tuple(f"hf-{os.getpid()}-{number}" for number in (0, 1))
        self._random = random.Random(0)
        self._devices: list[int] = []
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="network", daemon=True)

    def command(self, machine: int, *command: str) -> list[str]:
        """Return the command that runs another one on a machine."""
        return ["ip", "netns", "exec", self._names[machine], *command]

    def __enter__(self) -> Network:
        try:
            for name, own, other in zip(self._names, ADDRESSES, reversed(ADDRESSES), strict=True):
                _ip("netns", "add", name)
                self._devices.append(_open_device(name))
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "addr", "add", own, "peer", other, "dev", DEVICE)
                _ip("-n", name, "link", "set", DEVICE, "up")
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._wake, b"x")
        self._thread.join()
        self._remove()

    def _remove(self) -> None:
        for fd in (*self._devices, self._wake, self._woken):
            os.close(fd)
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _carry(self) -> None:
        on_the_way: list[tuple[float, int, int, bytes]] = []
        number = 0
        while True:
            wait_s = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
            ready, _, _ = select.select([*self._devices, self._woken], [], [], wait_s)
            if self._woken in ready:
                return
            for fd in ready:
                packet = os.read(fd, _PACKET)
                if self.cut or self._random.random() < self.loss:
                    self.num_lost += 1
                    continue
                number += 1
                other = self._devices[1 - self._devices.index(fd)]
                heapq.heappush(on_the_way, (time.monotonic() + self.delay_s, number, other, packet))
            while on_the_way and on_the_way[0][0] <= time.monotonic():
                _, _, fd, packet = heapq.heappop(on_the_way)
                if not self.cut:
                    os.write(fd, packet)
                    self.num_carried += 1


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _open_device(name: str) -> int:
    """Make the TUN device of a namespace, which exists as long as its descriptor is open."""
    found: list[int | OSError] = []

    def work() -> None:  # in a thread of its own: only that enters the namespace
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            home = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if libc.setns(home, _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            finally:
                os.close(home)
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
            found.append(fd)
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]
