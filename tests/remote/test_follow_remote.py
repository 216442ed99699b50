"""`follow` and `hold` against a real S3 server, while a real trainer works, is killed and started again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from catalog_kit import catalog_of
from object_kit import BUCKET, moto, s3_environment
from process_kit import wait_until

import holdfast as hf
from holdfast.run.external import EXTERNAL
from holdfast.storage import resolve

_HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with moto() as url:
        yield url


@pytest.fixture
def trainers(endpoint, monkeypatch) -> Iterator[Trainers]:
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_"))]:
        monkeypatch.delenv(name)
    for name, value in s3_environment(endpoint).items():
        monkeypatch.setenv(name, value)
    with contextlib.ExitStack() as stack:
        yield Trainers(stack)


class Trainers:
    """Starts trainers, and ends those that a test leaves."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def start(self, script: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(_HERE / script), *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        # Nobody reads what it prints but the line that names its writer.
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        self._stack.callback(process.stdout.close)
        self._stack.callback(process.wait, 60)
        self._stack.callback(process.kill)
        return process


def writer_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("at "))
    return int(line.split()[2])


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the trainer and its writer."""
    for pid in (process.pid, writer_of(process)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(30)


@pytest.mark.slow
def test_through_a_kill_and_a_restart(trainers) -> None:
    """What both lives save comes in order, each once; the end of the run ends it; the trainer keeps nothing for us."""
    run = f"s3://{BUCKET}/kill"
    first = trainers.start("follow_trainer.py", run, 10, 3, 0.2)
    seen: list[tuple[int, int]] = []
    for checkpoint in hf.follow(run, start="first", poll_s=0.1, timeout_s=180):
        manifest = checkpoint.manifest
        assert manifest is not None
        seen.append((manifest.attempt, manifest.step or 0))
        if len(seen) == 3:
            kill(first)
            trainers.start("follow_trainer.py", run, 10, 3, 0.2)
    attempts = sorted({attempt for attempt, _ in seen})
    assert attempts == [1, 2]
    assert seen == sorted(set(seen))
    assert seen[-1] == (2, 10)
    assert len([step for attempt, step in seen if attempt == 2]) >= 3
    storage = resolve(run)
    assert [record.step for record in catalog_of(storage).records()][:3] == [10, 9, 8]
    assert not list(storage.list(EXTERNAL))


@pytest.mark.slow
def test_a_hold_keeps_retention_away(trainers) -> None:
    """One that is held stays whole while newer ones come and go, what is reported of it is kept; then it goes."""
    run = f"s3://{BUCKET}/hold"
    trainers.start("follow_trainer.py", run, 24, 1, 0.2)
    storage = resolve(run)
    feed = hf.follow(run, start="first", poll_s=0.1, timeout_s=180)
    for checkpoint in feed:
        with contextlib.suppress(FileNotFoundError, hf.CheckpointNotFoundError), checkpoint.hold(at_most_s=300):
            held = checkpoint.step or 0
            if held > 16 or not checkpoint.verify().ok:
                continue
            checkpoint.report(val=0.5)
            assert wait_until(lambda held=held: catalog_of(storage).newest().step >= held + 4, 120)
            assert checkpoint.verify().ok
            assert {record.step for record in catalog_of(storage).records()} >= {held}
            break
    else:
        raise AssertionError("nothing could be held")
    last = [one.step for one in feed][-1]
    assert last == 24
    catalog = catalog_of(storage)
    assert [record.step for record in catalog.records()] == [24]
    rules = {one.name: one.why for one in catalog.index.read_history().events if one.what == "deleted"}
    assert rules[checkpoint.name] == "not among last 1"


@pytest.mark.long
@pytest.mark.parametrize("side", ["remote", "local"])
def test_a_mirrored_run(trainers, tmp_path, side) -> None:
    """Either side of a mirrored run can be followed through a kill; each has what it has when it has it."""
    run, local = f"s3://{BUCKET}/mirror-{side}", tmp_path / "local"
    first = trainers.start("mirror_trainer.py", run, local, 8, 0.2)
    seen: list[tuple[int, int]] = []
    for checkpoint in hf.follow(run if side == "remote" else local, start="first", poll_s=0.1, timeout_s=180):
        manifest = checkpoint.manifest
        assert manifest is not None
        seen.append((manifest.attempt, manifest.step or 0))
        if len(seen) == 2:
            kill(first)
            trainers.start("mirror_trainer.py", run, local, 8, 0.2)
    assert len(seen) == len(set(seen))
    assert seen[-1] == (2, 8)
    assert {attempt for attempt, _ in seen} == {1, 2}
