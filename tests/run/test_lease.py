"""The lease: one writer per run, whatever dies, hangs or starts at once. Real processes hold it here."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import RunBusyError, StoragePermissionError, StorageUnavailableError
from holdfast.run import lease as lease_module
from holdfast.run import process as process_module
from holdfast.run.lease import LEASE_FILE, LOCK_FILE, Heartbeat, Lease, make_owner
from holdfast.run.process import is_dead
from holdfast.storage import LocalStorage, MemoryStorage

# Says one line when it has the lease (or why not), then holds it until its stdin ends.
HOLDER = """
import sys
from holdfast.run.lease import Lease, make_owner
from holdfast.errors import RunBusyError
from holdfast.storage import LocalStorage
root, start_id, trainer_pid = sys.argv[1:4]
sys.stdin.readline()
try:
    held = Lease.acquire(LocalStorage(root), make_owner(start_id, trainer_pid=int(trainer_pid) or None), wait_s=0)
    held.heartbeat()
    print("held", flush=True)
except RunBusyError as error:
    print("busy", error, flush=True)
    sys.exit()
sys.stdin.readline()
held.release()
"""


class Holder:
    """A process that takes the lease when told to, and says whether it has it."""

    def __init__(self, root: Path, start_id: str, trainer_pid: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(root), start_id, str(trainer_pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(lease_module.__file__).parents[2])},
        )

    def go(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        ready, _, _ = select.select([self.process.stdout], [], [], 30)
        assert ready, "the holder said nothing"
        return self.process.stdout.readline()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.end()


@pytest.fixture
def start(tmp_path):
    holders = []

    def make(start_id: str, trainer_pid: int = 0) -> Holder:
        holders.append(Holder(tmp_path, start_id, trainer_pid))
        return holders[-1]

    yield make
    for holder in holders:
        holder.kill()


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_two_at_once_exactly_one_wins(start) -> None:
    """Of six processes released at the same moment exactly one holds the lease; the others name it."""
    holders = [start(f"s{number}") for number in range(6)]
    for holder in holders:
        holder.go()
    answers = [holder.answer() for holder in holders]
    assert [answer.startswith("held") for answer in answers].count(True) == 1
    assert all("in use" in answer for answer in answers if answer.startswith("busy"))


def test_a_live_owner_is_named_at_once(start, tmp_path) -> None:
    """The error names host, pid, start and what to do, without waiting for the time-out."""
    holder = start("theirs")
    holder.go()
    assert holder.answer() == "held\n"
    begun = time.monotonic()
    with pytest.raises(RunBusyError) as caught:
        Lease.acquire(LocalStorage(tmp_path), make_owner("ours"), wait_s=60)
    assert time.monotonic() - begun < 30
    message = str(caught.value)
    for part in (str(holder.process.pid), os.uname().nodename, "theirs", "since", "kill"):
        assert part in message


def test_the_earlier_life_of_our_slurm_job_is_waited_for(start, tmp_path, monkeypatch) -> None:
    """A requeued job waits until the life before has ended; another job, or the same life, is refused at once."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c")
    owner = start("theirs")
    owner.go()
    assert owner.answer() == "held\n"
    storage = LocalStorage(tmp_path)
    waits: list[float] = []

    def end_owner(pause_s: float) -> None:
        waits.append(pause_s)
        if owner.process.poll() is None:
            owner.process.kill()
            owner.process.wait()

    with pytest.raises(RunBusyError, match="One process at a time"):
        Lease.acquire(storage, make_owner("same-life"), sleep=end_owner)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(RunBusyError, match=r"an earlier life of the same SLURM job.*scontrol requeue 17"):
        Lease.acquire(storage, make_owner("impatient"), wait_s=0, sleep=end_owner)
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    with pytest.raises(RunBusyError, match="One process at a time"):
        Lease.acquire(storage, make_owner("other-job"), sleep=end_owner)
    assert not waits
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    Lease.acquire(storage, make_owner("next"), sleep=end_owner).release()
    assert len(waits) == 1


