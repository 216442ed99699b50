"""Signals, kills and full disks: what is saved stays good, and the next start goes on from it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_kit import everything, loader, names, plain, rich

import holdfast as hf
from holdfast.callbacks import Callback, CheckpointSaver
from holdfast.core import Event, State
from holdfast.loggers import RemoteUploaderDownloader
from holdfast.run.rollbacks import BatchSpan
from holdfast.state.save.snapshot import Snapshotter
from holdfast.testing import assert_state_equal
from holdfast.trainers.loop.saving.folder import FileLeases
from holdfast.trainers.loop.saving.load import LoadOptions, load_path

ROOT = Path(__file__).resolve().parents[3]


class Term(Callback):
    """Sends this process a signal at an event of a batch."""

    def __init__(self, event: str, batch: int) -> None:
        self.event, self.batch = event, batch

    def run_event(self, event, state, logger) -> None:  # type: ignore[no-untyped-def]
        if event.value == self.event and int(state.timestamp.batch) == self.batch:
            self.batch = -1
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "batch", "saved"),
    [
        ("batch_start", 8, 9),
        ("after_backward", 8, 9),
        ("batch_end", 9, 9),
        ("epoch_end", 12, 12),
        ("eval_batch_start", 12, 12),
        ("eval_start", 9, 9),
        ("batch_checkpoint", 12, 12),
    ],
)
def test_sigterm(tmp_path: Path, event: str, batch: int, saved: int) -> None:
    """A signal at any moment, in an evaluation too.

    The state after the current batch is saved, the process leaves with the code for requeueing, and training ends
    as it would have; an evaluation that was left is done again.
    """
    options = {
        "save_interval": "1ep",
        "eval_interval": "3ba" if event == "eval_start" else "1ep",
        "max_duration": "3ep",
    }
    whole = rich(tmp_path / "a", **options)
    whole.fit()
    values = dict(whole.state.eval_metric_values)
    trainer = rich(tmp_path / "b", callbacks=[Term(event, batch)], **options)
    with pytest.raises(SystemExit) as left:
        trainer.fit()
    assert left.value.code == 85
    assert int(trainer.state.timestamp.batch) == saved
    trainer.close()
    again = rich(tmp_path / "b", autoresume=True, **options)
    assert int(again.state.timestamp.batch) == saved
    again.fit()
    assert_state_equal(everything(again), everything(whole))
    assert again.state.eval_metric_values == values


class Count(Callback):
    """Counts events by name."""

    def __init__(self) -> None:
        self.seen = Counter[str]()

    def run_event(self, event, state, logger) -> None:  # type: ignore[no-untyped-def]
        self.seen[event.name] += 1


def left_with_85(trainer: hf.Trainer) -> None:
    """Train until a signal ends that."""
    with pytest.raises(SystemExit) as left:
        trainer.fit()
    assert left.value.code == 85
    trainer.close()


def two_lives(folder: Path, events: list[str], **options: Any) -> tuple[hf.Trainer, list[list[int]]]:
    """Train to the end, and start once more; return the last trainer, and how often each life saw these events."""
    seen = []
    for _ in range(2):
        with plain(folder, callbacks=Count(), **options) as trainer:
            trainer.fit()
            seen.append([trainer.state.callbacks[0].seen[event] for event in events])
    return trainer, seen


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_a_checkpoint_gets_the_metrics_of_the_evaluation_that_was_left(tmp_path: Path, suffix: str) -> None:
    """Saved by a signal within the evaluation of its epoch: the next life completes it, here and among the uploads.

    It is the best one, so it has to stay.
    """

    def make(*callbacks: Callback) -> hf.Trainer:
        def score(outputs: torch.Tensor, targets: torch.Tensor) -> float:
            return {1: 0.5, 2: 0.75, 3: 0.25, 4: 0.125}[int(trainer.state.timestamp.epoch)]

        keep = hf.Keep(best=1, metric="eval/score", mode="max")
        saver = CheckpointSaver(tmp_path / "runs", "ep{epoch}" + suffix, save_interval="1ep", keep=keep)
        trainer = plain(
            None, callbacks=[saver, *callbacks], eval_dataloader=loader(9, shuffle=False),
            eval_metrics={"score": score}, loggers=RemoteUploaderDownloader(str(tmp_path / "bucket")), run_name="r",
            max_duration="4ep", autoresume=True,
        )  # fmt: skip
        return trainer

    left_with_85(make(Term("eval_batch_start", 12)))
    assert names(tmp_path / "runs") == [f"ep1{suffix}", f"ep2{suffix}"]
    first = None if suffix else hf.Checkpoint(tmp_path / "runs" / "ep1").manifest
    with make() as again:
        assert int(again.state.timestamp.batch) == 12
        again.fit()
    assert names(tmp_path / "runs") == [f"ep2{suffix}", f"ep4{suffix}"]
    if not suffix:
        for folder in ("runs", "bucket/r/checkpoints"):
            best = hf.Checkpoint(tmp_path / folder / "ep2")
            assert best.metrics["eval"]["score"] == 0.75
            assert "loss" in best.metrics
            assert best.verify(deep=True).ok
            assert best.manifest.parent == first.checkpoint_id


@pytest.mark.parametrize("interval", ["1ep", lambda state, event: False])
def test_a_training_that_was_left_in_its_last_evaluation_ends_once(
    tmp_path: Path, interval: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The next start evaluates and ends it, also where no save is due; the start after that has nothing to do."""
    options: dict[str, Any] = {
        "eval_dataloader": loader(9, shuffle=False), "save_filename": "ep{epoch}", "save_interval": interval,
        "autoresume": True,
    }  # fmt: skip
    left_with_85(plain(tmp_path, callbacks=Term("eval_batch_start", 12), **options))
    _, seen = two_lives(tmp_path, ["EVAL_END", "FIT_END"], **options)
    assert seen == [[1, 1], [0, 0]]
    assert "nothing to do" in caplog.text
    assert "loss" in hf.Checkpoint(tmp_path / "ep2").metrics["eval"]


