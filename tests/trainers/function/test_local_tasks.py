"""Tasks of the local engine: single functions in processes of their own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from engine_kit import Driver

from holdfast.errors import TrainingError
from holdfast.trainers.function.engine import TaskEnded
from holdfast.trainers.function.engines.process_engine import LocalEngine

pytestmark = pytest.mark.usefixtures("all_forked")


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine(entry="engine_peer:serve")
    yield engine
    engine.close()


def run_task(engine: LocalEngine, function: Any, **options: Any) -> TaskEnded:
    task = engine.run_task(cloudpickle.dumps(function), **options)
    ended = Driver(engine).next(TaskEnded)
    assert ended.task == task
    return ended


def test_task_returns(engine: LocalEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A task's value comes back; its output is shown under its name and kept."""
    data = os.urandom(1 << 20)
    log = tmp_path / "logs" / "validation.log"
    ended = run_task(
        engine, lambda: print("at work") or {"accuracy": 0.5, "data": data}, name="validation", log_file=log
    )
    assert ended.error is None
    assert cloudpickle.loads(ended.result) == {"accuracy": 0.5, "data": data}
    assert "(validation) at work\n" in capfd.readouterr().out
    assert log.read_text() == "at work\n"


def test_task_raises(engine: LocalEngine) -> None:
    """Its exception comes back with the traceback it had there as its cause."""

    def fail() -> None:
        raise KeyError("missing")

    ended = run_task(engine, fail)
    assert ended.result is None
    assert isinstance(ended.error, KeyError)
    assert "in fail" in str(ended.error.__cause__)


def test_task_raises_what_cannot_be_rebuilt(engine: LocalEngine) -> None:
    """Such an exception arrives as TrainingError in words."""

    class OddError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def fail() -> None:
        raise OddError(1, 2)

    ended = run_task(engine, fail)
    assert isinstance(ended.error, TrainingError)
    assert "OddError" in str(ended.error)
    assert "1 and 2" in str(ended.error)


def test_task_dies(engine: LocalEngine) -> None:
    """A task that ends without a result says how it ended and what it last wrote."""

    def die() -> None:
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)

    ended = run_task(engine, die, name="validation")
    assert isinstance(ended.error, TrainingError)
    assert "the process of validation ended with status 3" in str(ended.error)
    assert "last words" in str(ended.error)


def test_task_is_killed(engine: LocalEngine) -> None:
    """A task that takes too long is ended with what it started, beside a running group."""
    driver = Driver(engine)
    driver.start(1)
    task = engine.run_task(cloudpickle.dumps(lambda: time.sleep(600)))
    engine.kill_task(task)
    ended = driver.next(TaskEnded)
    assert ended.task == task
    assert "SIGKILL" in str(ended.error)
    assert driver.run(0, lambda channel, facts: 1) == 1
    engine.kill_task(task)
    driver.clear()
