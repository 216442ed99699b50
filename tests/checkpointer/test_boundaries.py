"""Where a step ends, what the index of a batch is, and what a script seems to have forgotten."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import run_kit as kit
import torch
from catalog_kit import index_of
from torch.utils.data import DataLoader, IterableDataset, Sampler

import holdfast as hf
from holdfast.checkpointer import boundaries
from holdfast.checkpointer.run_session import RunSession
from holdfast.storage import MemoryStorage


class Killed(Exception):
    """Ends a life as a kill would: nothing is saved after it."""


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def ended_at(path: Any, steps: int, every: int = 1) -> None:
    """A life of a loop over epochs that dies in the batch after ``steps`` steps."""
    with pytest.raises(Killed), hf.Checkpointer(path, {"w": torch.zeros(1)}, every=every) as ck:
        for _ in ck.epochs(9):
            for _ in ck.batches(kit.loader()):
                if ck.global_step == steps:
                    raise Killed
                ck.step()


def test_a_step_is_saved_where_the_next_batch_is_asked_for(tmp_path: Path) -> None:
    """What the body does after ck.step() is in the checkpoint of that step, a report too."""
    with hf.Checkpointer(tmp_path, {"n": 0}, every=1, keep=None) as ck:
        for _ in ck.batches(kit.loader(6)):
            ck.step()
            ck.state["n"] = ck.global_step * 10
            ck.report(val=ck.global_step)
            ck.state["n"] += 1
    assert [hf.load(one)["n"] for one in ck.checkpoints()] == [21, 11]
    assert [one.metrics["val"] for one in ck.checkpoints()] == [2, 1]


@pytest.mark.parametrize("asks", ["report", "save"])
def test_what_another_thread_asks_for_is_not_saved_in_the_middle_of_a_step(
    tmp_path: Path, asks: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A validation beside the loop: its metric is recorded, a save is made where the step under way has ended."""
    state = {"a": torch.zeros(2), "b": torch.zeros(2)}
    keep = hf.Keep(last=9, best=9, metric="val")

    def beside() -> None:
        if asks == "report":
            ck.report(val=1.0)
        else:
            ck.save()
        ck.wait()

    with hf.Checkpointer(tmp_path, state, every=None, keep=keep) as ck:
        for _ in ck.batches(kit.loader(15)):
            state["a"] += 1
            if ck.global_step in (1, 3):
                thread = threading.Thread(target=beside)
                thread.start()
                thread.join()
            state["b"] += 1
            ck.step()
    assert [one.step for one in ck.checkpoints()] == ([5] if asks == "report" else [5, 4, 2])
    for one in ck.checkpoints():
        assert [hf.load(one)[name][0].item() for name in "ab"] == [one.step, one.step]
    rows = [row["metrics"] for row in index_of(tmp_path).history() if row["step"] == 1]
    assert rows == ([{"val": 1.0}] if asks == "report" else [])
    assert caplog.text.count("in another thread than that of the steps") == (asks == "report")


@pytest.mark.parametrize("how", ["exit", "no close", "closed"])
def test_steps_that_are_lost_without_an_error_are_said(
    request: pytest.FixtureRequest, tmp_path: Path, how: str
) -> None:
    """With status 0 nothing else tells: `sys.exit` in the body, and a script that forgets ``ck.close()``."""
    if how != "no close":  # that one is ended by a real interpreter
        request.getfixturevalue("forked")
    ends = {"exit": "sys.exit(0)", "no close": "", "closed": "ck.close()"}
    begin = "with ck:\n    ck.step(); ck.step(); " if how == "exit" else "ck.start(); ck.step(); ck.step(); "
    body = f"import sys, holdfast as hf\nck = hf.Checkpointer(sys.argv[1], {{'n': 0}})\n{begin}{ends[how]}\n"
    code, _, err = kit.finish(kit.start(body, tmp_path / "run"))
    assert code == 0
    assert err.count("steps 1 to 2 are in no checkpoint") == (how != "closed"), err


