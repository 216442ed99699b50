"""`Result`: what it says about runs of all kinds, also damaged ones, and that it only reads."""

from __future__ import annotations

import math
import os
import pickle
import sys
from pathlib import Path

import pytest
from catalog_kit import catalog_of
from result_kit import BEGIN, Clock, Run

import holdfast as hf
from holdfast.config import Keep
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.trainers.function.config import CheckpointConfig
from holdfast.trainers.function.control.result import Result


@pytest.fixture
def run(tmp_path, monkeypatch) -> Run:
    clock = Clock()
    clock.rule(monkeypatch)
    return Run(LocalStorage(tmp_path / "runs" / "gpt"), clock)


def names(result: Result) -> list[str]:
    return [checkpoint.name for checkpoint, _ in result.best_checkpoints]


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_run_with_metrics_checkpoints_and_an_end(run: Run) -> None:
    """Latest, best (ascending), last metrics, all rows, no error."""
    run.start(0)
    for step, acc in enumerate([0.1, 0.9, 0.4, 0.6], start=1):
        run.report(step, step, {"val": {"acc": acc}, "loss": 1 / step}, checkpoint=True)
    run.report(5, 5, {"loss": 0.1})
    run.prune(CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="val/acc").retention)
    run.end(6, "finished")
    run.index.finish({})
    result = Result.from_path(run.storage.uri)
    assert result.path == run.storage.uri
    assert result.checkpoint == hf.Checkpoint(f"{result.path}/checkpoint_000004")
    assert hf.Checkpoint(f"{result.path}/checkpoint_000004", result.filesystem) == result.checkpoint
    assert names(result) == ["checkpoint_000004", "checkpoint_000002"]
    assert result.best_checkpoints[-1][1] == {"val": {"acc": 0.9}, "loss": 0.5}
    assert result.metrics == {"loss": 0.1}
    assert result.error is None
    assert [(one.attempt, one.reason, one.seconds_lost) for one in result.attempts] == [(1, "finished", 0.0)]
    assert result.attempts[0].started == BEGIN
    assert result.get_best_checkpoint("loss", "max").name == "checkpoint_000002"
    assert result.get_best_checkpoint("val/acc", "min").name == "checkpoint_000004"
    assert "checkpoint_000004" in repr(result)


def test_the_newest_stays_without_being_among_the_best(run: Run) -> None:
    """With a bad newest checkpoint there are K + 1 on disk: `checkpoint` is it, `best_checkpoints` has K."""
    run.start(0)
    for step, loss in enumerate([0.2, 0.1, 0.3, 0.9], start=1):
        run.report(step, step, {"loss": loss}, checkpoint=True)
    keep = Keep(best=2, metric="loss", mode="min")
    run.prune(keep)
    result = Result.from_path(run.storage.uri)
    assert result.checkpoint is not None
    assert result.checkpoint.name == "checkpoint_000004"
    assert names(result) == ["checkpoint_000001", "checkpoint_000002"]


@pytest.mark.parametrize(
    ("keep", "order"),
    [
        (Keep(), [1, 2, 3, 4, 5, 6]),
        (Keep(last=2), [5, 6]),
        (Keep(metric="m", mode="max"), [3, 6, 5, 1, 2, 4]),
        (Keep(metric="m", mode="min"), [3, 6, 1, 2, 4, 5]),
        (Keep(best=3, metric="m", mode="min"), [2, 4, 5]),
        (Keep(last=1, metric="m", mode="min"), [3, 6, 1, 2, 4, 5]),
    ],
)
def test_order_of_the_best(run: Run, keep: Keep, order: list[int]) -> None:
    """Missing and NaN come first (worst) in both orders, of equal ones the newer is better."""
    run.start(0)
    for step, value in enumerate([1.0, 1.0, math.nan, 1.0, 0.5, None], start=1):
        run.report(step, step, {} if value is None else {"m": value}, checkpoint=True)
    result = Result(run.storage, keep=keep)
    assert names(result) == [f"checkpoint_{number:06d}" for number in order]


def test_best_checkpoints_are_never_deleted_ones(run: Run) -> None:
    """One that goes after the result was made disappears from it, and the next best takes its place."""
    run.start(0)
    for step in (1, 2, 3):
        run.report(step, step, {"m": step}, checkpoint=True)
    result = Result(run.storage, keep=Keep(best=2, metric="m", mode="max"))
    assert names(result) == ["checkpoint_000002", "checkpoint_000003"]
    run.storage.delete("checkpoint_000003/manifest.json")
    assert names(result) == ["checkpoint_000001", "checkpoint_000002"]
    assert result.get_best_checkpoint("m", "max").name == "checkpoint_000002"


