"""The driver: a controller, a real writer and storage, and workers that are scripts."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Script

from holdfast import Checkpoint
from holdfast.config import Keep
from holdfast.errors import RunBusyError, StorageError, TrainingFailedError
from holdfast.storage import LocalStorage
from holdfast.trainers.function.config import ValidationConfig
from holdfast.trainers.function.control.actions import RunState
from holdfast.trainers.function.control.drive import Driver, DriverOptions, Stops
from holdfast.trainers.function.control.plan import FailurePolicy, RunSpec, WaitLimits
from holdfast.trainers.function.control.result import Result
from holdfast.trainers.function.transit import error_to_wire


def make(root: Path, script: Script, *, options: dict[str, Any] | None = None, **fields: Any) -> Driver:
    storage = LocalStorage(root)
    plan = RunSpec(
        **{"run_name": "run", "storage": storage.describe() or {}, "uri": storage.uri, "num_workers": 1, **fields}
    )
    return Driver(plan, DriverOptions(blob=b"function", keep=Keep(), **(options or {})), storage, FakeEngine(script))


def drive(driver: Driver) -> Any:
    try:
        return driver.run()
    finally:
        driver.close()
        driver.close()


def reports(directory: Path, count: int = 1) -> Script:
    """A worker that reports one directory after another, in the run's own order."""

    def report(engine: FakeEngine, rank: int, index: int) -> None:
        source = directory / f"{rank}-{index}"
        source.mkdir()
        (source / "data").write_text(f"{rank} {index}")
        engine.report_directory(rank, index, source, owned=False)

    def script(engine: FakeEngine, rank: int, header: dict[str, Any], attachments: tuple[bytes, ...]) -> None:
        if header["do"] == "begin":
            assert attachments == (b"function",)
            engine.say(rank, on="running")
            report(engine, rank, header["first_index"])
        elif header["do"] == "answer":
            assert "error" not in header, header
            if header["call"] < count:
                report(engine, rank, header["call"] + 1)
            else:
                engine.say(rank, on="finished")
                engine.exit(rank)

    return script


