"""The writer killed at every storage operation of a run: it goes on, or the next driver does, with nothing lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from holdfast.config import Keep
from holdfast.storage import LocalStorage, Storage
from holdfast.testing import FaultyStorage
from holdfast.trainers.function.control.actions import RunState
from holdfast.trainers.function.control.drive import Driver, DriverOptions
from holdfast.trainers.function.control.plan import FailurePolicy, RunSpec
from holdfast.trainers.function.control.result import Result
from holdfast.trainers.function.transit import error_to_wire

NUM_REPORTS = 4
FAILS_AT = 2


class Training:
    """A worker that reports a directory a step, fails once, and goes on from what it is given."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self.failed = False

    def __call__(self, engine: FakeEngine, rank: int, header: dict[str, Any], _: tuple[bytes, ...]) -> None:
        if header["do"] == "begin":
            checkpoint = header["checkpoint"]
            if checkpoint is not None:
                data = Path(checkpoint["uri"], checkpoint["name"], "data").read_text()
                assert data == f"step {header['first_index'] - 1}"
            engine.say(rank, on="running")
            self._step(engine, rank, header["first_index"])
        elif header["do"] == "answer":
            if "error" in header:
                engine.exit(rank, code=1)
            else:
                self._step(engine, rank, header["call"] + 1)

    def _step(self, engine: FakeEngine, rank: int, index: int) -> None:
        if index > NUM_REPORTS:
            engine.say(rank, on="finished")
            engine.exit(rank)
            return
        if index == FAILS_AT + 1 and not self.failed:
            self.failed = True
            told, data = error_to_wire(ValueError("boom"))
            engine.say(rank, data, on="failed", error=told)
            engine.exit(rank, code=1)
            return
        source = self._scratch / f"{index}-{time.monotonic_ns()}"
        source.mkdir()
        (source / "data").write_text(f"step {index}")
        engine.report_directory(rank, index, source, owned=index % 2 == 0)


def drive(storage: Storage, script: Any, before: Callable[[Driver], None] = lambda _: None) -> Any:
    plan = RunSpec(
        run_name="run",
        storage=LocalStorage(storage.local_root or "").describe() or {},
        uri=storage.uri,
        num_workers=1,
        policy=FailurePolicy(max_failures=1),
    )
    driver = Driver(plan, DriverOptions(blob=b"", keep=Keep(last=2)), storage, FakeEngine(script))
    before(driver)
    try:
        return driver.run()
    finally:
        driver.close()


def check(root: Path) -> None:
    """Everything that was reported is there, the newest two are kept, and nothing else lies about."""
    result = Result.from_path(root)
    assert list(result.metrics_dataframe["loss"]) == [1, 2, 3, 4]
    assert result.checkpoint is not None
    assert (Path(result.checkpoint.path) / "data").read_text() == f"step {NUM_REPORTS}"
    for checkpoint, _ in result.best_checkpoints:
        assert checkpoint.verify()
    # One whose deletion was cut short has no manifest; the next start removes the rest.
    kept = {path.parent.name for path in root.glob("*/manifest.json") if not path.parent.is_symlink()}
    resumed = {one.resumed_from for one in result.attempts[-1:]}
    assert len(kept - resumed) <= 2
    assert not [path for path in root.iterdir() if path.name.startswith((".incoming", ".probe"))]


def give_up(driver: Driver) -> None:
    """Let the writer's death be the end, as if the driver had died with it."""
    driver._session.client._conversation._restarted = time.monotonic()


@pytest.fixture(scope="module")
def num_operations(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many operations a run has."""
    scratch = tmp_path_factory.mktemp("dry")
    trace = scratch / "trace"
    assert drive(FaultyStorage(scratch / "run", trace=str(trace)), Training(scratch)).state is RunState.FINISHED
    return len(trace.read_text().splitlines())


def sweep(root: Path, operations: range) -> None:
    deaths = 0
    for at in operations:
        for together in (False, True):
            scratch = root / f"{at}-{together}"
            scratch.mkdir()
            mark = scratch / "died"
            storage = FaultyStorage(scratch / "run", crash_at=at, crash_once=str(mark))
            end = drive(storage, Training(scratch), give_up if together else lambda _: None)
            deaths += mark.exists()
            if end.state is not RunState.FINISHED:
                assert together, (at, end.error)
                training = Training(scratch)
                training.failed = True
                end = drive(LocalStorage(scratch / "run"), training)
            assert end.state is RunState.FINISHED, (at, together, end.error)
            check(scratch / "run")
    assert deaths >= 1.6 * len(operations)


def test_some_operations(tmp_path: Path, num_operations: int) -> None:
    """Every 47th operation; `make sweep` takes them all."""
    assert num_operations > 60
    sweep(tmp_path, range(0, num_operations, 47))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_operation(tmp_path: Path, num_operations: int, part: int) -> None:
    """Every single one."""
    sweep(tmp_path, range(part, num_operations, 8))
