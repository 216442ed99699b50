"""`TorchTrainer.fit`: dictionaries, uploads, validations, callbacks: every way to a checkpoint, with real workers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from fit_functions import attempt, fail, load_epoch, meet, rank, save_directory
from fit_kit import epochs, make, read

import holdfast as hf

pytestmark = pytest.mark.usefixtures("forked")


def dictionaries(config: dict[str, Any]) -> None:
    """Save a dictionary an epoch, in the style of Ray 1.x."""
    values = hf.load_checkpoint()
    start = 0 if values is None else values["epoch"] + 1
    for epoch in range(start, config.get("epochs", 4)):
        meet()
        if epoch == config.get("fail_epoch") and attempt() == 1:
            fail("kill", 1)
        hf.save_checkpoint(epoch=epoch, acc=config["scores"][epoch])
        hf.report({"epoch": epoch, "start": start})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "run").iterdir() if path.name.startswith("checkpoint"))


@pytest.mark.slow
def test_dictionaries_are_kept_by_score(tmp_path: Path) -> None:
    """One that is not strictly better than the worst of those kept is not written, but has a number."""
    best = hf.CheckpointStrategy(num_to_keep=2, checkpoint_score_attribute="acc")
    config = {"scores": [0.5, 0.7, 0.5, 0.9, 0.1], "epochs": 5}
    result = make(tmp_path, dictionaries, checkpoint_config=best, train_loop_config=config).fit()
    assert names(tmp_path) == ["checkpoint_000002", "checkpoint_000004"]
    assert result.best_checkpoint_path == tmp_path / "run" / "checkpoint_000004"
    assert result.latest_checkpoint == {"epoch": 4, "acc": 0.1}  # the newest, which was not written
    again = {"scores": [0.0] * 5 + [0.8], "epochs": 6}
    result = make(tmp_path, dictionaries, checkpoint_config=best, train_loop_config=again).fit()
    assert "checkpoint_000006" not in names(tmp_path)  # of epoch 4, saved again: number 6 was not worth it
    assert "checkpoint_000007" in names(tmp_path)  # numbers go on


def test_nothing_on_disk(tmp_path: Path) -> None:
    """num_to_keep=0 writes no checkpoint, and a worker's death costs nothing all the same."""
    none = hf.CheckpointStrategy(num_to_keep=0)
    config = {"scores": [0.0] * 4, "fail_epoch": 2}
    result = make(tmp_path, dictionaries, failures=1, checkpoint_config=none, train_loop_config=config).fit()
    assert names(tmp_path) == []
    assert result.checkpoint is None
    assert result.latest_checkpoint == {"epoch": 3, "acc": 0.0}
    assert result.metrics == {"epoch": 3, "start": 2}
    assert result.attempts[1].resumed_from == "checkpoint_000002 (in memory)"


@pytest.mark.slow
def test_the_newest_dictionaries_by_default(tmp_path: Path) -> None:
    """Without a score the newest are the best, and a restart goes on from the newest."""
    config = {"scores": [0.0] * 4, "fail_epoch": 3}
    strategy = hf.CheckpointStrategy(num_to_keep=2)
    result = make(tmp_path, dictionaries, failures=1, checkpoint_config=strategy, train_loop_config=config).fit()
    assert names(tmp_path)[-1] == "checkpoint_000004"
    assert result.latest_checkpoint == {"epoch": 3, "acc": 0.0}
    assert result.metrics["start"] == 3


def test_a_missing_score(tmp_path: Path) -> None:
    """A dictionary without its score attribute is a ValueError at the call."""
    strategy = hf.CheckpointStrategy(num_to_keep=2, checkpoint_score_attribute="accuracy")
    with pytest.raises(hf.TrainingFailedError) as caught:
        make(tmp_path, dictionaries, checkpoint_config=strategy, train_loop_config={"scores": [0.0] * 4}).fit()
    assert isinstance(caught.value.failures[0], ValueError)
    assert "accuracy" in str(caught.value.failures[0])


