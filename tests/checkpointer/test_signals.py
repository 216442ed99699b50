"""Signals and deadlines stop a run at a step boundary with everything saved: real signals to real processes."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import run_kit as kit
import torch

import holdfast as hf
from holdfast.checkpointer.boundaries import StepBoundary
from holdfast.checkpointer.save_policy import Deadline
from holdfast.checkpointer.signals import StopSignals
from holdfast.errors import ConfigError

TRAINER = """
import sys, time, threading, run_kit as kit, holdfast as hf
path, mode, total = sys.argv[1], sys.argv[2], int(sys.argv[3])
state = kit.make_state()
if mode == "saving":
    import torch
    state["ballast"] = torch.zeros(6 << 20)
workers = 2 if mode == "workers" else 0
step = 0
try:
    with hf.Checkpointer(path, state, every=1 if mode == "saving" else 50, keep=hf.Keep(last=2)) as ck:
        step = ck.global_step
        print("resumed", step, flush=True)
        print("ready", flush=True)
        for epoch in ck.epochs(10**6):
            for batch in ck.batches(kit.loader(30, num_workers=workers)):
                loss = kit.train_one(state, batch)
                time.sleep(0.002)
                ck.step(loss=loss)
                step = ck.global_step
                if step >= total:
                    break
            if step >= total:
                break
            if mode == "evaluating":
                for _ in range(100):
                    time.sleep(0.01)
                    if ck.should_stop:
                        break
                if ck.should_stop:
                    break
finally:
    # The step in which the signal came is finished, and left by the exit: the loop itself has not counted it.
    print("step", ck.global_step, flush=True)
"""


def stop_once(path: Path, mode: str, name: str, delay_s: float) -> tuple[int, str, str]:
    process = kit.start(TRAINER, path, mode, 10**9)
    kit.wait_for(process, "ready")
    time.sleep(delay_s)  # a random moment is the point
    process.send_signal(getattr(signal, name))
    return kit.finish(process)


def check_stopped(path: Path, name: str, result: tuple[int, str, str]) -> int:
    code, out, err = result
    assert code == 85, err
    step = int(out.split("step ")[-1])
    assert f"holdfast: {name}: saving at the next step" in err
    assert "the same command goes on from there (exit status 85)" in err
    newest = hf.Checkpoint(path / kit.names(path)[0])
    assert newest.step == step
    assert newest.verify().ok
    return step


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("plain", "SIGTERM"),
        pytest.param("evaluating", "SIGUSR1", marks=pytest.mark.slow),
        pytest.param("saving", "SIGINT", marks=pytest.mark.slow),
        pytest.param("workers", "SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_the_last_step_and_the_same_command_goes_on(mode: str, name: str, tmp_path: Path) -> None:
    """Exit status 85, newest checkpoint of the last finished step, and the next start of the command resumes there."""
    step = check_stopped(tmp_path, name, stop_once(tmp_path, mode, name, random.uniform(0.05, 0.4)))
    if mode in ("evaluating", "saving"):  # the next start is the same for all: two of them do
        assert kit.train(tmp_path, step, state=_state(mode)).resumed_from.step == step
        return
    code, out, _ = kit.finish(kit.start(TRAINER, tmp_path, mode, step + 5))
    assert code == 0
    assert f"resumed {step}\n" in out
    assert kit.steps(tmp_path)[-1] == step + 5


def _state(mode: str) -> dict[str, Any]:
    return kit.make_state() | ({"ballast": torch.zeros(6 << 20)} if mode == "saving" else {})


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(6))
@pytest.mark.parametrize("mode", ["plain", "evaluating", "saving", "workers"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_signals_at_many_random_moments(name: str, mode: str, round_: int, tmp_path: Path) -> None:
    """The same for every signal in every mode at moments drawn anew."""
    check_stopped(tmp_path, name, stop_once(tmp_path, mode, name, random.uniform(0.0, 1.5)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_reaches_loader_workers_too_and_the_step_is_saved(name: str, tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole process group, SLURM any signal to all of a job: workers leave the first."""
    process = kit.start(TRAINER, tmp_path, "workers", 10**9)
    kit.wait_for(process, "ready")
    time.sleep(0.4)
    os.killpg(process.pid, getattr(signal, name))
    check_stopped(tmp_path, name, kit.finish(process))


