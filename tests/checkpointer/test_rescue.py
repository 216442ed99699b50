"""Snapshots in memory are committed by the writer when the trainer dies, and never otherwise."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_kit import RankServer

import holdfast as hf
from holdfast.errors import ConfigError
from holdfast.run import costs
from holdfast.run.index import RunIndex
from holdfast.run.record import timestamp
from holdfast.run.reports import read_history
from holdfast.state.save import snapshot
from holdfast.storage import resolve
from holdfast.testing import assert_state_equal
from holdfast.writer.arena import Arena
from holdfast.writer.free_memory import FreeMemory

TOTAL = 110


def make_state(ballast: int = 0) -> dict[str, Any]:
    random.seed(0)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "seen": []}
    if ballast:
        state["ballast"] = torch.zeros(ballast, dtype=torch.uint8)
    return state


def train_one(state: dict[str, Any]) -> float:
    loss = state["model"](torch.randn(4, 16)).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    if "ballast" in state:
        state["ballast"] += 1
    return float(loss.detach())


def trainer(run: str, done: str, kill_at: int | None, every: int | None, rescue: Any, ballast: int, how: str) -> None:
    """Train to the end, or to the step after which this life ends; ``done`` gets each step that is over."""
    state = make_state(ballast)
    fd = os.open(done, os.O_WRONLY | os.O_CREAT)
    with hf.Checkpointer(run, state, every=every, rescue=rescue) as ck:
        os.pwrite(fd, f"{ck.global_step:8d}".encode(), 8)
        while ck.global_step < TOTAL:
            loss = train_one(state)
            state["seen"].append(ck.global_step)
            ck.step(loss=loss)
            os.pwrite(fd, f"{ck.global_step:8d}".encode(), 0)
            if ck.global_step == kill_at:
                if how == "raise":
                    raise ZeroDivisionError
                os.kill(os.getpid(), signal.SIGKILL)


def life(
    run: str, done: str, kill_at: int | None = None, every: int | None = None, rescue: Any = 1, ballast: int = 0,
    how: str = "kill", after_s: float | None = None,
) -> int:  # fmt: skip
    """Live one life in a child, which is killed at a step or ``after_s`` after its training has begun."""
    pid = os.fork()
    if pid == 0:
        try:
            trainer(run, done, kill_at, every, rescue, ballast, how)
        except ZeroDivisionError:
            os._exit(7)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    if after_s is not None:
        until = time.monotonic() + 30
        while (
            len(text := read(done)) < 16
            and time.monotonic() < until
            and not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        ):
            time.sleep(0.001)
        assert text
        time.sleep(after_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def run_life(ranks: RankServer, home: Path, **options: Any) -> int:
    (home / "done").unlink(missing_ok=True)
    outcome = ranks.run(f"{__file__}:life", str(home / "run"), str(home / "done"), **options)
    return int(outcome.checked())


def settled(home: Path) -> hf.Checkpoint | None:
    """Return the newest checkpoint once the writer of the dead trainer has given the run back."""
    until = time.monotonic() + 30
    while '"owner": null' not in read(str(home / "run" / "lease.json")) and (home / "run" / "lease.json").exists():
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    names = sorted(path.parent for path in (home / "run").glob("step_*/manifest.json"))
    return hf.Checkpoint(names[-1]) if names else None


def test_a_killed_trainer_loses_no_step_that_was_kept(ranks: RankServer, tmp_path: Path) -> None:
    """No save is ever due: the checkpoint is that of the step before the kill, whole, and says why it is there."""
    assert run_life(ranks, tmp_path, kill_at=7) == -signal.SIGKILL
    found = settled(tmp_path)
    assert found is not None
    assert found.step == 7
    assert found.verify(deep=True).ok
    assert found.manifest is not None
    assert "the trainer died" in found.manifest.extra["rescued"]
    assert found.load()["seen"] == list(range(7))
    assert list(found.metrics) == ["loss"]


def test_what_a_killed_life_was_useful_for(ranks: RankServer, tmp_path: Path) -> None:
    """It has ended when its trainer died, before the snapshot was saved; what snapshots have cost is known.

    It was heard of too rarely to tell whether it hung before it was killed (a busy machine may hold it for a while).
    """
    assert run_life(ranks, tmp_path, kill_at=2) == -signal.SIGKILL
    settled(tmp_path)
    history = RunIndex.load(resolve(str(tmp_path / "run"))).read_history()
    (saved,) = costs.saves(history.events)
    (snapshots,) = [event for event in history.events if event.what == "snapshots"]
    assert timestamp(history.attempts[1].ended or "") <= saved.time
    assert (snapshots.held_s or 0.0) > 0
    parts = costs.goodput(history, [saved])
    assert parts is not None
    assert parts["held_s"] > 0
    assert run_life(ranks, tmp_path, kill_at=3) == -signal.SIGKILL
    settled(tmp_path)
    history = RunIndex.load(resolve(str(tmp_path / "run"))).read_history()
    parts = costs.goodput(history, costs.saves(history.events))
    assert parts is not None
    ended = timestamp(history.attempts[1].ended or "")
    rows = [row["time"] for row in history.rows if (row["attempt"], row["step"]) == (1, 2)]
    assert parts["again_s"] == pytest.approx(max(0.0, ended - max(*rows, snapshots.time)), abs=0.01)


def stalled_life(run: str) -> int:
    """Be killed two steps after the writer was stopped with its socket full; then the writer goes on."""
    pid = os.fork()
    if pid == 0:
        state = {"w": torch.zeros(16)}
        with hf.Checkpointer(run, state, every=None, rescue=1) as ck:
            for step in range(1, 6):
                state["w"] += 1
                ck.step()
                if step == 3:
                    client = ck._boundary._session.client  # type: ignore[union-attr]
                    assert client.release(Arena.create(4096))  # the writer has all that was said before
                    assert client.process_id is not None
                    os.kill(client.process_id, signal.SIGSTOP)
                    Path(run, "stopped").write_text(str(client.process_id))
                    client.run_op("journal", events=[{"what": "x" * (16 << 20)}])
            os.kill(os.getpid(), signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.kill(int(Path(run, "stopped").read_text()), signal.SIGCONT)
    return status


def test_a_snapshot_is_not_written_over_before_the_writer_knows(ranks: RankServer, tmp_path: Path) -> None:
    """The writer hears nothing of steps 4 and 5 before the trainer is killed: step 3 is rescued, with its own bytes."""
    outcome = ranks.run(f"{__file__}:stalled_life", str(tmp_path / "run"))
    assert outcome.checked() == -signal.SIGKILL
    found = settled(tmp_path)
    assert found is not None
    assert found.step == 3
    assert found.load()["w"].unique().tolist() == [3.0]


def torn_life(run: str, grows: bool) -> int:
    """Be killed within the copying of step 7, while the save of step 5 is still being written, or with a new layout."""
    pid = os.fork()
    if pid == 0:
        state = {"w": torch.zeros(24 << 20, dtype=torch.uint8)}
        copy = snapshot.stage

        def torn(*args: Any, **options: Any) -> None:
            copy(*args, **options)
            if int(state["w"][0]) == 7:
                os.kill(os.getpid(), signal.SIGKILL)

        snapshot.stage = torn  # type: ignore[assignment]
        with hf.Checkpointer(run, state, every=None if grows else 5, rescue=1) as ck:
            for step in range(1, 8):
                state["w"] += 1
                if grows and step == 7:
                    state["more"] = torch.zeros(1)
                ck.step()
                writer = ck._boundary._session.client.process_id  # type: ignore[union-attr]
                if step == 5 and writer is not None and not grows:
                    os.kill(writer, signal.SIGSTOP)
                    threading.Timer(0.3, os.kill, (writer, signal.SIGCONT)).start()
        os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("grows", [False, True])
def test_the_newest_snapshot_is_kept_until_the_next_one_is_sealed(
    ranks: RankServer, tmp_path: Path, grows: bool
) -> None:
    """A kill within the copy of step 7 leaves step 6, also with a save in one of the two arenas, or a new layout."""
    outcome = ranks.run(f"{__file__}:torn_life", str(tmp_path / "run"), grows)
    assert outcome.checked() == -signal.SIGKILL
    found = settled(tmp_path)
    assert found is not None
    assert found.step == 6
    assert found.load()["w"].unique().tolist() == [6]


def rows_life(run: str) -> int:
    """Be killed right after rows were sent, before the memory that the writer has too forgets them."""
    pid = os.fork()
    if pid == 0:
        with hf.Checkpointer(run, {"w": torch.zeros(4)}, every=None) as ck:
            ck._boundary._session.memory.clear_rows = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
            for step in range(3):
                ck.step(loss=float(step))
            ck.report(score=1.0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_rows_that_were_sent_are_not_recorded_twice(ranks: RankServer, tmp_path: Path) -> None:
    """What a killed trainer had sent counts once, although it was still in the memory that it left."""
    outcome = ranks.run(f"{__file__}:rows_life", str(tmp_path / "run"))
    assert outcome.checked() == -signal.SIGKILL
    settled(tmp_path)
    rows = read_history(resolve(str(tmp_path / "run"))).rows
    assert [row["metrics"] for row in rows] == [{"loss": 0.0}, {"loss": 1.0}, {"loss": 2.0}, {"score": 1.0}]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("last", ["pass", "raise ZeroDivisionError"])
def test_a_script_that_ends_without_close_keeps_its_last_step(tmp_path: Path, last: str) -> None:
    """``ck.start()`` without ``ck.close()`` counts as killed, and a snapshot is rescued as after a kill."""
    script = f"""
