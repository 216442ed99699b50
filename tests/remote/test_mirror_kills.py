"""Mirrored runs whose processes are killed in the middle of uploads, with and without the local disk surviving."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from catalog_kit import catalog_of
from mirror_kit import bucket
from object_kit import BUCKET, moto, s3_environment
from process_kit import wait_until

import holdfast as hf
from holdfast.storage import LocalStorage, Storage
from holdfast.testing import Fault, FaultProxy

_STEPS = 20


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    with moto() as url, FaultProxy(url) as one:
        yield one


class Life:
    """One start of the trainer, and what it says."""

    def __init__(self, proxy: FaultProxy, name: str, local: Path, *, steps: int = _STEPS, pause: float = 0.0) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "S3_"))}
        environment |= s3_environment(proxy.url) | {"PYTHONPATH": os.pathsep.join(sys.path)}
        script = str(Path(__file__).with_name("mirror_trainer.py"))
        command = [sys.executable, script, f"s3://{BUCKET}/{name}", str(local), str(steps), str(pause)]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.writer = 0

    def wait_for(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(f"{word} "):
                return line.removeprefix(f"{word} ").strip()
        _, err = self.process.communicate(timeout=30)
        raise AssertionError(f"ended without saying {word!r}: {err}")

    def start(self) -> tuple[int, str]:
        """Give the step and the checkpoint that it goes on from."""
        step, writer, source = self.wait_for("at").split()
        self.writer = int(writer)
        return int(step), source

    def kill(self, *, writer: bool) -> None:
        """SIGKILL to the trainer, and to its writer."""
        for pid in (self.process.pid, self.writer) if writer else (self.process.pid,):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> str:
        result = self.wait_for("end")
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        return result

    def bury(self) -> None:
        """Wait for the end of both processes."""
        self.process.communicate(timeout=30)
        assert wait_until(lambda: not _lives(self.writer), 40)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _newest(*sides: Storage) -> int:
    return max((record.step for side in sides for record in catalog_of(side).records()), default=0)


@pytest.fixture(scope="module")
def calm(proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give what a run ends with that nobody kills."""
    life = Life(proxy, "calm", tmp_path_factory.mktemp("calm"))
    life.start()
    return life.end()


def _kill_at(proxy: FaultProxy, life: Life, request: int, *, writer: bool) -> None:
    """Kill when the ``request``-th write into a checkpoint at the remote from now on arrives, and is carried out."""
    killed = threading.Event()

    def act(_: object) -> None:
        life.kill(writer=writer)
        killed.set()

    proxy.inject(Fault(kind="call", method="PUT", path="/step_", at=request, carried_out=True, call=act))
    assert killed.wait(60)


def _sweep(proxy: FaultProxy, tmp_path: Path, name: str, result: str, kills: list[tuple[int, bool, bool]]) -> None:
    """Kill life after life, look at what is there, and end with ``result``.

    Each kill is (number of the write, whether the writer dies too, whether the local disk is lost).
    """
    local, remote = tmp_path / "scratch", bucket(proxy, name)
    expected = there = 0
    for request, writer, is_lost in kills:
        life = Life(proxy, name, local, pause=0.15)
        step, source = life.start()
        assert step == expected, source
        _kill_at(proxy, life, request, writer=writer)
        life.bury()
        proxy.inject()
        here = _newest(LocalStorage(local))
        if not writer:
            assert _newest(remote) == here, "the writer of a dead trainer uploads what it has"
            assert json.loads(remote.read("lease.json"))["released"] is True
        if is_lost:
            shutil.rmtree(local)
            local.mkdir()
        expected = _newest(LocalStorage(local), remote)
        assert _newest(remote) >= there, "what the remote had stays"
        there = _newest(remote)
    last = Life(proxy, name, local)
    step, _ = last.start()
    assert step == expected
    assert last.end() == result
    assert [record.step for record in catalog_of(remote).records()][:3] == [_STEPS, _STEPS - 1, _STEPS - 2]
    for info in remote.list("", recursive=False):
        directory = info.path.rstrip("/")
        if directory.startswith("step_"):  # nothing half-sent is left, files that have one name in all saves included
            found = hf.Checkpoint.at(remote, directory)
            assert found.verify(deep=True).ok, directory
            assert "config.json" in {entry.path for entry in found.manifest.files}
            assert not [one.path for one in remote.list(directory) if "/plan-" in one.path]


@pytest.mark.slow
def test_killed_in_the_middle_of_an_upload(proxy: FaultProxy, tmp_path: Path, calm: str) -> None:
    """A machine dies with its disk while a checkpoint is half sent: resumed from the newest complete one, bit-exact."""
    _sweep(proxy, tmp_path, "one-kill", calm, [(5, True, True)])


@pytest.mark.long
def test_killed_at_many_moments(proxy: FaultProxy, tmp_path: Path, calm: str) -> None:
    """Trainer alone or with its writer, at every request of an upload, the disk surviving or not: always bit-exact."""
    kills = [(request, request % 2 == 0, request % 3 == 0) for request in range(10)]
    _sweep(proxy, tmp_path, "many-kills", calm, kills)


@pytest.mark.long
def test_a_writer_does_not_hang_on_a_silent_remote(proxy: FaultProxy, tmp_path: Path) -> None:
    """The remote answers nothing any more and the trainer is killed: its writer ends all the same."""
    life = Life(proxy, "silent", tmp_path / "scratch", pause=0.2)
    life.start()
    assert life.wait_for("saved") == "1"
    proxy.inject(Fault(kind="silence", seconds=200))
    assert life.wait_for("saved") == "2"
    life.kill(writer=False)
    life.bury()
    proxy.inject()
    assert _newest(LocalStorage(tmp_path / "scratch")) >= 2
    last = Life(proxy, "silent", tmp_path / "scratch")
    assert last.start()[0] >= 2
    last.end()
    assert _newest(bucket(proxy, "silent")) == _STEPS
