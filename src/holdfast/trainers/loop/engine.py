"""Passes events on to algorithms, callbacks and loggers, at next to no cost for those nobody listens to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .callbacks import Callback, Logger, LoggerDestination
from .events import Event
from .state import State

__all__ = ["EventEngine"]


class EventEngine:
    """Runs what listens to each event: algorithms first, then callbacks and loggers in their order, savers last.

    At INIT it is loggers, callbacks, algorithms: what logs is there for the others. At events whose names begin
    with AFTER_ algorithms undo what they did before, so the last algorithm comes first there.
    """

    def __init__(self, state: State, logger: Logger) -> None:
        self._state, self._logger = state, logger
        # By the value of the event: an Enum's own hash is a Python function, asked a dozen times for each batch.
        self._handlers: dict[str, list[Callable[..., object]]] = {}
        self._callbacks: Sequence[Any] = ()
        self._begun = False

    def listen(self, callbacks: Sequence[Any]) -> None:
        """Set what listens, apart from the algorithms of the state."""
        self._callbacks = tuple(callbacks)
        self._handlers = {
            event._value_: [h for callback in callbacks for h in _handlers(callback, event)] for event in Event
        }

    def run(self, event: Event) -> None:
        """Tell everybody who listens to ``event``."""
        state, logger = self._state, self._logger
        if event is Event.INIT:
            first = [callback for callback in self._callbacks if isinstance(callback, LoggerDestination)]
            for callback in (*first, *(other for other in self._callbacks if other not in first)):
                for handler in _handlers(callback, event):
                    handler(state, logger)
        if state.algorithms:
            self._run_algorithms(event)
        if event is Event.INIT:
            self._begun = True
            return
        for handler in self._handlers[event._value_]:
            handler(state, logger)

    def _run_algorithms(self, event: Event) -> None:
        state, logger = self._state, self._logger
        matching = [algorithm for algorithm in state.algorithms if algorithm.match(event, state)]
        for algorithm in reversed(matching) if event.name.startswith("AFTER_") else matching:
            algorithm.apply(event, state, logger)

    def close(self) -> None:
        """Close everything that listens, once; the first error is raised after all have been closed."""
        if not self._begun:
            return
        self._begun = False
        problem: Exception | None = None
        for call in ("close", "post_close"):
            for callback in self._callbacks:
                try:
                    method = getattr(callback, call, None)
                    if method is not None:
                        _ = method(self._state, self._logger) if call == "close" else method()
                except Exception as error:  # noqa: BLE001 - raised below: the others have to be closed as well
                    problem = problem or error
        if problem is not None:
            raise problem


def _handlers(callback: Any, event: Event) -> list[Callable[..., object]]:
    kind = type(callback)
    if getattr(kind, "run_event", None) is not Callback.run_event:
        return [lambda state, logger: callback.run_event(event, state, logger)]
    own = event.value in vars(callback)
    if getattr(kind, event.value, None) is getattr(Callback, event.value) and not own:
        return []
    return [getattr(callback, event.value)]