def test_an_owner_killed_is_taken_over_at_once(start, tmp_path) -> None:
    """After kill -9 of the owner the next one starts without waiting for a time-out."""
    holder = start("theirs")
    holder.go()
    assert holder.answer() == "held\n"
    holder.kill()
    held = Lease.acquire(LocalStorage(tmp_path), make_owner("ours"), wait_s=60)
    assert held.waited_s < 10
    assert json.loads((tmp_path / LEASE_FILE).read_text())["start_id"] == "ours"
    held.release()


def test_a_writer_that_finishes_for_a_dead_trainer_is_waited_for(start, tmp_path) -> None:
    """The owner lives, its trainer does not: the lease is taken as soon as the owner lets go."""
    holder = start("theirs", trainer_pid=dead_pid())
    holder.go()
    assert holder.answer() == "held\n"
    looks = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            holder.end()

    held = Lease.acquire(LocalStorage(tmp_path), make_owner("ours"), wait_s=60, sleep=pause)
    assert len(looks) >= 3
    held.release()


def is_given_back(storage) -> bool:
    """On a disk the record is gone; a store deletes without conditions, so there it stays and says so."""
    if storage.local_root is not None:
        return not storage.exists(LEASE_FILE)
    left = json.loads(storage.read(LEASE_FILE))
    return left["released"] is True and "fence_due" not in left and "doomed" not in left


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_what_was_announced_is_known_to_the_next(kind, clock, tmp_path) -> None:
    """Deletions said by an owner that may still act are told with the lease; after the takeover nothing can be said."""
    storage = MemoryStorage(f"lease-{tmp_path.name}") if kind == "memory" else LocalStorage(tmp_path)
    theirs = Lease.acquire(storage, {**make_owner("theirs"), **elsewhere("theirs")}, wait_s=0)
    theirs.announce(["step_1", "step_0"])
    theirs.verify()
    if kind == "local":
        theirs._lock.drop()  # another process could not lock it; this one could, twice
    ours = Lease.acquire(storage, make_owner("ours"), wait_s=60, sleep=clock.pause)
    assert ours.predecessor.may_act
    assert ours.predecessor.doomed == ("step_0", "step_1")
    for act in (theirs.verify, lambda: theirs.announce(["step_2"]), theirs.heartbeat):
        with pytest.raises(RunBusyError, match="was lost to"):
            act()
    theirs.release()
    assert json.loads(storage.read(LEASE_FILE))["doomed"] == ["step_0", "step_1"], "until the fence has them"
    ours.fenced()
    assert "doomed" not in json.loads(storage.read(LEASE_FILE))
    ours.release()
    assert is_given_back(storage)


def test_a_record_that_a_power_cut_damaged_calls_for_no_fence(tmp_path) -> None:
    """On a disk the lock tells that nobody is there any more."""
    (tmp_path / LEASE_FILE).write_bytes(b"")
    held = Lease.acquire(LocalStorage(tmp_path), make_owner("ours"), wait_s=0)
    assert not held.predecessor.may_act
    held.release()
    storage = MemoryStorage(f"lease-{tmp_path.name}")
    storage.put(LEASE_FILE, b"")
    assert Lease.acquire(storage, make_owner("ours"), wait_s=0).predecessor.may_act


def test_waiting_for_a_dead_trainers_writer_is_bounded(start, tmp_path) -> None:
    """A writer that never ends is named when the wait is over."""
    holder = start("theirs", trainer_pid=dead_pid())
    holder.go()
    assert holder.answer() == "held\n"
    with pytest.raises(RunBusyError, match="waited"):
        Lease.acquire(LocalStorage(tmp_path), make_owner("ours"), wait_s=0.2)


