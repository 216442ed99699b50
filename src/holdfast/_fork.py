"""What a forked child does first: it lets go of what belongs to its parent."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from itertools import count
from types import MethodType
from typing import TypeVar

_Callback = TypeVar("_Callback", bound=Callable[[], object])
_numbers = count()
_callbacks: dict[int, Callable[[], Callable[[], object] | None]] = {}


def after_fork_in_child(callback: _Callback) -> _Callback:
    """Call ``callback`` in every process that is forked from this one, before anything else runs there.

    A data loader worker inherits sockets, locks and memory. It has one thread: a lock that another thread of the parent
    held stays locked, so ``callback`` takes no lock and makes new ones. What it closes is the child's copy alone.

    Callbacks run in the order in which they were given. If a callback raises, that is logged and the others run. Where
    the system cannot fork, nothing is called.

    Args:
        callback: a function, for which this is a decorator too, or a method. A method does not keep its object alive
            and is called as long as that lives.

    Returns:
        The callback.
    """
    number = next(_numbers)
    if isinstance(callback, MethodType):
        forget = _callbacks.pop  # not looked up then: while an interpreter ends, globals go before objects do
        owner, function = weakref.ref(callback.__self__, lambda _: forget(number, None)), callback.__func__
        _callbacks[number] = lambda: None if (found := owner()) is None else MethodType(function, found)
    else:
        _callbacks[number] = lambda: callback
    return callback


def _run() -> None:
    for find in list(_callbacks.values()):
        callback = find()
        if callback is None:
            continue
        try:
            callback()
        except Exception:  # noqa: BLE001 - a failing callback must not keep the others from letting go
            from ._log import get_logger  # here: `import holdfast` needs no logging

            get_logger("fork").exception("a forked child could not let go of what belongs to its parent")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_run)