ENDING = """
import os, signal, sys, time, torch, holdfast as hf, holdfast.checkpointer.signals as ours

ours._HOLD_S = 1e6 if sys.argv[2] != "worker" else 0.2

class Data(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, index): return os.getpid()

# Lists: a tensor cut off on its way from the worker is an error of its own, and then torch's comes, too.
loader = torch.utils.data.DataLoader(Data(), num_workers=1, persistent_workers=True, collate_fn=list)
ck = hf.Checkpointer(sys.argv[1], {"x": 1}, every=None).start()
batches = iter(loader)
worker = next(batches)[0]
print("ready", flush=True)
if sys.argv[2] == "pool":
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(int, "1")  # its end is SIGTERM, and waits
if sys.argv[2] == "worker":
    os.kill(worker, signal.SIGTERM)
    try:
        while True:
            next(batches)
            time.sleep(0.01)
            batches = batches if batches._num_yielded < 90 else iter(loader)
    except RuntimeError:
        print("the worker is dead", flush=True)
"""


@pytest.mark.parametrize("mode", ["exit", *(pytest.param(one, marks=pytest.mark.slow) for one in ("pool", "worker"))])
def test_children_end_as_they_would_without_us(mode: str, tmp_path: Path) -> None:
    """A script that ends in the middle of a run, a pool that is left, a worker that somebody kills: nothing hangs."""
    code, out, err = kit.finish(kit.start(ENDING, tmp_path, mode))
    assert code == 0, err
    assert ("the worker is dead" in out) == (mode == "worker")


@pytest.mark.parametrize("asks", ["report", "save"])
def test_a_signal_before_a_save_that_is_asked_for_stops_in_order(tmp_path: Path, asks: str) -> None:
    """In the evaluation behind an epoch whose metric ranks checkpoints, and before a save within the body."""
    keep = hf.Keep(last=1, best=1, metric="val") if asks == "report" else None
    with pytest.raises(SystemExit) as stop, hf.Checkpointer(tmp_path, {"n": 0}, every=100, keep=keep) as ck:
        for epoch in ck.epochs(5):
            for _ in ck.batches(kit.loader()):
                ck.step()
                if asks == "save" and ck.global_step == 6:
                    ck.save()
                    signal.raise_signal(signal.SIGTERM)
            if asks == "report" and epoch == 1:
                signal.raise_signal(signal.SIGTERM)
                ck.report(val=0.5)
    assert stop.value.code == 85
    assert kit.steps(tmp_path) == [8 if asks == "report" else 6]


@pytest.mark.parametrize("again", [False, True])
def test_after_a_second_ctrl_c_an_end_that_fails_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """A final save that fails is followed by the rescue of the last snapshot, which takes time, unless asked not to."""
    rescued: list[str] = []

    def fails(self: StepBoundary) -> None:
        raise hf.StorageError("the disk is gone")

    monkeypatch.setattr(StepBoundary, "end", fails)
    monkeypatch.setattr(StepBoundary, "end_after", lambda self, reason: rescued.append(reason))
    with pytest.raises(hf.StorageError, match="the disk is gone"), hf.Checkpointer(tmp_path, {"n": 0}) as ck:
        ck.step()
        if again:
            for _ in range(2):
                try:
                    signal.raise_signal(signal.SIGINT)
                except KeyboardInterrupt:  # as a library may do
                    break
    assert [reason.partition(":")[0] for reason in rescued] == ([] if again else ["StorageError"])