def test_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Directories become committed checkpoints, the index says how it ended, and everything is closed."""
    before = set(threading.enumerate())
    driver = make(tmp_path / "run", reports(tmp_path, 3), num_workers=2)
    end = drive(driver)
    assert (end.state, end.error) == (RunState.FINISHED, None)
    result = Result.from_path(tmp_path / "run")
    assert result.checkpoint is not None
    assert result.checkpoint.verify()
    with result.checkpoint.as_directory() as path:
        assert sorted(os.listdir(path)) == ["data", "data.rank-1", "manifest.json"]
    assert [one.reason for one in result.attempts] == ["finished"]
    told = capfd.readouterr().err
    assert told.count("holdfast: run starts fresh") == 1
    assert "checkpoint_000000: several ranks reported different files" in told
    assert "run finished at report 3 after" in driver.last_words()
    assert set(threading.enumerate()) <= before


def test_a_failed_worker_starts_again(tmp_path: Path) -> None:
    """The second attempt gets the newest checkpoint, logs of its own, and a start id of its own."""
    begins: list[dict[str, Any]] = []
    good = reports(tmp_path, 2)

    def script(engine: FakeEngine, rank: int, header: dict[str, Any], attachments: tuple[bytes, ...]) -> None:
        if header["do"] == "begin":
            begins.append(header)
        if header["do"] == "answer" and len(begins) == 1:
            told, data = error_to_wire(ValueError("boom"))
            engine.say(rank, data, on="failed", error=told)
            engine.exit(rank, code=1)
            return
        good(engine, rank, header, attachments)

    driver = make(tmp_path / "run", script, policy=FailurePolicy(max_failures=1))
    assert drive(driver).state is RunState.FINISHED
    assert begins[1]["checkpoint"]["name"] == "checkpoint_000000"
    assert begins[1]["first_index"] == 2
    assert begins[0]["start_id"] != begins[1]["start_id"]
    logs = [spec.log_directory for spec in driver._engine.specs]  # type: ignore[attr-defined]
    assert logs == [tmp_path / "run/logs/attempt-00001", tmp_path / "run/logs/attempt-00002"]
    first, second = Result.from_path(tmp_path / "run").attempts
    assert first.details["failures"] == {"0": "ValueError: boom"}
    assert second.resumed_from == "checkpoint_000000"


def test_a_slow_callback_is_no_hang(tmp_path: Path) -> None:
    """The driver hears no worker meanwhile: that time does not count as their silence."""

    class Slow:
        def after_report(self, *_: Any) -> None:
            threading.Event().wait(0.6)

    options = {"callbacks": [Slow()]}
    limits = WaitLimits(hang_s=0.5)
    driver = make(tmp_path / "run", reports(tmp_path), options=options, limits=limits, has_callbacks=True)
    assert drive(driver).state is RunState.FINISHED


def test_a_run_that_gives_up(tmp_path: Path) -> None:
    """The error comes back with the exception itself; the index has it in words."""

    def script(engine: FakeEngine, rank: int, header: dict[str, Any], attachments: tuple[bytes, ...]) -> None:
        told, data = error_to_wire(ValueError("boom"))
        engine.say(rank, data, on="failed", error=told)
        engine.exit(rank, code=1)

    end = drive(make(tmp_path / "run", script))
    assert isinstance(end.error, TrainingFailedError)
    assert isinstance(end.error.failures[0], ValueError)
    assert isinstance(Result.from_path(tmp_path / "run").error, TrainingFailedError)


def test_a_busy_run(tmp_path: Path) -> None:
    """The second driver ends at once and leaves the first alone."""
    first = make(tmp_path / "run", lambda *_: None)
    thread = threading.Thread(target=drive, args=(first,))
    thread.start()
    while not first._session.is_open:
        threading.Event().wait(0.01)
    end = drive(make(tmp_path / "run", lambda *_: None))
    assert isinstance(end.error, RunBusyError)
    first.stop("SIGINT")
    thread.join(30)
    assert first.controller.state is RunState.ABORTED


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """The error of the storage is the end, and nothing was started."""
    (tmp_path / "run").write_text("a file")
    driver = make(tmp_path / "run", lambda *_: None)
    assert isinstance(drive(driver).error, StorageError)
    assert driver._engine.specs == []  # type: ignore[attr-defined]


def test_the_writer_dies(tmp_path: Path) -> None:
    """It is started again and repeats what was not done; the run notices nothing."""
    good = reports(tmp_path, 3)

    def script(engine: FakeEngine, rank: int, header: dict[str, Any], attachments: tuple[bytes, ...]) -> None:
        good(engine, rank, header, attachments)
        if header["do"] == "begin":
            pid = driver._session.client.process_id
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    driver = make(tmp_path / "run", script)
    assert drive(driver).state is RunState.FINISHED
    result = Result.from_path(tmp_path / "run")
    assert len(result.best_checkpoints) == 3
    assert len(result.metrics_dataframe) == 3


def test_a_validation(tmp_path: Path) -> None:
    """It gets a handle of the checkpoint; tensors and odd numbers become plain metrics."""

    def check(checkpoint: Checkpoint) -> dict[str, Any]:
        import torch

        with checkpoint.as_directory() as path:
            return {"val": torch.tensor(len(os.listdir(path)))}

    good = reports(tmp_path)

    class Asking(FakeEngine):
        def say(self, rank: int, *attachments: bytes, **header: Any) -> None:
            super().say(rank, *attachments, **(header | ({"validation": True} if header["on"] == "report" else {})))

    driver = make(tmp_path / "run", good, validates=True, options={"validation": ValidationConfig(check)})
    driver._engine = Asking(good)  # type: ignore[assignment]
    assert drive(driver).state is RunState.FINISHED
    assert Result.from_path(tmp_path / "run").best_checkpoints[0][1] == {"loss": 1, "val": 2}


def test_a_mistake_of_ours_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in the driver, workers are ended and the lease is given back."""
    driver = make(tmp_path / "run", reports(tmp_path))
    monkeypatch.setattr(driver.controller, "deadline", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drive(driver)
    assert driver._engine.closed  # type: ignore[attr-defined]
    assert drive(make(tmp_path / "run", reports(tmp_path / "run"))).state is RunState.FINISHED


def test_storage_that_is_stuck_is_said(tmp_path: Path) -> None:
    """Opening the run is bounded."""
    driver = make(tmp_path / "run", lambda *_: None, limits=WaitLimits(start_s=0.2))
    driver._session.client.open_run = lambda *_, **__: _Never()  # type: ignore[assignment, method-assign, return-value]
    assert "did not answer within 0.2 s" in str(drive(driver).error)


class _Never:
    def add_done_callback(self, _: Any) -> None:
        """Nothing is ever done."""


def test_signals_are_passed_on_and_put_back() -> None:
    """The first two go to the run, the third does what it always did; handlers are restored."""
    before = signal.getsignal(signal.SIGINT)
    told: list[str] = []
    with Stops(told.append) as stops:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert told == ["SIGTERM", "SIGINT"]
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGINT)
        assert caught.value.code == 143
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(SystemExit):
        stops.raise_again()


def test_signals_in_other_threads_are_left_alone() -> None:
    """Python handles them in the main thread only."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with Stops(lambda _: None):
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