@pytest.mark.usefixtures("forked")
def test_a_save_under_way_at_the_end_of_a_script_is_not_said_to_be_lost(tmp_path: Path) -> None:
    """The end of the interpreter waits for it; steps after it are lost."""
    body = (
        "import sys, torch, holdfast as hf\nstate = {'w': torch.zeros(1 << 24)}\n"
        "ck = hf.Checkpointer(sys.argv[1], state, every=None).start(); ck.step(); ck.save(); ck.step()\n"
    )
    code, _, err = kit.finish(kit.start(body, tmp_path / "run"))
    assert code == 0
    assert "step 2 is in no checkpoint" in err


def test_steps_are_said_to_be_lost_although_their_snapshot_could_not_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`sys.exit()` in the body, and the writer cannot save the snapshot: nothing else would tell of the steps."""

    def full(self: RunSession, *given: object) -> None:
        raise hf.StorageFullError("no space for the snapshot")

    with pytest.raises(SystemExit), hf.Checkpointer(tmp_path, {"n": 0}, every=None, rescue=1) as ck:
        ck.step()
        ck.step()
        monkeypatch.setattr(RunSession, "answer", full)  # nothing else is asked at such an end
        raise SystemExit
    assert any("steps 1 to 2 are in no checkpoint" in line for line in said(caplog))


def test_runs_of_one_program_gather_nothing_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that enters one run after another with ``start`` does not have more to do at its exit with each."""
    at_exit: list[object] = []
    monkeypatch.setattr(atexit, "register", lambda call, *given: at_exit.append(call))
    monkeypatch.setattr(atexit, "unregister", lambda call: at_exit.remove(call) if call in at_exit else None)
    gathered = []
    for number in range(2):
        hf.Checkpointer(tmp_path / str(number), {"n": 0}, every=None).start().close()
        gathered.append(len(at_exit))
    assert gathered[0] == gathered[1]


