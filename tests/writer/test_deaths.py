"""Processes die at the worst moment; what was sealed is committed, what was not leaves no trace."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import writer_kit as kit
from process_kit import wait_gone, wait_until

from holdfast import Checkpoint
from holdfast.errors import HoldfastError, SessionError
from holdfast.run.index import RunIndex
from holdfast.run.view import RunView
from holdfast.storage import LocalStorage
from holdfast.testing import FaultyStorage
from holdfast.writer.arena import Arena
from holdfast.writer.client import WriterClient


@pytest.fixture
def trainers() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for trainer in started:
        trainer.kill()
        trainer.wait()
        for pipe in (trainer.stdin, trainer.stdout):
            assert pipe is not None
            pipe.close()


def test_trainer_killed_after_submit_is_committed(tmp_path: Path, trainers: list[subprocess.Popen[str]]) -> None:
    """SIGKILL of the trainer's whole process group right after submit: the writer commits, records, and ends."""
    trainer = kit.start_trainer("sealed", tmp_path)
    trainers.append(trainer)
    writer = int(kit.wait_line(trainer, "writer"))
    directory = kit.wait_line(trainer, "submitted")
    os.killpg(trainer.pid, signal.SIGKILL)
    trainer.wait(60)
    assert wait_gone(writer), "the writer outlives its trainer"
    storage = LocalStorage(tmp_path)
    manifest = Checkpoint.at(storage, directory).manifest
    data = {entry.size: storage.read(f"{directory}/{entry.path}") for entry in manifest.files}
    assert data[48 * kit.MIB] == kit.noise(1, 48 * kit.MIB)
    run = json.loads(storage.read("run.json"))
    assert [row[0] for row in run["rows"]] == [directory]
    assert not storage.exists("lease.json")


def test_trainer_killed_before_seal_leaves_nothing(tmp_path: Path, trainers: list[subprocess.Popen[str]]) -> None:
    """SIGKILL in the middle of a windowed save: no checkpoint, no file, the writer gone."""
    trainer = kit.start_trainer("unsealed", tmp_path)
    trainers.append(trainer)
    writer = int(kit.wait_line(trainer, "writer"))
    directory = kit.wait_line(trainer, "submitted")
    assert list((tmp_path / directory).iterdir())
    trainer.kill()
    trainer.wait(60)
    assert wait_gone(writer)
    assert not (tmp_path / directory).exists()


def test_trainer_killed_while_it_fills_the_arena_leaves_nothing(
    tmp_path: Path, trainers: list[subprocess.Popen[str]]
) -> None:
    """SIGKILL while the writer follows the copying: the arena is not complete, so the save is dropped."""
    trainer = kit.start_trainer("filling", tmp_path)
    trainers.append(trainer)
    writer = int(kit.wait_line(trainer, "writer"))
    directory = kit.wait_line(trainer, "submitted")
    trainer.kill()
    trainer.wait(60)
    assert wait_gone(writer)
    assert not (tmp_path / directory).exists()


def test_leftovers_are_swept_at_the_next_start(tmp_path: Path, trainers: list[subprocess.Popen[str]]) -> None:
    """Trainer and writer both killed in a save: invisible, and the next open_run removes the remains."""
    trainer = kit.start_trainer("unsealed", tmp_path)
    trainers.append(trainer)
    writer = int(kit.wait_line(trainer, "writer"))
    directory = kit.wait_line(trainer, "submitted")
    os.kill(trainer.pid, signal.SIGSTOP)  # so that it cannot start the writer again
    os.kill(writer, signal.SIGKILL)
    trainer.kill()
    trainer.wait(60)
    assert wait_gone(writer)
    assert list((tmp_path / directory).iterdir())
    storage = LocalStorage(tmp_path)
    with WriterClient.start(storage) as client:
        opened = client.open_run(storage).result(60)
        assert opened.attempt == 2
        assert opened.records == ()
        assert opened.swept
    assert not (tmp_path / directory).exists()


