"""The buffer of reports: nothing is lost, and closing ends, however the threads are interleaved."""

import sys
import threading
import time

import pytest

from holdfast.errors import HoldfastError
from holdfast.run.reports import ReportBuffer


@pytest.fixture
def hasty_threads():
    """Let threads take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def close_in_time(buffer):
    closer = threading.Thread(target=buffer.close, daemon=True)
    closer.start()
    closer.join(20)
    assert not closer.is_alive(), "close() hangs"


def test_close_during_a_write_ends(hasty_threads):
    """The end asked for while the thread is between its write and its pause was once forgotten."""
    for _ in range(300):
        written, answered = [], []
        buffer = ReportBuffer(written.extend)
        buffer.add(1, [{"loss": 1.0}], lambda calls, error, answered=answered: answered.append((calls, error)))
        close_in_time(buffer)
        assert written == [{"loss": 1.0}]
        assert answered == [([1], None)]


def test_close_while_another_write_is_under_way():
    """Deterministic: the buffer's own thread has woken up and waits its turn when the end comes."""
    writing, go_on = threading.Event(), threading.Event()

    def write(rows):
        writing.set()
        assert go_on.wait(20)

    buffer = ReportBuffer(write)
    answered = []
    buffer.add(1, [{}], lambda calls, error: answered.extend(calls))
    flusher = threading.Thread(target=buffer.flush, daemon=True)
    flusher.start()
    assert writing.wait(20)
    buffer.add(2, [{}], lambda calls, error: answered.extend(calls))
    time.sleep(0.05)  # both threads stand before the write now
    closer = threading.Thread(target=buffer.close, daemon=True)
    closer.start()
    time.sleep(0.05)
    go_on.set()
    closer.join(20)
    assert not closer.is_alive()
    assert sorted(answered) == [1, 2]


def test_rows_after_the_end_are_refused():
    """A caller whose row can no longer be written hears of it at once instead of waiting."""
    buffer = ReportBuffer(lambda rows: None)
    buffer.close()
    with pytest.raises(HoldfastError, match="closed"):
        buffer.add(1, [{}], lambda calls, error: None)