def uploads(config: dict[str, Any]) -> None:
    """Report one checkpoint in each mode."""
    context = hf.get_context()
    if rank() == 0:
        place = Path(context.get_storage().build_checkpoint_path_from_name("placed"))
        place.mkdir()
        (place / "epoch.txt").write_text("0")
        hf.report(
            {"epoch": 0}, hf.Checkpoint.from_directory(place), checkpoint_upload_mode=hf.CheckpointUploadMode.NO_UPLOAD
        )
        own = Path(config["scratch"], "own")
        own.mkdir()
        (own / "epoch.txt").write_text("1")
        hf.report({"epoch": 1}, hf.Checkpoint.from_directory(own), checkpoint_upload_mode=hf.CheckpointUploadMode.ASYNC)
        assert not own.exists()
    else:
        hf.report({})
        hf.report({})
    save_directory(2, {"epoch": 2}, **({"checkpoint_dir_name": "named"} if rank() == 0 else {}))
    assert hf.get_checkpoint() is not None
    hf.report({"epoch": 3}, state={"epoch": 3})
    kept = hf.get_all_reported_checkpoints()
    assert [one.checkpoint.name for one in kept] == ["placed", "checkpoint_000000", "named", "checkpoint_000001"]


def test_every_upload_mode(tmp_path: Path) -> None:
    """NO_UPLOAD, ASYNC, SYNC under a name, and a state make one history of checkpoints."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    result = make(tmp_path, uploads, train_loop_config={"scratch": str(scratch)}).fit()
    assert epochs(result) == [0, 1, 2, 3]
    for name in ("placed", "checkpoint_000000", "named", "checkpoint_000001"):
        assert hf.Checkpoint(tmp_path / "run" / name).verify()
    assert read(hf.Checkpoint(tmp_path / "run" / "placed")) == "0"
    assert not list((tmp_path / "run").glob(".incoming-*"))


def test_a_name_twice(tmp_path: Path) -> None:
    """A name that is taken is refused at the call, on the rank that gave it."""

    def train() -> None:
        for epoch in range(2):
            save_directory(epoch, {"epoch": epoch}, checkpoint_dir_name="same")

    with pytest.raises(hf.TrainingFailedError, match="checkpoint_dir_name='same' is taken in this run"):
        make(tmp_path, train, workers=1).fit()


def test_states_by_one_rank_only(tmp_path: Path) -> None:
    """A state that not all ranks report is refused: they share the work."""

    def train() -> None:
        if rank() == 0:
            hf.report({}, state={"x": 1})
        else:
            hf.report({})
        hf.report({})

    with pytest.raises(hf.TrainingFailedError, match="rank 1 called it without state="):
        make(tmp_path, train).fit()


def validate(checkpoint: hf.Checkpoint, factor: float = 1.0, shift: float = 0.0) -> dict[str, float]:
    value = int(read(checkpoint))
    if value == 2:
        raise ValueError("not this one")
    if value == 3:
        time.sleep(60)
    return {"val": shift - value * factor, "pid": os.getpid()}


def validated() -> None:
    for epoch in range(load_epoch(), 4):
        wanted: Any = {0: True, 1: {"factor": 10.0}, 2: True, 3: hf.ValidationTaskConfig(timeout_s=0.5)}[epoch]
        save_directory(epoch, {"epoch": epoch}, validation=wanted)
    told = {one.checkpoint.name: one.status.value for one in hf.get_all_reported_checkpoints()}
    hf.report({"told": told})


def test_validations_rank_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They run one after the other in the background; their metrics join, failures and time-outs are noted.

    Arguments of a report are on top of those that hold for all.
    """
    best = hf.CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="val")
    config = hf.ValidationConfig(validate, hf.ValidationTaskConfig(fn_kwargs={"shift": 0.5}))
    result = make(tmp_path, validated, workers=1, validation_config=config, checkpoint_config=best).fit()
    told = capfd.readouterr().err
    assert "the validation of checkpoint_000002 failed: ValueError: not this one" in told
    assert "the validation of checkpoint_000003 failed: stopped after 0.5 s (timeout_s)" in told
    assert [metrics["val"] for _, metrics in result.best_checkpoints] == [-9.5, 0.5]
    assert result.metrics["told"] == {
        "checkpoint_000000": "VALIDATED",
        "checkpoint_000001": "VALIDATED",
        "checkpoint_000003": "VALIDATION_TIMEOUT",
    }
    assert all("_validated" not in metrics for _, metrics in result.best_checkpoints)


