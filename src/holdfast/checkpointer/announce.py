"""Listeners of committed checkpoints: called without holding or failing a training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast._log import get_logger
from holdfast._optional import tracker
from holdfast.errors import CheckpointNotFoundError, ConfigError

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint

_LOG = get_logger("announce")

Listener = Callable[["Checkpoint"], object]


def listeners(given: Listener | str | Sequence[Listener | str]) -> tuple[Listener, ...]:
    """Check the argument ``on_commit``; a text names a tracker of an installed package.

    Raises:
        ConfigError: something cannot be called.
    """
    several: Iterable[Any] = (given,)
    if isinstance(given, Iterable) and not callable(given) and not isinstance(given, str):
        several = given
    found = tuple(tracker(listener, what="on_commit") for listener in several)
    for listener in found:
        if not callable(listener):
            raise ConfigError(f"on_commit={listener!r}: give a function of one argument, the committed checkpoint")
    return found


class Announcer:
    """Calls listeners in turn on a thread of its own; what they raise is logged.

    Args:
        listeners: called with each committed checkpoint.
    """

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.listeners = tuple(listeners)
        import_module("holdfast.checkpoint.handle")  # now: no step waits for what listeners get
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    def tell(self, checkpoint: Checkpoint) -> None:
        """Queue the calls for a checkpoint; returns at once."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-announce")
        self._pending = [call for call in self._pending if not call.done()]
        self._pending.append(self._thread.submit(self._call, checkpoint))

    def wait(self, timeout_s: float) -> None:
        """Wait until all calls have ended; logs a warning if that takes longer."""
        if wait(self._pending, timeout=timeout_s).not_done:
            names = ", ".join(map(_name, self.listeners))
            _LOG.warning("%s did not take note of all checkpoints within %.0f s", names, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Wait like `wait`, and end the thread; idempotent."""
        self.wait(timeout_s)
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    def _call(self, checkpoint: Checkpoint) -> None:
        for listener in self.listeners:
            try:
                listener(checkpoint)
            except CheckpointNotFoundError:
                _LOG.warning("%s was removed before %s could read it", checkpoint.uri, _name(listener))
            except Exception:  # noqa: BLE001 - the user's code must not end a training
                _LOG.exception("%s did not take note of %s; training goes on", _name(listener), checkpoint.uri)


def _name(listener: Listener) -> str:
    """Name a listener in a log: the class of a tracker, the name of a function."""
    owner = getattr(listener, "__self__", None)
    return getattr(listener, "__qualname__", type(listener).__name__) if owner is None else type(owner).__name__