import holdfast as hf, torch
state = {{"w": torch.zeros(4)}}
ck = hf.Checkpointer({str(tmp_path / "run")!r}, state, every=None, rescue=1).start()
for _ in range(3):
    state["w"] += 1
    ck.step()
{last}
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, check=False, capture_output=True)
    found = settled(tmp_path)
    assert found is not None
    assert found.step == 3
    assert found.manifest is not None
    assert found.manifest.extra["rescued"] == "its program has ended"


@pytest.mark.usefixtures("forked")
def test_a_snapshot_that_finds_no_room_is_said_in_a_line(tmp_path: Path) -> None:
    """The disk is full when the trainer dies: the writer says so in words, and the newest checkpoint stays."""
    script = f"""
import os, signal
import holdfast as hf, torch
from holdfast.testing import FaultyStorage
storage = FaultyStorage({str(tmp_path / "run")!r}, events={{"mkdir:step_00000002": "ENOSPC"}})
with hf.Checkpointer(storage, {{"w": torch.zeros(4)}}, every=None, rescue=1) as ck:
    ck.step()
    ck.save()
    ck.wait()
    ck.step()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "the snapshot of the dead trainer could not be saved, the newest checkpoint counts: cannot" in done.stderr
    assert "Traceback" not in done.stderr
    assert hf.Checkpoint(tmp_path / "run" / "step_00000001").verify().ok


def test_an_exception_in_the_body_keeps_the_last_boundary(ranks: RankServer, tmp_path: Path) -> None:
    """The body raises after step 9: that step is committed, with the error as the reason."""
    assert run_life(ranks, tmp_path, kill_at=9, how="raise") == 7
    found = settled(tmp_path)
    assert found is not None
    assert found.step == 9
    assert found.manifest is not None
    assert "ZeroDivisionError" in found.manifest.extra["rescued"]


def test_a_run_that_ends_in_order_writes_no_snapshot(tmp_path: Path) -> None:
    """One checkpoint, the last step, although each step was kept; and it was never rescued."""
    state = make_state()
    with hf.Checkpointer(tmp_path, state, every=None, rescue=1) as ck:
        for _ in range(5):
            ck.step(loss=train_one(state))
        assert ck.stats.saves == 0
    names = [path.parent.name for path in tmp_path.glob("*/manifest.json") if not path.parent.is_symlink()]
    assert len(names) == 1
    assert "rescued" not in hf.Checkpoint(tmp_path / names[0]).manifest.extra


def test_a_newer_save_wins_over_an_older_snapshot(ranks: RankServer, tmp_path: Path) -> None:
    """Killed right after a save, which is sealed: no snapshot of a step before it is committed later."""
    assert run_life(ranks, tmp_path, kill_at=20, every=10, rescue=3) == -signal.SIGKILL
    found = settled(tmp_path)
    assert found is not None
    assert found.step == 20
    steps = sorted(hf.Checkpoint(path.parent).step or 0 for path in (tmp_path / "run").glob("step_*/manifest.json"))
    assert steps == [10, 20]


def test_memory_for_one_copy_only_leaves_it_out_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where two copies do not fit, there is one, for saves, and the start says what is missing."""
    state = {"w": torch.zeros(40 << 20, dtype=torch.uint8)}
    monkeypatch.setattr(
        "holdfast.writer.free_memory.free_memory", lambda: FreeMemory(bytes=(128 << 20) + (60 << 20), bound="test")
    )
    with hf.Checkpointer(tmp_path, state, every=None, rescue=1) as ck:
        ck.step()
        ck.step()
    assert "memory is short for rescue=" in capfd.readouterr().err


