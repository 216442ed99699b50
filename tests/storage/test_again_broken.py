"""Requests that broke off are repeated: so often, with such pauses, and no longer than the client's own deadline."""

from __future__ import annotations

import pytest

from holdfast.storage.object import client
from holdfast.storage.object.client import ShortAnswerError, again_if_broken


@pytest.fixture
def clock(monkeypatch):
    """Pauses pass at once, and are listed; random ones are the longest."""
    now, pauses = [100.0], []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        now[0] += pause_s

    monkeypatch.setattr(client.time, "sleep", sleep)
    monkeypatch.setattr(client.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(client.random, "uniform", lambda low, high: high)
    return now, pauses


def test_tries_are_bounded_and_pauses_grow(clock):
    """Eight tries, pauses that double from 50 ms; then the error comes through."""
    tries = []

    def broken() -> None:
        tries.append(1)
        raise ShortAnswerError("ended early")

    with pytest.raises(ShortAnswerError):
        again_if_broken(broken)
    assert len(tries) == 8
    assert clock[1] == [0.05 * 2**number for number in range(7)]
    assert max(clock[1]) <= 5.0


def test_a_request_that_took_its_whole_time_is_not_repeated(clock):
    """After two minutes no new try begins."""
    tries = []

    def slow() -> None:
        tries.append(1)
        clock[0][0] += 121
        raise ShortAnswerError("ended early")

    with pytest.raises(ShortAnswerError):
        again_if_broken(slow)
    assert len(tries) == 1


def test_what_is_not_broken_comes_through_at_once(clock):
    """Other errors are not repeated; a result after a broken try is the result."""
    with pytest.raises(KeyError):
        again_if_broken(lambda: {}["x"])
    answers = [ShortAnswerError("early"), None]

    def second() -> str:
        if (error := answers.pop(0)) is not None:
            raise error
        return "done"

    assert again_if_broken(second) == "done"
    assert len(clock[1]) == 1
