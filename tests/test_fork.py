"""What a forked child lets go of."""

from __future__ import annotations

import logging
import os

from holdfast import _fork
from holdfast._fork import after_fork_in_child


class Held:
    """Something of the parent's, which writes its name into a pipe when the child lets go of it."""

    def __init__(self, pipe: int, name: bytes, *, fails: bool = False) -> None:
        self.pipe, self.name, self.fails = pipe, name, fails
        after_fork_in_child(self.let_go)

    def let_go(self) -> None:
        """Say who we are."""
        os.write(self.pipe, self.name)
        if self.fails:
            raise OSError("no such thing here")


def said_by_a_child(reading: int, writing: int) -> bytes:
    """What the callbacks of a child write, between a fork and its end; closes the pipe."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        return file.read()


def test_callbacks_run_in_order_and_one_that_fails_keeps_no_other() -> None:
    """The error is logged by the child; what is gone in the parent is not called."""
    reading, writing = os.pipe()
    kept = [Held(writing, b"a"), Held(writing, b"b", fails=True), Held(writing, b"c")]
    num_callbacks = len(_fork._callbacks)
    gone = Held(writing, b"x")
    del gone
    assert len(_fork._callbacks) == num_callbacks
    with open(writing, "w", closefd=False) as errors:
        log = logging.StreamHandler(errors)
        logging.getLogger("holdfast.fork").addHandler(log)
        try:
            said = said_by_a_child(reading, writing)
        finally:
            logging.getLogger("holdfast.fork").removeHandler(log)
    assert (said[:2], said[-1:]) == (b"ab", b"c")
    assert b"no such thing here" in said
    del kept


def test_it_is_a_decorator() -> None:
    """A function is given back as it was, and called in the child alone."""
    reading, writing = os.pipe()
    calls: list[int] = []

    @after_fork_in_child
    def let_go() -> None:
        calls.append(1)
        os.write(writing, b"z")

    try:
        assert said_by_a_child(reading, writing) == b"z"
        assert calls == []
    finally:
        _fork._callbacks.popitem()
