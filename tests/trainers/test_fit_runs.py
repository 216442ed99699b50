"""`TorchTrainer.fit`: resuming, two drivers, dead drivers, signals, mismatches, places that cannot work."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fit_functions import meet, rank, save_directory
from fit_kit import LIMIT_S, epochs, make, read
from process_kit import wait_gone

import holdfast as hf

pytestmark = pytest.mark.usefixtures("forked")

SCRIPT = Path(__file__).with_name("fit_script.py")


def start_script(root: Path, **config: Any) -> subprocess.Popen[str]:
    """Start a driver of its own."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), json.dumps({"root": str(root), **config})],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Read the driver's standard output up to a line with ``text``; give that line."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"no {text!r}: {process.communicate()}")


@contextlib.contextmanager
def running(root: Path, **config: Any) -> Iterator[subprocess.Popen[str]]:
    process = start_script(root, **config)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def test_the_same_script_again_resumes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A finished run says so, and trains on if train_func has more to do."""
    make(tmp_path, train_loop_config={"epochs": 2}).fit()
    result = make(tmp_path, train_loop_config={"epochs": 4}).fit()
    assert epochs(result) == [0, 1, 2, 3]
    assert os.readlink(tmp_path / "run" / "latest") == "checkpoint_000003"
    told = capfd.readouterr().err
    assert "run resumes from checkpoint_000001 at report 2 (attempt 2)" in told
    assert "this run had finished after report 2: train_func runs again and goes on from there" in told


@pytest.mark.slow
def test_resume_from_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A Checkpoint, its path or a dict start a new run; a run with checkpoints of its own goes on with these."""
    first = make(tmp_path, name="first", train_loop_config={"epochs": 2}).fit()
    assert first.checkpoint is not None
    by_handle = make(tmp_path, name="second", resume_from_checkpoint=first.checkpoint).fit()
    assert epochs(by_handle) == [2, 3]
    assert read(by_handle.checkpoint) == "3"
    by_path = make(tmp_path, name="third", resume_from_checkpoint=first.checkpoint.path).fit()
    assert epochs(by_path) == [2, 3]
    assert f"third starts from {first.checkpoint.path} (attempt 1)" in capfd.readouterr().err
    again = make(
        tmp_path, name="second", resume_from_checkpoint=first.checkpoint, train_loop_config={"epochs": 5}
    ).fit()
    assert epochs(again) == [2, 3, 4]
    assert "this run has checkpoints of its own: resume_from_checkpoint is not used" in capfd.readouterr().err


@pytest.mark.slow
def test_resume_from_a_dictionary(tmp_path: Path) -> None:
    """A dictionary starts a run, on every rank."""

    def train() -> None:
        values = hf.load_checkpoint()
        assert values is not None
        hf.report({"epoch": values["epoch"], "rank": rank()})

    result = make(tmp_path, train, resume_from_checkpoint={"epoch": 7}).fit()
    assert result.metrics == {"epoch": 7, "rank": 0}


def test_resume_from_nothing(tmp_path: Path) -> None:
    """What is not there, or was never committed, is refused by the constructor."""
    with pytest.raises(hf.CheckpointNotFoundError, match="there is nothing at"):
        make(tmp_path, resume_from_checkpoint=tmp_path / "nothing")
    with pytest.raises(hf.ConfigError, match="resume_from_checkpoint=7"):
        make(tmp_path, resume_from_checkpoint=7)


