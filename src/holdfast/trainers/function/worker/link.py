"""A worker's link to its controller: reports in order, answers, and what is still on its way.

Two parts are separate classes: uploads in the background, whose reports keep their place among the others
(`BackgroundUploads`), and saves that all ranks agree on (`Agreement`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import SessionError
from holdfast.writer.frames import Channel, Message
from holdfast.writer.serial_executor import SerialExecutor

from ..transit import error_to_wire
from .answers import ControllerAnswers, end_process
from .report_queue import ReportQueue

__all__ = ["Agreement", "BackgroundUploads", "ControllerLink"]

_LOG = get_logger("trainers.function")
_CLOSE_S = 1.0
_MAX_WAITING = 4
_HOLD_S = 60.0


class ControllerLink:
    """Numbers the reports of a rank and sends them. Callers make sure that reports follow one another.

    Args:
        channel: to the controller; only this link receives on it.
        first_index: number of the next report.
        timeout_s: how long to wait for a controller that takes no message.
        on_gone: what to do when the driver is gone.

    Attributes:
        count: number of the last report that was entered.
        agreement: this rank's part in agreed saves.
    """

    def __init__(
        self, channel: Channel, *, first_index: int, timeout_s: float, on_gone: Callable[[], None] = end_process
    ) -> None:
        self.count = first_index - 1
        self._channel, self._timeout_s = channel, timeout_s
        self._closed = False
        self._queue = ReportQueue(channel, timeout_s=timeout_s)
        self.agreement = Agreement(self._queue.send_now)
        self._answers = ControllerAnswers(channel, on_gone=on_gone, other=self.agreement.take)
        self._uploads = BackgroundUploads(self._queue)

    # -- reports -------------------------------------------------------------------------------------------------

    def add(self, row: dict[str, Any] | None) -> None:
        """Enter a report without data; ``row`` is None where the metrics are not kept."""
        self.count += 1
        self._queue.add(self.count, row)

    def call(self, header: dict[str, Any]) -> Future[Message]:
        """Enter a report that is answered."""
        header["call"], future = self._answers.call()
        self.count = header["index"]
        self._queue.send(header)
        return future

    def tell(
        self, header: dict[str, Any], *, undo: Callable[[], object], done: Callable[[], object] | None = None
    ) -> None:
        """Enter a report that is committed in the background; ``undo`` is called if that fails, ``done`` if not."""
        self.count = header["index"]
        self._answers.expect(self.count, undo, done)
        self._queue.send(header)

    def tell_later(self, index: int, work: Callable[[], dict[str, Any]]) -> None:
        """Enter a report whose message ``work`` makes in the background; what follows is sent after it."""
        self._answers.expect(index)  # first: the message "committed" may come before `submit` returns
        try:
            self._uploads.submit(work)
        except BaseException:
            self._answers.forget(index)
            raise
        self.count = index

    def expect(self, index: int) -> None:
        """Note that report ``index`` goes on in the background."""
        self._answers.expect(index)

    def memory(self, index: int, values: bytes) -> None:
        """Send the controller values that are not written to storage."""
        self._queue.send({"on": "memory", "index": index}, (values,))

    def sealed(self, index: int) -> None:
        """Report that this rank's writer has its part and will finish it even if this process dies."""
        self._queue.send_now({"on": "sealed", "index": index})

    def staged(self, index: int, left: Mapping[str, Any]) -> None:
        """Report that this rank's part is on a disk of this node, to be uploaded; ``left`` says where."""
        self._queue.send_now({"on": "staged", "index": index, "unfinished": dict(left)})

    def part_ended(self, index: int, error: BaseException | None) -> None:
        """Report that this rank's part is durable, or has failed: then the next call here raises the error."""
        if error is None:
            self._queue.send_now({"on": "part", "index": index})
        else:
            self.part_failed(index, error)
            self._answers.trouble(index, error)

    def brought(self, index: int) -> None:
        """Report that the files of a report are in the store, after the report itself, which may wait for another."""
        self._queue.send({"on": "part", "index": index})

    def is_expected(self, index: int) -> bool:
        """Whether report ``index`` goes on in the background; not once it has failed."""
        return self._answers.is_expected(index)

    def bringing_failed(self, index: int, error: BaseException) -> None:
        """Report that files were not uploaded; the next call here raises the error, unless the report has ended.

        Sent in any case: else the node would go on with these files when this worker has ended.
        """
        self._answers.fail_here(index, error)
        self._tell_failure(index, error)

    def undo_all(self) -> None:
        """Put back the files of every report in the background that has not ended."""
        self._answers.undo_all()

    def part_failed(self, index: int, error: BaseException) -> None:
        """Report that this rank's part has failed with an error that the caller has got already."""
        self._tell_failure(index, error)
        self._answers.forget(index)

    def _tell_failure(self, index: int, error: BaseException) -> None:
        description, blob = error_to_wire(error)
        self._queue.send({"on": "part", "index": index, "error": description}, (blob,))  # after the report itself

    # -- answers -------------------------------------------------------------------------------------------------

    def ask(self, question: dict[str, Any]) -> Callable[[], Message]:
        """Send a question; return a function that waits for its answer."""
        call, future = self._answers.call()
        self._queue.send_now({"on": "ask", "call": call, **question})
        return partial(self._answers.answer, future, f"the answer to {question['what']!r}")

    def answer(self, future: Future[Message], index: int) -> Message:
        """Wait for the answer to report ``index``.

        Raises:
            BaseException: what the controller answered instead.
        """
        return self._answers.answer(future, f"report {index}")

    def committed(self, index: int) -> None:
        """Wait for the commit of report ``index``; raise the error if it failed."""
        self._answers.settled(f"the commit of report {index}", index)

    def check(self) -> None:
        """Refuse to go on after the end, or after an upload that has left a hole in the reports of this rank."""
        if self._closed:
            raise SessionError("this session is over: train_func has ended on this worker")
        self._uploads.check()

    @property
    def has_trouble(self) -> bool:
        """Whether background work has failed with an error that was not raised yet."""
        return bool(self._answers.troubles)

    def raise_trouble(self) -> None:
        """Raise the oldest failure of background work, once."""
        self._answers.raise_trouble()

    # -- the end -------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until everything reported is committed; raises what failed and was not raised yet."""
        self._uploads.drain()
        self.check()
        self.raise_trouble()
        if not self._queue.flush(self._timeout_s):
            raise SessionError(f"the driver has taken nothing for {self._timeout_s:.0f} s: is it stopped?")
        self._answers.settled("the last reports to be committed")

    def abandon(self, timeout_s: float) -> None:
        """Send what is ready; never raises."""
        deadline = time.monotonic() + timeout_s
        done = self._uploads.drain(timeout_s)
        if not self._queue.flush(max(0.0, deadline - time.monotonic())) or not done:
            _LOG.warning("uploads in the background, or reports, were given up: train_func has failed")

    def close(self) -> None:
        """End all threads and close the channel; idempotent."""
        self._closed = True
        self.agreement.end()
        self._uploads.close()
        self._queue.close()
        self._channel.flush(_CLOSE_S)
        self._answers.close()

    def forget_in_child(self) -> None:
        """Let go of the channel in a forked child, so that the driver still sees this worker's end."""
        self._closed = True
        self._channel.forget_in_child()


