"""`TorchTrainer.fit` with real workers: failures of every kind, and going on from the newest checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from fit_functions import guarded, learn
from fit_kit import epochs, make, read

import holdfast as hf

pytestmark = pytest.mark.usefixtures("forked")


def test_two_workers_and_rank_zero_checkpoints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The plain case of Ray's documentation: all metrics kept, the best two and the newest kept, both in the result."""
    best = hf.CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score")
    scores = [0.1, 0.9, 0.8, 0.2, 0.3]
    config = {"epochs": 5, "scores": scores}
    result = make(tmp_path, checkpoint_config=best, train_loop_config=config).fit()
    assert result.error is None
    assert result.metrics == {"epoch": 4, "score": 0.3}
    assert epochs(result) == [0, 1, 2, 3, 4]
    assert read(result.checkpoint) == "4"
    assert [metrics["score"] for _, metrics in result.best_checkpoints] == [0.8, 0.9]
    there = sorted(path.name for path in (tmp_path / "run").iterdir() if path.name.startswith("checkpoint"))
    assert there == ["checkpoint_000001", "checkpoint_000002", "checkpoint_000004"]
    told = capfd.readouterr().err
    assert "holdfast: run starts fresh: there is no checkpoint (attempt 1)" in told
    assert f"storage   {tmp_path}/run" in told
    assert "workers   2 on this machine, process group gloo" in told
    assert "keeps     the best 2 by score (max), and the newest" in told
    assert "holdfast: run finished at report 5 after" in told
    assert (tmp_path / "run/logs/attempt-00001/rank-1.log").read_text() == "starts at epoch 0\n"


@pytest.mark.parametrize("how", ["raise", "kill", "exit", "segfault"])
def test_a_failure_restarts_all_from_the_newest_checkpoint(
    tmp_path: Path, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """One failure of any kind costs nothing that was reported before it."""
    config = {"fail_epoch": 2, "fail_rank": 1, "how": how}
    result = make(tmp_path, failures=1, train_loop_config=config).fit()
    assert epochs(result) == [0, 1, 2, 3]
    assert read(result.checkpoint) == "3"
    first, second = result.attempts
    words = {"raise": "rank 1: ValueError", "kill": "SIGKILL", "exit": "status 7", "segfault": "SIGSEGV"}
    assert words[how] in (first.reason or "")
    assert (second.reason, second.resumed_from) == ("finished", "checkpoint_000001")
    assert {"find", "start", "load"} <= second.details["seconds"].keys()
    assert "starting 2 workers again from checkpoint_000001 (attempt 2)" in capfd.readouterr().err


def test_preemptions_do_not_count_as_failures(tmp_path: Path) -> None:
    """A worker that was told to go is started again although no failure is allowed."""
    config = {"fail_epoch": 1, "fail_rank": 1, "how": "preempted"}
    result = make(tmp_path, train_loop_config=config).fit()
    assert epochs(result) == [0, 1, 2, 3]
    assert result.attempts[0].details["cause"] == "preemption"


def test_too_many_failures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The error has the exception of the rank with its own traceback; the same script goes on from there later."""
    config = {"fail_epoch": 2, "fail_attempts": (1, 2), "how": "raise"}
    with pytest.raises(hf.TrainingFailedError, match=r"failure 2 with max_failures=1") as caught:
        make(tmp_path, failures=1, train_loop_config=config).fit()
    error = caught.value.failures[0]
    assert type(error) is ValueError
    assert str(error) == "intentional failure of rank 0"
    assert "fit_functions.py" in str(error.__cause__)
    assert "run failed at report 2 after" in capfd.readouterr().err
    stored = hf.Result.from_path(tmp_path / "run")
    assert isinstance(stored.error, hf.TrainingFailedError)
    assert read(stored.checkpoint) == "1"
    result = make(tmp_path, train_loop_config=config).fit()
    assert epochs(result) == [0, 1, 2, 3]
    assert "run resumes from checkpoint_000001 at report 2 (attempt 3)" in capfd.readouterr().err
    assert result.error is None


def test_a_hang_is_a_failure(tmp_path: Path) -> None:
    """Workers that give no sign of life are killed, whatever they wait for."""
    config = {"fail_epoch": 1, "fail_rank": 1, "how": "hang"}
    result = make(tmp_path, failures=1, hang_timeout_s=3.0, train_loop_config=config).fit()
    assert epochs(result) == [0, 1, 2, 3]
    assert "WorkerHangError" in (result.attempts[0].reason or "")


def test_a_worker_that_writes_to_our_socket_is_a_failure(tmp_path: Path) -> None:
    """What it sends cannot be understood: it is ended, named, and the run goes on like after any other failure."""
    config = {"fail_epoch": 1, "fail_rank": 1, "how": "garbage"}
    result = make(tmp_path, failures=1, train_loop_config=config).fit()
    assert epochs(result) == [0, 1, 2, 3]
    assert "rank 1" in (result.attempts[0].reason or "")
    assert "a worker sent" in (result.attempts[0].reason or "")


@pytest.mark.slow
def test_states_are_shared_and_survive_a_kill(tmp_path: Path) -> None:
    """What was sealed when a worker was killed is committed by its writer; the end is that of a calm run."""
    calm = make(tmp_path, learn, name="calm").fit()
    config = {"fail_step": 3, "how": "kill"}
    killed = make(tmp_path, learn, name="killed", failures=1, train_loop_config=config).fit()
    assert killed.attempts[1].resumed_from == "checkpoint_000003"  # reported right before the kill
    assert calm.checkpoint is not None
    assert killed.checkpoint is not None
    ours, theirs = killed.checkpoint.load(), calm.checkpoint.load()
    assert ours["step"] == theirs["step"] == 6
    for name, value in theirs["model"].items():
        assert value.equal(ours["model"][name])
    manifest = killed.checkpoint.manifest
    assert manifest is not None
    assert manifest.world_size == 2
    assert manifest.writers == (0, 1)


def test_closures_and_lambdas(tmp_path: Path) -> None:
    """A train function needs no module and no arguments."""
    seen = tmp_path / "seen"
    result = make(tmp_path, lambda: (seen.write_text("here"), hf.report({"loss": 1})), workers=1).fit()
    assert seen.read_text() == "here"
    assert result.metrics == {"loss": 1}
    assert result.checkpoint is None


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_guard_in_the_function_takes_all_workers_back(tmp_path: Path, workers: int) -> None:
    """Twice for a bad batch, with no failure allowed; then it is left out, bitwise as in a run that never had it."""

    def fit(what: str) -> hf.Result:
        config = {"what": what, "run": str(tmp_path / f"{what}-own")}
        return make(tmp_path / what, guarded, workers=workers, train_loop_config=config).fit()

    result = fit("bad")
    assert result.return_value == fit("without").return_value
    assert len(result.attempts) == 3


@pytest.mark.slow
def test_a_guard_that_gives_up_fails_the_run(tmp_path: Path) -> None:
    """``max_rollbacks`` bounds it, whatever `FailureConfig` allows for failures."""
    config = {"what": "bad", "run": str(tmp_path / "own"), "max": 0}
    with pytest.raises(hf.TrainingFailedError, match="max_rollbacks=0"):
        make(tmp_path, guarded, train_loop_config=config).fit()