def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The next older one is taken and the damaged one is named; if none is good nothing starts from zero."""
    result = make(tmp_path, train_loop_config={"epochs": 2}).fit()
    assert result.checkpoint is not None
    Path(result.checkpoint.path, "epoch.txt").unlink()
    result = make(tmp_path, train_loop_config={"epochs": 3}).fit()
    assert epochs(result) == [0, 1, 2]
    told = capfd.readouterr().err
    assert "run resumes from checkpoint_000000 at report 1 (attempt 2)" in told
    assert "set aside checkpoint_000001, its files are left alone" in told
    rotten = Path(result.checkpoint.path, "epoch.txt")
    rotten.write_bytes(bytes([rotten.read_bytes()[0] ^ 1]))  # as many bytes as before
    with pytest.raises(hf.CorruptCheckpointError, match=r"epoch.txt: its bytes are not what was written|epoch.txt"):
        make(tmp_path, name="other", resume_from_checkpoint=result.checkpoint.path)
    result = make(tmp_path, train_loop_config={"epochs": 3}).fit()
    assert epochs(result) == [0, 1, 2], "trained again, not read from the rotten file"
    assert "not what was written" in capfd.readouterr().err
    for path in (tmp_path / "run").glob("checkpoint_*/epoch.txt"):
        path.unlink()
    with pytest.raises(hf.CorruptCheckpointError, match="none of them is good"):
        make(tmp_path).fit()


def test_two_drivers(tmp_path: Path) -> None:
    """The second driver of a run is told who holds it, and starts nothing."""
    with running(tmp_path, forever=True) as first:
        wait_for(first, "epoch 0")
        with pytest.raises(hf.RunBusyError, match=str(first.pid)):
            make(tmp_path).fit()


def test_a_killed_driver(tmp_path: Path) -> None:
    """Its workers end with it, and the same script goes on from the newest checkpoint."""
    with running(tmp_path, forever=True) as first:
        wait_for(first, "epoch 2")
        workers = [int(wait_for(first, "pid").split()[-1]) for _ in range(2)]
        first.kill()
        first.wait(LIMIT_S)
    for pid in workers:
        assert wait_gone(pid)
    result = make(tmp_path, train_loop_config={"epochs": 6}).fit()
    assert epochs(result) == [0, 1, 2, 3, 4, 5]
    assert result.attempts[0].reason.startswith("the trainer died")
    assert result.attempts[1].resumed_from is not None


@pytest.mark.parametrize(
    ("number", "status"), [pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_signal_ends_the_run_in_order(tmp_path: Path, number: int, status: int) -> None:
    """Ctrl-C and SIGTERM stop the workers, note the end, and mean what they always mean."""
    with running(tmp_path, forever=True) as first:
        wait_for(first, "epoch 1")
        first.send_signal(number)
        _, told = first.communicate(timeout=LIMIT_S)
    assert first.returncode in (status, -number)
    name = signal.Signals(number).name
    assert f"run was stopped ({name}) at report" in told
    stored = hf.Result.from_path(tmp_path / "run")
    assert [one.reason for one in stored.attempts] == [name]
    assert stored.error is None


@pytest.mark.slow
def test_a_missing_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that ends, or takes too long, while others wait for its report is named."""

    def too_few() -> None:
        if rank() == 0:
            save_directory(0, {"epoch": 0})

    with pytest.raises(hf.TrainingFailedError) as caught:
        make(tmp_path, too_few).fit()
    assert isinstance(caught.value.failures[1], hf.ReportMismatchError)
    assert "report 1 was not called by rank 1: it ended without it" in str(caught.value)

    def too_late() -> None:
        if rank() == 1:
            time.sleep(60)
        save_directory(0, {"epoch": 0})

    monkeypatch.setenv("HOLDFAST_REPORT_TIMEOUT_S", "0.5")
    with pytest.raises(hf.TrainingFailedError, match=r"did not come to it within 0\.5 s"):
        make(tmp_path, too_late, name="late").fit()


def test_places_that_cannot_work(tmp_path: Path) -> None:
    """A place that workers cannot reach, or a file, is refused by the constructor."""
    with pytest.raises(hf.ConfigError, match="lives in the memory of this process"):
        make(tmp_path, storage_path="memory://runs")
    with pytest.raises(hf.ConfigError, match=r"memory of this process .* without workers, too"):
        make(tmp_path, workers=0, storage_path="memory://runs")
    (tmp_path / "run").write_text("")
    with pytest.raises(hf.ConfigError, match="is a file; a run needs a directory"):
        make(tmp_path)


def test_what_cannot_travel(tmp_path: Path) -> None:
    """A function that holds a lock cannot be sent; the error names it."""
    lock = threading.Lock()

    def train() -> None:
        with lock:
            meet()

    with pytest.raises(hf.ConfigError, match="lock"):
        make(tmp_path, train).fit()


def test_wrong_arguments() -> None:
    """Each wrong argument is named, those of Ray that we have not with what to do instead."""
    with pytest.raises(hf.ConfigError, match="takes one function"):
        make(Path("x"), None)
    with pytest.raises(hf.ConfigError, match="needs the arguments a, b"):
        make(Path("x"), lambda a, b: None)
    with pytest.raises(hf.ConfigError, match="no such argument: datasets: use prepare_data_loader"):
        make(Path("x"), datasets={})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        make(Path("x"), nonsense=1)
    with pytest.raises(hf.ConfigError, match="validation=3"):
        make(Path("x"), validation=3)
    with pytest.raises(hf.ConfigError, match="train_loop_config=3"):
        make(Path("x"), train_loop_config=3)


@pytest.mark.slow
def test_the_default_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without a name is called after its function, the day and an id, in a place of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    begun = time.strftime("%Y-%m-%d")
    result = make(tmp_path, workers=1, name=None, storage_path=None, train_loop_config={"epochs": 1}).fit()
    path = Path(result.path)
    assert path.parent == tmp_path / "holdfast_results"
    name, day = path.name.split("-", 1)
    assert name == "count_up"
    assert begun <= day[:10] <= time.strftime("%Y-%m-%d")