def test_an_error_after_that_of_the_body_is_told_and_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What fails while a run ends for an error is logged; the rest of the end is done, the first error raised."""

    def lost(self: RunSession) -> None:
        raise hf.StorageError("the last save is lost")

    monkeypatch.setattr(RunSession, "finish", lost)
    with pytest.raises(Killed), hf.Checkpointer(tmp_path, {"n": 0}, every=2) as ck:
        ck.step()
        raise Killed
    assert any("failed too: the last save is lost" in line for line in said(caplog))
    assert index_of(tmp_path).current.reason.startswith("Killed")


def test_a_stop_after_the_last_step_was_saved(tmp_path: Path) -> None:
    """A signal comes between the last step of an epoch and the next: its checkpoint is there, and is made once."""
    with (
        pytest.raises(SystemExit),
        hf.Checkpointer(tmp_path, {"n": 0}, every=1, keep=None) as ck,
    ):
        for _ in ck.epochs(2):
            for _ in range(3):
                ck.step()
            ck.wait()
            os.kill(os.getpid(), signal.SIGTERM)
    steps = kit.steps(tmp_path)
    assert steps[-1] == 3
    assert len(steps) == len({*steps}) == ck.stats.saves


class Refusing(MemoryStorage):
    """Takes no file of a checkpoint once it is told not to."""

    refuses = False

    def put(self, path: str, data: Any, **conditions: Any) -> str | None:
        if self.refuses and path.startswith("step_"):
            raise hf.StorageError("broken")
        return super().put(path, data, **conditions)

    def create(self, path: str, size: int) -> Any:
        if self.refuses:
            raise hf.StorageError("broken")
        return super().create(path, size)


def test_a_stop_whose_save_fails_is_an_error(tmp_path: Path) -> None:
    """Nobody may start again believing that the last step is safe: the exit is none in order."""
    storage = Refusing(f"refusing-{tmp_path.name}")
    with pytest.raises(hf.StorageError, match="broken"), hf.Checkpointer(storage, {"n": 0}, every=None) as ck:
        ck.step()
        storage.refuses = True
        os.kill(os.getpid(), signal.SIGTERM)
        ck.step()


def test_a_failed_save_does_not_keep_a_life_from_its_end(tmp_path: Path) -> None:
    """The body has raised, and so would the save: the error of the body is raised, and the run is given back."""
    storage = Refusing(f"failing-{tmp_path.name}")
    with pytest.raises(KeyError), hf.Checkpointer(storage, {"n": 0}, every=1) as ck:
        ck.step()
        ck.wait()
        storage.refuses = True
        ck.step()
        raise KeyError("of the body")
    last = index_of(storage).current
    assert last is not None
    assert last.ended is not None
    assert json.loads(storage.read("lease.json"))["released"] is True


def test_without_batches_step_is_the_boundary(tmp_path: Path) -> None:
    """A loop of its own: the state is that of the moment of ck.step(); the end of the run is saved beside."""
    with hf.Checkpointer(tmp_path, {"n": 0}, every=1, keep=None) as ck:
        for _ in range(2):
            ck.step()
            ck.state["n"] += 1
    assert [(one.step, hf.load(one)["n"]) for one in ck.checkpoints()] == [(2, 2), (2, 1), (1, 0)]


def test_waiting_between_two_steps_of_a_batch_saves_no_half_of_it(tmp_path: Path) -> None:
    """A due save is left to the end of the batch; after the last step of a batch, and after the loop, it is made."""
    durable = []
    with hf.Checkpointer(tmp_path, {"w": torch.zeros(1)}, every=3, keep=None) as ck:
        for number, _ in enumerate(ck.batches([0] * 5)):
            ck.step()
            ck.wait()
            if number == 4:
                break
            ck.step()
            if number == 2:
                ck.wait()
                durable.append(ck.stats.last_durable_step)
        ck.wait()
        durable.append(ck.stats.last_durable_step)
    assert durable == [6, 9]
    assert [one.step for one in ck.checkpoints()] == [9, 6, 4]


def test_a_save_asked_for_before_step_is_that_of_the_step(tmp_path: Path) -> None:
    """Between optimizer.step() and ck.step() the weights are those of a step that is not counted yet."""
    with hf.Checkpointer(tmp_path, {"n": 0}, every=None, keep=None) as ck:
        for index, _ in ck.enumerate(kit.loader(12)):
            ck.state["n"] += 1
            if index in {0, 2}:
                ck.save()
            if index != 2:  # a batch that is left out: the save is that of the next step
                ck.step()
    assert [(one.step, hf.load(one)["n"]) for one in ck.checkpoints()] == [(3, 4), (1, 1)]


def test_a_save_asked_for_before_step_is_made_also_where_the_step_before_is_saved(tmp_path: Path) -> None:
    """Each of two bodies in a row asks for its own step: the second one is no repetition of the first."""
    with hf.Checkpointer(tmp_path, {"n": 0}, every=None, keep=None) as ck:
        for index, _ in ck.enumerate(kit.loader(12)):
            ck.state["n"] += 1
            if index < 2:
                ck.save()
            ck.step()
    assert [(one.step, hf.load(one)["n"]) for one in ck.checkpoints()] == [(4, 4), (2, 2), (1, 1)]


def test_a_save_that_saves_nothing_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After the loop, and right after a resume, the state may have changed; the end of an epoch's body comes again."""

    def num_said() -> int:
        return caplog.text.count("so ck.save() saves nothing")

    for life in (1, 2):
        with hf.Checkpointer(tmp_path, {"n": 0}, every=2, keep=None) as ck:
            if life == 2:
                ck.state["n"] = 8
                ck.save()
                assert num_said() == 2
                break
            for _ in ck.epochs(2):
                for _ in ck.batches(kit.loader(6)):
                    ck.step()
                ck.save()
            assert num_said() == 0
            ck.state["n"] = 7
            ck.save(val=0.5)
            ck.save()
            ck.save()
            assert num_said() == 1
    assert kit.steps(tmp_path) == [2, 4, 4, 4]  # the changes are saved where the run is left


def test_waiting_saves_at_once_also_before_step(tmp_path: Path) -> None:
    with hf.Checkpointer(tmp_path, {"n": 0}, every=None, keep=None) as ck:
        for index, _ in ck.enumerate(kit.loader(6)):
            if index == 1:
                ck.save()
                ck.wait()
                assert ck.latest().step == 1
            ck.step()