@pytest.mark.usefixtures("forked")
def test_a_second_ctrl_c_exits_at_once(tmp_path: Path) -> None:
    """In a step that never ends the first SIGINT waits, the second is KeyboardInterrupt without any waiting."""
    process = kit.start(
        """
        import sys, time, run_kit as kit, holdfast as hf
        state = kit.make_state()
        with hf.Checkpointer(sys.argv[1], state, every=1, keep=None) as ck:
            ck.step()
            ck.step()
            print("ready", flush=True)
            time.sleep(100)
        """,
        tmp_path,
    )
    kit.wait_for(process, "ready")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "once more to stop at once" not in process.stderr.readline():
        pass
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, _, err = kit.finish(process)
    assert time.monotonic() - begun < 60, "it slept on"
    assert code in (130, -signal.SIGINT)
    assert "KeyboardInterrupt" in err
    assert kit.train(tmp_path, 3).resumed_from.step == 2  # what was under way was committed all the same


def test_earlier_handlers_are_called_and_put_back(tmp_path: Path) -> None:
    """A handler of the user runs on the signal as well, and is the handler again after the body."""
    heard: list[int] = []

    def mine(number: int, _: object) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGUSR1, mine)
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with (
            pytest.raises(SystemExit) as caught,
            hf.Checkpointer(tmp_path, kit.make_state(), exit_code_for_requeue=7) as ck,
        ):
            ck.step()
            assert not ck.should_stop
            os.kill(os.getpid(), signal.SIGUSR1)
            assert ck.should_stop
            ck.step()
            raise AssertionError("the step after a signal does not return")
        assert caught.value.code == 7
        assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert kit.steps(tmp_path) == [2]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("name", "how"), [("SIGTERM", "exit"), ("SIGUSR1", "raise")])
def test_an_earlier_handler_that_leaves_does_not_come_before_the_save(name: str, how: str, tmp_path: Path) -> None:
    """Scripts in containers exit on SIGTERM: the step is saved first, and the status is that of the run."""
    process = kit.start(
        """
        import signal, sys, time, run_kit as kit, holdfast as hf

        def leave(*_):
            if sys.argv[3] == "exit":
                sys.exit(0)
            raise InterruptedError("preempted")

        signal.signal(getattr(signal, sys.argv[2]), leave)
        try:
            with hf.Checkpointer(sys.argv[1], kit.make_state(), every=None) as ck:
                while ck.global_step < 10**6:
                    ck.step()
                    print("made", ck.global_step, flush=True)
                    time.sleep(0.01)
        finally:
            print("step", ck.global_step, flush=True)
        """,
        tmp_path, name, how,
    )  # fmt: skip
    kit.wait_for(process, "made 3")
    process.send_signal(getattr(signal, name))
    result = kit.finish(process)
    check_stopped(tmp_path, name, result)
    assert f"raises {'SystemExit' if how == 'exit' else 'InterruptedError'}, which is left aside" in result[2]


