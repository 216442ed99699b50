"""A failing disk: training goes on or stops as asked, and what was saved before is untouched."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.errors import HoldfastError, StorageError, StorageFullError, StoragePermissionError
from holdfast.testing import ArmedOps, FaultyStorage, assert_state_equal


class FullOps(ArmedOps):
    """A disk that can be filled and emptied: growing fails with ENOSPC from the ``after``-th such operation on."""

    def __init__(self, kinds=("open", "pwrite", "mkdir", "link", "rename")):
        super().__init__()
        self.kinds, self.left = kinds, None

    def fill(self, after):
        self.left = after

    def empty(self):
        self.left = None

    def _grow(self, name, path):
        with self._lock:
            if self.left is None or name not in self.kinds:
                return
            if self.left <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            self.left -= 1

    def open(self, path, flags):
        self._grow("open", path)
        return super().open(path, flags)

    def pwrite(self, fd, view, offset):
        self._grow("pwrite", "")
        return super().pwrite(fd, view, offset)

    def mkdir(self, path):
        self._grow("mkdir", path)
        super().mkdir(path)

    def link(self, source, target):
        self._grow("link", target)
        super().link(source, target)


def make_state():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 6)
    frozen = torch.nn.Linear(20, 20).requires_grad_(False)
    return {"model": model, "frozen": frozen, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)}


def one_step(ck, state, **metrics):
    state["optimizer"].zero_grad()
    state["model"](torch.full((1, 6), float(ck.global_step))).sum().backward()
    state["optimizer"].step()
    ck.step(loss=float(ck.global_step), **metrics)


def at_step(step):
    state = make_state()
    with hf.Checkpointer("memory://reference", state, every=None, keep=None, resume="never") as ck:
        for _ in range(step):
            one_step(ck, state)
    return state


def verify_all(root):
    names = [
        path for path in Path(root).iterdir() if path.name.startswith("step_") and (path / "manifest.json").exists()
    ]
    for path in names:
        assert hf.Checkpoint(path).verify().ok, path
    return {path.name for path in names}


def run_full(root, after, on_full):
    """Save step 2, fill the disk, save step 3 and report, empty it, save step 4; what happened to step 3."""
    ops, state = FullOps(), make_state()
    storage = FaultyStorage(root, ops=ops)
    with hf.Checkpointer(storage, state, every=None, keep=hf.Keep(last=3), on_full=on_full) as ck:
        for _ in range(2):
            one_step(ck, state)
            ck.save()
        ck.wait()
        one_step(ck, state)
        ops.fill(after)
        ck.save(acc=1.0)
        ck.report(val_loss=3.0)
        ck.wait()
        hit = ops.left == 0
        assert verify_all(root) >= {"step_00000001", "step_00000002"}
        skipped = ck.stats.skipped
        ops.empty()
        one_step(ck, state)
        ck.save()
        ck.wait()
        assert ck.stats.last_durable_step == 4
        assert ck.stats.saves + skipped == 4
    return hit, skipped


@pytest.mark.slow
def test_full_at_every_write_of_a_save(tmp_path):
    """ENOSPC at each growing operation: training goes on, old checkpoints are whole, the next save works."""
    hits = skips = after = 0
    while True:
        root = tmp_path / str(after)
        hit, skipped = run_full(root, after, "skip")
        names = verify_all(root)
        assert "step_00000004" in names
        assert ("step_00000003" in names) == (not skipped)
        state = make_state()
        hf.load(root / "step_00000004", into={**state, "holdfast": {}}, skip="holdfast", strict=False)
        assert_state_equal(state, at_step(4))
        leftovers = [
            path for path in root.rglob("*") if ".tmp-" in path.name or (path.is_dir() and not any(path.iterdir()))
        ]
        assert leftovers == []
        hits, skips, after = hits + hit, skips + skipped, after + 1
        if not hit:
            break
    assert hits >= 12
    assert skips >= 8


def test_full_raises_when_asked(tmp_path):
    """on_full="raise": the next wait raises StorageFullError, what was saved before is whole."""
    ops, state = FullOps(), make_state()
    with (
        pytest.raises(StorageFullError),
        hf.Checkpointer(FaultyStorage(tmp_path, ops=ops), state, every=None, on_full="raise") as ck,
    ):
        one_step(ck, state)
        ck.save()
        ck.wait()
        one_step(ck, state)
        ops.fill(3)
        ck.save()
        ck.wait()
    ops.empty()
    assert verify_all(tmp_path) == {"step_00000001"}


def test_full_waits_when_asked(tmp_path, monkeypatch):
    """on_full="wait": training is held until there is space, then the save is made."""
    from holdfast.checkpointer import boundaries

    ops, state = FullOps(), make_state()
    monkeypatch.setattr(boundaries, "_FULL_RETRY_S", 0.05)
    with hf.Checkpointer(FaultyStorage(tmp_path, ops=ops), state, every=None, on_full="wait", timeout_s=30) as ck:
        one_step(ck, state)
        ck.save()
        ck.wait()
        one_step(ck, state)
        ops.fill(3)
        ck.save()
        ck.wait()
        room = threading.Timer(0.3, ops.empty)
        begun = time.monotonic()
        room.start()
        one_step(ck, state)
        assert time.monotonic() - begun > 0.2, "training was held"
        room.join()
        assert ck.stats.last_durable_step == 3
    assert "step_00000003" in verify_all(tmp_path)


@pytest.mark.parametrize("name", ["fsync", "fsync_dir", "pwrite", "rename", "link"])
def test_io_errors_surface(tmp_path, name):
    """EIO on one kind of operation during a save: an error with the cause, never a checkpoint that is not whole."""
    ops, state = ArmedOps(), make_state()
    with (
        pytest.raises(StorageError, match="device reported an error"),
        hf.Checkpointer(FaultyStorage(tmp_path, ops=ops), state, every=None) as ck,
    ):
        one_step(ck, state)
        ck.save()
        ck.wait()
        one_step(ck, state)
        ops._fail_on = {name: errno.EIO}
        ck.save()
        ck.wait()
        ops._fail_on = {}
        raise StorageError("device reported an error: no, the save survived it")  # a failed link is copied instead
    ops._fail_on = {}
    assert verify_all(tmp_path) >= {"step_00000001"}
    state = make_state()
    with hf.Checkpointer(tmp_path, state, every=None) as ck:
        assert_state_equal(state, at_step(ck.global_step))


def one_save_with_eio(root, at):
    """Save step 1, then step 2 with one EIO at operation ``at``; returns the operations of the second save."""
    ops, state = ArmedOps(), make_state()
    try:
        with hf.Checkpointer(FaultyStorage(root, ops=ops), state, every=None) as ck:
            one_step(ck, state)
            ck.save()
            ck.wait()
            one_step(ck, state)
            ops.arm(crash_after=None)
            ops._fail_at = {} if at is None else {ops.count + at: errno.EIO}
            ck.save()
            ck.wait()
            durable = 2
    except StorageError:
        durable = 1
    ops._fail_at = {}
    verify_all(root)
    state = make_state()
    with hf.Checkpointer(FaultyStorage(root, ops=ArmedOps()), state, every=None) as ck:
        assert durable <= ck.global_step <= 2
        assert_state_equal(state, at_step(ck.global_step))
    return ops.since


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_eio_at_each_operation(tmp_path, stride):
    """EIO once in a save: an error or a whole checkpoint; the next start finds the newest whole one."""
    count = one_save_with_eio(tmp_path / "dry", None)
    assert count > 20
    for at in range(0, count, stride):
        one_save_with_eio(tmp_path / str(at), at)


def test_short_writes(tmp_path):
    """A disk that takes 1 000 bytes at a time: everything arrives."""
    state = make_state()
    with hf.Checkpointer(FaultyStorage(tmp_path, ops=None, short_write=1000), state, every=None) as ck:
        one_step(ck, state)
    assert verify_all(tmp_path) == {"step_00000001"}


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("operation", ["open", "mkdir"])
def test_no_permission_is_said_before_the_first_step(tmp_path, code, operation):
    """EACCES and EROFS: StoragePermissionError on entering, nothing is trained."""
    storage = FaultyStorage(tmp_path / "new", fail_on={operation: code})
    with pytest.raises(StoragePermissionError), hf.Checkpointer(storage, make_state()):
        raise AssertionError("the body must not run")


class HangingOps(ArmedOps):
    """A disk that stops answering."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()
        self.go.set()

    def fsync(self, fd):
        self.go.wait(120)
        super().fsync(fd)