def test_a_stopped_owner_keeps_its_lease(start, tmp_path) -> None:
    """SIGSTOP is not death: the owner may go on any moment, so nobody takes over."""
    holder = start("theirs")
    holder.go()
    assert holder.answer() == "held\n"
    os.kill(holder.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(RunBusyError):
            Lease.acquire(LocalStorage(tmp_path), make_owner("ours"), wait_s=1, stale_s=0.05)
    finally:
        os.kill(holder.process.pid, signal.SIGCONT)


def test_forked_children_do_not_keep_the_lock(start, tmp_path) -> None:
    """A data loader worker that outlives its trainer does not lock the next start out."""
    code = (
        "import os, sys, time\n"
        "from holdfast.run.lease import Lease, make_owner\n"
        "from holdfast.storage.local.local_storage import LocalStorage\n"
        "held = Lease.acquire(LocalStorage(sys.argv[1]), make_owner('theirs'), wait_s=0)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.write(1, b'x'); os.read(0, 1); os._exit(0)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(lease_module.__file__).parents[2])}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        assert parent.stdout.read(1) == b"x"
        parent.wait(30)
        Lease.acquire(LocalStorage(tmp_path), make_owner("ours"), wait_s=30).release()
    finally:
        parent.stdin.close()
        parent.stdout.close()


def test_release_leaves_nothing_and_may_be_repeated(tmp_path) -> None:
    """After release no file is left and another process may take the run."""
    held = Lease.acquire(LocalStorage(tmp_path), make_owner("one"), wait_s=0)
    assert {path.name for path in tmp_path.iterdir()} == {LEASE_FILE, LOCK_FILE}
    held.release()
    held.release()
    held.heartbeat()
    assert list(tmp_path.iterdir()) == []


def test_one_process_cannot_hold_a_run_twice(tmp_path) -> None:
    """Two checkpointers of one process on one run are refused as well."""
    held = Lease.acquire(LocalStorage(tmp_path), make_owner("one"), wait_s=0)
    with pytest.raises(RunBusyError, match=str(os.getpid())):
        Lease.acquire(LocalStorage(tmp_path), make_owner("two"), wait_s=10)
    held.release()


def test_a_container_beside_ours_is_not_ourselves(tmp_path) -> None:
    """Trainers are process 1 in every container, and containers of one machine have one boot id."""
    held = Lease.acquire(LocalStorage(tmp_path), {**make_owner("one"), "pid_namespace": "another"}, wait_s=0)
    with pytest.raises(RunBusyError, match=r"stop it with `kill ") as caught:
        Lease.acquire(LocalStorage(tmp_path), make_owner("two"), wait_s=0)
    assert "this very process" not in str(caught.value)
    held.release()


def elsewhere(start_id: str) -> dict[str, object]:
    return {**make_owner(start_id), "host": "elsewhere", "boot": "another-boot", "pid": 1, "trainer_pid": 1}


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that only `pause` moves; the wall clock runs backwards to prove that nobody asks it."""

    class Clock:
        now = 100.0

        def pause(self, seconds: float) -> None:
            self.now += seconds
            for moment, action in list(self.at):
                if self.now >= moment:
                    self.at.remove((moment, action))
                    action()

    made = Clock()
    made.at = []
    wrong = SimpleNamespace(monotonic=lambda: made.now, time=lambda: 1e9 - made.now * 1e6, sleep=time.sleep)
    monkeypatch.setattr(lease_module, "time", wrong)
    return made


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_an_owner_elsewhere_is_given_up_after_its_counter_stood_still(kind, clock, tmp_path) -> None:
    """An owner on another host that died is taken over after 30 s by the observer's own clock, not before."""
    storage = MemoryStorage(f"lease-{tmp_path.name}") if kind == "memory" else LocalStorage(tmp_path)
    storage.put(LEASE_FILE, json.dumps({**elsewhere("theirs"), "beat": 7}).encode())
    begun = clock.now
    held = Lease.acquire(storage, make_owner("ours"), wait_s=60, sleep=clock.pause)
    assert 30 <= clock.now - begun < 31
    held.heartbeat()
    assert json.loads(storage.read(LEASE_FILE))["start_id"] == "ours"
    assert held.predecessor.may_act
    held.release()
    left = json.loads(storage.read(LEASE_FILE))
    assert left["released"] is True, "it waits for nobody"
    assert left["fence_due"] is True, "whoever comes next has to draw the fence that we have not drawn"
    after = Lease.acquire(storage, make_owner("next"), wait_s=0, sleep=clock.pause)
    assert after.predecessor.may_act
    after.fenced()
    after.release()
    assert is_given_back(storage)


def test_slow_requests_are_no_wait_for_an_owner(clock, tmp_path) -> None:
    """A start at a far store takes seconds; what it says of waiting is the time that somebody else had the run."""

    class Far(MemoryStorage):
        def open(self, path):
            clock.now += 1.5
            return super().open(path)

        def put(self, path, data, **options):
            clock.now += 1.5
            return super().put(path, data, **options)

    storage = Far(f"lease-{tmp_path.name}")
    begun = clock.now
    fresh = Lease.acquire(storage, make_owner("ours"), wait_s=60, sleep=clock.pause)
    assert clock.now - begun > 1
    assert fresh.waited_s == 0
    fresh.release()
    again = Lease.acquire(storage, make_owner("next"), wait_s=60, sleep=clock.pause)
    assert again.waited_s == 0
    again.release()
    storage.put(LEASE_FILE, json.dumps({**elsewhere("theirs"), "beat": 7}).encode())
    assert 29 < Lease.acquire(storage, make_owner("ours"), wait_s=60, sleep=clock.pause).waited_s < 40


def test_an_owner_elsewhere_that_beats_is_busy(clock, tmp_path) -> None:
    """As soon as the counter of an owner on another host moves, the run is known to be in use."""
    storage = MemoryStorage(f"lease-{tmp_path.name}")
    theirs = elsewhere("theirs")
    storage.put(LEASE_FILE, json.dumps({**theirs, "beat": 7}).encode())
    clock.at.append((clock.now + 4, lambda: storage.put(LEASE_FILE, json.dumps({**theirs, "beat": 8}).encode())))
    begun = clock.now
    with pytest.raises(RunBusyError, match="elsewhere"):
        Lease.acquire(storage, make_owner("ours"), wait_s=60, sleep=clock.pause)
    assert clock.now - begun < 6


def test_an_owner_elsewhere_whose_trainer_died_is_waited_for(clock, tmp_path) -> None:
    """A beating writer that says its trainer is gone is no reason to give up, and its end is noticed."""
    storage = MemoryStorage(f"lease-{tmp_path.name}")
    theirs = {**elsewhere("theirs"), "trainer_alive": False}
    storage.put(LEASE_FILE, json.dumps({**theirs, "beat": 1}).encode())
    for beat in (2, 3):
        body = json.dumps({**theirs, "beat": beat}).encode()
        clock.at.append((clock.now + 5 * beat, lambda body=body: storage.put(LEASE_FILE, body)))
    clock.at.append((clock.now + 20, lambda: storage.delete(LEASE_FILE)))
    begun = clock.now
    Lease.acquire(storage, make_owner("ours"), wait_s=60, sleep=clock.pause).release()
    assert 20 <= clock.now - begun < 21


@pytest.mark.parametrize("patience", [600, 100])
def test_a_writer_that_works_on_a_large_save_is_waited_for(clock, patience, tmp_path, caplog) -> None:
    """9 GB at 50 MB/s take three minutes: as long as its counter moves it may take what `timeout_s` allows."""
    storage = MemoryStorage(f"lease-{tmp_path.name}")
    theirs, begun = {**elsewhere("theirs"), "trainer_alive": False}, clock.now
    storage.put(LEASE_FILE, json.dumps({**theirs, "beat": 0}).encode())
    for beat in range(1, 36):
        body = json.dumps({**theirs, "beat": beat}).encode()
        clock.at.append((begun + 5 * beat, lambda body=body: storage.put(LEASE_FILE, body)))
    clock.at.append((begun + 180, lambda: storage.delete(LEASE_FILE)))
    if patience < 180:
        with pytest.raises(RunBusyError, match="waited 1m40s for it to finish its last save"):
            Lease.acquire(storage, make_owner("ours"), wait_s=patience, sleep=clock.pause)
    else:
        Lease.acquire(storage, make_owner("ours"), wait_s=patience, sleep=clock.pause).release()
        assert 180 <= clock.now - begun < 181
    assert caplog.text.count("still writes its last save") == 1


def test_an_owner_that_gives_no_sign_is_given_a_minute(tmp_path, clock) -> None:
    """A lock is held, and nobody says for whom: a larger ``wait_s`` is for those whose counter moves."""
    held = Lease.acquire(LocalStorage(tmp_path), {**make_owner("theirs"), "trainer_pid": dead_pid()}, wait_s=0)
    begun = clock.now
    with pytest.raises(RunBusyError):
        Lease.acquire(LocalStorage(tmp_path), make_owner("ours"), wait_s=600, sleep=clock.pause)
    assert 60 <= clock.now - begun < 61
    held.release()


def test_a_lost_lease_is_noticed_by_the_next_heartbeat(tmp_path) -> None:
    """Who stood still too long learns from the heartbeat who has the run now, and does not take it back."""
    storage = MemoryStorage(f"lease-{tmp_path.name}")
    held = Lease.acquire(storage, make_owner("slow"), wait_s=0)
    storage.put(LEASE_FILE, json.dumps({**elsewhere("theirs"), "beat": 1}).encode())
    with pytest.raises(RunBusyError, match="elsewhere"):
        held.heartbeat()
    held.release()
    assert json.loads(storage.read(LEASE_FILE))["start_id"] == "theirs"


def test_a_damaged_lease_file_does_not_lock_a_run_for_ever(tmp_path) -> None:
    """A lease.json that cannot be read counts as free where the flock is ours."""
    (tmp_path / LEASE_FILE).write_bytes(b"\0garbage")
    Lease.acquire(LocalStorage(tmp_path), make_owner("ours"), wait_s=0).release()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission_is_said_as_such(tmp_path) -> None:
    """A run that may not be written to is a permission error, not a busy run."""
    tmp_path.chmod(0o555)
    with pytest.raises(StoragePermissionError):
        Lease.acquire(LocalStorage(tmp_path), make_owner("ours"), wait_s=0)
    tmp_path.chmod(0o755)


def test_a_record_that_was_overwritten_by_hand_is_put_back(tmp_path) -> None:
    """On a disk the lock says that nobody else has come in, whatever somebody wrote into lease.json."""
    storage = LocalStorage(tmp_path)
    held = Lease.acquire(storage, make_owner("ours"), wait_s=0)
    (tmp_path / LEASE_FILE).write_bytes(b"oops")
    held.heartbeat()
    assert json.loads(storage.read(LEASE_FILE))["start_id"] == "ours"
    held.release()
    assert not storage.exists(LEASE_FILE)


def test_an_end_within_a_slow_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the beat; the lease is given back after it."""
    lease = Lease.acquire(LocalStorage(tmp_path), make_owner("ab12"))
    begun, go_on = threading.Event(), threading.Event()

    def slow(**_: Any) -> None:
        begun.set()
        go_on.wait(30)

    monkeypatch.setattr(lease, "heartbeat", slow)
    beats = Heartbeat(lease)
    beats.trainer_gone()  # wakes it
    assert begun.wait(30)
    beats.close(wait=False)
    assert (tmp_path / "lease.json").exists()
    go_on.set()
    beats._thread.join(30)
    assert list(tmp_path.iterdir()) == []


def test_a_loss_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that find it at one time both hear of it; those that wait for it are woken once."""
    storage = MemoryStorage("lease-lost-once")
    lease = Lease.acquire(storage, make_owner("ab12"))
    verify, entered, go_on, passed = lease.verify, threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        go_on.wait(30)
        verify()

    monkeypatch.setattr(lease, "verify", slow)
    beats, told, errors = Heartbeat(lease), [], []
    beats.on_lost = lambda: told.append(beats.lost)
    check = beats.check
    monkeypatch.setattr(beats, "check", lambda: (check(), passed.set()))

    def ask(how: Any) -> None:
        try:
            how()
        except RunBusyError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=ask, args=(how,)) for how in (beats.verify, beats.confirm)]
    threads[0].start()
    assert entered.wait(30)
    passed.clear()
    threads[1].start()
    assert passed.wait(30)  # nothing is lost as far as it knows
    storage.put(LEASE_FILE, json.dumps({**make_owner("cd34"), "beat": 1}).encode())
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert ["was lost to" in error for error in errors] == [True, True]
    assert len(told) == 1
    beats.close()