def test_a_ranked_report_before_step_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its checkpoint is made in the middle of a body that a resume begins anew; after ck.step() nothing is said."""
    keep = hf.Keep(last=2, best=1, metric="val")
    for where, early in (("early", True), ("late", False)):
        caplog.clear()
        with hf.Checkpointer(tmp_path / where, {"n": 0}, every=None, keep=keep) as ck:
            for _ in ck.batches(kit.loader(12)):
                if early:
                    ck.report(val=1.0)
                ck.step()
                if not early:
                    ck.report(val=1.0)
        assert sum("before ck.step()" in line for line in said(caplog)) == early


@pytest.mark.parametrize("kept", [True, False])
def test_steps_on_batches_that_the_script_keeps_are_said(
    kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """itertools.cycle asks for one pass and repeats what it has kept; a loop begun again asks for the next pass."""
    with hf.Checkpointer(tmp_path, {"n": 0}, every=None) as ck:
        batches = ck.batches(kit.loader())
        again = itertools.cycle(batches) if kept else itertools.chain.from_iterable(itertools.repeat(batches))
        while ck.global_step < 3 * len(batches):
            next(again)
            ck.step()
    assert sum("itertools.cycle" in line for line in said(caplog)) == kept


def test_waiting_saves_at_once_what_is_due(tmp_path: Path) -> None:
    """ck.save() in the body is made at its end; ck.wait() after it wants it now."""
    with hf.Checkpointer(tmp_path, {"n": 0}, every=None) as ck:
        for number, _ in ck.enumerate(kit.loader()):
            ck.step()
            ck.save(val=number)
            if number == 1:
                ck.wait()
                assert ck.stats.last_durable_step == 2
                assert ck.latest().metrics["val"] == 1
                break


def test_a_report_at_the_end_of_an_epoch_is_saved_with_all_of_it(tmp_path: Path) -> None:
    """A ranked report saves where the epoch ends, with what follows it in the body."""
    done = []
    for life in range(2):
        with (
            contextlib.suppress(Killed),
            hf.Checkpointer(tmp_path, {"ends": 0}, every=None, keep=hf.Keep(best=3, metric="val")) as ck,
        ):
            for epoch in ck.epochs(3):
                if epoch == 2 and life == 0:
                    ck.wait()
                    raise Killed
                done.append(epoch)
                for _ in ck.batches(kit.loader(3)):
                    ck.step()
                ck.report(val=epoch)
                ck.state["ends"] += 1
    assert (done, ck.state["ends"]) == ([0, 1, 2], 3)


def test_several_steps_in_a_body_are_saved_at_its_end(tmp_path: Path) -> None:
    """Two steps for each batch: the checkpoints are those of whole batches."""
    with hf.Checkpointer(tmp_path, {"w": torch.zeros(1)}, every=1, keep=None) as ck:
        for _ in ck.batches(kit.loader(9)):
            ck.step()
            ck.step()
    assert [one.step for one in ck.checkpoints()] == [6, 4, 2]


def test_steps_after_a_loop_that_was_left_are_boundaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After `break` each step saves again; an iterator that is kept and never asked again does not hold saves up."""
    monkeypatch.setattr(boundaries, "_MAX_OPEN", 5)
    with hf.Checkpointer(tmp_path, {"w": torch.zeros(1)}, every=1, keep=None) as ck:
        for _ in ck.batches(kit.loader()):
            ck.step()
            break
        ck.step()
        ck.step()
        kept = iter(ck.batches(kit.loader()))
        next(kept)
        for _ in range(7):
            ck.step()
    assert [one.step for one in ck.checkpoints()] == [10, 9, 3, 2]
    assert "5 steps were made since" in caplog.text


def test_a_long_body_is_over_when_the_next_batch_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a body with too many steps each further one is a boundary; the bodies after it end where they end again."""
    monkeypatch.setattr(boundaries, "_MAX_OPEN", 3)
    with hf.Checkpointer(tmp_path, {"n": 0}, every=1, keep=None) as ck:
        for _, steps in zip(ck.batches(kit.loader(15)), (5, 2, 1, 4), strict=False):
            for _ in range(steps):
                ck.step()
            ck.state["n"] = ck.global_step
    found = {one.step: hf.load(one)["n"] for one in ck.checkpoints()}
    assert found == {4: 0, 5: 0, 7: 7, 8: 8, 12: 8}
    assert len([text for text in said(caplog) if "steps were made since" in text]) == 1


def test_batches_drawn_by_another_thread_leave_the_boundary_with_step(tmp_path: Path) -> None:
    """A background thread that draws never saves in the middle of somebody's step."""
    drawn: list[Any] = []
    with hf.Checkpointer(tmp_path, {"w": torch.zeros(1)}, every=1, keep=None) as ck:
        worker = threading.Thread(target=lambda: drawn.extend(ck.batches(kit.loader())))
        worker.start()
        worker.join()
        for _ in drawn:
            ck.step()
            assert ck.stats.saves >= ck.global_step - 1
    assert len(ck.checkpoints()) == len(drawn) == 4


