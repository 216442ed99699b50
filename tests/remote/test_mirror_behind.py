"""Runs whose remote is down, slow or behind: training goes on, what is not there yet is said and arrives."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from catalog_kit import index_of
from mirror_kit import DOWN, be_impatient, running, step_to, steps
from process_kit import wait_until

import holdfast as hf
from holdfast.errors import StorageError
from holdfast.storage import LocalStorage
from holdfast.testing import Exchange, Fault


def test_a_remote_that_goes_down_does_not_stop_training(remote, local, proxy, capfd):
    """Saves go on at the disk's pace; too many behind gives up the oldest, once said; what waits arrives later.

    What is under way is not given up: it may wait in the place of one that is newer, never of the newest.
    """
    with running(remote, hf.Mirror(local, keep=hf.Keep(last=1), max_behind=2)) as (ck, state):
        step_to(ck, state, 1)
        ck.wait(remote=True)
        proxy.inject(DOWN)
        step_to(ck, state, 7)
        assert ck.stats.last_durable_step == 7
        assert ck.stats.last_remote_step == 1
        watch = ck._session.remote_watch
        assert wait_until(lambda: watch._state["error"] and watch._state["waiting"][-1:] == ["step_00000007"])
        assert ck.stats.remote_behind == 2
        before = int(watch._state["waiting"][0].removeprefix("step_"))
        assert ck.latest().step == 7
        assert {before, 7} <= {*steps(LocalStorage(local))}  # nothing that waits goes, whatever keep says
        proxy.inject()
        ck.wait(remote=True)
        assert ck.stats.last_remote_step == 7
        assert ck.stats.remote_behind == 0
    assert steps(remote) == [1, before, 7]
    assert steps(LocalStorage(local)) == [7]
    there = {info.path for info in remote.list("", recursive=False) if info.path.startswith("step_")}
    assert there == {"step_00000001/", f"step_{before:08d}/", "step_00000007/"}
    said = capfd.readouterr().err
    assert said.count("is not uploaded") == 1
    assert said.count("could not be reached") >= 1
    assert "answers again" in said


def test_a_save_may_wait_for_the_remote(remote, local, proxy):
    """when_behind="wait" holds the next save until there is room: nothing is given up."""
    reached, progress = threading.Event(), []

    def hold(_: Exchange) -> None:
        if not reached.is_set():
            reached.set()
            time.sleep(1.0)  # four small saves to a disk take less
            progress.append(ck.global_step)

    with running(remote, hf.Mirror(local, max_behind=1, when_behind="wait")) as (ck, state):
        proxy.inject(Fault(kind="call", call=hold, method="PUT", path="step_00000001"))
        step_to(ck, state, 4)
        assert reached.is_set()
        ck.wait(remote=True)
    assert progress[0] < 4, "training was held while the first checkpoint was on its way"
    assert steps(remote) == [1, 2, 3, 4]


@pytest.mark.parametrize("rule", ["raise", pytest.param("wait", marks=pytest.mark.long)])
def test_being_behind_may_end_the_run(remote, local, proxy, rule):
    """With the remote away "raise" ends training at once, "wait" after timeout_s; both say what is where."""
    with (
        pytest.raises(StorageError, match=f"when_behind='{rule}'.*on the local disk .* only: step_"),
        running(remote, hf.Mirror(local, max_behind=1, when_behind=rule)) as (ck, state),
    ):
        proxy.inject(DOWN)
        step_to(ck, state, 1)
        if rule == "wait":
            be_impatient(ck, 2.0)
        try:
            step_to(ck, state, 3)
        finally:
            be_impatient(ck, 0.5)  # of what is on the disk alone by now
    os.kill(ck._session.client.process_id, signal.SIGKILL)


def test_the_end_waits_for_a_remote_that_is_away_once(remote, local, proxy, capfd):
    """Up to timeout_s, and then it raises; what the writer still brings is not waited for once more."""
    with (
        pytest.raises(StorageError, match=r"not everything is at .* only: step_00000002"),
        running(remote, hf.Mirror(local)) as (ck, state),
    ):
        step_to(ck, state, 1)
        ck.wait(remote=True)
        proxy.inject(DOWN)
        step_to(ck, state, 2)
        be_impatient(ck, 0.5)
    os.kill(ck._session.client.process_id, signal.SIGKILL)
    assert "this failed too" not in capfd.readouterr().err


@pytest.mark.long
def test_behind_for_long_is_said(remote, local, proxy, capfd):
    """When nothing arrives for warn_after, the log says so with the age and the cause."""
    with running(remote, hf.Mirror(local, warn_after="1s")) as (ck, state):
        step_to(ck, state, 1)
        ck.wait(remote=True)
        proxy.inject(DOWN)
        step_to(ck, state, 2)
        seen: list[str] = []
        assert wait_until(lambda: seen.append(capfd.readouterr().err) or "nothing has arrived at" in "".join(seen), 30)
        proxy.inject()
    assert "1 checkpoint(s) wait on the local disk" in "".join(seen)


@pytest.mark.long
def test_faults_lose_nothing(remote, local, proxy):
    """A fifth of all requests goes wrong: everything is uploaded in the end."""
    chosen = [
        Fault(kind=kind, share=0.05, seed=number) for number, kind in enumerate(("500", "503", "reset", "truncated"))
    ]
    with running(remote, hf.Mirror(local, max_behind=9)) as (ck, state):
        proxy.inject(*chosen)
        step_to(ck, state, 5)
        ck.wait(remote=True)
        proxy.inject()
    assert len([one for one in proxy.exchanges if one.fault]) >= 5
    assert steps(remote) == [1, 2, 3, 4, 5]


@pytest.mark.long
def test_saving_does_not_wait_for_a_slow_remote(remote, local, proxy):
    """A remote that does not answer holds no save: six are durable before the second has arrived."""
    going = threading.Event()
    with running(remote, hf.Mirror(local, max_behind=9)) as (ck, state):
        proxy.inject(Fault(kind="call", call=lambda exchange: not going.wait(60), method="PUT", path="step_00000002"))
        try:
            step_to(ck, state, 6)
            assert ck.stats.last_durable_step == 6
            assert ck.stats.last_remote_step < 2
        finally:
            going.set()
            proxy.inject()
    assert steps(remote) == [1, 2, 3, 4, 5, 6]


def test_a_writer_that_dies_is_followed_by_one_that_goes_on(remote, local, proxy):
    """SIGKILL of the writer process in the middle of an upload: it is started again and everything arrives."""
    with running(remote, local) as (ck, state):
        step_to(ck, state, 1)
        ck.wait(remote=True)
        proxy.inject(Fault(kind="reset", path="/step_00000003"))
        step_to(ck, state, 3)
        os.kill(killed := ck._session.client.process_id, signal.SIGKILL)
        assert wait_until(lambda: ck._session.client.process_id != killed), "another one is started"
        proxy.inject()
        step_to(ck, state, 5)
        ck.wait(remote=True)
        assert ck.stats.last_remote_step == 5
    assert steps(remote) == [1, 2, 3, 4, 5]
    assert len(index_of(remote).attempts) == 1