@pytest.mark.parametrize("error", [SystemExit(0), RuntimeError("a loader worker is gone")], ids=["exit", "error"])
def test_a_body_that_is_left_otherwise_after_a_signal_claims_no_stop(
    error: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process ends with another status than 85, and step 2 is in no checkpoint: the last line says so."""
    with pytest.raises(type(error)), hf.Checkpointer(tmp_path, kit.make_state(), every=None) as ck:
        ck.step()
        ck.save()
        os.kill(os.getpid(), signal.SIGUSR1)
        raise error
    said = capsys.readouterr().err
    left = f"but {type(error).__name__} left the body first: step 1 is saved in {tmp_path}; the exit status is not 85"
    assert left in said
    assert "(exit status 85)" not in said


def test_a_body_left_because_should_stop_was_true_is_not_finished(tmp_path: Path) -> None:
    """Leaving by `break` after a signal saves the last step, exits with the status, and notes no end of training."""
    with pytest.raises(SystemExit) as caught, hf.Checkpointer(tmp_path, kit.make_state(), every=None) as ck:
        for _ in range(10):
            ck.step()
            if ck.global_step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
                if ck.should_stop:
                    break
    assert caught.value.code == 85
    assert kit.steps(tmp_path) == [3]
    assert '"finished": null' in (tmp_path / "run.json").read_text()


def test_a_handler_kept_by_somebody_passes_signals_on_after_the_run() -> None:
    """Code that chained to our handler and outlives us reaches the handler that was there before."""
    heard: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("first"))
    try:
        ours = StopSignals()
        assert ours.install()
        chained = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda *received: heard.append("wrapped") or chained(*received))
        ours.remove()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == ["wrapped", "first"]
        assert ours.received is None
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_run_that_ended_below_another_stands_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs in one process, the first of them ends first: a signal is the second one's, and kills nobody.

    Called as an earlier handler, the ended run would do what the signal does by default: end the process.
    """
    killed: list[tuple[int, int]] = []
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    first, second = StopSignals(), StopSignals()
    try:
        assert first.install()
        assert second.install()
        first.remove()
        monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
        signal.raise_signal(signal.SIGTERM)
        assert second.received == "SIGTERM"
        assert not killed
        second.remove()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_counts_although_nobody_reads_standard_error() -> None:
    """Ctrl-C ends the other side of `2>&1 | tee log` too: a broken pipe must not take the place of the save."""
    read, write = os.pipe()
    os.close(read)
    before, ours = os.dup(2), StopSignals()
    ours.install()
    try:
        os.dup2(write, 2)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.dup2(before, 2)
        ours.remove()
        for fd in (before, write):
            os.close(fd)
    assert ours.received == "SIGTERM"


def test_outside_of_the_main_thread_signals_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run in a thread works, changes no handler, and says that signals will not reach it."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            kit.train(tmp_path, 3)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before
    assert kit.steps(tmp_path) == [2, 3]
    assert "not in the main thread: signals are left alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    "spec",
    [3, 3.0, "3s", timedelta(seconds=3), lambda: datetime.now(timezone.utc) + timedelta(seconds=3)],
    ids=["int", "float", "text", "timedelta", "datetime"],
)
def test_a_near_deadline_saves_and_stops(spec: object, tmp_path: Path) -> None:
    """Every spelling of a deadline that leaves no time for another step stops after the first one, saved."""
    spec = spec() if callable(spec) else spec
    with pytest.raises(SystemExit) as caught:
        kit.train(tmp_path, 100, every=None, deadline=spec)
    assert caught.value.code == 85
    assert kit.steps(tmp_path) == [1]


def test_the_end_of_a_slurm_job_is_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """deadline="slurm": SLURM's variable, else what squeue says; no deadline outside of a job or without a limit."""

    def end() -> float:
        return hf.Checkpointer(tmp_path, deadline="slurm").options.deadline.at - time.monotonic()

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert end() == float("inf")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ConfigError, match="SLURM_JOB_END_TIME is not set, and `squeue"):
        end()
    (tmp_path / "bin").mkdir()
    squeue = tmp_path / "bin/squeue"
    squeue.write_text("#!/bin/sh\necho $TOLD\n")
    squeue.chmod(0o755)
    for told, least, most in (
        (datetime.fromtimestamp(time.time() + 900).isoformat(timespec="seconds"), 600, 901), ("N/A", 1e9, float("inf")),
    ):  # fmt: skip
        monkeypatch.setenv("TOLD", told)
        assert least < end() <= most
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 500))
    assert 200 < end() <= 501
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert end() == float("inf")  # rank 0's counts


def test_a_deadline_far_away_changes_nothing(tmp_path: Path) -> None:
    """An hour away: the run ends by itself."""
    assert kit.train(tmp_path, 3, deadline="1h").global_step == 3


@pytest.mark.parametrize("spec", ["10ba", -1, 0, "0s", datetime(2001, 1, 1), datetime(2001, 1, 1, tzinfo=timezone.utc)])
def test_a_deadline_that_is_none_is_refused_at_construction(spec: object, tmp_path: Path) -> None:
    """Steps, the past and moments without a time zone are ConfigError before anything is written."""
    with pytest.raises(hf.ConfigError):
        hf.Checkpointer(tmp_path / "run", deadline=spec)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_the_last_chance_before_a_deadline_depends_on_step_and_save_time() -> None:
    """Twice the last step, twice the last save and five seconds must fit."""
    deadline = Deadline(100, now=0.0)
    assert not deadline.near(now=74.9, step_s=5.0, save_s=5.0)
    assert deadline.near(now=75.0, step_s=5.0, save_s=5.0)
