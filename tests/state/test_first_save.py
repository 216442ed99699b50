"""The first big save: windows that are sent from the front and copied from the back are each right, once."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from holdfast.errors import HoldfastError
from holdfast.state.save import windows
from holdfast.state.save.plan import plan, signature
from holdfast.state.save.staging import stage
from holdfast.state.save.windows import AsideCopy
from holdfast.state.tree.flatten import flatten
from holdfast.writer.arena import Arena

WINDOW = 64 << 10


def made(num: int = 5):
    """A state of several files' worth of odd tensors, its layout, and the bytes that a whole arena would hold."""
    tensors = {f"t{number}": torch.randn(70_001 + number) for number in range(num)}
    flat = flatten({**tensors, "strided": torch.randn(300, 50).T, "tied": tensors["t0"], "empty": torch.empty(0)})
    layout = plan(signature(flat), max_file_bytes=400_000)
    assert len(layout.files) > 1
    with Arena.create(layout.arena_bytes) as arena:
        layout.write_static(arena.view)
        stage(flat.tensors, layout.offsets, layout.sizes, arena)
        return flat, layout, bytes(arena.view)


def every_window(layout):
    return [
        (file, start, min(WINDOW, file.padded - start))
        for file in layout.files
        for start in range(0, file.padded, WINDOW)
    ]


def send(copy: AsideCopy, layout, target, each=lambda number: None):
    """What the streaming thread does: every window in order, then the end."""
    base = ctypes.addressof(target)
    try:
        for number, (file, start, size) in enumerate(every_window(layout)):
            each(number)
            copy.fill(file, start, size, base + file.arena_offset + start)
    finally:
        copy.close()


@pytest.mark.parametrize("first", [0, 1, 7, 1000])
def test_wherever_the_two_sides_meet(first):
    """The front sends some windows, then waits until the rest is copied; all bytes are those before the change."""
    flat, layout, expected = made()
    copy = AsideCopy(layout, flat.tensors, WINDOW)
    target = (ctypes.c_char * layout.arena_bytes)()
    reached, changed = threading.Event(), threading.Event()

    def each(number):
        if number == min(first, len(every_window(layout)) - 1):
            reached.set()
            assert changed.wait(30)

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, copy, layout, target, each)
        assert reached.wait(30)
        copy.copy()
        for tensor in flat.tensors:
            tensor.zero_()
        changed.set()
        sent.result(30)
    assert bytes(target) == expected


def test_a_window_that_is_being_sent_holds_the_caller(monkeypatch):
    """The tensors belong to the caller again only when the window that the front is reading has been read."""
    flat, layout, expected = made()
    copy = AsideCopy(layout, flat.tensors, WINDOW)
    target = (ctypes.c_char * layout.arena_bytes)()
    entered, go_on = threading.Event(), threading.Event()
    original = windows.copy_window

    def slow(*arguments):
        if arguments[-1] == ctypes.addressof(target):
            entered.set()
            assert go_on.wait(30)
        original(*arguments)

    monkeypatch.setattr(windows, "copy_window", slow)
    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(send, copy, layout, target)
        assert entered.wait(30)
        copied = pool.submit(copy.copy)
        while copy._left:
            pass
        assert not copied.done()
        go_on.set()
        copied.result(30)
        for tensor in flat.tensors:
            tensor.zero_()
        sent.result(30)
    assert bytes(target) == expected


def test_a_front_that_fails_leaves_no_thread_behind():
    """The writer died, say: the caller still gets its tensors back, and the memory is given back once."""
    flat, layout, _ = made()
    copy = AsideCopy(layout, flat.tensors, WINDOW)

    def fail(number):
        if number == 2:
            raise HoldfastError("the writer is gone")

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, copy, layout, (ctypes.c_char * layout.arena_bytes)(), fail)
        copy.copy()
        assert isinstance(sent.exception(30), HoldfastError)
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-first-copy"]


def test_an_interrupted_copy_is_never_sent(monkeypatch):
    """After a Ctrl-C in the copying the front gives up, instead of sending memory that nobody filled."""
    flat, layout, _ = made()
    copy = AsideCopy(layout, flat.tensors, WINDOW)
    original, calls = windows.copy_window, []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        original(*arguments, **options)

    monkeypatch.setattr(windows, "copy_window", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy.copy()
    with pytest.raises(HoldfastError, match="given up"):
        send(copy, layout, (ctypes.c_char * layout.arena_bytes)())


def test_nothing_is_sent_of_a_copy_that_was_given_up():
    """Nobody has begun to copy, say for want of a thread: the live tensors are not read any more either."""
    flat, layout, _ = made()
    copy = AsideCopy(layout, flat.tensors, WINDOW)
    copy.give_up()
    with pytest.raises(HoldfastError, match="given up"):
        send(copy, layout, (ctypes.c_char * layout.arena_bytes)())