def test_a_forked_child_holds_nothing(tmp_path: Path, trainers: list[subprocess.Popen[str]]) -> None:
    """A child forked by the trainer has neither socket nor arena, and does not keep the writer alive."""
    trainer = kit.start_trainer("fork", tmp_path)
    trainers.append(trainer)
    writer = int(kit.wait_line(trainer, "writer"))
    child, *held = kit.wait_line(trainer, "child").split()
    try:
        assert held == []
        os.kill(trainer.pid, signal.SIGKILL)
        assert wait_gone(writer)
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_a_killed_writer_is_started_again_and_commits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SIGKILL of the writer in the middle of a save: restarted once, the job is repeated and commits, bit-exact."""
    storage = LocalStorage(tmp_path)
    contents = [kit.noise(3, 192 * kit.MIB), kit.noise(4, 5000)]
    with kit.fill(contents) as arena, WriterClient.start(storage) as client:
        opened = client.open_run(storage, owner={"start_id": "aaaaaaaa"}).result(60)
        first = client.process_id
        assert first is not None
        fields = {"run_id": opened.run_id, "attempt": opened.attempt}
        job = kit.make_job(contents, run=True, manifest=fields)
        future = client.submit(storage, job, [b"{}"], arena)
        deadline = time.monotonic() + 20
        while not (tmp_path / job.directory).exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(first, signal.SIGKILL)
        result = future.result(60)
        assert wait_until(lambda: client.process_id != first)  # on a busy machine the kill may have come too late
        assert "started again" in caplog.text
        manifest = Checkpoint.at(storage, job.directory).manifest
        assert manifest.checkpoint_id == job.manifest["checkpoint_id"]
        assert storage.read(f"{job.directory}/{job.files[0].path}") == contents[0]
        assert result.directory == job.directory
        records = client.run_op("records").result(20)
        assert [row[0] for row in records] == [job.directory]
        rows = json.loads(storage.read("run.json"))
        assert len(rows["attempts"]) == 1, "a new writer of the same trainer is the same attempt"
        client.run_op("report", rows=[{"step": 1, "metrics": {"loss": 1.0}}]).result(20)


def test_in_a_process_of_ray_the_writer_is_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray kills the children of what it ends: there the writer is none; it is started again, and ends, all the same."""
    monkeypatch.setenv("RAY_RAYLET_PID", str(os.getppid()))
    storage = LocalStorage(tmp_path)
    with kit.fill([b"x" * 5000]) as arena, WriterClient.start(storage) as client:
        first = client.process_id
        assert first is not None
        children = {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
        assert first not in children
        client.submit(storage, kit.make_job([b"x" * 5000]), [b"{}"], arena).result(30)
        os.kill(first, signal.SIGKILL)
        assert wait_until(lambda: client.process_id != first)
        second = client.process_id
        client.submit(storage, kit.make_job([b"x" * 5000], step=2), [b"{}"], arena).result(30)
    assert not os.path.exists(f"/proc/{second}/exe")


def test_a_save_that_follows_the_copying_survives_the_death_of_its_writer(tmp_path: Path) -> None:
    """Killed while it waits for the rest of the arena: the new writer gets the mark so far, then the rest; commits."""
    storage = LocalStorage(tmp_path)
    contents = [kit.noise(5, 80 * kit.MIB), kit.noise(6, 5000)]
    with kit.fill(contents) as arena, WriterClient.start(storage) as client:
        first = client.process_id
        assert first is not None
        job = kit.make_job(contents)
        future = client.submit(storage, job, [b"{}"], arena, filled=0)
        client.fill(future, 64 * kit.MIB)
        os.kill(first, signal.SIGKILL)
        assert wait_gone(first)
        client.fill(future, arena.size)
        future.result(60)
        assert client.process_id != first
        assert storage.read(f"{job.directory}/{job.files[0].path}") == contents[0]


def test_an_abandoned_filling_save_leaves_nothing(tmp_path: Path) -> None:
    """The trainer fails while copying: the future says abandoned, the files go, the next save works."""
    storage = LocalStorage(tmp_path)
    contents = [kit.noise(7, 2 * kit.MIB)]
    with kit.fill(contents) as arena, WriterClient.start(storage) as client:
        job = kit.make_job(contents)
        future = client.submit(storage, job, [b"{}"], arena, filled=4096)
        client.abandon(future)
        assert "abandoned" in str(future.exception(30))
        assert not (tmp_path / job.directory).exists()
        client.submit(storage, kit.make_job(contents, step=2), [b"{}"], arena).result(30)


def hold_one(client: WriterClient, storage: LocalStorage, contents: list[bytes], arena: Arena) -> None:
    """Have the writer hold a snapshot of a run that begins, and wait until it has it."""
    opened = client.open_run(storage, owner={"start_id": "aaaaaaaa"}).result(60)
    fields = {"run_id": opened.run_id, "attempt": opened.attempt, "step": 1}
    client.hold(storage, kit.make_job(contents, run=True, manifest=fields), [b"{}"], arena)
    client.run_op("records").result(20)


def cannot_send(number: int) -> Callable[..., None]:
    """A ``send`` of a channel that fails with this errno."""

    def send(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return send


def test_a_message_that_cannot_be_sent_rescues_no_snapshot_of_a_living_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for "release": the writer would take the closed channel for a death, and the trainer writes there."""
    storage = LocalStorage(tmp_path)
    contents = [kit.noise(8, 16 * kit.MIB)]
    with kit.fill(contents) as arena, WriterClient.start(storage) as client:
        hold_one(client, storage, contents, arena)
        first = client.process_id
        assert first is not None
        with monkeypatch.context() as patch:
            patch.setattr(client._conversation._channel, "send", cannot_send(errno.ENOMEM))
            assert client.release(arena), "the arena may change from now on"
        arena.view[:] = bytes(arena.size)
        assert wait_gone(first)
        assert client.run_op("records").result(60) == []


def test_a_writer_thread_whose_channel_ends_rescues_no_snapshot_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer lives by definition: nothing is rescued, the run does not say that it died, and calls say why."""
    storage = LocalStorage(tmp_path)
    contents = [kit.noise(8, kit.MIB)]
    with kit.fill(contents) as arena, WriterClient.start(storage, thread=True) as client:
        hold_one(client, storage, contents, arena)
        with monkeypatch.context() as patch:
            patch.setattr(client._conversation._channel, "send", cannot_send(errno.ENOBUFS))
            client.release(arena)
        arena.view[:] = bytes(arena.size)
        assert client._conversation._thread is not None
        client._conversation._thread.join(20)
        with pytest.raises(HoldfastError, match="a thread, was lost"):
            client.run_op("records")
    assert RunView(storage).names() == []
    assert RunIndex.load(storage).attempts[-1].reason == "nothing more could be sent to its writer"


def test_the_second_death_fails_the_futures(tmp_path: Path) -> None:
    """A writer that dies in every save: the future says so, later submits too, nothing hangs, nothing is visible."""
    storage = FaultyStorage(tmp_path, crash_at=4)
    with kit.fill([b"x" * 5000]) as arena, WriterClient.start(storage) as client:
        job = kit.make_job([b"x" * 5000])
        error = client.submit(storage, job, [b"{}"], arena).exception(60)
        assert isinstance(error, HoldfastError)
        assert "second time" in str(error)
        with pytest.raises(HoldfastError, match="second time"):
            client.submit(storage, job, [b"{}"], arena)
    assert not (tmp_path / job.directory / "manifest.json").exists()


def test_a_committed_job_is_not_an_error_when_repeated(tmp_path: Path) -> None:
    """The writer dies after its commit and before its answer: the repeated job finds its own manifest."""
    storage = LocalStorage(tmp_path)
    contents = [b"y" * 9000]
    with kit.fill(contents) as arena:
        job = kit.make_job(contents)
        with WriterClient.start(storage) as client:
            client.submit(storage, job, [b"{}"], arena).result(30)
        with WriterClient.start(storage) as client:
            conversation = client._conversation
            with conversation.lock:
                original, conversation.send = conversation.send, lambda *_a, **_k: None  # type: ignore[method-assign]
                future = client.submit(storage, job, [b"{}"], arena)
                conversation.send = original  # type: ignore[method-assign]
                conversation._arenas.clear()
                conversation._keys.clear()
                conversation.tell_storage(storage)
                conversation.tell_arena(arena)
                call = conversation._calls[future.number]
                conversation.send({**call.header, "call": future.number, "again": True}, call.attachments)
            assert future.result(30).directory == job.directory


def test_close_ends_the_writer(tmp_path: Path) -> None:
    """After close returns, the process is gone and pending saves are committed."""
    storage = LocalStorage(tmp_path)
    contents = [kit.noise(1, 8 * kit.MIB)]
    with kit.fill(contents) as arena:
        client = WriterClient.start(storage)
        pid = client.process_id
        assert pid is not None
        job = kit.make_job(contents)
        future = client.submit(storage, job, [b"{}"], arena)
        client.close()
        assert future.done()
        assert future.result().directory == job.directory
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        client.close()
        with pytest.raises(SessionError, match="closed"):
            client.submit(storage, job, [b"{}"], arena)


def test_close_with_a_limit_leaves_the_sealed_save_to_the_writer(tmp_path: Path) -> None:
    """close(timeout_s) returns in time although the writer hangs; once it goes on it commits and ends by itself."""
    storage = LocalStorage(tmp_path)
    contents = [kit.noise(1, 8 * kit.MIB)]
    with kit.fill(contents) as arena:
        client = WriterClient.start(storage)
        pid = client.process_id
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            job = kit.make_job(contents)
            future = client.submit(storage, job, [b"{}"], arena)
            begun = time.monotonic()
            client.close(0.2)
            assert time.monotonic() - begun < 20
            with pytest.raises(HoldfastError, match="still committed"):
                future.result(0)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert wait_gone(pid)
        assert Checkpoint.at(storage, job.directory).manifest


def test_signals_of_a_batch_system_do_not_stop_a_save(tmp_path: Path) -> None:
    """SIGTERM and SIGINT to the writer are ignored: it ends with its trainer, after the last save."""
    storage = LocalStorage(tmp_path)
    with Arena.create(4096) as arena, WriterClient.start(storage) as client:
        client.probe(storage, directory=".probe-aaaaaaaa").result(30)  # the handlers are in place
        pid = client.process_id
        assert pid is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
        job = kit.make_job([b"z" * 10])
        assert client.submit(storage, job, [b"{}"], arena).result(30).directory == job.directory
        assert client.process_id == pid


def test_a_writer_thread_ends_with_close() -> None:
    """A thread writer leaves no thread behind."""
    before = {thread.name for thread in threading.enumerate()}
    client = WriterClient.start(thread=True)
    assert client.process_id is None
    client.close()
    assert {thread.name for thread in threading.enumerate()} <= before
