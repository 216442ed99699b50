"""The arena: shared, page-aligned, faulted in the background, harmless to forked children."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
from process_kit import Background

from holdfast.errors import HoldfastError
from holdfast.writer.arena import Arena

MIB = 1 << 20
MAP_FIXED_NOREPLACE = 0x100000  # of Linux' mman.h


def test_both_sides_see_the_same_bytes() -> None:
    """What one mapping writes the other reads."""
    with Arena.create(5000) as arena:
        assert arena.size == 8192
        assert arena.address % 4096 == 0
        assert arena.fd is not None
        with Arena.attach(os.dup(arena.fd), arena.size) as other:
            other.view[4097:4100] = b"abc"
            assert bytes(arena.view[4097:4100]) == b"abc"


def test_prefault_touches_every_page() -> None:
    """After `prefaulted` is set all pages exist, and they are zero."""
    with Arena.create(70 * MIB) as arena:
        assert arena.fd is not None
        assert os.fstat(arena.fd).st_blocks == 0
        arena.prefault()
        arena.prefault()
        assert arena.prefaulted.wait(60)
        assert os.fstat(arena.fd).st_blocks * 512 >= 70 * MIB
        assert arena.view[69 * MIB] == 0


def test_memory_that_is_not_given() -> None:
    """A limit of the system, such as `ulimit -f`, is said with what can be done about it."""
    with pytest.raises(HoldfastError, match=r"cannot get \d+ bytes of shared memory.*ulimit -f"):
        Arena.create(1 << 62)


def test_close_is_idempotent_and_survives_views() -> None:
    """Views that others hold stay readable after close; the descriptor goes."""
    arena = Arena.create(4096)
    seen: list[int] = []
    arena.on_close(lambda closed: seen.append(closed.number))
    arena.view[:2] = b"ok"
    held = arena.view[:4]
    arena.close()
    arena.close()
    assert bytes(held[:2]) == b"ok"
    assert seen == [arena.number]
    assert arena.fd is None
    with pytest.raises(ValueError, match="closed"):
        _ = arena.view


def test_close_while_prefaulting() -> None:
    """Closing a large arena in the middle of its prefault neither crashes nor waits for all of it."""
    arena = Arena.create(256 * MIB)
    arena.prefault()
    arena.close()
    assert arena.fd is None


def test_close_waits_for_the_prefault_however_often_ctrl_c_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the descriptor is closed its number may be that of another file, which must not grow."""
    other = Background()
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: other.work())
    with Arena.create(MIB) as arena:
        arena.prefault()
        with other.interrupts():
            with pytest.raises(KeyboardInterrupt):
                arena.close()
            arena.close()
            assert other.over.is_set()


def test_a_forked_child_does_not_inherit_it() -> None:
    """The mapping and the descriptor are absent in a forked child, which ends normally."""
    with Arena.create(4096) as arena:
        arena.view[0] = 1
        start = f"{arena.address:x}-"
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            mapped = any(line.startswith(start) for line in Path("/proc/self/maps").read_text().splitlines())
            links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
            held = any("holdfast-arena" in link for link in links)
            arena.close()
            os.write(write, b"held" if mapped or held else b"absent")
            os._exit(0)
        os.close(write)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(read, 10) == b"absent"
        os.close(read)
        assert any(line.startswith(start) for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_forked_child_keeps_memory_that_it_has_where_an_arena_was() -> None:
    """A view that outlives its arena, as a writer thread has one, takes nothing away when it goes in the child."""
    arena = Arena.create(MIB)
    address, held = arena.address, [arena.view[:]]
    arena.close()
    del arena
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None)
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        libc.mmap.restype = ctypes.c_void_p
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
        is_there = libc.mmap(address, MIB, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
        held.clear()
        ctypes.memset(address, 1, MIB)
        os._exit(not is_there)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
