"""Messages that a worker gets from its controller: answers, commits, trouble, and the end of the driver."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import SessionError
from holdfast.writer.frames import Channel, Message

from ..transit import error_from_wire

__all__ = ["ControllerAnswers", "end_process"]

_LOG = get_logger("trainers.function")
_PATIENCE_S = 60.0


def end_process() -> None:
    """End this worker at once: without its driver its reports go nowhere, and nothing else would stop it.

    What was handed to a writer process is still committed by that process.
    """
    os._exit(1)


class ControllerAnswers:
    """Receives on a thread of its own; an answer or the end of the driver releases callers that wait.

    Args:
        channel: from the controller; only this object receives on it from now on.
        on_gone: called on the receiving thread when the controller has gone away by itself.
        other: takes messages of other kinds; returns whether it knows them.

    Attributes:
        troubles: failures of background work that were not raised yet.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        on_gone: Callable[[], None] = end_process,
        other: Callable[[Mapping[str, Any]], bool] = lambda _: False,
    ) -> None:
        self._channel, self._on_gone, self._other = channel, on_gone, other
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._calls: dict[int, Future[Message]] = {}
        self._unsettled: set[int] = set()
        self._undo: dict[int, Callable[[], object]] = {}  # of reports in the background that have taken files away
        self._done: dict[int, Callable[[], object]] = {}  # of reports with work left after the commit
        self._failed_here: set[int] = set()  # failures that the controller repeats are ignored
        self.troubles: deque[BaseException] = deque()
        self._closing = self._gone = False
        self._thread = threading.Thread(target=self._read, name="holdfast-session", daemon=True)
        self._thread.start()

    def call(self) -> tuple[int, Future[Message]]:
        """Return a number for a question, and the future of its answer."""
        number, future = next(self._numbers), Future[Message]()
        with self._changed:
            if self._gone:
                future.set_exception(_gone())
            else:
                self._calls[number] = future
        return number, future

    def answer(self, future: Future[Message], what: str) -> Message:
        """Wait for an answer; the controller bounds the wait. Logs what it waits for once a minute.

        Raises:
            BaseException: what the controller answered instead.
        """
        begun = time.monotonic()
        while not wait([future], timeout=_PATIENCE_S).done:
            _LOG.warning("still waiting for %s, for %.0f s now", what, time.monotonic() - begun)
        return future.result()

    def expect(
        self, index: int, undo: Callable[[], object] | None = None, done: Callable[[], object] | None = None
    ) -> None:
        """Note a report that goes on in the background: `settled` waits for its end.

        Args:
            index: of the report.
            undo: called if it fails.
            done: called when it is committed; returns at once.
        """
        if undo is not None:
            self._undo[index] = undo
        if done is not None:
            self._done[index] = done
        with self._changed:
            self._unsettled.add(index)

    def trouble(self, index: int | None, error: BaseException) -> None:
        """Keep a failure of background work for the next call; ``index`` is the report it ends, None if unknown."""
        undo = None
        if index is not None:
            undo = self._undo.pop(index, None)
            self._done.pop(index, None)
        if undo is not None:  # first: a caller that gets the error finds the files in their place
            undo()
        with self._changed:
            self.troubles.append(error)
            # Without a number it may be any report: nothing waits for any of them.
            self._unsettled -= set(self._unsettled) if index is None else {index}
            self._changed.notify_all()

    def is_expected(self, index: int) -> bool:
        """Whether a report that goes on in the background has not ended."""
        with self._changed:
            return index in self._unsettled

    def fail_here(self, index: int, error: BaseException) -> bool:
        """End a report that failed in this process; return False if the controller has ended it before."""
        with self._changed:
            if index not in self._unsettled:
                return False
            self._failed_here.add(index)
        self.trouble(index, error)
        return True

    def undo_all(self) -> None:
        """Put back the files of reports in the background that are not uploaded, those of the newest report first."""
        for index in reversed(list(self._undo)):
            undo = self._undo.pop(index, None)  # the receiving thread may end the report meanwhile
            if undo is not None:
                undo()

    def forget(self, index: int) -> None:
        """Stop waiting for a report: it is committed, or its caller knows that it never will be."""
        self._undo.pop(index, None)
        self._done.pop(index, None)
        with self._changed:
            self._unsettled.discard(index)
            self._changed.notify_all()

    def settled(self, what: str, index: int | None = None) -> None:
        """Wait until report ``index``, or every report noted, has been committed.

        Raises:
            BaseException: trouble in the background; it ends the waiting.
        """
        begun = time.monotonic()
        with self._changed:
            while not self._changed.wait_for(lambda: self._is_settled(index), _PATIENCE_S):
                seconds, waiting = time.monotonic() - begun, sorted(self._unsettled)
                _LOG.warning("still waiting for %s (reports %s), for %.0f s now", what, waiting, seconds)
            gone = self._gone
        self.raise_trouble()
        if gone:
            raise _gone()

    def raise_trouble(self) -> None:
        """Raise the oldest failure of background work that was not raised yet, if there is one."""
        if self.troubles:
            raise self.troubles.popleft()

    def close(self) -> None:
        """Close the channel and end the thread; idempotent."""
        self._closing = True
        self._channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _is_settled(self, index: int | None) -> bool:
        done = not self._unsettled if index is None else index not in self._unsettled
        return done or bool(self.troubles) or self._gone

    def _read(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._take(message)
        except Exception as error:  # noqa: BLE001 - a thread edge: waiting callers get an error
            _LOG.error("a message of the controller could not be read", exc_info=error)
        if not self._closing:
            self._on_gone()
        with self._changed:
            self._gone = True
            lost, self._calls = list(self._calls.values()), {}
            self._changed.notify_all()
        for future in lost:
            future.set_exception(_gone())

    def _take(self, message: Message) -> None:
        header = message.header
        if header["do"] == "answer":
            with self._changed:
                future = self._calls.pop(header["call"], None)
            if future is None:
                return
            if "error" in header:
                future.set_exception(_error(message))
            else:
                future.set_result(message)
        elif header["do"] == "committed":
            done = self._done.pop(header["index"], None)
            if done is not None:
                done()
            self.forget(header["index"])
        elif header["do"] == "trouble":
            if header.get("index") not in self._failed_here:
                self.trouble(header.get("index"), _error(message))
        elif not self._other(header):
            _LOG.debug("a message of unknown kind: %s", header["do"])


def _error(message: Message) -> BaseException:
    return error_from_wire(message.header["error"], message.attachments[0] if message.attachments else b"")


def _gone() -> SessionError:
    return SessionError("the driver of this run is gone: nobody takes reports any more, this worker has to end")