def test_a_validation_without_a_function(tmp_path: Path) -> None:
    """Asking for a validation that nobody can carry out is refused at the call."""
    with pytest.raises(hf.TrainingFailedError, match="give the trainer a function for it"):
        make(tmp_path, validated, workers=1).fit()


@pytest.mark.slow
def test_validations_are_taken_up_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What a driver did not come to is done by the next one."""

    def interrupted() -> None:
        save_directory(0, {"epoch": 0}, validation=True)
        raise RuntimeError("over")

    def slow(checkpoint: hf.Checkpoint) -> dict[str, float]:
        time.sleep(60)
        return {}

    with pytest.raises(hf.TrainingFailedError):
        make(tmp_path, interrupted, workers=1, validation=slow).fit()
    result = make(tmp_path, lambda: hf.report({"epoch": 1}), workers=1, validation=validate).fit()
    assert "takes up the validation of checkpoint_000000" in capfd.readouterr().err
    assert result.best_checkpoints[0][1]["val"] == 0.0


class Listener:
    """Notes what it hears; fails once."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def before_run(self, run_context: Any) -> None:
        self.heard.append(f"before {run_context.name}")
        raise RuntimeError("a callback fails")

    def after_run(self, run_context: Any) -> None:
        self.heard.append(f"after {run_context.name}")

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        self.heard.append((run_context.name, metrics[0]["epoch"], checkpoint and checkpoint.name))
        if len(self.heard) == 2:
            raise RuntimeError("a callback fails")

    def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
        self.heard.append({number: type(error) for number, error in worker_exceptions.items()})


def test_callbacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They hear of start, reports, failures and end in the driver; one that fails does not stop the training."""

    def train() -> None:
        if attempt() == 1:
            hf.report({"epoch": 0})
            save_directory(1, {"epoch": 1})
            raise ValueError("x")

    listener = Listener()
    make(tmp_path, train, workers=1, failures=1, callbacks=[listener]).fit()
    reports = [("run", 0, None), ("run", 1, "checkpoint_000000")]
    assert listener.heard == ["before run", *reports, {0: ValueError}, "after run"]
    assert "before_run of" in caplog.text
    assert "after_report of" in caplog.text


def test_damaged_bytes_are_found_at_the_load(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Damage that no size shows stops the load; the checkpoint is set aside and the older one is taken, for free."""

    def train() -> None:
        state = {"numbers": list(range(1000)), "step": 0}
        if (checkpoint := hf.get_checkpoint()) is not None:
            state["step"] = hf.load(checkpoint, state)["step"]
        for step in range(state["step"], 3):
            state["step"] = step + 1
            hf.report({"step": step}, state=state)

    result = make(tmp_path, train, workers=1).fit()
    assert result.checkpoint is not None
    (stored,) = Path(result.checkpoint.path).glob("state-*.json")
    data = bytearray(stored.read_bytes())
    data[len(data) // 2] ^= 1
    stored.write_bytes(data)
    result = make(tmp_path, train, workers=1).fit()
    assert "starting 1 worker again from checkpoint_000001" in capfd.readouterr().err
    assert [one.resumed_from for one in result.attempts] == [None, "checkpoint_000002", "checkpoint_000001"]
    assert result.checkpoint is not None
    assert result.checkpoint.load()["step"] == 3