def test_wrong_questions_get_clear_answers(run: Run) -> None:
    """A wrong mode, an unknown metric (the known ones are listed), no checkpoint, no run, a checkpoint, runs inside."""
    run.start(0)
    result = Result.from_path(run.storage.uri)
    assert (result.checkpoint, result.metrics, result.best_checkpoints) == (None, {}, [])
    assert (result.latest_checkpoint, result.latest_checkpoint_id, result.best_checkpoint_path) == (None, None, None)
    with pytest.raises(hf.CheckpointNotFoundError, match="has no checkpoint"):
        result.get_best_checkpoint("m", "max")
    run.report(1, 1, {"val": {"acc": 1.0}, "note": "x", "m": math.nan}, checkpoint=True)
    result = Result.from_path(run.storage.uri)
    with pytest.raises(hf.ConfigError, match=r"there are: val/acc$"):
        result.get_best_checkpoint("m", "max")
    with pytest.raises(hf.ConfigError, match="'max'"):
        result.get_best_checkpoint("val/acc", "best")
    folder = Path(result.path)
    with pytest.raises(hf.CheckpointNotFoundError, match="holds the runs gpt"):
        Result.from_path(folder.parent)
    with pytest.raises(hf.CheckpointNotFoundError, match="is a checkpoint"):
        Result.from_path(folder / "checkpoint_000001")
    with pytest.raises(hf.CheckpointNotFoundError, match="no run"):
        Result.from_path(folder / "nothing")
    with pytest.raises(hf.ConfigError, match="outside"):
        Result.from_path("/elsewhere", LocalStorage(folder))
    assert not (folder / "nothing").exists()


def test_places_a_run_can_be_named_by(run: Run, monkeypatch) -> None:
    """A path, a Path, a trailing slash, a relative path, file://, a storage, a path in a storage."""
    run.start(0)
    run.report(1, 1, {"m": 1}, checkpoint=True)
    folder = Path(run.storage.uri)
    monkeypatch.chdir(folder.parent)
    outside = LocalStorage(folder.parent)
    places = [
        (str(folder), None), (folder, None), (f"{folder}/", None), ("gpt", None), (f"file://{folder}", None),
        (run.storage, None), ("gpt", outside), (f"{folder}/", outside), (str(folder), run.storage),
    ]  # fmt: skip
    for path, filesystem in places:
        result = Result.from_path(path, filesystem)
        assert (result.path, names(result)) == (str(folder), ["checkpoint_000001"])


def test_reading_changes_nothing(run: Run) -> None:
    """`from_path` and everything asked of the result leave every file as it was, also with a damaged index."""
    run.start(0)
    run.report(1, 1, {"m": 1}, checkpoint=True)
    run.report(2, 2, {"m": 2}, checkpoint=True)
    folder = Path(run.storage.uri)
    for damage in (None, b"{", b""):
        if damage is not None:
            (folder / "run.json").write_bytes(damage)
        before = tree(folder)
        result = Result.from_path(folder)
        assert names(result) == ["checkpoint_000001", "checkpoint_000002"]
        assert len(result.metrics_dataframe) == 2
        assert tree(folder) == before


@pytest.mark.parametrize("damage", ["truncated", "missing", "old schema", "garbage"])
def test_a_damaged_index_is_rebuilt_by_looking(run: Run, damage: str, caplog) -> None:
    """Everything but the reasons of the last end is found again; it is said in the log."""
    run.start(0)
    run.report(1, 1, {"m": 0.5}, checkpoint=True)
    run.report(2, 2, {"m": 0.9})
    run.end(3, "rank 0: RuntimeError: boom")
    run.start(4)
    run.resume("checkpoint_000001")
    run.report(2, 5, {"m": 0.7}, checkpoint=True)
    run.index.note("keep", Keep(best=5, metric="m", mode="min").to_json())
    index = Path(run.storage.uri) / "run.json"
    if damage == "missing":
        index.unlink()
    else:
        body = {"truncated": index.read_bytes()[:-40], "old schema": b'{"version": 0, "checkpoints": []}'}
        index.write_bytes(body.get(damage, os.urandom(64)))
    result = Result.from_path(run.storage.uri)
    assert names(result) == ["checkpoint_000002", "checkpoint_000001"]
    assert result.metrics == {"m": 0.7}
    assert [one.attempt for one in result.attempts] == [1, 2]
    assert result.attempts[0].reason == "rank 0: RuntimeError: boom"
    assert result.attempts[1].resumed_from == "checkpoint_000001"
    assert [row["m"] for row in result.metrics_dataframe.to_dict("records")] == [0.5, 0.7]
    assert "rebuilt" in caplog.text


