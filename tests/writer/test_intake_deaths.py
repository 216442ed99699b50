"""The trainer dies right after it handed something over: the writer finishes it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import writer_kit as kit
import writer_trainer
from process_kit import wait_gone

from holdfast import Checkpoint
from holdfast.errors import CheckpointError
from holdfast.storage import LocalStorage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import PartsJob


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


def killed(mode: str, root: Path, trainers: list[subprocess.Popen[str]]) -> tuple[str, int]:
    """Start a trainer, kill its process group when it has handed over; what it said, and its writer."""
    trainer = kit.start_trainer(mode, root)
    trainers.append(trainer)
    writer = int(kit.wait_line(trainer, "writer"))
    said = kit.wait_line(trainer, "submitted")
    os.killpg(trainer.pid, signal.SIGKILL)
    trainer.wait(60)
    return said, writer


def commit_of(save_id: str, wait_s: float) -> PartsJob:
    fields = {"checkpoint_id": f"id-{save_id}"}
    return PartsJob(directory="step_00000001", save_id=save_id, writers=(0,), manifest=fields, wait_s=wait_s, run=False)


def test_a_driver_killed_after_ingest_is_committed(tmp_path: Path, trainers: list[subprocess.Popen[str]]) -> None:
    """SIGKILL of the driver's process group right after ingest: committed, recorded, nothing handed over is left."""
    directory, writer = killed("intake", tmp_path, trainers)
    assert wait_gone(writer)
    storage = LocalStorage(tmp_path)
    assert Checkpoint.at(storage, directory).verify().ok
    stored = kit.stored(storage, directory)
    assert {name: stored[name] for name in ("0.bin", "1.bin")} == {
        f"{number}.bin": content for number, content in enumerate(writer_trainer.contents())
    }
    run = json.loads(storage.read("run.json"))
    assert [row[0] for row in run["rows"]] == [directory]
    assert sorted(path.name for path in tmp_path.iterdir()) == [directory, "latest", "reports", "run.json"]


def test_a_worker_killed_after_its_part_was_sealed(tmp_path: Path, trainers: list[subprocess.Popen[str]]) -> None:
    """SIGKILL of a worker right after its part was handed over: its writer stores it, and the driver's commits it."""
    storage = LocalStorage(tmp_path)
    with WriterClient.start(storage) as driver:
        save_id, writer = killed("part", tmp_path, trainers)
        job = commit_of(save_id, wait_s=20)
        driver.commit_parts(storage, job).result(30)
        assert wait_gone(writer)
    assert Checkpoint.at(storage, "step_00000001").verify().ok
    assert writer_trainer.contents()[0] in kit.stored(storage, "step_00000001").values()


def test_a_part_whose_writer_died_too_is_swept(tmp_path: Path, trainers: list[subprocess.Popen[str]]) -> None:
    """Worker and writer both killed: the commit gives up in time and leaves nothing."""
    storage = LocalStorage(tmp_path)
    trainer = kit.start_trainer("part", tmp_path)
    trainers.append(trainer)
    writer = int(kit.wait_line(trainer, "writer"))
    save_id = kit.wait_line(trainer, "submitted")
    os.kill(trainer.pid, signal.SIGSTOP)  # so that it cannot start the writer again
    os.kill(writer, signal.SIGKILL)
    trainer.kill()
    trainer.wait(60)
    assert wait_gone(writer)
    job = commit_of(save_id, wait_s=0.2)
    with WriterClient.start(storage) as driver:
        error = driver.commit_parts(storage, job).exception(30)
    if error is not None:  # else it was too late for the part
        assert isinstance(error, CheckpointError)
        assert not (tmp_path / "step_00000001").exists()
