"""A fork at the worst moment, while other threads hold locks and descriptors: the child goes on, the parent hears."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
from process_kit import wait_gone, wait_until

from holdfast import _paused_gc
from holdfast.errors import SessionError
from holdfast.state.save import staging
from holdfast.storage import MemoryStorage
from holdfast.writer import conversation
from holdfast.writer.client import WriterClient


def fork_while_held(lock: Any, act: Callable[[], object]) -> int:
    """Fork while another thread holds ``lock``; exit status of a child that does ``act``, or the signal it needed."""
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            let_go.wait(30)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert held.wait(20)
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    let_go.set()
    holder.join(20)
    if not _ends(child, 60):
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _ends(child: int, timeout_s: float) -> bool:
    return wait_gone(child, timeout_s)


def test_a_child_is_refused_and_ends_although_a_call_was_under_way() -> None:
    """Another thread of the trainer held the conversation's lock: its copy in the child is nobody's."""
    with WriterClient.start(thread=True) as client:

        def act() -> None:
            with pytest.raises(SessionError, match="forked"):
                client.run_op("records")
            client.close()  # as the exit of the child does

        assert fork_while_held(client._conversation.lock, act) == 0


def test_a_child_copies_although_the_helper_was_being_made() -> None:
    """The lock around the copying helper is made anew in a child."""
    assert fork_while_held(staging._helper_lock, staging._pool) == 0


def test_a_child_collects_garbage_although_the_collector_was_paused() -> None:
    """Who paused it is no thread of the child: it runs there, and can be paused."""

    def act() -> None:
        assert gc.isenabled()
        with _paused_gc.paused_gc():
            assert not gc.isenabled()
        assert gc.isenabled()

    for held in (_paused_gc.paused_gc(), _paused_gc._PAUSES.lock):
        assert fork_while_held(held, act) == 0
    assert gc.isenabled()


def test_a_child_uses_memory_although_it_was_being_written() -> None:
    """A memory storage stays usable in a child, whatever the writer thread of the parent was doing."""
    storage = MemoryStorage("forked-store")
    assert fork_while_held(storage._store.lock, lambda: storage.put("a", b"b")) == 0


def test_the_death_of_a_writer_is_noticed_although_a_child_was_forked_during_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Data loader workers forked by one thread while another starts the writer do not keep the writer's socket."""
    children: list[int] = []
    forked = threading.Event()

    def fork() -> None:
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        children.append(child)
        forked.set()

    forker = threading.Thread(target=fork, daemon=True)
    real = subprocess.Popen

    def meanwhile(*arguments: Any, **options: Any) -> Any:
        if not children and not forker.is_alive():
            forker.start()
            forked.wait(0.5)
        return real(*arguments, **options)

    monkeypatch.setattr(conversation.subprocess, "Popen", meanwhile)
    client = WriterClient.start(thread=False)
    try:
        forker.join(20)
        first = client.process_id
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert wait_until(lambda: client.process_id != first, 60)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        client.close(20)
