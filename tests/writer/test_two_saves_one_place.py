"""Two saves into one directory, whose model files have one name in both: one checkpoint at most, and that whole."""

from __future__ import annotations

import threading

import pytest

from holdfast import Checkpoint
from holdfast.errors import CheckpointExistsError
from holdfast.format.parts import put_plan
from holdfast.storage import LocalStorage
from holdfast.writer.messages import FilePlan, SaveJob
from holdfast.writer.pipeline import Watermark
from holdfast.writer.save import SaveRunner, Task


def task(storage, save_id, content, gate=None):
    job = SaveJob(
        directory="a",
        save_id=save_id,
        files=(FilePlan(path="config.json", size=len(content), role="user", arena_offset=0, stable=False),),
        manifest={"checkpoint_id": save_id},
    )
    return Task(job=job, storage=storage, storage_key=1, view=memoryview(content.ljust(4096)), arriving=gate)


def save(job):
    runner = SaveRunner()
    try:
        return runner.save(job, None)
    finally:
        runner.close()


class Stopping(LocalStorage):
    """A disk at which the first save that creates its file waits until `go`."""

    def __init__(self, root):
        super().__init__(root)
        self.reached, self.go = threading.Event(), threading.Event()

    def create(self, path, size):
        writer = super().create(path, size)
        if not self.reached.is_set():
            self.reached.set()
            assert self.go.wait(30)
        return writer


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_that_another_one_overtook_commits_nothing_and_takes_nothing_away(tmp_path, fails):
    """The first is in the middle when the second begins; then it goes on, or fails. The second stays whole."""
    storage, errors = Stopping(tmp_path), []
    gate = Watermark(0, 4096)
    first = task(storage, "aaaaaaaa-1", b"first", gate)

    def run():
        try:
            save(first)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert storage.reached.wait(30)
        save(task(LocalStorage(tmp_path), "bbbbbbbb-1", b"second"))
    finally:
        if fails:
            gate.abandon(CheckpointExistsError("given up"))
        else:
            gate.rise(4096)
        storage.go.set()
        thread.join(30)
    assert isinstance(errors[0], CheckpointExistsError)
    assert (tmp_path / "a/config.json").read_bytes() == b"second"
    assert Checkpoint(str(tmp_path / "a")).verify().ok


def test_a_save_that_was_overtaken_does_not_commit_before_the_other_either(tmp_path):
    """The second took the first one's plan away and is still at it: the first must not commit the second's file."""
    storage, errors = Stopping(tmp_path), []
    first = task(LocalStorage(tmp_path), "aaaaaaaa-1", b"first", gate := Watermark(0, 4096))
    waits = Stopping(tmp_path)
    first = Task(job=first.job, storage=waits, storage_key=1, view=first.view, arriving=gate)

    def run(job):
        try:
            save(job)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(first,))]
    threads[0].start()
    assert waits.reached.wait(30)
    threads.append(threading.Thread(target=run, args=(task(storage, "bbbbbbbb-1", b"second"),)))
    threads[1].start()
    assert storage.reached.wait(30)
    gate.rise(4096)
    waits.go.set()
    threads[0].join(30)
    assert [type(error) for error in errors] == [CheckpointExistsError]
    assert not (tmp_path / "a/manifest.json").exists()
    storage.go.set()
    threads[1].join(30)
    assert len(errors) == 1
    assert Checkpoint(str(tmp_path / "a")).verify().ok


def test_saves_that_begin_at_one_time_are_both_refused(tmp_path, monkeypatch):
    """A plan that comes while ours is put is of a save that lives; its files, and ours, are left alone."""
    storage = LocalStorage(tmp_path)

    def put_two(*args):
        put_plan(storage, "a", "bbbbbbbb-1", ["config.json"], {})
        put_plan(*args)

    monkeypatch.setattr("holdfast.writer.save.put_plan", put_two)
    with pytest.raises(CheckpointExistsError, match="plan-00000-bbbbbbbb-1"):
        save(task(storage, "aaaaaaaa-1", b"first"))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["plan-00000-bbbbbbbb-1.json"]


def test_what_a_dead_save_planned_is_replaced(tmp_path):
    """Its plan and its files are there: the next save with these names sweeps them, and commits."""
    storage = LocalStorage(tmp_path)
    put_plan(storage, "a", "cccccccc-1", ["config.json", "old.json"], {})
    (tmp_path / "a/config.json").write_text("half")
    (tmp_path / "a/old.json").write_text("half")
    save(task(storage, "aaaaaaaa-1", b"first"))
    assert Checkpoint(str(tmp_path / "a")).verify().ok
    assert not (tmp_path / "a/old.json").exists()
    assert not list((tmp_path / "a").glob("plan-*"))
