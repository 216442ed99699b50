"""Messages of a worker to its controller, in the order of its reports.

Metrics-only reports are gathered: the first goes at once, those that follow at most every millisecond, so that a kill
of the worker takes no more than those. A report whose content is still being made (an upload in the background) holds
its place, and everything later waits behind it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import SessionError
from holdfast.writer.frames import Channel

__all__ = ["ReportQueue", "Slot"]

_LOG = get_logger("trainers.function")
_PAUSE_S = 0.001
_MAX_WAITING = 2000
_BACKLOG_S = 1.0


class Slot:
    """The place of a message among the others; sent once it is filled."""

    __slots__ = ("attachments", "header")

    count = 0

    def __init__(self, header: dict[str, Any] | None = None, attachments: Sequence[bytes] = ()) -> None:
        self.header, self.attachments = header, attachments

    def message(self) -> dict[str, Any] | None:
        """Return the message; None until it is filled in."""
        return self.header


class _Batch:
    """Metrics-only reports one after another; ranks other than 0 only count them."""

    __slots__ = ("first", "rows", "upto")

    attachments: Sequence[bytes] = ()

    def __init__(self, index: int, row: dict[str, Any] | None) -> None:
        self.first = self.upto = index
        self.rows = [] if row is None else [row]

    @property
    def count(self) -> int:
        return self.upto - self.first + 1

    def message(self) -> dict[str, Any]:
        if self.rows:
            return {"on": "rows", "first": self.first, "rows": self.rows}
        return {"on": "count", "upto": self.upto}


class ReportQueue:
    """Sends the messages of a rank. May be used by several threads; `close` ends its own.

    Args:
        channel: to the controller.
        pause_s: metrics-only reports go at most this often.
        max_waiting: metrics-only reports that may wait here before `add` waits too.
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
        self._queue: deque[Slot | _Batch] = deque()
        self._open: _Batch | None = None  # the last item of the queue, if more rows may join it
        self._waiting = self._blocked = 0  # reports that wait to be sent; threads that wait for room
        self._due = 0.0
        self._armed = False  # the thread looks at the queue at `_due`, without being woken
        self._closed = self._gone = False
        self._thread = threading.Thread(target=self._run, name="holdfast-reports", daemon=True)
        self._thread.start()

    def add(self, index: int, row: dict[str, Any] | None) -> None:
        """Queue a metrics-only report; ``row`` is None on ranks whose metrics are not kept.

        Raises:
            SessionError: the controller has taken nothing for ``timeout_s``.
        """
        with self._changed:
            batch = self._open
            if batch is None:
                self._open = batch = _Batch(index, row)
                self._queue.append(batch)
                self._waiting += 1
                if time.monotonic() >= self._due and self._channel.flush(0.0):
                    self._push()
                else:
                    self._arm()
                return
            batch.upto = index
            if row is not None:
                batch.rows.append(row)
            self._waiting += 1
            if self._waiting >= self._max:
                self._wait_for_room()

    def send(self, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send a message after everything before it; never waits."""
        with self._changed:
            self._append(Slot(header, attachments))
            self._push()

    def send_now(self, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send a message that need not wait for a held place; what is ready before it goes first."""
        with self._changed:
            self._push()
            self._deliver(header, attachments)

    def hold(self) -> Slot:
        """Hold the place of a message; `fill` fills it later."""
        slot = Slot()
        with self._changed:
            self._append(slot)
        return slot

    def fill(self, slot: Slot, header: dict[str, Any]) -> None:
        """Fill a held place; its message is sent once everything before it is."""
        with self._changed:
            slot.header = header
            self._push()

    def flush(self, timeout_s: float) -> bool:
        """Send what is ready and wait until the kernel has it; return False when that took too long."""
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

    def _append(self, slot: Slot) -> None:
        self._queue.append(slot)
        self._open = None

    def _push(self) -> None:
        """Send from the front of the queue as long as there is something to send."""
        sent = False
        while self._queue and (header := self._queue[0].message()) is not None:
            item = self._queue.popleft()
            if item is self._open:
                self._open = None
            self._waiting -= item.count
            self._deliver(header, item.attachments)
            sent = True
        if sent:
            self._due = time.monotonic() + self._pause_s
            if self._blocked:
                self._changed.notify_all()

    def _deliver(self, header: dict[str, Any], attachments: Sequence[bytes]) -> None:
        try:
            self._channel.send(header, attachments)
        except OSError as error:
            # The reader of the channel sees the same end and handles it.
            self._gone = True
            _LOG.debug("the controller is gone (%s): %s is lost", error, header.get("on"))

    def _arm(self) -> None:
        # Waking a thread costs more than the rest of a report: once awake it stays so while reports keep coming.
        if not self._armed:
            self._armed = True
            self._changed.notify_all()

    def _wait_for_room(self) -> None:
        self._blocked += 1
        self._armed = True
        self._changed.notify_all()
        try:
            if self._changed.wait_for(self._has_room, self._timeout_s):
                return
        finally:
            self._blocked -= 1
        held = bool(self._queue) and not self._is_ready()
        why = "an upload in the background before them has not ended" if held else "the driver has taken nothing"
        raise SessionError(
            f"{self._waiting} reports wait to be sent: {why} for {self._timeout_s:.0f} s; is it stuck, or its storage?"
        )

    def _has_room(self) -> bool:
        return self._waiting < self._max or self._closed or self._gone

    def _is_ready(self) -> bool:
        return bool(self._queue) and self._queue[0].message() is not None

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
                    self._armed = self._is_ready()  # nothing came for a while: sleep until something does
                    self._push()
