"""One writer for several parts of a trainer, each with a client of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import writer_kit as kit
from process_kit import wait_until

from holdfast.errors import HoldfastError, RunBusyError, SessionError
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.writer.arena import MAILBOX_BYTES, WHO_LEFT, Arena, StepMailbox
from holdfast.writer.client import SharedWriter, WriterClient
from holdfast.writer.uploads.files import UploadJob

OF = "0123abcd"


def is_free(storage: LocalStorage, of: str = OF) -> bool:
    """Whether another writer gets the lease of a name at once."""
    with WriterClient.start(storage, thread=True) as other:
        try:
            other.take_name(storage, of, start_id="ffff", wait_s=0.0).result(60)
        except RunBusyError:
            return False
        return True


def test_a_run_files_and_uploads_have_one_process(tmp_path: Path) -> None:
    """The first to close gives back what it had, the others go on; the last ends the process."""
    run, files, far = (LocalStorage(tmp_path / name) for name in ("run", "files", "far"))
    shared = SharedWriter()
    of_run, of_files, of_uploads = (
        shared.client(run, for_run=True),
        shared.client(files),
        shared.client(run, remote=far),
    )
    process = of_run._conversation.process
    assert process is not None
    assert of_run.process_id == of_files.process_id == of_uploads.process_id == process.pid
    opened = of_run.open_run(run, owner={"start_id": "aaaa"}).result(60)
    of_files.take_name(files, OF, start_id="aaaa").result(60)
    with kit.fill([b"x" * 9000]) as arena:
        job = kit.make_job([b"x" * 9000], directory="one", manifest={"run_id": opened.run_id})
        of_run.submit(run, job, [b"{}"], arena).result(60)
    assert not is_free(files)
    of_files.close()
    of_files.close()
    assert of_files.closed
    assert not of_run.closed
    assert is_free(files)
    with WriterClient.start(run) as other, pytest.raises(RunBusyError):
        other.open_run(run, wait_s=0.0).result(60)
    of_run.close(why="it has ended")
    with WriterClient.start(run) as other:
        other.open_run(run, wait_s=0.0).result(60)  # the lease is free, although the process goes on
    of_uploads.upload(run, far, UploadJob(path="there", name="one", kind="checkpoint")).result(60)
    assert kit.stored(far, "there") == kit.stored(run, "one")
    assert process.poll() is None
    of_uploads.close()
    assert process.poll() == 0
    with pytest.raises(SessionError, match="closed"):
        of_uploads.take_name(files, OF, start_id="aaaa")
    again = shared.client(files)
    assert again.process_id != process.pid
    again.close()


def test_one_name_in_two_folders(tmp_path: Path) -> None:
    """Each folder has a lease of its own for it: giving one back leaves the other held."""
    first, second = LocalStorage(tmp_path / "first"), LocalStorage(tmp_path / "second")
    with WriterClient.start(first) as client:
        for storage in (first, second):
            client.take_name(storage, OF, start_id="aaaa").result(60)
        client.give_back_name(first, OF).result(60)
        assert is_free(first)
        assert not is_free(second)
        client.verify_name(second, OF).result(60)
        with pytest.raises(HoldfastError, match="does not hold"):
            client.verify_name(first, OF).result(60)


def test_what_does_not_fit_has_a_writer_of_its_own(tmp_path: Path) -> None:
    """A storage of this process has a thread; a second run has a second process; whoever needs neither shares."""
    shared, disk, memory = SharedWriter(), LocalStorage(tmp_path), MemoryStorage("shared-writer")
    clients = [shared.client(disk, for_run=True), shared.client(memory), shared.client(disk, for_run=True)]
    clients += [shared.client(disk), shared.client(memory, for_run=True)]
    first, thread, second, third, same = clients
    assert first.process_id != second.process_id
    assert third.process_id == first.process_id
    assert thread.process_id is same.process_id is None
    assert thread._conversation is same._conversation
    first.close()
    clients.append(shared.client(disk, for_run=True))
    assert clients[-1].process_id == third.process_id, "the place of the run is free again"
    for client in clients:
        client.close()


def test_a_writer_that_dies_is_started_again_for_all(tmp_path: Path) -> None:
    """The next one holds the run and the names of every client that is still there, and of no other."""
    run, files, gone = (LocalStorage(tmp_path / name) for name in ("run", "files", "gone"))
    shared = SharedWriter()
    of_run, of_files, of_gone = shared.client(run, for_run=True), shared.client(files), shared.client(gone)
    of_run.open_run(run, owner={"start_id": "aaaa"}).result(60)
    for client, storage in ((of_files, files), (of_gone, gone)):
        client.take_name(storage, OF, start_id="aaaa").result(60)
    of_gone.close()
    process = of_run._conversation.process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    of_files.verify_name(files, OF).result(60)
    of_run.run_op("confirm", names=[]).result(60)
    assert of_run.process_id not in (None, process.pid)
    assert is_free(gone)
    assert not is_free(files)
    of_run.close()
    of_files.close()


def test_a_rank_leaves_the_others_while_its_writer_goes_on(tmp_path: Path) -> None:
    """They hear at once why, and a save that they begin afterwards fails, although uploads keep the process."""
    storage, shared = LocalStorage(tmp_path), SharedWriter()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Arena.create(MAILBOX_BYTES) as one,
        Arena.create(MAILBOX_BYTES) as two,
        WriterClient.start(storage) as other,
    ):
        of_run, of_uploads = shared.client(storage, for_run=True), shared.client(storage)
        where: dict[str, Any] = {"addresses": [listener.getsockname()], "token": "0123456789abcdef", "timeout_s": 60.0}
        for client, rank, mailbox in ((other, 0, one), (of_run, 1, two)):
            StepMailbox(mailbox.view).clear(step=0)
            client.join(mailbox, rank=rank, world_size=2, listener=None if rank else listener.fileno(), **where)
        of_run.ask_ranks("save 1").result(60)
        of_run.close(why="it has left the training (ValueError)")
        assert wait_until(lambda: "left the training" in str(other.ask_ranks(WHO_LEFT).exception(60)))
        assert of_uploads._conversation.membership is None
        of_uploads.take_name(storage, OF, start_id="aaaa").result(60)
        of_uploads.close()


KILLED = """
import os, signal, sys
from holdfast.storage import LocalStorage
from holdfast.writer.client import SharedWriter
import writer_kit as kit