def test_a_hang_is_bounded(tmp_path):
    """A disk that hangs in a save: an error that says so after timeout_s, not an endless wait."""
    ops, state = HangingOps(), make_state()
    ck = hf.Checkpointer(FaultyStorage(tmp_path, ops=ops), state, every=None)
    begun = 0.0
    try:
        with pytest.raises(HoldfastError, match="timeout_s"), ck:
            one_step(ck, state)
            ck.save()
            ck.wait()
            one_step(ck, state)
            ops.go.clear()
            # Not from the start: a busy machine may need longer for what is no hang.
            ck.options = dataclasses.replace(ck.options, timeout_s=0.5)
            ck._session.timeout_s = ck._session.saves.timeout_s = 0.5
            begun = time.monotonic()
            ck.save()
            ck.wait()
        assert time.monotonic() - begun < 60
    finally:
        ops.go.set()
    assert "step_00000001" in verify_all(tmp_path)


def test_a_hang_at_the_start_is_bounded(tmp_path):
    """A disk that hangs in the preflight: the same, before the first step."""
    ops = HangingOps()
    ops.go.clear()
    begun = time.monotonic()
    try:
        with (
            pytest.raises((HoldfastError, TimeoutError)),
            hf.Checkpointer(FaultyStorage(tmp_path, ops=ops), make_state(), every=None, timeout_s=0.5),
        ):
            raise AssertionError("the body must not run")
        assert time.monotonic() - begun < 60
    finally:
        ops.go.set()
