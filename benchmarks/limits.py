"""What this machine can do at best: memory copies, raw direct writes, reads, fsync."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from holdfast.format.digest import chunk_digests

from .bench import Context, drop_cache, remove

__all__ = ["Limits", "memory_block"]

_CHUNK = 8 << 20
_HASHED = 512 << 10
_PAGE = 4096
_LINE = 64
_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def memory_block(size: int, *, shared: bool) -> tuple[mmap.mmap, int]:
    """Map memory with all pages present; a memfd like Holdfast's arena when ``shared``."""
    if shared:
        fd = os.memfd_create("bench")
        os.ftruncate(fd, size)
        block = mmap.mmap(fd, size)
        os.close(fd)
    else:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    ctypes.memset(address, 1, size)
    return block, address


def _share(pieces: int, threads: int, work: Callable[[int], None]) -> float:
    """Return the seconds in which ``threads`` threads work through the pieces."""
    todo = iter(range(pieces))
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                piece = next(todo, None)
            if piece is None:
                return
            work(piece)

    others = [threading.Thread(target=run) for _ in range(threads - 1)]
    start = time.perf_counter()
    for thread in others:
        thread.start()
    run()
    for thread in others:
        thread.join()
    return time.perf_counter() - start


class Limits:
    """Measures limits for states of ``size`` bytes; keeps two warm blocks of that size until `close`."""

    def __init__(self, context: Context, size: int) -> None:
        self.context = context
        self.size = max(_PAGE, size // _PAGE * _PAGE)
        self._shared, self._to = memory_block(self.size, shared=True)
        self._private, self._from = memory_block(self.size, shared=False)
        self._view = memoryview(self._shared)
        self.samples: dict[str, list[float]] = {}

    def _note(self, name: str, seconds: float) -> float:
        self.samples.setdefault(name, []).append(seconds)
        return seconds

    def memcpy(self) -> float:
        """Copy private memory to warm shared memory, with one and with two threads; the better of the two."""

        def piece(number: int) -> None:
            start = number * _CHUNK
            _memmove(self._to + start, self._from + start, min(_CHUNK, self.size - start))

        pieces = -(-self.size // _CHUNK)
        times = [self._note(f"memcpy_{threads}", _share(pieces, threads, piece)) for threads in (1, 2)]
        return min(times)

    def write(self, path: Path | None = None) -> float:
        """Write the shared memory to a new file with O_DIRECT and fsync file and directory."""
        target = path or self.context.folder("raw-write")
        self.context.scratch.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        try:
            fd = os.open(target, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o644)
        except OSError:  # tmpfs before Linux 6.6 and others know no direct writes
            fd = os.open(target, os.O_CREAT | os.O_WRONLY, 0o644)
        try:
            os.posix_fallocate(fd, 0, self.size)
            for offset in range(0, self.size, 64 << 20):
                os.pwrite(fd, self._view[offset : offset + (64 << 20)], offset)
            os.fsync(fd)
        finally:
            os.close(fd)
        folder = os.open(target.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        seconds = self._note("write", time.perf_counter() - start)
        if path is None:
            remove(target)
        return seconds

    def read(self, path: Path, *, cold: bool) -> float:
        """Read a file into warm memory: cold with O_DIRECT or from a dropped cache, else from the page cache."""
        name = "read_cold" if cold else "read_warm"
        best = float("inf")
        ways = [(threads, direct) for threads in (1, 2) for direct in ((True, False) if cold else (False,))]
        for threads, direct in ways:
            if cold:
                drop_cache(path)
            try:
                fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            except OSError:
                continue

            def piece(number: int, fd: int = fd) -> None:
                start = number * _CHUNK
                os.preadv(fd, [self._view[start : min(start + _CHUNK, self.size)]], start)

            best = min(best, _share(-(-self.size // _CHUNK), threads, piece))
            os.close(fd)
        return self._note(name, best)

    def read_hashed(self, path: Path, tensors: Iterable[torch.Tensor]) -> float:
        """Read a file from the page cache into tensors in turn, two threads, 512 KiB a call, and hash what came."""
        pieces: list[tuple[int, int, int]] = []
        offset = 0
        for tensor in tensors:
            for start in range(0, tensor.nbytes, _HASHED):
                size = min(_HASHED, tensor.nbytes - start, self.size - offset)
                if size > 0:
                    pieces.append((offset, tensor.data_ptr() + start, size))
                    offset += -(-size // _LINE) * _LINE  # bytes that lie otherwise than in memory are copied slower
        fd = os.open(path, os.O_RDONLY)

        def piece(number: int) -> None:
            offset, address, size = pieces[number]
            view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            os.preadv(fd, [view], offset)
            chunk_digests(view)

        try:
            return self._note("read_hashed", _share(len(pieces), 2, piece))
        finally:
            os.close(fd)

    def fsync(self) -> float:
        """Append one page to a file and fsync it."""
        target = self.context.folder("fsync")
        self.context.scratch.mkdir(parents=True, exist_ok=True)
        with target.open("wb", buffering=0) as file:
            for _ in range(5):
                file.write(bytes(_PAGE))
                start = time.perf_counter()
                os.fsync(file.fileno())
                self._note("fsync", time.perf_counter() - start)
        target.unlink()
        return min(self.samples["fsync"])

    def measure(self) -> None:
        """Measure copying, writing and fsync once or more, as the settings say."""
        self.memcpy()
        for _ in range(2 if self.context.quick else 3):
            self.memcpy()
            self.write()
        self.fsync()

    @property
    def best_memcpy(self) -> float:
        """Seconds of the fastest warm copy with one or two threads."""
        return min(self.samples["memcpy_1"] + self.samples["memcpy_2"])

    def to_json(self) -> dict[str, object]:
        gib = self.size / (1 << 30)
        best = {name: min(values) for name, values in self.samples.items()}
        return {
            "bytes": self.size,
            "seconds": self.samples,
            "best_gib_per_s": {name: gib / seconds for name, seconds in best.items() if name != "fsync"},
        }

    def close(self) -> None:
        """Give the memory back."""
        self._view.release()
        for block in (self._shared, self._private):
            try:
                block.close()
            except BufferError:  # ctypes holds on to it until the next collection
                continue