@pytest.mark.parametrize("waits", [True, False])
def test_a_thread_that_draws_ahead_is_said(tmp_path: Path, waits: bool, caplog: pytest.LogCaptureFixture) -> None:
    """How many batches it has in hand at a step is chance, so there is no place; one that is waited for has one."""
    with hf.Checkpointer(tmp_path, {"n": 0}, every=None) as ck, ThreadPoolExecutor(1) as other:
        batches = iter(ck.batches(kit.loader(), ahead=0 if waits else 3))
        for count in (1, 1, 1) if waits else (2, 1, 1):
            for _ in range(count):
                other.submit(next, batches).result()
            ck.step()
    assert sum("drawn by another thread" in text for text in said(caplog)) == (not waits)


@pytest.mark.parametrize("by_thread", [True, False])
def test_steps_on_another_loader_when_one_is_done(
    tmp_path: Path, by_thread: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is at its end gives nothing more, in this life or a resumed one: that is no thread that draws ahead."""

    def through(batches: Any) -> Iterator[Any]:
        drawn = iter(batches)
        while (batch := (other.submit(next, drawn, None).result() if by_thread else next(drawn, None))) is not None:
            yield batch

    for steps in (4, 6):
        run = hf.Checkpointer(tmp_path, {"n": 0}, every=1)
        with ThreadPoolExecutor(1) as other, contextlib.suppress(Killed), run as ck:
            for _ in ck.epochs(1):
                for name in ("one", "two"):
                    for _ in through(ck.batches(kit.loader(9), name=name)):
                        ck.step()
                        if ck.global_step == steps == 4:
                            ck.wait()
                            raise Killed
    assert ck.global_step == 6
    assert not [text for text in said(caplog) if "drawn by another thread" in text]


@pytest.mark.parametrize(("ahead", "told"), [(1, "pass ahead=2"), (2, ""), (3, "repeat some that were trained")])
def test_an_ahead_that_does_not_fit_is_said(
    tmp_path: Path, ahead: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop with two batches in hand: with another number a resume would leave out or repeat some."""
    with hf.Checkpointer(tmp_path, {"n": 0}, every=None) as ck:
        batches = iter(ck.batches(kit.loader(), ahead=ahead))
        hand = [next(batches), next(batches)]
        for batch in batches:
            hand = [*hand[1:], batch]
            ck.step()
    messages = [text for text in said(caplog) if "drawn before a step" in text]
    assert len(messages) == bool(told)
    assert all(told in text for text in messages)


def test_a_short_gathering_at_the_end_of_an_epoch_is_not_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gradients of three batches for the first step, and of the last one for the second: none is drawn ahead."""
    with hf.Checkpointer(tmp_path, {"n": 0}, every=None) as ck:
        for number, _ in enumerate(ck.batches(kit.loader())):
            if number in (2, 3):
                ck.step()
    assert (ck.global_step, said(caplog)) == (2, [])


def test_the_index_goes_on_after_a_resume() -> None:
    """len() is the whole epoch, ck.batch and ck.enumerate count from the epoch's begin, tqdm's arguments fit."""
    path = "memory://index/run"
    ended_at(path, 6)
    with hf.Checkpointer(path, {"w": torch.zeros(1)}, every=None) as ck:
        seen = []
        assert (ck.epoch, ck.batch) == (1, 2)
        for _ in ck.epochs(3):
            batches = ck.enumerate(kit.loader())
            assert (len(batches), len(ck.batches(kit.loader()))) == (4, 4)
            for index, _ in batches:
                assert ck.batch == index
                seen.append(index)
                ck.step()
            assert ck.batch == 4
    assert seen == [2, 3, 0, 1, 2, 3]


def test_the_index_belongs_to_the_length_after_a_change_of_the_batch_size() -> None:
    """Other batches within an epoch: lives count in their own, and the last index is len() - 1 in each of them."""
    path, indices, seen = "memory://resized/run", [], []
    for size, until in ((3, 3), (6, 4), (6, 0)):
        with hf.Checkpointer(path, {}, every=None) as ck:
            batches = ck.enumerate(kit.loader(24, batch_size=size))
            for index, batch in batches:
                indices.append((index, len(batches)))
                seen += batch.tolist()
                ck.step()
                if ck.global_step == until:
                    break
    assert indices == [(0, 8), (1, 8), (2, 8), (1, 4), (2, 4), (3, 4)]
    assert sorted(seen) == list(range(24))


def test_the_block_says_that_enumerate_begins_at_zero(capsys: pytest.CaptureFixture[str]) -> None:
    """A resume in the middle of an epoch names the batch it goes on with, and who counts from there."""
    ended_at("memory://says/run", 3)
    capsys.readouterr()
    with hf.Checkpointer("memory://says/run", {"w": torch.zeros(1)}) as ck:
        ck.step()
    assert "epoch 0 goes on with batch 3: ck.batch and ck.enumerate(loader) count from there" in capsys.readouterr().err


class Told(Sampler[int]):
    """Notes when it is told an epoch, which may cost it anything."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def test_asking_for_the_length_in_the_body_draws_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """`index + 1 == len(batches)`: of ten million samples an order takes longer than a step; samplers hear nothing."""
    drawn, randperm, told = [], torch.randperm, Told()
    monkeypatch.setattr(torch, "randperm", lambda *args, **options: drawn.append(args) or randperm(*args, **options))
    with hf.Checkpointer("memory://length/run", {}, every=None) as ck:
        for _ in ck.epochs(2):
            batches = ck.enumerate(kit.loader())
            assert [index for index, _ in batches if index + 1 == len(batches) and not ck.step()] == [3]
            assert len(ck.batches(kit.loader())) == 4
        batches = ck.batches(DataLoader(kit.Ids(12), 3, sampler=told))
        assert [len(batches) for _ in batches] == [4] * 4
    assert (len(drawn), len(told.epochs)) == (2, 3)  # once for the length, twice for the batches


def test_one_object_serves_all_epochs() -> None:
    """`batches = ck.batches(loader)` made once before the loop over epochs, as people do for its length."""
    with hf.Checkpointer("memory://once/run", {}, every=None) as ck:
        batches = ck.batches(kit.loader())
        assert [len([ck.step() for _ in batches]) for _ in ck.epochs(3)] == [4, 4, 4]


@pytest.mark.parametrize("again", [True, False], ids=["one object", "a new one"])
def test_an_epoch_that_is_left_is_followed_by_a_whole_order(again: bool) -> None:
    """`break` after two of four batches: the next epoch draws anew, in an order of its own, from one object as well."""
    seen: list[list[int]] = []
    with hf.Checkpointer(f"memory://part/{again}", {}, every=None) as ck:
        kept = ck.batches(kit.loader())
        for _ in ck.epochs(3):
            seen.append([])
            for index, batch in enumerate(kept if again else ck.batches(kit.loader())):
                if index >= 2:
                    break
                seen[-1] += batch.tolist()
                ck.step()
        assert ck.global_step == 6
    assert [len(set(ids)) for ids in seen] == [6, 6, 6]
    assert len({tuple(ids) for ids in seen}) == 3


def in_step(ck: hf.Checkpointer) -> None:
    """Loaders of two lengths, in a loop over epochs of the script's own."""
    for _ in range(ck.epoch, 3):
        for _ in zip(ck.batches(kit.loader(12), name="long"), ck.batches(kit.loader(6), name="short"), strict=False):
            ck.step()


def beside(ck: hf.Checkpointer) -> None:
    """A long loader, drawn by `next` beside many passes over a short one."""
    more = iter(ck.batches(kit.loader(60), name="long"))
    while ck.global_step < 9:
        for _ in ck.batches(kit.loader(6)):
            next(more)
            ck.step()


def across(ck: hf.Checkpointer) -> None:
    """The same across ck.epochs()."""
    more = iter(ck.batches(kit.loader(60), name="long"))
    for _ in ck.epochs(3):
        for _ in ck.batches(kit.loader(6)):
            next(more)
            ck.step()


@pytest.mark.parametrize("loop", [in_step, beside, across])
def test_a_pass_that_would_outlive_its_epoch_is_refused(loop: Callable[[hf.Checkpointer], None]) -> None:
    """No resume could go on with it: what to write is said, before a batch of it is trained that belongs nowhere."""
    with (
        pytest.raises(hf.ConfigError, match=r"the pass over 'long' ended with epoch 0.*for epoch in ck\.epochs"),
        hf.Checkpointer(f"memory://outlives/{loop.__name__}", {}, every=None) as ck,
    ):
        loop(ck)


@pytest.mark.parametrize("by_epochs", [True, False])
def test_an_evaluation_in_the_body_needs_no_batches(by_epochs: bool) -> None:
    """Under the name of the loop around it, it would move the position of that: refused when the next batch is due."""
    with (
        pytest.raises(hf.ConfigError, match="another loader was gone through under the name 'train'"),
        hf.Checkpointer(f"memory://within/{by_epochs}", {}, every=None) as ck,
    ):
        for _ in ck.epochs(2) if by_epochs else range(ck.epoch, 2):
            for _ in ck.batches(kit.loader()):
                ck.step()
                assert ck.global_step == 1
                list(ck.batches(kit.loader(60)))


def test_two_iterators_of_one_loader_share_its_batches() -> None:
    """Each goes on where the other one is; no batch comes twice."""
    loader, seen = kit.loader(), []
    with hf.Checkpointer("memory://share/run", {}, every=None) as ck:
        one, two = iter(ck.batches(loader)), iter(ck.batches(loader))
        for iterator in (one, two, one, two):
            seen += next(iterator).tolist()
            ck.step()
        assert sorted(seen) == list(range(12))
        assert next(two, None) is None
        assert next(one, None) is None, "it ends with the pass, and begins no other epoch"
        assert ck.epoch == 0


def test_a_length_that_nobody_knows() -> None:
    """len() of a stream raises TypeError, as len() of its loader does; iterating works."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    with hf.Checkpointer("memory://stream/run", {}, every=None) as ck:
        with pytest.raises(TypeError):
            len(ck.batches(DataLoader(Stream())))
        assert len([ck.step() for _ in ck.batches(DataLoader(Stream()))]) == 4


def test_a_batch_drawn_ahead_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Two draws before the first step and one before each later one: said once, with ahead=1 as what to do."""
    for ahead in (0, 1):
        caplog.clear()
        with hf.Checkpointer(f"memory://ahead/{ahead}", {}, every=None) as ck:
            batches = iter(ck.batches(kit.loader(), ahead=ahead))
            batch = next(batches)
            while batch is not None:
                batch = next(batches, None)
                ck.step()
        assert [("ahead=1" in line) for line in said(caplog)] == [True] * (1 - ahead)


@pytest.mark.parametrize("ahead", [-1, True, 1.0])
def test_ahead_is_a_number_of_batches(ahead: Any) -> None:
    """Anything else is a ConfigError."""
    with hf.Checkpointer("memory://wrong/run", {}) as ck, pytest.raises(hf.ConfigError, match="ahead="):
        ck.batches(kit.loader(), ahead=ahead)


def test_a_loader_with_its_own_state_cannot_be_ahead() -> None:
    """Its position cannot go back: refused, and why."""

    class Own:
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    with hf.Checkpointer("memory://own/run", {}) as ck, pytest.raises(hf.ConfigError, match="keeps its own position"):
        next(iter(ck.batches(Own(), ahead=1)))


def test_a_body_without_a_step_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Batches were drawn and nothing counted; an empty body too; a finished run started again is silent."""
    with hf.Checkpointer("memory://no-step/drawn", {}) as ck:
        list(ck.batches(kit.loader()))
    with hf.Checkpointer("memory://no-step/empty", {}) as ck:
        pass
    assert ["after 4 batches without a single" in said(caplog)[0], "without a single" in said(caplog)[1]] == [True] * 2
    caplog.clear()
    for _ in range(2):
        with hf.Checkpointer("memory://no-step/whole", {}) as ck:
            for _ in ck.epochs(1):
                for _ in ck.batches(kit.loader()):
                    ck.step()
        with hf.Checkpointer("memory://no-step/asked", {}) as ck:
            for _ in ck.batches(kit.loader()):
                if ck.global_step >= 2:
                    break
                ck.step()
    assert said(caplog) == []


def test_epochs_that_are_not_the_runs_own_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """`for epoch in range(3)` around ck.batches: said in the first life; not where the script looks at ck.epoch."""
    for known in (False, True):
        caplog.clear()
        with hf.Checkpointer(f"memory://range/{known}", {}, every=None) as ck:
            for _ in range(ck.epoch if known else 0, 3):
                for _ in ck.batches(kit.loader()):
                    ck.step()
        assert ["ck.epochs(n)" in line for line in said(caplog)] == [True] * (not known)


def test_epochs_without_batches_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """A plain loader inside of ck.epochs(): a resume would begin the epoch anew; one step an epoch needs no loader."""
    with hf.Checkpointer("memory://plain/loader", {}, every=None) as ck:
        for _ in ck.epochs(2):
            for _ in kit.loader():
                ck.step()
    assert ["Wrap the training loader" in line for line in said(caplog)] == [True]
    caplog.clear()
    with hf.Checkpointer("memory://plain/one", {}, every=None) as ck:
        for _ in ck.epochs(3):
            ck.step()
    assert said(caplog) == []


def test_gradients_left_at_the_end_of_an_epoch_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """Four batches and a step for every third: the last one's gradients are in no checkpoint."""
    with hf.Checkpointer("memory://left/run", {}, every=None) as ck:
        for _ in ck.epochs(2):
            for index, _ in ck.enumerate(kit.loader()):
                if index % 3 == 2:
                    ck.step()
    assert ["gradients that were not stepped" in line for line in said(caplog)] == [True]


def test_start_and_close_are_the_same_without_indentation(tmp_path: Path) -> None:
    """start() enters and gives the Checkpointer, close() saves the last step; closing twice does nothing."""
    ck = hf.Checkpointer(tmp_path, {"n": 3}, every=None).start()
    ck.step()
    ck.close()
    ck.close()
    assert hf.load(ck.latest())["n"] == 3


@pytest.mark.usefixtures("forked")
def test_a_script_that_forgets_close_has_what_was_sealed(tmp_path: Path) -> None:
    """It counts as killed: its saves are committed by the writer, the last step is not saved, the next life goes on."""
    body = """
    import sys
    import holdfast
    ck = holdfast.Checkpointer(sys.argv[1], {"n": 0}, every=2).start()
    for _ in range(3):
        ck.step()
    """
    assert kit.finish(kit.start(body, tmp_path))[0] == 0
    with hf.Checkpointer(tmp_path, {"n": 0}) as ck:
        assert ck.global_step == 2
        ck.step()


def test_the_path_of_a_run_is_its_newest_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """load, export and resume= take a run where a checkpoint is expected, and say which one they took."""
    kit.train(tmp_path / "run", 4, state={**kit.make_state(), "n": 5})
    assert hf.load(tmp_path / "run")["n"] == 5
    assert "its newest checkpoint, step_00000004, is taken" in caplog.text
    assert hf.export(tmp_path / "run", tmp_path / "out.pt", to="torch").num_tensors > 4
    with hf.Checkpointer(tmp_path / "two", {**kit.make_state(), "n": 0}, resume=tmp_path / "run") as ck:
        assert (ck.global_step, ck.state["n"]) == (4, 5)
    with pytest.raises(hf.CheckpointError):
        hf.load(tmp_path)


def test_a_forked_child_is_told_that_the_run_is_not_its_own(tmp_path: Path) -> None:
    """Saving, stepping and waiting in a child raise at once, instead of waiting for a writer that is the trainer's."""
    with hf.Checkpointer(tmp_path, {"n": 0}, every=1) as ck:
        ck.step()
        for call in (ck.step, ck.save, ck.wait, ck.report):
            told, tell = os.pipe()
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    try:
                        call()
                    except hf.SessionError as error:
                        os.write(tell, str(error).encode())
                os._exit(0)
            os.close(tell)
            os.waitpid(child, 0)
            with open(told) as answer:
                assert "was forked from the trainer" in answer.read()
        ck.step()
    assert ck.latest().step == 2