@pytest.mark.parametrize(
    ("event", "duration", "suffix"),
    [
        ("eval_batch_start", "2ep", ""),
        ("epoch_checkpoint", "2ep", ".pt"),
        ("batch_checkpoint", "12ba", ""),
        ("batch_checkpoint", "2ep", ""),
    ],
)
def test_a_signal_after_the_last_batch(tmp_path: Path, event: str, duration: str, suffix: str) -> None:
    """In an evaluation at the end too: it ends with 85, and the next life does what was left of the end, once."""
    options: dict[str, Any] = {
        "eval_dataloader": loader(9, shuffle=False), "eval_interval": lambda state, event: event is Event.FIT_END,
        "save_interval": "12ba", "save_filename": "ep{epoch}-ba{batch}" + suffix, "max_duration": duration,
        "autoresume": True,
    }  # fmt: skip
    left_with_85(plain(tmp_path, callbacks=Term(event, 12), **options))
    trainer, seen = two_lives(tmp_path, ["BATCH_START", "EPOCH_END", "EVAL_END", "FIT_END"], **options)
    assert seen == [[0, int(event == "batch_checkpoint"), 1, 1], [0, 0, 0, 0]]
    assert int(trainer.state.timestamp.epoch) == 2
    assert names(tmp_path) == [f"ep1-ba12{suffix}"]
    if not suffix:
        last = hf.Checkpoint(tmp_path / "ep1-ba12")
        assert last.verify(deep=True).ok
        assert last.manifest.parent is None  # not what it has replaced


def test_a_signal_after_the_last_batch_where_one_is_left_out(tmp_path: Path) -> None:
    """The epoch is at its end with one batch less: the next life ends it once, the one after has nothing to do."""
    options = {"save_interval": "100ba", "save_filename": "ba{batch}", "max_duration": "2ep", "autoresume": True}
    first = plain(tmp_path, callbacks=Term("batch_checkpoint", 11), **options)
    first.state.dataset_state.left_out.spans.update([BatchSpan("train", 1, 0, 1)])
    left_with_85(first)
    _, seen = two_lives(tmp_path, ["BATCH_START", "EPOCH_END", "FIT_END"], **options)
    assert seen == [[0, 1, 1], [0, 0, 0]]
    assert names(tmp_path) == ["ba11"]