def test_a_damaged_checkpoint_is_not_the_latest(run: Run) -> None:
    """One with a broken manifest is passed over."""
    run.start(0)
    run.report(1, 1, {"m": 1}, checkpoint=True)
    run.report(2, 2, {"m": 2}, checkpoint=True)
    (Path(run.storage.uri) / "checkpoint_000002" / "manifest.json").write_bytes(b"{}")
    result = Result.from_path(run.storage.uri)
    assert result.checkpoint is not None
    assert result.checkpoint.name == "checkpoint_000001"


def test_the_dataframe_has_every_report_that_counts(run: Run) -> None:
    """Flattened names, rows of deleted checkpoints, none of a life that was undone, late metrics, clashing names."""
    run.start(0)
    run.report(1, 1, {"val": {"acc": 0.1}, "step": 100}, checkpoint=True)
    run.report(2, 2, {"val": {"acc": 0.2}, "step": 200}, checkpoint=True)
    run.report(3, 3, {"val": {"acc": 0.9}, "step": 300})
    run.end(4, "boom")
    run.start(5)
    run.resume("checkpoint_000002")
    run.report(3, 6, {"val": {"acc": 0.3}, "step": 300, "extra": math.nan}, checkpoint=True)
    run.prune(Keep(last=2))
    catalog_of(run.storage).set_metrics("checkpoint_000003", {"late": 7, "_validated": True})
    result = Result.from_path(run.storage.uri)
    frame = result.metrics_dataframe
    assert list(frame.columns) == ["_step", "attempt", "time", "checkpoint", "val/acc", "step", "extra", "late"]
    assert frame["_step"].tolist() == [1, 2, 3]
    assert frame["val/acc"].tolist() == [0.1, 0.2, 0.3]
    assert frame["attempt"].tolist() == [1, 1, 2]
    assert frame["checkpoint"].tolist() == ["checkpoint_000001", "checkpoint_000002", "checkpoint_000003"]
    assert frame["late"].tolist()[-1] == 7
    assert (frame["time"][2].to_pydatetime() - BEGIN).total_seconds() == 6
    assert result.metrics["late"] == 7
    assert "_validated" not in result.metrics
    assert names(result) == ["checkpoint_000002", "checkpoint_000003"]
    assert "_validated" not in result.best_checkpoints[-1][1]


def test_a_run_without_reports_gives_an_empty_frame_and_the_metrics_of_its_checkpoint(run: Run) -> None:
    """Columns are there; metrics come from the newest manifest if the reports are gone."""
    run.start(0)
    run.report(1, 1, {"m": 4}, checkpoint=True)
    for file in (Path(run.storage.uri) / "reports").iterdir():
        file.unlink()
    result = Result.from_path(run.storage.uri)
    assert list(result.metrics_dataframe.columns) == ["step", "attempt", "time", "checkpoint"]
    assert len(result.metrics_dataframe) == 0
    assert result.metrics == {"m": 4}


def test_text_without_a_utf8_form_is_escaped_in_the_dataframe(run: Run) -> None:
    """A name with a stray byte, as of a file, does not cost the table; `metrics` has it as it was reported."""
    run.start(0.0)
    run.report(1, 1.0, {"shard\udc80": "a\udc81", "all": ["b\udc82"], "m": 0.5})
    run.end(2.0, "finished")
    result = Result.from_path(run.storage.uri)
    (row,) = result.metrics_dataframe.to_dict("records")
    assert (row["shard\\udc80"], row["all"], row["m"]) == ("a\\udc81", ["b\\udc82"], 0.5)
    assert result.metrics["shard\udc80"] == "a\udc81"


def test_the_dataframe_says_what_to_install(run: Run, monkeypatch) -> None:
    """Without pandas only this property fails."""
    run.start(0)
    result = Result.from_path(run.storage.uri)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(hf.MissingExtraError, match=r"pip install .*\[pandas\]'"):
        _ = result.metrics_dataframe


def test_seconds_lost(run: Run) -> None:
    """From the last work that was kept to the end, plus the phases of the next start; nothing for a clean end."""
    run.start(0)
    run.report(1, 100, {}, checkpoint=True)
    run.end(130, "rank 1: SIGKILL", failures={"1": "SIGKILL"}, seconds={"detect": 1, "stop": 2})
    run.start(130)
    run.resume("checkpoint_000001")
    # It fails before it has saved anything: all its time is lost, but not what the first one lost already.
    run.end(150, "rank 0: SIGKILL", seconds={"find": 1, "start": 2, "load": 0.5, "detect": 9})
    run.start(150)
    run.resume("checkpoint_000001")
    run.report(2, 160, {})
    # Killed with its driver: its last report is the last sign of it. The next one begins a day later.
    run.start(90_000)
    run.resume("checkpoint_000001")
    run.report(2, 90_010, {}, checkpoint=True)
    run.end(90_020, "finished")
    run.index.finish({})
    result = Result.from_path(run.storage.uri)
    assert [one.seconds_lost for one in result.attempts] == [33.5, 20.0, 10.0, 0.0]
    assert [one.resumed_from for one in result.attempts] == [None, *["checkpoint_000001"] * 3]
    assert result.attempts[2].ended is None
    assert result.attempts[0].details["failures"] == {"1": "SIGKILL"}