root = sys.argv[1]
run, far, shared = LocalStorage(root + "/run"), LocalStorage(root + "/far"), SharedWriter()
of_run, of_files = shared.client(run, for_run=True), shared.client(run)
opened = of_run.open_run(run, owner={"start_id": "aaaa"}).result(60)
of_files.take_name(run, "0123abcd", start_id="aaaa").result(60)
arena = kit.fill([b"x" * 9000])
os.kill(of_run.process_id, signal.SIGSTOP)
job = kit.make_job([b"x" * 9000], directory="one", run=True, manifest={"run_id": opened.run_id})
of_run.submit(run, job, [b"{}"], arena)
of_files.close(0.0)
print(of_run.process_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_trainer_killed_after_one_part_has_left(tmp_path: Path) -> None:
    """What is sealed is committed, and all leases are given back."""
    path = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    os.kill(int(ended.stdout), signal.SIGCONT)
    storage = LocalStorage(tmp_path / "run")
    with WriterClient.start(storage) as other:
        opened = other.open_run(storage, wait_s=60.0).result(120)
        assert [row[0] for row in opened.records] == ["one"]
        other.take_name(storage, OF, start_id="ffff", wait_s=60.0).result(120)


def test_steps_of_the_run_before_do_not_hinder_a_rescue(tmp_path: Path) -> None:
    """One writer, two runs: the second, younger in steps, has its snapshot rescued, and none of the first."""
    shared, contents = SharedWriter(), [b"x" * 5000]
    with shared.client(LocalStorage(tmp_path)) as other, kit.fill(contents) as saved, kit.fill(contents) as kept:
        for name, steps in {"a": (100, 101), "b": (50, 60)}.items():
            (tmp_path / name).mkdir()
            storage = LocalStorage(tmp_path / name)
            with shared.client(storage, for_run=True) as client:
                assert client.process_id == other.process_id
                opened = client.open_run(storage, owner={"start_id": name * 8}).result(60)
                for step, arena in zip(steps, (saved, kept), strict=True):
                    about = {"run_id": opened.run_id, "attempt": opened.attempt}
                    if name == "b" and step == 60:
                        about["extra"] = {"content": "weights"}  # no start goes on there
                    job = kit.make_job(contents, step=step, start_id=name * 8, run=True, manifest=about)
                    if step in (100, 60):
                        client.submit(storage, job, [b"{}"], arena).result(60)
                    else:
                        client.hold(storage, job, [b"{}"], arena)
                if name == "b":
                    assert client.rescue("a test").result(60) == "step_00000050"
                client.run_op("close_run", reason="stopped").result(60)
        assert not (tmp_path / "a" / "step_00000101").exists()
