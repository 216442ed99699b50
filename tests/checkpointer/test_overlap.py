"""Saving while training goes on: nothing leaks in, nothing fails in silence, a slow or dead writer is survived."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import run_kit as kit
import torch

import holdfast as hf
from holdfast.checkpointer import pending_saves
from holdfast.storage import FileWriter, MemoryStorage
from holdfast.testing import FaultyStorage


class Gated(MemoryStorage):
    """A storage whose manifests wait for permission: saves stay pending as long as a test wants."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.gate.set()

    def put(self, path: str, data: Any, **options: Any) -> str | None:
        if path.endswith("manifest.json") and ".probe" not in path:
            self.reached.set()
            assert self.gate.wait(30)
        return super().put(path, data, **options)


@pytest.fixture
def gated(request: pytest.FixtureRequest) -> Iterator[Gated]:
    storage = Gated(f"gated-{request.node.name}")
    yield storage
    storage.gate.set()


@pytest.mark.parametrize("staging", [None, 8 << 20])
def test_what_changes_right_after_step_is_not_in_the_checkpoint(staging: int | None, tmp_path: Path) -> None:
    """Weights, optimizer state and plain data overwritten the moment ck.step returns: the old ones are saved."""
    state: dict[str, Any] = {"weights": torch.arange(6 << 20, dtype=torch.float32), "notes": {"best": 1, "list": [1]}}
    state["tied"] = state["weights"][: 1 << 10]
    with hf.Checkpointer(tmp_path, state, every=1, keep=None, max_staging_bytes=staging) as ck:
        for step in range(1, 5):
            ck.step()
            state["weights"] += 1
            state["notes"]["best"] = step + 1
            state["notes"]["list"].append(step + 1)
    for step in range(1, 5):
        found = hf.load(tmp_path / f"step_{step:08d}")
        assert torch.equal(found["weights"], torch.arange(6 << 20, dtype=torch.float32) + (step - 1))
        assert torch.equal(found["tied"], found["weights"][: 1 << 10])
        assert found["notes"] == {"best": step, "list": list(range(1, step + 1))}


def test_bounded_memory_keeps_its_bound_and_resumes(tmp_path: Path) -> None:
    """max_staging_bytes: the arena is never larger, and the state comes back bit for bit."""
    state = {"weights": torch.randn(4 << 20)}
    with hf.Checkpointer(tmp_path, state, every=1, keep=None, max_staging_bytes=4 << 20) as ck:
        ck.step()
        assert ck._boundary._snapshotter.arena.size <= 4 << 20
    fresh = {"weights": torch.zeros(4 << 20)}
    with hf.Checkpointer(tmp_path, fresh, every=None, max_staging_bytes=4 << 20):
        assert torch.equal(fresh["weights"], state["weights"])


def test_when_busy_skip_leaves_saves_out_and_wait_waits(gated: Gated) -> None:
    """With a save pending, skip trains on (and says so in stats); the next multiple after it is saved."""
    with hf.Checkpointer(gated, {"w": torch.zeros(4)}, every=2, keep=None, when_busy="skip") as ck:
        gated.gate.clear()
        for _ in range(7):
            ck.step()
        assert ck.stats.skipped == 2  # at 4 and 6
        assert gated.reached.wait(60)
        gated.gate.set()
        ck.wait()
        ck.step()
    assert kit.steps(gated) == [2, 8]


def test_a_save_that_is_asked_for_is_not_left_out(gated: Gated) -> None:
    """With "skip" only what the intervals call for may be: `ck.save` waits for the writer."""
    with hf.Checkpointer(gated, {"w": torch.zeros(4)}, every=2, keep=None, when_busy="skip") as ck:
        gated.gate.clear()
        ck.step()
        ck.step()
        assert gated.reached.wait(60)
        ck.step()
        threading.Timer(0.2, gated.gate.set).start()
        ck.save()
        ck.step()
        ck.step()
    assert 3 in kit.steps(gated)