def test_a_process_of_another_user_is_no_dead_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says that it may not be signalled: so it lives."""

    def kill(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(process_module.os, "kill", kill)
    assert not is_dead({**make_owner("ab12"), "pid": os.getppid()})


def test_a_lease_deleted_by_hand(tmp_path: Path) -> None:
    """It is written again while the lock proves that nobody else came; without the lock this process stops."""
    lease = Lease.acquire(LocalStorage(tmp_path / "run"), make_owner("ab12"))
    (tmp_path / "run/lease.json").unlink()
    lease.heartbeat()
    assert (tmp_path / "run/lease.json").exists()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunBusyError, match="was deleted"):
        lease.heartbeat()
    lease.release()


class _Passing(MemoryStorage):
    """Answers the next reads of a file with other bytes: a proxy's page, a part of the file, nothing."""

    answers: list[bytes]

    def read_tagged(self, path: str) -> tuple[bytes, str | None]:
        data, etag = super().read_tagged(path)
        return (self.answers.pop(0), etag) if self.answers else (data, etag)

    def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
        data = super().read(path, offset, size)
        return self.answers.pop(0) if self.answers else data


@pytest.mark.parametrize("answer", [b"<html>busy</html>", b"", b'{"host": "x"', b"[]", b'{"host": 1, "start_id": "a"}'])
def test_an_unreadable_lease_at_a_store_is_asked_for_again(monkeypatch, tmp_path, answer) -> None:
    """One bad answer, or three, cost a second look each: the lease is still ours, and nothing ends."""
    monkeypatch.setattr(lease_module, "_LOOK_AGAIN_S", (0.0, 0.0, 0.0))
    storage = _Passing(f"lease-{tmp_path.name}")
    storage.answers = []
    held = Lease.acquire(storage, make_owner("ours"), wait_s=0)
    for times in (1, 3):
        storage.answers = [answer] * times
        held.verify()
        assert not storage.answers
    held._etag = "of an answer that was lost"
    storage.answers = [answer]
    held.heartbeat()
    held.verify()