def test_a_state_that_streams_leaves_it_out_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """With `max_staging_bytes` there is no whole copy of the state: said at the start, or once the state has grown."""
    state = {"w": torch.zeros(4 << 20, dtype=torch.uint8)}
    with hf.Checkpointer(tmp_path / "a", state, every=None, rescue=1, max_staging_bytes="2MiB") as ck:
        ck.step()
    assert "rescue= is left out: the state does not fit into max_staging_bytes" in capfd.readouterr().err
    state = {"w": torch.zeros(4)}
    with hf.Checkpointer(tmp_path / "b", state, every=None, rescue=1, max_staging_bytes="2MiB") as ck:
        ck.step()
        state["w"] = torch.zeros(1 << 20)
        ck.step()
    assert "rescue= is left out from here on" in caplog.text


def test_two_arenas_and_never_a_third(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty snapshots and saves of 24 MiB, some while a save is being written, make two arenas."""
    made: list[int] = []
    create = snapshot.Arena.create

    def counted(size: int) -> Any:
        made.append(size)
        return create(size)

    monkeypatch.setattr(snapshot.Arena, "create", counted)
    state = {"w": torch.zeros(24 << 20, dtype=torch.uint8)}
    with hf.Checkpointer(tmp_path, state, every=5, rescue=1) as ck:
        for _ in range(40):
            ck.step()
    assert len([size for size in made if size > 24 << 20]) == 2


@pytest.mark.usefixtures("forked")
def test_an_interval_that_the_run_finds(tmp_path: Path) -> None:
    """A run that is killed within two seconds has kept its state by then, and says how often it will."""
    script = """
import os, sys, time, torch, holdfast
with holdfast.Checkpointer(sys.argv[1], {"w": torch.zeros(9)}, every=None, rescue="auto") as ck:
    until = time.monotonic() + 1.2
    while time.monotonic() < until:
        ck.step()
        time.sleep(0.001)
    os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "snapshots every" in done.stderr
    found = settled(tmp_path)
    assert found is not None
    assert found.step is not None
    assert found.step > 50
    assert found.manifest is not None
    assert "died" in found.manifest.extra["rescued"]


@pytest.mark.parametrize("rescue", ["5tok", "1ep", 0, "soon"])
def test_a_wrong_interval_is_refused(tmp_path: Path, rescue: Any) -> None:
    """Before training, with what is right."""
    with pytest.raises(ConfigError):
        hf.Checkpointer(tmp_path, rescue=rescue)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ballast", "num_kills", "after_s", "every", "seed"),
    [
        pytest.param(0, 100, 0.12, 100, 5, id="small", marks=pytest.mark.slow),
        pytest.param(32 << 20, 12, 0.9, 7, 5, id="big", marks=pytest.mark.slow),
        # With the first of these a thousand kills of a small training, a hundred at a time.
        *(pytest.param(0, 100, 0.12, 100, seed, id=f"small-{seed}", marks=pytest.mark.long) for seed in range(6, 15)),
    ],
)
def test_kills_at_random_moments(
    ranks: RankServer, tmp_path: Path, ballast: int, num_kills: int, after_s: float, every: int, seed: int
) -> None:
    """Never more than the step in flight is lost, and the end is bitwise that of a twin that nobody touched."""
    chance = random.Random(seed)
    (tmp_path / "twin").mkdir()
    assert run_life(ranks, tmp_path / "twin", every=every, ballast=ballast) == 0
    twin = settled(tmp_path / "twin")
    assert twin is not None
    kills = 0
    while kills < num_kills:
        (tmp_path / f"{kills}").mkdir()
        home, done = tmp_path / f"{kills}", 0
        options = {"every": every, "ballast": ballast}
        while (status := run_life(ranks, home, after_s=chance.uniform(0.0, after_s), **options)) != 0:
            assert status == -signal.SIGKILL
            kills += 1
            steps = read(str(home / "done"))
            assert int(steps[8:]) >= done, f"kill {kills}: began at {steps[8:]}, {done} was over"
            done = int(steps[:8].strip("\0 ") or steps[8:])
        last = settled(home)
        assert last is not None
        left, right = twin.load(), last.load()
        for own in (left, right):
            del own["holdfast"]["progress"]  # names the lives that there were
        assert_state_equal(left, right)
        shutil.rmtree(home)