def test_when_busy_wait_holds_the_loop_until_the_save_before_is_done(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "wait" nothing is left out: the step that is due returns only after the writer is free."""
    with hf.Checkpointer(gated, {"w": torch.zeros(4)}, every=1, keep=None) as ck:
        gated.gate.clear()
        ck.step()
        real = pending_saves.wait

        def wait(*arguments: Any, **options: Any) -> Any:
            threading.Timer(0.2, gated.gate.set).start()  # not before it waits, however busy the machine is
            return real(*arguments, **options)

        monkeypatch.setattr(pending_saves, "wait", wait)
        ck.step()
        monkeypatch.undo()
        assert ck.stats.last_durable_step == 1
        assert ck.stats.seconds_blocked >= 0.15
    assert kit.steps(gated) == [1, 2]
    assert ck.stats.skipped == 0


def test_a_writer_that_never_answers_is_an_error_in_bounded_time(gated: Gated) -> None:
    """timeout_s bounds the wait for the save before, and the message says which step is not safe."""
    with (
        pytest.raises(hf.HoldfastError, match=r"the save of step 1 is not durable after 0 s \(timeout_s\)"),
        hf.Checkpointer(gated, {"w": torch.zeros(4)}, every=1) as ck,
    ):
        kit.be_impatient(ck, 0.3)
        gated.gate.clear()
        ck.step()
        assert gated.reached.wait(60)
        ck.step()


class Failing(MemoryStorage):
    """Fails the manifests of the steps it is told."""

    bad: tuple[str, ...] = ()

    def put(self, path: str, data: Any, **options: Any) -> str | None:
        if path in {f"step_{step:0>8}/manifest.json" for step in self.bad}:
            raise hf.StorageError(f"no {path} today")
        return super().put(path, data, **options)


def test_a_failed_save_raises_at_the_next_step_and_the_run_can_go_on() -> None:
    """The error comes once; caught, training and saving go on, and no parent points to the lost checkpoint."""
    storage = Failing("failing-save")
    storage.bad = ("2",)
    with hf.Checkpointer(storage, {"w": torch.zeros(4)}, every=1, keep=None) as ck:
        ck.step()
        ck.step()
        ck._session.saves._pending[0].future.exception()
        with pytest.raises(hf.StorageError, match="no step_00000002"):
            ck.step()
        ck.step()
    assert kit.steps(storage) == [1, 4]
    parents = {one.step: one.manifest.parent for one in ck.checkpoints()}
    assert parents[4] == next(one.manifest.checkpoint_id for one in ck.checkpoints() if one.step == 1)


def test_a_failed_final_save_raises_on_leaving() -> None:
    """Nobody leaves the body believing that the last step is safe."""
    storage = Failing("failing-final")
    storage.bad = ("2",)
    with (
        pytest.raises(hf.StorageError, match="no step_00000002"),
        hf.Checkpointer(storage, {"w": torch.zeros(4)}, every=None) as ck,
    ):
        ck.step()
        ck.step()


def test_an_error_of_the_body_is_not_hidden_by_a_failed_save(caplog: pytest.LogCaptureFixture) -> None:
    """Both fail: the body's exception is raised, the save's is logged."""
    storage = Failing("failing-both")
    storage.bad = ("1",)
    with pytest.raises(ZeroDivisionError), hf.Checkpointer(storage, {"w": torch.zeros(4)}, every=1) as ck:
        ck.step()
        1 / 0  # noqa: B018
    assert "no step_00000001/manifest.json today" in caplog.text


def test_an_io_error_in_the_writer_process_reaches_the_loop(tmp_path: Path) -> None:
    """EIO from every fsync after the start is StorageError in the trainer."""
    storage = FaultyStorage(tmp_path, fail_from=(120, errno.EIO))
    with pytest.raises(hf.StorageError), hf.Checkpointer(storage, kit.make_state(), every=1, keep=None) as ck:
        for _ in range(100):
            ck.step()


def test_a_value_that_became_unsupported_fails_the_step_that_saves_it(tmp_path: Path) -> None:
    """UnsupportedStateError names the path; before the run when it is there from the start."""
    with pytest.raises(hf.UnsupportedStateError, match="state"), hf.Checkpointer(tmp_path, {"bad": object()}):
        raise AssertionError("entered")
    state: dict[str, Any] = {"notes": {}}
    with (
        pytest.raises(hf.UnsupportedStateError, match=r"state\['notes'\]\['bad'\]"),
        hf.Checkpointer(tmp_path, state, every=2) as ck,
    ):
        ck.step()
        state["notes"]["bad"] = object()
        ck.step()


def test_a_killed_writer_is_replaced_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SIGKILL to the writer between saves: said, started again, and every due step is saved."""
    state = kit.make_state()
    with hf.Checkpointer(tmp_path, state, every=2, keep=None) as ck:
        for step in range(1, 9):
            ck.step(loss=kit.train_one(state))
            if step == 4:
                os.kill(ck._session.client.process_id, signal.SIGKILL)
    assert kit.steps(tmp_path) == [2, 4, 6, 8]
    assert all(one.verify().ok for one in ck.checkpoints())
    assert "it is started again" in caplog.text
    assert kit.train(tmp_path, 10).resumed_from.step == 8


def test_a_writer_killed_twice_ends_the_run_with_an_error(tmp_path: Path) -> None:
    """The second death is said at a following step, and the body's exception path ends in bounded time."""
    with (
        pytest.raises(hf.HoldfastError, match="for the second time"),
        hf.Checkpointer(tmp_path, kit.make_state(), every=1, keep=None) as ck,
    ):
        for step in range(1, 50):
            ck.step()
            if step in (2, 5):
                ck.wait()
                process = ck._session.client._conversation.process
                os.kill(process.pid, signal.SIGKILL)


def test_a_slow_disk_counts_as_time_lost_only_while_it_holds(tmp_path: Path) -> None:
    """Files written slowly in the background: the time to durable shows it, the blocked time of the loop does not."""

    class Slow(MemoryStorage):
        def create(self, path: str, size: int) -> FileWriter:
            assert go_on.wait(30)
            return super().create(path, size)

    go_on = threading.Event()
    go_on.set()
    with hf.Checkpointer(Slow("slow-disk"), {"w": torch.zeros(64)}, every=1) as ck:
        go_on.clear()
        begun = time.perf_counter()
        ck.step()
        held = time.perf_counter() - begun  # it was back although not one file was written
        assert ck.stats.seconds_blocked <= held
        time.sleep(0.3)
        go_on.set()
        ck.wait()
        assert ck.stats.seconds_to_durable[0] >= 0.3


class Stuck(MemoryStorage):
    """A storage whose files stop taking bytes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.go_on = threading.Event()
        self.go_on.set()

    def create(self, path: str, size: int) -> FileWriter:
        assert self.go_on.wait(30)
        return super().create(path, size)


def test_a_storage_that_is_stuck_is_an_error_in_bounded_memory_too() -> None:
    """With max_staging_bytes the step itself waits for the writer: timeout_s bounds that wait as well."""
    storage = Stuck("stuck-windows")
    try:
        begun = 0.0
        with (
            pytest.raises(hf.HoldfastError, match="timeout_s"),
            hf.Checkpointer(storage, {"w": torch.zeros(2 << 20)}, every=1, keep=None, max_staging_bytes=2 << 20) as ck,
        ):
            kit.be_impatient(ck, 0.3)
            storage.go_on.clear()
            begun = time.monotonic()
            ck.step()
        assert time.monotonic() - begun < 20
    finally:
        storage.go_on.set()
