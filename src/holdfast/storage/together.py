"""Requests side by side: as many at once as a storage says are worth it, one after another on a disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from .base import StorageTraits

__all__ = ["together"]

_T = TypeVar("_T")


class _Parallel(Protocol):
    @property
    def traits(self) -> StorageTraits: ...


def together(storage: _Parallel, calls: Sequence[Callable[[], _T]]) -> list[_T]:
    """Carry out calls that do not wait for each other, and return their results in order; blocks until all have ended.

    Not with a `ThreadPoolExecutor`, which refuses work while the interpreter shuts down, when a writer
    thread finishes the last save. The caller works, too, so a call may use this function itself.

    Args:
        storage: says how many at once (`StorageTraits.num_parallel`).
        calls: begun in this order. After a call has failed no further call is begun.

    Raises:
        BaseException: the error of the first failed call, in the order of ``calls``.
    """
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

    threads = [
        threading.Thread(target=work, name="holdfast-together", daemon=True)
        for _ in range(min(storage.traits.num_parallel, len(calls)) - 1)
    ]
    started = []
    with suppress(RuntimeError):  # no new threads at the end of the interpreter, or of the system's: fewer will do
        for thread in threads:
            thread.start()
            started.append(thread)
    work()
    try:
        for thread in started:
            thread.join()
    except BaseException:  # a Ctrl-C: the memory that calls write to is theirs until they have ended
        with lock:
            failed.setdefault(len(calls), KeyboardInterrupt())  # no further call is begun
        for thread in started:
            thread.join()
        raise
    if failed:
        raise failed[min(failed)]
    return results  # type: ignore[return-value]
