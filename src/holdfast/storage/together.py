"""Calls on other threads: requests side by side, as many at once as a storage says are worth it, or one after another.

Neither with a `ThreadPoolExecutor`: that one refuses work while the interpreter shuts down, when a writer thread
finishes the last save, and already once the main thread has returned, which a trainer in another thread survives.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from holdfast.errors import StorageNotFoundError

from .base import StorageTraits

_T = TypeVar("_T")
_LOOK_AGAIN_S = (0.1, 0.3, 0.6)


class _Parallel(Protocol):
    @property
    def traits(self) -> StorageTraits: ...


def together(storage: _Parallel, calls: Sequence[Callable[[], _T]]) -> list[_T]:
    """Carry out calls that do not wait for each other, and return their results in order; blocks until all have ended.

    The caller works, too, so a call may use this function itself.

    Args:
        storage: says how many at once (`StorageTraits.num_parallel`).
        calls: begun in this order. After a call has failed no further call is begun.

    Raises:
        BaseException: the error of the first failed call, in the order of ``calls``.
    """
    num_threads = min(storage.traits.num_parallel, len(calls)) - 1
    if num_threads < 1:
        return [call() for call in calls]
    results: list[_T | None] = [None] * len(calls)
    failed: dict[int, BaseException] = {}
    numbers, lock = iter(range(len(calls))), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = None if failed else next(numbers, None)
            if number is None:
                return
            try:
                results[number] = calls[number]()
            except BaseException as error:  # noqa: BLE001 - a thread edge: the caller raises it
                with lock:
                    failed[number] = error

    def help_out(ended: threading.Event) -> None:
        try:
            work()
        finally:
            ended.set()

    helpers: list[tuple[threading.Thread, threading.Event]] = []
    try:
        with suppress(RuntimeError):  # no new threads at the end of the interpreter, or of the system's: fewer will do
            for _ in range(num_threads):
                ended = threading.Event()
                thread = threading.Thread(target=help_out, args=(ended,), name="holdfast-together", daemon=True)
                thread.start()
                helpers.append((thread, ended))
        work()
        for thread, ended in helpers:
            ended.wait()
            thread.join()
    except BaseException:  # a Ctrl-C: the memory that calls write to is theirs until they have ended
        with lock:
            failed.setdefault(len(calls), KeyboardInterrupt())  # no further call is begun
        wait_out(lambda: [ended.wait() for _, ended in helpers])
        raise
    if failed:
        raise failed[min(failed)]
    return results  # type: ignore[return-value]


def wait_out(wait: Callable[[], object]) -> None:
    """Wait for a thread that uses our memory, however often a Ctrl-C comes; the last of them is raised at the end.

    Args:
        wait: returns when the thread has done with it; called again after each Ctrl-C. Not `threading.Thread.join`:
            after a Ctrl-C in it CPython before 3.13 takes the thread for ended (gh-90882).
    """
    interrupted: KeyboardInterrupt | None = None
    while True:
        try:
            wait()
            break
        except KeyboardInterrupt as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


def asked_again(storage: _Parallel, call: Callable[[], _T], missing: type[Exception] = StorageNotFoundError) -> _T:
    """Carry out a call for a file that has to be there; blocks for up to a second if a store says that it is not.

    A replica of a store may lag behind, or may have lost what others have. A disk is believed.

    Args:
        storage: is asked again where it takes several requests at once.
        call: safe to repeat.
        missing: says that the file is not there.

    Raises:
        Exception: what ``call`` raises, of another kind or in the end.
    """
    for pause_s in _LOOK_AGAIN_S if storage.traits.num_parallel > 1 else ():
        try:
            return call()
        except missing:
            time.sleep(pause_s)
    return call()


def chain(source: Future[_T], target: Future[_T]) -> None:
    """Let ``target`` end as ``source`` does, with its result or its error."""

    def ended(done: Future[_T]) -> None:
        error = done.exception()
        if error is not None:
            target.set_exception(error)
        else:
            target.set_result(done.result())

    source.add_done_callback(ended)


class SerialExecutor:
    """Runs calls one after another on one daemon thread: work beside the writing, notes, copies."""

    def __init__(self, name: str = "holdfast-side") -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], _T]) -> Future[_T]:
        """Queue ``call``; its result or exception comes through the future."""
        future: Future[_T] = Future()
        self._queue.put((future, call))
        return future

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - a thread edge: the future carries it
                    future.set_exception(error)
            del item, future, call  # while idle it must not keep a state's memory alive
        self._ended.set()

    def close(self, *, wait: bool = True) -> None:
        """End the thread after what is queued; idempotent.

        Args:
            wait: return when it has ended.
        """
        self._queue.put(None)
        if wait and self._thread.is_alive():  # not in a forked child
            self._ended.wait()  # first: see `wait_out`
            self._thread.join()
