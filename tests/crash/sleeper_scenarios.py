"""An owner that is stopped at one operation, a second one that takes over, and the first one waking up again.

Runs in children of a fork server: a case forks once more, the child trains as a process of another host (another boot
id) and stops itself with SIGSTOP, or is stopped; its parent takes the run over, goes on with it, and lets it wake up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

from crash_scenarios import (
    Diary,
    assert_state_equal,
    checkpointer,
    one_step,
    quiet,
    state_at,
    threaded,
)

import holdfast as hf
from holdfast.checkpointer import run_session
from holdfast.errors import HoldfastError, RunBusyError
from holdfast.run import lease as lease_module
from holdfast.run import process
from holdfast.run.catalog import Catalog
from holdfast.run.lease import Lease
from holdfast.storage import LocalStorage
from holdfast.storage.local import local_tree
from holdfast.storage.object.object_storage import ObjectStorage
from holdfast.testing import ArmedOps, FaultyStorage

STALE_S = 0.3
PATIENCE_S = 40.0


class StoppingOps(ArmedOps):
    """A disk whose process stops itself at one operation, right before it or right after it.

    Attributes:
        stop_at: number of the operation, or a part of the first path that it is about; None for none.
        stop_after: whether it is carried out first.
    """

    stop_at = None
    stop_after = False

    def __init__(self):
        super().__init__()
        self._stopping = threading.Lock()

    def _hit(self, *paths):
        """True once: two threads may look at the same count, and the next one seen is two further."""
        with self._stopping:
            if self.stop_at is None:
                return False
            if isinstance(self.stop_at, str):
                if not any(self.stop_at in os.fspath(path) for path in paths):
                    return False
            elif self.since < self.stop_at:
                return False
            self.stop_at = None
            return True

    @contextlib.contextmanager
    def _operation(self, name, path, torn=None, *, target=""):
        hit = self._hit(path, target)
        if hit and not self.stop_after:
            os.kill(os.getpid(), signal.SIGSTOP)
        with super()._operation(name, path, torn, target=target) as told:
            yield told
        if hit and self.stop_after:
            os.kill(os.getpid(), signal.SIGSTOP)


class InThread(ObjectStorage):
    """A bucket whose writer is a thread, so that one signal stops all of an owner."""

    def describe(self):
        return None


def elsewhere():
    """Be another host from here on."""
    other = {"host": "other-host", "boot": "00000000-0000-0000-0000-000000000000", "pid_namespace": "1"}
    process.machine = lease_module.machine = lambda: dict(other)


def impatient():
    """Take an owner elsewhere for dead after a fraction of a second, and give up as soon."""
    Lease.acquire.__func__.__kwdefaults__["stale_s"] = STALE_S
    run_session._LEASE_S, local_tree._LOCK_S = 2.0, 0.2


def bucket(endpoint, uri):
    keys = {"access_key_id": "AKIAHOLDFASTTEST0001", "secret_access_key": "s3cret-of-the-sweep"}
    return InThread(uri, {"endpoint": endpoint, **keys})


# ---- what the first owner does


def train(storage, notes, armed, **options):
    """Step 4 and 5 are saved with retention, step 4 gets late metrics, and the run is closed."""
    state = state_at(0)
    with checkpointer(storage, state, **options) as ck:
        first = ck.global_step
        armed()
        for step in (first + 1, first + 2):
            one_step(ck, state)
            ck.save(acc=0.5)
            ck.wait()
            if ck.stats.last_durable_step == step:  # a store that does not answer costs a save, and training goes on
                notes.promise(acked=step)
            ck.report(val_loss=0.25)
            ck.wait()


def overwrite(storage, notes, armed):
    """One checkpoint on its own is replaced."""
    armed()
    hf.save(hf.Checkpoint.at(storage, "best"), state_at(2), overwrite=True)
    notes.promise(acked=2)


CASES = {"train": train, "overwrite": overwrite}


class Sleeper:
    """The first owner, in a process of its own."""

    def __init__(self, work, diary):
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                elsewhere()
                with quiet():
                    work(Diary(diary))
                status = 0
            except HoldfastError as error:
                Diary(diary).promise(error=str(error))
                status = 3
            finally:
                os._exit(status)
        self.status = None

    def wait(self):
        """Wait until it is stopped (True) or has ended (False)."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            pid, status = os.waitpid(self.pid, os.WUNTRACED | os.WNOHANG)
            if pid and os.WIFSTOPPED(status):
                return True
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                return False
            time.sleep(0.005)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("the first owner neither stopped nor ended")

    def wake(self):
        os.kill(self.pid, signal.SIGCONT)
        while self.wait():
            os.kill(self.pid, signal.SIGCONT)


# ---- the second owner, and what must be true


def take_over(storage, sleeper, diary, **options):
    """Go on with the run while the first owner sleeps, wake it up, go on; give what both did."""
    impatient()
    state = state_at(0)
    with quiet(), checkpointer(storage, state, **options) as ck:
        start = ck.global_step
        assert_state_equal(state, state_at(start))
        from_name = None if ck.resumed_from is None else ck.resumed_from.name
        one_step(ck, state)
        ck.save()
        ck.wait()
        sleeper.wake()
        if from_name is not None:
            assert_holds(storage, from_name, start)
        one_step(ck, state)
        ck.save()
        ck.wait()
        last = ck.global_step
    told = Diary.read(diary)
    assert sleeper.status in (0, 3), (sleeper.status, told)
    return start, last, told


