"""A worker's link to its controller: reports in order, answers, commits, trouble, and the end of the driver.

`ReportQueue` gathers reports without data; `Agreement` is this rank's part in saves that all ranks agree on.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import SessionError
from holdfast.writer.frames import Channel, Message

from ..transit import add_note, error_from_wire, error_to_wire

_LOG = get_logger("trainers.function")
_CLOSE_S = 1.0
_HOLD_S = 60.0
_PATIENCE_S = 60.0
_PAUSE_S = 0.001
_MAX_WAITING = 2000
_BACKLOG_S = 1.0


def end_process() -> None:
    """End this worker at once: without its driver its reports go nowhere, and nothing else would stop it.

    What was handed to a writer process is still committed by that process.
    """
    os._exit(1)


class ControllerLink:
    """Numbers the reports of a rank, sends them, and receives on a thread of its own. Callers report one by one.

    An answer or the end of the driver releases callers that wait.

    Args:
        channel: to the controller; only this link receives on it from now on.
        first_index: number of the next report.
        timeout_s: how long to wait for a controller that takes no message.
        on_gone: called on the receiving thread when the driver has gone away by itself.
        beat_s: while this rank's part of a report is being stored, say so this often; None: never.

    Attributes:
        count: number of the last report that was entered.
        agreement: this rank's part in agreed saves.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        first_index: int,
        timeout_s: float,
        on_gone: Callable[[], None] = end_process,
        beat_s: float | None = None,
    ) -> None:
        self.count = first_index - 1
        self._channel, self._timeout_s, self._on_gone = channel, timeout_s, on_gone
        self._queue = ReportQueue(channel, timeout_s=timeout_s)
        self.agreement = Agreement(self._queue.send)
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._calls: dict[int, Future[Message]] = {}
        self._unsettled: set[int] = set()  # reports that go on in the background
        self._storing: set[int] = set()  # reports whose part of this rank is with a storage
        self._undo: dict[int, Callable[[], object]] = {}  # of those that have taken files away
        self._done: dict[int, Callable[[], object]] = {}  # of those with work left after the commit
        self._known: set[int] = set()  # reports whose failure is told here: once, whatever else fails because of it
        self._troubles: deque[tuple[int, BaseException]] = deque()  # (report, failure) that were not raised yet
        self._closed = self._gone = False
        self._thread = threading.Thread(target=self._read, name="holdfast-session", daemon=True)
        self._thread.start()
        self._end = threading.Event()
        if beat_s is not None:
            threading.Thread(target=self._beat, args=(beat_s,), name="holdfast-storing", daemon=True).start()

    # -- reports -------------------------------------------------------------------------------------------------

    def add(self, row: dict[str, Any] | None) -> None:
        """Enter a report without data; ``row`` is None where the metrics are not kept."""
        self.count += 1
        self._queue.add(self.count, row)

    def skip(self) -> None:
        """Enter a report of which nothing is kept."""
        self.count += 1
        self._queue.send({"on": "count", "upto": self.count})

    def refuse(self, row: dict[str, Any] | None, error: BaseException, *, root: int | None = None) -> None:
        """Enter a report whose call raises ``error`` here: it fails on all ranks, whose files would lack those of this.

        Args:
            row: what is kept of it all the same.
            error: what the call raises.
            root: the report that had failed before, whose error it is; None: it is one of this report.
        """
        index = self.count + 1
        with self._changed:
            self._known.add(index if root is None else root)
        self._tell_failure(index, error, root)  # first: once all ranks have entered it, it is committed
        if row is None:
            self.skip()
        else:
            self.add(row)

    def call(self, header: dict[str, Any]) -> Future[Message]:
        """Enter a report that is answered."""
        header["call"], future = self._new_call()
        self.count = header["index"]
        self._queue.send(header)
        return future

    def tell(
        self,
        header: dict[str, Any],
        *,
        undo: Callable[[], object] | None = None,
        done: Callable[[], object] | None = None,
    ) -> None:
        """Enter a report that is committed in the background; see `expect`."""
        self.count = header["index"]
        self.expect(self.count, undo=undo, done=done)  # first: "committed" may come before `send` returns
        self._queue.send(header)

    def send(self, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send a message about a report that is entered; never waits."""
        self._queue.send(header, attachments)

    def expect(
        self, index: int, *, undo: Callable[[], object] | None = None, done: Callable[[], object] | None = None
    ) -> None:
        """Note that a report goes on in the background: `drain` waits for its end.

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

    def is_expected(self, index: int) -> bool:
        """Whether report ``index`` goes on in the background; not once it has failed."""
        with self._changed:
            return index in self._unsettled

    def begin_part(self, index: int) -> None:
        """Note that this rank's part of a report goes to a storage, until `part_ended` or `part_failed`.

        However long that takes is no hang. The driver cannot see it: it hears of a part when that is stored, and of one
        whose worker stands still never.
        """
        self._storing.add(index)

    def part_ended(self, index: int, error: BaseException | None, **where: Any) -> None:
        """Report that this rank's part is stored, or has failed: then the next call here raises the error, once.

        A failure is sent in any case: else the node would go on with these files when this worker has ended.

        Args:
            index: of the report.
            error: why it failed.
            where: what was not known yet when the report was entered: "source" or "location".
        """
        self._storing.discard(index)
        if error is None:
            self._queue.send({"on": "part", "index": index, **where})
            return
        with self._changed:
            ends_it = index in self._unsettled  # else the controller was first
        if ends_it:
            add_note(error, f"holdfast: in the background, after the call of report {index}")
            self._fail(index, error, root=index)
        self._tell_failure(index, error)

    def part_failed(self, index: int, error: BaseException) -> None:
        """Report that this rank's part has failed with an error that the caller gets now."""
        self._storing.discard(index)
        self._tell_failure(index, error)
        self._settle(index)

    def _tell_failure(self, index: int, error: BaseException, root: int | None = None) -> None:
        description, blob = error_to_wire(error)
        cause = {} if root is None else {"root": root}
        self._queue.send({"on": "part", "index": index, "error": description, **cause}, (blob,))

    def undo_all(self) -> None:
        """Put back the files of reports in the background that have not ended, those of the newest report first."""
        for index in reversed(list(self._undo)):
            undo = self._undo.pop(index, None)  # the receiving thread may end the report meanwhile
            if undo is not None:
                undo()

    # -- answers -------------------------------------------------------------------------------------------------

    def ask(self, question: dict[str, Any]) -> Callable[[], Message]:
        """Send a question; return a function that waits for its answer."""
        call, future = self._new_call()
        self._queue.send({"on": "ask", "call": call, **question})
        return partial(self.answer, future, f"the answer to {question['what']!r}")

    def answer(self, future: Future[Message], what: str) -> Message:
        """Wait for the answer to ``what``; the controller bounds the wait.

        Raises:
            BaseException: what the controller answered instead.
        """
        begun = time.monotonic()
        while not wait([future], timeout=_PATIENCE_S).done:
            _LOG.warning("still waiting for %s, for %.0f s now", what, time.monotonic() - begun)
        return future.result()

    def committed(self, index: int) -> None:
        """Wait for the commit of report ``index``; raise the error if it failed."""
        self._wait_settled(f"the commit of report {index}", lambda: index not in self._unsettled)

    def check(self) -> None:
        """Refuse to go on after the end."""
        if self._closed:
            raise SessionError("this session is over: train_func has ended on this worker")

    def next_trouble(self) -> tuple[int, BaseException] | None:
        """Take the oldest failure of background work that was not raised yet, with its report; None: there is none."""
        return self._troubles.popleft() if self._troubles else None

    def raise_trouble(self) -> None:
        """Raise that failure, if there is one."""
        if (found := self.next_trouble()) is not None:
            raise found[1]

    # -- the end -------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until everything reported is committed; raises what failed and was not raised yet."""
        self.check()
        self.raise_trouble()
        if not self._queue.flush(self._timeout_s):
            raise SessionError(f"the driver has taken nothing for {self._timeout_s:.0f} s: is it stopped?")
        self._wait_settled("the last reports to be committed", lambda: not self._unsettled)

    def abandon(self, timeout_s: float) -> None:
        """Send what is ready; never raises."""
        if not self._queue.flush(timeout_s):
            _LOG.warning("reports were given up, which the driver did not take: train_func has failed")

    def close(self) -> None:
        """End all threads and close the channel; idempotent."""
        self._closed = True
        self._end.set()
        self.agreement.end()
        self._queue.close()
        self._channel.flush(_CLOSE_S)
        self._channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def forget_in_child(self) -> None:
        """Let go of the channel in a forked child, so that the driver still sees this worker's end."""
        self._closed = True
        self._channel.forget_in_child()

    # -- inside --------------------------------------------------------------------------------------------------

    def _new_call(self) -> tuple[int, Future[Message]]:
        number, future = next(self._numbers), Future[Message]()
        with self._changed:
            if self._gone:
                future.set_exception(_gone())
            else:
                self._calls[number] = future
        return number, future

    def _fail(self, index: int, error: BaseException, *, root: int) -> None:
        """End a report, and keep its failure for the next call unless that of report ``root``, its cause, was told."""
        self._done.pop(index, None)
        undo = self._undo.pop(index, None)
        if undo is not None:  # first: a caller that gets the error finds the files in their place
            undo()
        with self._changed:
            if root not in self._known:
                self._known.add(root)
                self._troubles.append((root, error))
            self._unsettled.discard(index)
            self._changed.notify_all()

    def _settle(self, index: int) -> None:
        """Stop waiting for a report: it is committed, or its caller knows that it never will be."""
        self._undo.pop(index, None)
        self._done.pop(index, None)
        with self._changed:
            self._unsettled.discard(index)
            self._changed.notify_all()

    def _wait_settled(self, what: str, is_settled: Callable[[], bool]) -> None:
        begun = time.monotonic()
        with self._changed:
            while not self._changed.wait_for(lambda: is_settled() or self._troubles or self._gone, _PATIENCE_S):
                seconds, waiting = time.monotonic() - begun, sorted(self._unsettled)
                _LOG.warning("still waiting for %s (reports %s), for %.0f s now", what, waiting, seconds)
            gone = self._gone
        self.raise_trouble()
        if gone:
            raise _gone()

    def _beat(self, beat_s: float) -> None:
        while not self._end.wait(beat_s):
            if self._storing:
                self._queue.send({"on": "storing"})

    def _read(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._take(message)
        except Exception as error:  # noqa: BLE001 - a thread edge: waiting callers get an error
            _LOG.error("a message of the controller could not be read", exc_info=error)
        if not self._closed:
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
            self._settle(header["index"])
        elif header["do"] == "trouble":
            self._fail(header["index"], _error(message), root=header["root"])
        elif not self.agreement.take(header):
            _LOG.debug("a message of unknown kind: %s", header["do"])


def _error(message: Message) -> BaseException:
    return error_from_wire(message.header["error"], message.attachments[0] if message.attachments else b"")


def _gone() -> SessionError:
    return SessionError("the driver of this run is gone: nobody takes reports any more, this worker has to end")


class _Batch:
    """Reports without data, one after another; ranks other than 0 only count them."""

    __slots__ = ("first", "rows", "upto")

    def __init__(self, index: int, row: dict[str, Any] | None) -> None:
        self.first = self.upto = index
        self.rows = [] if row is None else [row]


class ReportQueue:
    """Sends the messages of a rank in the order of its reports, those without data gathered.

    The first of these goes at once, those that follow at most every millisecond, so that a kill of the worker takes no
    more than those. May be used by several threads; `close` ends its own.

    Args:
        channel: to the controller.
        pause_s: reports without data go at most this often.
        max_waiting: reports that may wait here before `add` waits too.
        timeout_s: how long `add` waits for a controller that takes no message.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        pause_s: float = _PAUSE_S,
        max_waiting: int = _MAX_WAITING,
        timeout_s: float = 600.0,
    ) -> None:
        self._channel, self._pause_s, self._max, self._timeout_s = channel, pause_s, max_waiting, timeout_s
        self._changed = threading.Condition()  # re-entrant: a signal handler may report in the middle of a report
        self._batch: _Batch | None = None  # what waits
        self._blocked = 0  # threads that wait for room
        self._due = 0.0
        self._armed = False  # the thread looks at the batch at `_due`, without being woken
        self._closed = self._gone = False
        self._thread = threading.Thread(target=self._run, name="holdfast-reports", daemon=True)
        self._thread.start()

    def add(self, index: int, row: dict[str, Any] | None) -> None:
        """Queue a report without data; ``row`` is None on ranks whose metrics are not kept.

        Raises:
            SessionError: the controller has taken nothing for ``timeout_s``.
        """
        with self._changed:
            batch = self._batch
            if batch is None:
                batch = _Batch(index, row)
                while self._batch is not None:  # of a signal handler that has reported meanwhile
                    self._push()
                self._batch = batch
                if time.monotonic() >= self._due and self._channel.flush(0.0):
                    self._push()
                elif not self._armed:
                    # Waking a thread costs more than the rest of a report: once awake it stays so while reports come.
                    self._armed = True
                    self._changed.notify_all()
                return
            batch.upto = index
            if row is not None:
                batch.rows.append(row)
            if batch.upto - batch.first >= self._max - 1:
                self._wait_for_room()

    def send(self, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send a message after the reports before it; never waits."""
        with self._changed:
            self._push()
            self._deliver(header, attachments)

    def flush(self, timeout_s: float) -> bool:
        """Send what waits here and wait until the kernel has it; return False when that took too long."""
        with self._changed:
            self._push()
        return self._channel.flush(timeout_s)

    def close(self) -> None:
        """End the thread; idempotent. What was not flushed is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- inside, with the lock held ------------------------------------------------------------------------------

    def _push(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        if batch.rows:
            self._deliver({"on": "rows", "first": batch.first, "rows": batch.rows})
        else:
            self._deliver({"on": "count", "upto": batch.upto})
        self._due = time.monotonic() + self._pause_s
        if self._blocked:
            self._changed.notify_all()

    def _deliver(self, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        try:
            self._channel.send(header, attachments)
        except OSError as error:
            # The reader of the channel sees the same end and handles it.
            self._gone = True
            _LOG.debug("the controller is gone (%s): %s is lost", error, header.get("on"))

    def _wait_for_room(self) -> None:
        self._blocked += 1
        self._armed = True
        self._changed.notify_all()
        try:
            if self._changed.wait_for(self._has_room, self._timeout_s):
                return
        finally:
            self._blocked -= 1
        raise SessionError(
            f"{self._max} reports wait to be sent: the driver has taken nothing for {self._timeout_s:.0f} s; is it "
            "stuck, or its storage?"
        )

    def _has_room(self) -> bool:
        batch = self._batch
        return self._closed or self._gone or batch is None or batch.upto - batch.first < self._max - 1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._armed)
                pause = max(0.0, self._due - time.monotonic())
                self._changed.wait_for(lambda: self._closed or self._blocked > 0, pause)
                if self._closed:
                    return
            # A controller that is behind: rows wait here, where they are counted, not in the channel.
            if self._channel.flush(_BACKLOG_S):
                with self._changed:
                    self._armed = self._batch is not None  # nothing came for a while: sleep until something does
                    self._push()


class Agreement:
    """A rank's part in `should_save`: all ranks answer yes at the same call, without waiting for one another before.

    The controller asks how many calls each rank has made. From then on the next call of that rank waits; when all have
    answered, the first call that no rank has made yet is agreed on, which takes two messages and no collective. After
    it the workers are about to be ended: the next call waits for that.

    Args:
        tell: sends a message to the controller.
        hold_s: how long a call waits for the agreed call, or for the end of this worker, before it answers no.

    Attributes:
        reached: the agreed call was made: the next report is the agreed save.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None], *, hold_s: float = _HOLD_S) -> None:
        self._tell, self._hold_s = tell, hold_s
        self._changed = threading.Condition()
        self._calls = 0
        self._waits = False
        self._at: int | None = None
        self._over = False
        self.reached = False

    @property
    def is_used(self) -> bool:
        """Whether train_func has called `should_save`."""
        return self._calls > 0

    def take(self, header: Mapping[str, Any]) -> bool:
        """Take a message of the controller; return False if it is of another kind. Called on the receiving thread."""
        if header["do"] == "save_soon":
            with self._changed:
                self._waits, self._at = True, None
                self._tell({"on": "at", "calls": self._calls})
        elif header["do"] == "save_at":
            with self._changed:
                self._at = header["call"]
                self._changed.notify_all()
        else:
            return False
        return True

    def ask(self) -> bool:
        """Answer one call of `should_save`."""
        with self._changed:
            self._calls += 1
            if self.reached:  # saved; training from here on would be lost
                self._changed.wait_for(lambda: self._over, self._hold_s)
                self.reached, self._waits, self._at = False, False, None
                return False
            if self._waits and not self._changed.wait_for(lambda: self._at is not None or self._over, self._hold_s):
                self._waits = False  # the next calls do not wait again, and still follow a late agreement
            self.reached = self._calls == self._at
            return self.reached

    def end(self) -> None:
        """Release calls that wait: the controller is gone, or this worker ends."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
