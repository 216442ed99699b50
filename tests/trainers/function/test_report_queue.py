"""What a worker tells its controller: order, gathering, and the bound on what waits."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from session_kit import channels

from holdfast.errors import SessionError
from holdfast.trainers.function.worker.link import ReportQueue


class Ends:
    """An outbox and the other end of its channel."""

    def __init__(self, **options):
        self.near, self.far = channels()
        self.outbox = ReportQueue(self.near, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.outbox.close()
        self.near.close()
        self.far.close()

    def hear(self):
        message = self.far.receive()
        assert message is not None
        return message.header


def row(number):
    return {"metrics": {"loss": number}, "time": 0.0}


def test_the_first_report_goes_at_once_and_those_that_follow_together():
    """A report after a pause does not wait for others; many in a row make few messages, none lost, in order."""
    with Ends(pause_s=0.05) as ends:
        ends.outbox.add(1, row(1))
        assert ends.hear() == {"on": "rows", "first": 1, "rows": [row(1)]}
        for number in range(2, 502):
            ends.outbox.add(number, row(number))
        heard = []
        while not heard or heard[-1]["first"] + len(heard[-1]["rows"]) < 502:
            heard.append(ends.hear())
        flat = [one["metrics"]["loss"] for header in heard for one in header["rows"]]
        assert flat == list(range(2, 502))
        assert len(heard) < 100  # messages with 500 reports


def test_what_waits_goes_by_itself():
    """The last of a series needs no later call to be sent."""
    with Ends(pause_s=0.02) as ends:
        ends.outbox.add(1, row(1))
        ends.outbox.add(2, row(2))
        assert [ends.hear()["first"], ends.hear()["first"]] == [1, 2]


def test_after_a_rest_reports_go_again():
    """The thread sleeps when nothing comes and wakes up for the next series."""
    with Ends(pause_s=0.01) as ends:
        for number in range(1, 7, 2):
            ends.outbox.add(number, row(number))
            ends.outbox.add(number + 1, row(number + 1))
            assert [ends.hear()["first"], ends.hear()["first"]] == [number, number + 1]
            time.sleep(0.05)  # longer than the thread stays up: this very pause is under test


def test_ranks_that_keep_no_metrics_only_count():
    """One number says it all."""
    with Ends(pause_s=30.0) as ends:
        for number in range(1, 4):
            ends.outbox.add(number, None)
        ends.outbox.flush(1.0)
        assert ends.hear() == {"on": "count", "upto": 1}
        assert ends.hear() == {"on": "count", "upto": 3}


def test_a_message_follows_what_was_reported_before_it():
    """Rows that still wait go first, whatever the pause."""
    with Ends(pause_s=30.0) as ends:
        for number in range(1, 4):
            ends.outbox.add(number, row(number))
        ends.outbox.send({"on": "report", "index": 4}, (b"blob",))
        ends.outbox.add(5, row(5))
        ends.outbox.flush(1.0)
        heard = [ends.hear() for _ in range(4)]
        assert [(one["on"], one.get("first", one.get("index"))) for one in heard] == [
            ("rows", 1), ("rows", 2), ("report", 4), ("rows", 5)
        ]  # fmt: skip


def test_what_waits_is_bounded():
    """A controller that takes nothing stops the reports in the end, with an error; memory does not grow."""
    big = {"metrics": {"text": "x" * 20_000}, "time": 0.0}
    with Ends(pause_s=0.0, max_waiting=50, timeout_s=0.2) as ends:
        number = 0
        with pytest.raises(SessionError, match=r"the driver has taken nothing for 0 s"):
            while number < 5000:
                number += 1
                ends.outbox.add(number, big)
        # What the kernel took (4 MiB), one batch in the channel, and 50 reports.
        assert number < 800


def test_a_slow_controller_gets_everything():
    """Whoever waits for room goes on when the controller takes something."""
    big = {"metrics": {"text": "x" * 20_000}, "time": 0.0}
    with Ends(pause_s=0.0, max_waiting=50, timeout_s=20.0) as ends:
        done = threading.Event()

        def report():
            for number in range(1, 1001):
                ends.outbox.add(number, big)
            ends.outbox.flush(20.0)
            done.set()

        thread = threading.Thread(target=report)
        thread.start()
        upto = 0
        while upto < 1000:
            header = ends.hear()
            assert header["first"] == upto + 1
            upto += len(header["rows"])
        assert done.wait(20)
        thread.join()


def test_a_controller_that_is_gone_holds_nobody():
    """Nothing raises and nothing waits: the reader of the channel ends the process."""
    with Ends(pause_s=0.0, max_waiting=3) as ends:
        ends.far.close()
        for number in range(1, 100):
            ends.outbox.add(number, row(number))
        ends.outbox.send({"on": "report"})


def test_no_thread_is_left():
    """`close` ends the thread, twice is fine."""
    before = set(threading.enumerate())
    with Ends() as ends:
        ends.outbox.close()
        ends.outbox.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name == "holdfast-reports"]


def test_a_report_of_a_signal_handler_in_the_middle_of_another_is_sent():
    """Both reports go, and none takes the place of the other."""
    with Ends(pause_s=60) as ends:
        ends.outbox.add(1, row(1))  # goes at once; those that follow wait
        seen = []

        def handler(frame, event, _):
            if event == "call" and frame.f_code.co_name == "__init__" and not seen:
                seen.append(frame)
                ends.outbox.add(3, row(3))

        before = sys.getprofile()
        sys.setprofile(handler)
        try:
            ends.outbox.add(2, row(2))
        finally:
            sys.setprofile(before)
        ends.outbox.send({"on": "other"})
        heard = []
        while not heard or heard[-1]["on"] != "other":
            heard.append(ends.hear())
        assert seen
        assert sorted(one["metrics"]["loss"] for header in heard[:-1] for one in header["rows"]) == [1, 2, 3]