def test_a_signal_in_the_evaluation_of_the_last_batch(tmp_path: Path) -> None:
    """It comes before the end of its epoch, for a save: the next life ends the training, the one after does nothing."""
    options: dict[str, Any] = {
        "eval_dataloader": loader(9, shuffle=False), "save_interval": "12ba", "save_filename": "b{batch}",
        "autoresume": True,
    }  # fmt: skip
    left_with_85(plain(tmp_path, callbacks=Term("eval_batch_start", 12), **options))
    _, seen = two_lives(tmp_path, ["EVAL_END", "EPOCH_END", "FIT_END"], **options)
    assert seen == [[1, 1, 1], [0, 0, 0]]
    assert names(tmp_path) == ["b12"]
    assert hf.Checkpoint(tmp_path / "b12").metrics["eval"]["loss"] > 0


SCRIPT = """
import os, sys
from pathlib import Path
from loop_kit import rich
from holdfast.callbacks import Callback, CheckpointSaver

class Say(Callback):
    def batch_end(self, state, logger):
        print("batch", int(state.timestamp.batch), flush=True)

folder, suffix = Path(sys.argv[1]), sys.argv[2]
weights = CheckpointSaver(folder / "weights", "w{batch}" + suffix, save_interval="1ba", weights_only=True,
                          overwrite=True, num_checkpoints_to_keep=2)
trainer = rich(folder / "full", callbacks=[Say(), weights], save_interval="1ba", save_filename="b{batch}" + suffix,
               save_num_checkpoints_to_keep=2, max_duration="4ep", autoresume=True)
trainer.fit()
print("done", flush=True)
"""


@pytest.mark.long
def test_sigterm_at_random(tmp_path: Path) -> None:
    """Stopped again and again at any moment, evaluations too: each life saves and leaves with 85, nothing is lost."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests/kits'}"}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), ""]
    rng = torch.Generator().manual_seed(7)
    lives = 0
    for _ in range(12):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(int(torch.randint(1, 5, (1,), generator=rng)))]
        time.sleep(float(torch.rand(1, generator=rng)) * 0.02)  # anywhere within the batch that follows
        process.terminate()
        told = process.communicate(timeout=100)
        check_folder(tmp_path)
        if process.returncode == 0 or "batch 24\n" in lines:  # after the last batch `fit` may have ended
            break
        assert process.returncode == 85, told
        lives += 1
    assert lives > 2
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    whole = rich(None, max_duration="4ep")
    whole.fit()
    found = hf.load(tmp_path / "full" / "b24")
    for name, tensor in whole.state.model.state_dict().items():
        assert torch.equal(found["state"]["model"][name], tensor), name


def check_folder(folder: Path) -> None:
    """Whatever is named like a checkpoint loads, and so does what the links lead to."""
    for link in folder.glob("*/latest-rank0"):
        assert link.exists(), f"{link} dangles"
        state = State(model=torch.nn.Identity())
        options = LoadOptions(strict_model_weights=False, weights_only=True)
        load_path(link, state, options=options)


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_killed_at_random(tmp_path: Path, suffix: str) -> None:
    """Killed a dozen times while two savers save after every batch.

    Every link leads to a complete checkpoint, each start goes on, and the end is that of a training nobody
    killed.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests/kits'}"}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), suffix]
    rng = torch.Generator().manual_seed(11)
    for _ in range(7):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout is not None
        wanted = int(torch.randint(1, 5, (1,), generator=rng))
        seen = [line for line, _ in zip(process.stdout, range(wanted), strict=False)]
        process.kill()
        process.communicate()
        check_folder(tmp_path)
        if seen and seen[-1].startswith("done"):
            break
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stderr
    check_folder(tmp_path)
    found = names(tmp_path / "full")
    assert found == [f"b23{suffix}", f"b24{suffix}"]
    whole = rich(None, max_duration="4ep")
    whole.fit()
    found = (
        hf.load(tmp_path / "full" / "b24")
        if not suffix
        else torch.load(tmp_path / "full" / "b24.pt", weights_only=True)
    )
    for name, tensor in whole.state.model.state_dict().items():
        assert torch.equal(found["state"]["model"][name], tensor), name


def _no_space() -> Future[Any]:
    lost: Future[Any] = Future()
    lost.set_exception(hf.StorageFullError("no space left (a test)"))
    return lost