def test_a_lease_that_stays_unreadable_is_said_as_what_it_is(monkeypatch, tmp_path) -> None:
    """Garbage in lease.json at a store is as no answer, which costs a save; it is no loss of the run, and may end."""
    monkeypatch.setattr(lease_module, "_LOOK_AGAIN_S", (0.0, 0.0, 0.0))
    storage = MemoryStorage(f"lease-{tmp_path.name}")
    held = Lease.acquire(storage, make_owner("ours"), wait_s=0)
    ours = storage.read(LEASE_FILE)
    storage.put(LEASE_FILE, b"oops")
    for ask in (held.verify, held.heartbeat, lambda: held.announce(["a"])):
        with pytest.raises(StorageUnavailableError, match="is no lease of Holdfast, at 4 looks") as caught:
            ask()
        assert not isinstance(caught.value, RunBusyError)
    storage.put(LEASE_FILE, ours)
    held.verify()
    held.heartbeat()
    held.verify()


def test_a_store_that_is_away_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A beat every five seconds that fails does not fill the log; that the lease is renewed again is said too."""
    lease = Lease.acquire(MemoryStorage("lease-store-away"), make_owner("ab12"))
    beat, tries, back = lease.heartbeat, threading.Semaphore(0), threading.Event()

    def away(**more: Any) -> None:
        if back.is_set():
            beat(**more)
        tries.release()
        if not back.is_set():
            raise StorageUnavailableError("away")

    monkeypatch.setattr(lease, "heartbeat", away)
    monkeypatch.setattr("holdfast.run.lease.HEARTBEAT_S", 0.01)
    beats = Heartbeat(lease)
    for number in range(8):
        assert tries.acquire(timeout=30)
        if number == 3:
            back.set()
    beats.close()
    said = [record.getMessage() for record in caplog.records if record.name == "holdfast.writer"]
    assert [message.partition(",")[0] for message in said] == [
        "holdfast: the lease could not be renewed", "holdfast: the lease is renewed again"
    ]  # fmt: skip
