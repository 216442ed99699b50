"""The bar: drawn for people who watch what takes long, silent everywhere else."""

from __future__ import annotations

import io
import sys
import threading
from types import SimpleNamespace

import pytest

from holdfast import _progress
from holdfast._progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch) -> Terminal:
    """Not a fixture: the capture of pytest puts its own stderr back between set-up and test."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return found


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_nothing_is_drawn_without_a_terminal(capsys) -> None:
    """A log file gets no bar."""
    with progress_bar("copy", 10) as progress:
        progress(10)
    assert capsys.readouterr().err == ""


def test_bytes_of_all_threads_are_counted(monkeypatch) -> None:
    """The last line says all of them, and what is done."""
    terminal = a_terminal(monkeypatch)
    with progress_bar("copy c", 8 << 20) as progress:
        threads = [threading.Thread(target=progress, args=(1 << 20,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "copy c" in terminal.getvalue()
    assert "8.0/8.0 MiB" in terminal.getvalue()


def test_what_is_quick_leaves_no_trace(monkeypatch, clock) -> None:
    """Before the pause is over nothing is drawn, and nobody is asked for the total."""
    terminal, asked = a_terminal(monkeypatch), []
    with progress_bar("load", lambda: asked.append(1) or 4, after_s=2.0) as progress:
        clock[0] += 1.9
        progress(1)
        assert (terminal.getvalue(), asked) == ("", [])
        clock[0] += 0.2
        progress(1)
    assert asked == [1]
    assert "2/4 bytes" in terminal.getvalue()


def test_asked_for_and_refused(monkeypatch) -> None:
    """True draws where there is no terminal, False not even where there is one."""
    terminal = a_terminal(monkeypatch)
    with progress_bar("load", 10, show=False) as progress:
        progress(10)
    assert terminal.getvalue() == ""
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    with progress_bar("load", None, show=True) as progress:
        progress(10)
    assert "load" in plain.getvalue()