class FullDisk:
    """Lets saves of directories and single files find no space.

    Attributes:
        count: of saves that were begun.
        saves: the numbers of those that fail.
        when: fails them while it returns True.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.saves, self.when = 0, set[int](), lambda: False
        submit, submit_file = Snapshotter.submit, FileLeases.submit

        def submitted(*args: Any, **options: Any) -> Any:
            return _no_space() if self.is_full() else submit(*args, **options)

        def file_submitted(*args: Any, **options: Any) -> Any:
            return _no_space() if self.is_full() else submit_file(*args, **options)

        monkeypatch.setattr(Snapshotter, "submit", submitted)
        monkeypatch.setattr(FileLeases, "submit", file_submitted)

    def is_full(self) -> bool:
        self.count += 1
        return self.count in self.saves or self.when()


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_full_disk(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A save that finds no space costs that save: it is said, training goes on, older checkpoints are untouched."""
    count = 0

    def full(original):  # type: ignore[no-untyped-def]
        def call(*arguments, **options):  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            if count == 2:
                raise hf.StorageFullError("no space left (a test)")
            return original(*arguments, **options)

        return call

    monkeypatch.setattr(FileLeases, "submit", full(FileLeases.submit))
    monkeypatch.setattr(Snapshotter, "submit", full(Snapshotter.submit))
    trainer = rich(tmp_path, save_interval="1ep", save_filename="ep{epoch}" + suffix)
    trainer.fit()
    assert names(tmp_path) == [f"ep1{suffix}", f"ep3{suffix}"]
    assert "NOT saved" in caplog.text
    assert [Path(path).name for path in trainer.saved_checkpoints] == [f"ep1{suffix}", f"ep3{suffix}"]


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_a_lost_last_save_is_made_up_for(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the storage takes a moment later is saved all the same: at the end of training, and when asked for again."""
    full = FullDisk(monkeypatch)
    full.saves = {3}
    trainer = rich(tmp_path / "end", save_interval="1ep", save_filename="ep{epoch}" + suffix)
    trainer.fit()
    assert names(tmp_path / "end") == [f"ep{number}{suffix}" for number in (1, 2, 3)]
    full.saves = {5}
    with rich(tmp_path / "now", save_filename="ba{batch}" + suffix) as other:
        with pytest.raises(hf.StorageFullError, match="was NOT saved"):
            other.save_checkpoint_to_save_folder()
        assert names(tmp_path / "now") == []
        other.save_checkpoint_to_save_folder()
        other.save_checkpoint_to_save_folder()
    assert names(tmp_path / "now") == [f"ba0{suffix}"]
    assert full.count == 6


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_room_is_made_where_deletions_are_behind(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A life with a lower number to keep finds the disk full: what the number does not keep makes the room."""
    options: dict[str, Any] = {"save_interval": "2ba", "save_filename": "ba{batch}" + suffix, "autoresume": True}
    rich(tmp_path, max_duration="8ba", **options).fit()
    full = FullDisk(monkeypatch)
    full.when = lambda: len(names(tmp_path)) >= 4
    rich(tmp_path, max_duration="12ba", save_num_checkpoints_to_keep=2, **options).fit()
    assert "removed by the rules of retention" in caplog.text
    assert names(tmp_path) == ([f"ba10{suffix}", f"ba12{suffix}"] if suffix else ["ba12", "ba8"])


def test_a_parent_is_the_durable_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one whose save was lost; after a resume the one that training goes on from."""
    full = FullDisk(monkeypatch)
    full.saves = {3}
    options: dict[str, Any] = {"save_interval": "2ba", "save_filename": "ba{batch}", "autoresume": True}
    rich(tmp_path, max_duration="8ba", **options).fit()
    rich(tmp_path, max_duration="12ba", **options).fit()
    found = {batch: hf.Checkpoint(tmp_path / f"ba{batch}").manifest for batch in (2, 4, 8, 10, 12)}
    assert found[2].parent is None
    for before, after in itertools.pairwise(found):
        assert found[after].parent == found[before].checkpoint_id, after


def test_full_disk_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training whose last checkpoint found no space does not end as if all were well."""

    def full(*args: Any) -> Future[Any]:
        return _no_space()

    trainer = rich(tmp_path, save_interval="1ep", save_filename="ep{epoch}.pt", max_duration="1ep")
    monkeypatch.setattr(FileLeases, "submit", full)
    with pytest.raises(hf.StorageFullError, match=r"last checkpoint \(batch 6\) was NOT saved"):
        trainer.fit()
