"""Calls side by side: how many at once, in which order they end up, and what an error stops."""

from __future__ import annotations

import threading

import pytest
from process_kit import Background

from holdfast.storage import MemoryStorage, PrefixStorage, StorageTraits
from holdfast.storage.together import SerialExecutor, together, wait_out


class Four(MemoryStorage):
    traits = StorageTraits(num_parallel=4)


def test_results_come_in_order_and_so_many_run_at_once():
    """Four meet each other, a fifth never comes in meanwhile; a prefix of the storage says the same."""
    storage, meet, inside, most = PrefixStorage(Four("together"), "a"), threading.Barrier(4, timeout=60), [], []

    def one(number):
        inside.append(number)
        most.append(len(inside))
        if number < 4:
            meet.wait()
        inside.remove(number)
        return number

    assert together(storage, [lambda number=number: one(number) for number in range(9)]) == list(range(9))
    assert max(most) == 4


def test_calls_may_use_it_themselves():
    """The caller works, too, so nobody waits for a thread that never comes."""
    storage = Four("together")
    inner = [threading.get_ident] * 8
    assert len(together(storage, [lambda: together(storage, inner)] * 8)) == 8


def test_a_ctrl_c_waits_for_what_has_begun_however_often_it_comes():
    """Memory that a call fills is the caller's again when it is raised."""
    other = Background()
    with other.interrupts():
        with pytest.raises(KeyboardInterrupt):
            together(Four("together"), [other.work] * 2)
        assert other.over.is_set()


def test_a_ctrl_c_waits_for_the_end_of_an_executor():
    """What its thread writes to may go when it has ended, and not before."""
    other, executor = Background(), SerialExecutor()
    executor.run(other.work)
    with other.interrupts():
        with pytest.raises(KeyboardInterrupt):
            wait_out(executor.close)
        assert other.over.is_set()


def test_an_error_ends_it_after_what_has_begun():
    """The first error in the order of the calls is raised, once all that was begun has ended."""
    storage, meet, ended = Four("together"), threading.Barrier(3, timeout=60), []

    def fail(text):
        meet.wait()
        raise ValueError(text)

    def slow():
        meet.wait()
        ended.append(1)

    with pytest.raises(ValueError, match="first"):
        together(storage, [slow, lambda: fail("first"), lambda: fail("second")])
    assert ended == [1]


def test_one_after_another_on_a_disk():
    """Where nothing takes long all is done by the caller, and what comes behind an error is not done."""
    storage, done = MemoryStorage("together"), []
    threads = together(storage, [threading.get_ident] * 5)
    assert set(threads) == {threading.get_ident()}
    with pytest.raises(ZeroDivisionError):
        together(storage, [lambda: done.append(1), lambda: 1 // 0, lambda: done.append(2)])
    assert done == [1]


def test_no_threads_left(monkeypatch):
    """At the end of an interpreter no thread can be started: the caller does everything."""

    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert together(Four("together"), [lambda number=number: number for number in range(6)]) == list(range(6))