def assert_holds(storage, name, step):
    """A checkpoint loads, bit for bit."""
    state = state_at(0)
    hf.load(hf.Checkpoint.at(storage, name), into=state, skip="holdfast")
    assert_state_equal(state, state_at(step))


def check_run(storage, start, last, told, **options):
    """Everything the second owner acknowledged is there, and of the first one only what that one resumed from."""
    acked = told.get("acked", 0)
    assert start >= acked, f"step {acked} was acknowledged by the first owner, the second one found step {start}"
    catalog = Catalog(storage)
    found = {record.step: record for record in catalog.records()}
    assert max(found) == last, f"steps {sorted(found)}, and {last} was acknowledged"
    for record in found.values():
        result = hf.Checkpoint.at(storage, record.name).verify()
        assert result.ok, f"{record.name}: {result.problems}"
        assert record.step <= start or record.attempt == catalog.index.attempts[-1].attempt, record
        assert_holds(storage, record.name, record.step)
    assert {last, last - 1} <= set(found), sorted(found)
    state = state_at(0)
    with quiet(), checkpointer(storage, state, **options) as ck:  # a third one, as ever
        assert ck.global_step == last
        assert_state_equal(state, state_at(last))
        one_step(ck, state)
        ck.save()
        ck.wait()
    assert Catalog(storage).latest().step == last + 1
    return {"start": start, "acked": acked, "last": last, "error": told.get("error", "")[:200]}


def run_case(root, diary, stop_at, after):
    """Stop a trainer at one operation of its disk; None for ``stop_at`` counts them."""
    ops = StoppingOps()
    sleeper = None

    def work(notes):
        ops.stop_after = after

        def armed():
            ops.arm(crash_after=None)
            ops.stop_at = stop_at

        train(FaultyStorage(root, ops=ops), notes, armed)
        notes.promise(count=ops.since)

    sleeper = Sleeper(work, diary)
    if not sleeper.wait():
        return {"count": Diary.read(diary)["count"], "stopped": False}
    storage = threaded(root)
    try:
        told = take_over(storage, sleeper, diary)
    except RunBusyError:
        # Stopped with the lock in its hand, between comparing and swapping: nobody comes in, so nothing happened.
        sleeper.wake()
        told = Diary.read(diary)
        assert sleeper.status == 0, told
        return {**check_run(LocalStorage(root), told["acked"], told["acked"], told), "stopped": True, "refused": True}
    return {**check_run(LocalStorage(root), *told), "stopped": True, "refused": False}


def overwrite_case(root, diary, stop_at, after):
    """Stop a process at one operation of an overwrite, while another one overwrites the same checkpoint."""
    ops = StoppingOps()

    def work(notes):
        ops.stop_after = after

        def armed():
            ops.arm(crash_after=None)
            ops.stop_at = stop_at

        overwrite(FaultyStorage(root, ops=ops), notes, armed)
        notes.promise(count=ops.since)

    sleeper = Sleeper(work, diary)
    if not sleeper.wait():
        return {"count": Diary.read(diary)["count"], "stopped": False}
    error = ""
    try:
        hf.save(Path(root, "best"), state_at(3), overwrite=True)
    except HoldfastError as caught:
        error = str(caught)
    sleeper.wake()
    told = Diary.read(diary)
    state = state_at(0)
    hf.load(Path(root, "best"), into=state)
    step = len(state["note"].log)
    assert_state_equal(state, state_at(step))
    if not error:
        assert step == 3, f"the second one was acknowledged, and step {step} is there; the first one: {told}"
    elif "acked" in told:
        assert step == 2, (step, error, told)
    else:
        assert step in (1, 2), (step, error, told)
    result = hf.Checkpoint(Path(root, "best")).verify()
    assert result.ok, result.problems
    return {"stopped": True, "error": error, "first": told.get("error", "")[:200], "step": step}


def remote_case(endpoint, url, uri, diary, mirrored):
    """A trainer is stopped by the proxy at one request; ``endpoint`` is that proxy, ``url`` the server itself."""
    ours, theirs = ({"local_dir": hf.Mirror(f"{diary}-{who}", max_behind=9)} if mirrored else {} for who in "ab")

    def work(notes):
        train(bucket(endpoint, uri), notes, lambda: Path(f"{diary}.armed").write_text(str(os.getpid())), **ours)

    sleeper = Sleeper(work, diary)
    if not sleeper.wait():
        return {"stopped": False}
    storage = bucket(url, uri)
    start, last, told = take_over(storage, sleeper, diary, **theirs)
    if mirrored:
        told["acked"] = 0  # that was the disk of the other host
    return {**check_run(storage, start, last, told), "stopped": True}


def prepare_bucket(endpoint, uri):
    storage = bucket(endpoint, uri)
    for saves in (2, 1):
        state = state_at(0)
        with quiet(), checkpointer(storage, state) as ck:
            for _ in range(saves):
                one_step(ck, state)
                ck.save()