def test_seconds_lost_survive_the_deletion_of_the_checkpoint(run: Run) -> None:
    """The report of a checkpoint that is gone tells when it was made."""
    run.start(0)
    run.report(1, 100, {}, checkpoint=True)
    run.end(130, "boom")
    run.start(130)
    run.resume("checkpoint_000001")
    run.report(2, 140, {}, checkpoint=True)
    run.end(150, "boom")
    run.start(150)
    run.resume("checkpoint_000002")
    run.prune(Keep(last=1))
    assert not (Path(run.storage.uri) / "checkpoint_000001").exists()
    assert [one.seconds_lost for one in Result.from_path(run.storage.uri).attempts] == [30.0, 10.0, 0.0]


def test_the_error_of_a_run_that_gave_up(run: Run) -> None:
    """`fit` hands its error over; from the directory it is rebuilt from what was noted; a finished run has none."""
    run.start(0)
    run.report(1, 1, {"m": 1}, checkpoint=True)
    run.end(2, "training failed: failure 1 with max_failures=0", failures={"1": "ValueError: boom"})
    mine = hf.TrainingFailedError("mine")
    assert Result(run.storage, error=mine).error is mine
    error = Result.from_path(run.storage.uri).error
    assert isinstance(error, hf.TrainingFailedError)
    assert "max_failures=0" in str(error)
    assert str(error.failures[1]) == "ValueError: boom"
    run.start(3)
    assert Result.from_path(run.storage.uri).error is None
    run.end(4, "finished")
    run.index.finish({})
    assert Result.from_path(run.storage.uri).error is None


def test_the_style_of_ray_1x(run: Run, tmp_path) -> None:
    """Ids, directory, best path and the newest values, from memory or from the disk."""
    keep = Keep(best=2, metric="loss", mode="min")
    run.start(0)
    for step, loss in enumerate([0.5, 0.2, 0.3], start=1):
        run.report(step, step, {"loss": loss}, checkpoint=True)
    run.prune(keep)
    result = Result(run.storage, keep=keep, memory={"loss": 0.9, "epoch": 3})
    assert result.latest_checkpoint_id == 3
    assert result.latest_checkpoint_dir == Path(result.path)
    assert result.best_checkpoint_path == Path(result.path) / "checkpoint_000002"
    assert result.latest_checkpoint == {"loss": 0.9, "epoch": 3}
    hf.save(tmp_path / "solo" / "checkpoint_000007", {"loss": 0.1, "epoch": 4}, step=1)
    assert Result(LocalStorage(tmp_path / "solo")).latest_checkpoint is None  # saved on its own: of no run
    remote = MemoryStorage(f"{tmp_path.name}-ray1x")
    far = Run(remote, run.clock)
    far.start(0)
    far.report(1, 1, {"loss": 1}, checkpoint=True)
    result = Result.from_path(f"{remote.uri}/")
    assert result.best_checkpoint_path == f"{remote.uri}/checkpoint_000001"
    assert result.latest_checkpoint_dir == remote.uri
    assert result.latest_checkpoint == {"note": "first try"}


def test_a_long_history_is_read_when_it_is_asked_for(run: Run, monkeypatch) -> None:
    """With the last metrics known, making a result of a run with many reports does not read them."""
    run.start(0)
    for step in range(1, 4):
        run.report(step, step, {"m": step}, checkpoint=step == 1)
    run.end(4, "finished")
    run.index.finish({})
    monkeypatch.setattr("holdfast.trainers.function.control.result._QUICK_BYTES", 0)
    result = Result(run.storage, metrics={"m": 3})
    assert result._rows is None
    assert result.metrics == {"m": 3}
    assert result.metrics_dataframe["m"].tolist() == [1, 2, 3]


def test_results_pickle(run: Run) -> None:
    """A result travels to another process with everything it says."""
    run.start(0)
    run.report(1, 1, {"m": 1}, checkpoint=True)
    result = Result.from_path(run.storage.uri)
    again = pickle.loads(pickle.dumps(result))
    assert again.checkpoint == result.checkpoint
    assert again.metrics == {"m": 1}
    assert names(again) == names(result)
    assert again.metrics_dataframe["m"].tolist() == [1]