class BackgroundUploads:
    """Runs pieces of work in order on a thread and sends the message that each returns, in the place held for it.

    A failure stays: nothing behind it is sent any more, and every `check` raises it, because a report of this rank is
    missing for good.
    """

    def __init__(self, queue: ReportQueue) -> None:
        self._queue = queue
        self._executor: SerialExecutor | None = None
        self._closed = False
        self._waiting: deque[Future[None]] = deque()
        self._failure: BaseException | None = None

    def submit(self, work: Callable[[], dict[str, Any]]) -> None:
        """Run ``work`` later; its message goes before everything that is sent from now on.

        Waits while four others wait.
        """
        while len(self._waiting) >= _MAX_WAITING:
            wait([self._waiting.popleft()])
        self.check()
        if self._executor is None:
            self._executor = SerialExecutor("holdfast-upload")
        slot = self._queue.hold()

        def run() -> None:
            if self._failure is not None or self._closed:
                return
            try:
                self._queue.fill(slot, work())
            except BaseException as error:  # noqa: BLE001 - a thread edge: `check` raises it
                self._failure = error

        self._waiting.append(self._executor.run(run))

    def check(self) -> None:
        """Raise what an earlier piece of work raised."""
        if self._failure is not None:
            raise self._failure

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait for all work; return False when that took longer than ``timeout_s``."""
        return not wait(self._waiting, timeout=timeout_s).not_done

    def close(self) -> None:
        """Drop what has not begun; idempotent."""
        self._closed = True
        if self._executor is not None:
            self._executor.close(wait=False)


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
