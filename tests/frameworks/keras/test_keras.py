"""Keras 3 on the torch backend: a fit that is killed ends as one that was not."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_kit import BUCKET, moto_bucket

import holdfast as hf
from holdfast.testing import ForkServer

HERE = Path(__file__).parent
CASES = f"{HERE / 'fit_cases.py'}:"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """A process that has imported Keras once; each case runs in a fork of it."""
    with moto_bucket(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        with ForkServer(preload=["torch", "keras", "obstore", "holdfast.checkpointer", CASES[:-1]]) as running:
            yield running


@pytest.fixture(scope="module")
def whole(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an undisturbed training comes to."""
    return server.run(f"{CASES}fit", str(tmp_path_factory.mktemp("whole") / "run")).checked()


@pytest.mark.parametrize(("every", "stop", "found"), [("1ep", 9, 8), (2, 7, 6), (3, 4, 3), (4, 6, 4)])
def test_kill(server: ForkServer, whole: dict[str, Any], tmp_path: Path, every: Any, stop: int, found: int) -> None:
    """Killed in the middle of an epoch, a run goes on at its newest checkpoint, and ends with the same bits."""
    run = str(tmp_path / "run")
    assert server.run(f"{CASES}fit", run, every=every, stop=stop).status == -signal.SIGKILL
    again = server.run(f"{CASES}fit", run, every=every).checked()
    assert again["from"] == found
    assert again["digest"] == whole["digest"]
    assert again["loss"] == whole["loss"][-len(again["loss"]) :]  # of whole epochs, skipped batches included


@pytest.mark.parametrize("data", ["loader", "dataset", "generator"])
def test_other_data(server: ForkServer, tmp_path: Path, data: str) -> None:
    """A DataLoader with random augmentation, a PyDataset and a generator go on at the same sample, too."""
    alone = server.run(f"{CASES}fit", str(tmp_path / "alone"), data=data).checked()
    run = str(tmp_path / "run")
    assert server.run(f"{CASES}fit", run, data=data, every=3, stop=7).status == -signal.SIGKILL
    again = server.run(f"{CASES}fit", run, data=data, every=3).checked()
    assert again["from"] == 6
    assert again["digest"] == alone["digest"]


def test_several_batches_in_a_call(server: ForkServer, tmp_path: Path) -> None:
    """`every` and `Keep` count batches, however many Keras trains in a call; so does the place in the epoch."""
    whole = server.run(f"{CASES}fit", str(tmp_path / "whole"), data="dataset", every=4, per_call=2).checked()
    assert [step for step, _ in whole["kept"]] == [2, 4, 6]
    run = str(tmp_path / "run")
    assert server.run(f"{CASES}fit", run, data="dataset", every=2, stop=7).status == -signal.SIGKILL
    keep = {"every": "4ba", "last": 1}
    again = server.run(f"{CASES}fit", run, data="dataset", every=3, keep=keep, per_call=2).checked()
    assert (again["from"], again["digest"]) == (6, whole["digest"])
    assert [step for step, _ in again["kept"]][:3] == [2, 4, 6]
    other = str(tmp_path / "other")
    assert server.run(f"{CASES}fit", other, data="dataset", every=3, stop=4).status == -signal.SIGKILL
    refused = server.run(f"{CASES}fit", other, data="dataset", per_call=2)
    assert "the checkpoint lies 3 batches into epoch 1, where no call of 2 batches ends" in refused.error


def test_remote_and_best(server: ForkServer, whole: dict[str, Any]) -> None:
    """In a bucket: killed, resumed, and the best by val_loss is kept beside the newest."""
    run = f"s3://{BUCKET}/keras/run"
    keep = {"last": 1, "best": 1, "metric": "val_loss"}
    assert server.run(f"{CASES}fit", run, stop=6, keep=keep).status == -signal.SIGKILL
    again = server.run(f"{CASES}fit", run, keep=keep).checked()
    assert again["from"] == 4
    assert again["digest"] == whole["digest"]
    best = min(whole["val_loss"])
    assert [4 * (whole["val_loss"].index(best) + 1), best] in again["kept"]
    assert again["kept"][-1][0] == 12


def test_sigterm(server: ForkServer, whole: dict[str, Any], tmp_path: Path) -> None:
    """SIGTERM saves the batch it met, leaves with status 85, and the run goes on there."""
    run = str(tmp_path / "run")
    stopped = server.run(f"{CASES}fit", run, stop=6, number=signal.SIGTERM)
    assert stopped.error.endswith("SystemExit: 85\n"), stopped.error
    again = server.run(f"{CASES}fit", run).checked()
    assert again["from"] == 6
    assert again["digest"] == whole["digest"]


def test_finished(server: ForkServer, tmp_path: Path) -> None:
    """The script of a finished run trains nothing; asked for more epochs, it does those alone."""
    run = str(tmp_path / "run")
    first = server.run(f"{CASES}fit", run, epochs=2).checked()
    again = server.run(f"{CASES}fit", run, epochs=2).checked()
    assert (again["epochs"], again["digest"]) == ([], first["digest"])
    assert server.run(f"{CASES}fit", run, epochs=3).checked()["epochs"] == [2]


def test_an_exception_leaves_fit(server: ForkServer, whole: dict[str, Any], tmp_path: Path) -> None:
    """After an exception in `fit` the same process trains the run on: nothing of the first is in the way."""
    again = server.run(f"{CASES}fit_again_here", str(tmp_path / "run")).checked()
    assert again["from"] == 4
    assert again["digest"] == whole["digest"]


def test_counters(server: ForkServer, tmp_path: Path) -> None:
    """EarlyStopping goes on counting where it was, by the same `min_delta`, and a run that it has ended stays ended."""
    alone = server.run(f"{CASES}fit", str(tmp_path / "alone"), epochs=9, patience=5).checked()
    assert alone["epochs"] == [0, 1, 2, 3, 4]
    run = str(tmp_path / "run")
    assert server.run(f"{CASES}fit", run, epochs=9, patience=5, stop=10).status == -signal.SIGKILL
    assert server.run(f"{CASES}fit", run, epochs=9, patience=5).checked()["epochs"] == [2, 3, 4]
    assert server.run(f"{CASES}fit", run, epochs=9, patience=5).checked()["epochs"] == []


def test_what_callbacks_have_done(server: ForkServer, tmp_path: Path) -> None:
    """Rates, counts, swapped and best weights, states of recurrent layers: as in a training that nothing disturbed.

    Batches that are drawn again are seen by the callbacks twice, and count once.
    """
    whole = server.run(f"{CASES}tuned", str(tmp_path / "alone")).checked()
    assert whole["epochs"] == [[0, 4], [1, 8], [2, 12]]
    for name, kills in {"batch": [{"stop": 8}, {"stop": 3}], "epoch": [{"stop": 9}], "end": [{"at_end": True}]}.items():
        run = str(tmp_path / name)
        for kill in kills:
            assert server.run(f"{CASES}tuned", run, **kill).status == -signal.SIGKILL
        assert server.run(f"{CASES}tuned", run).checked() == whole, name


def test_what_else_a_run_has(server: ForkServer, tmp_path: Path) -> None:
    """A second optimizer and a state of the user's own come back; what would be lost or mixed up is refused."""
    found = server.run(f"{CASES}two_optimizers", str(tmp_path / "run")).checked()
    assert found["lives"] == [[4, 0], [8, 0]]  # the second life began with 5, and has what the first one saved
    assert found["same"]
    unbuilt, twice, taken = found["refused"]
    assert "model.second_optimizer.build(variables)" in unbuilt
    assert "two HoldfastCallbacks of one fit()" in twice
    assert "state has ['fit']" in taken
    assert found["after"] == [2]  # nothing holds the run


def test_optimizers_anywhere(server: ForkServer, tmp_path: Path) -> None:
    """Optimizers in lists, dictionaries and inner models come back, and so does the noise of `keras.random`."""
    found = server.run(f"{CASES}scattered_optimizers", str(tmp_path / "run")).checked()
    assert found["same"]
    assert [name for name in found["items"] if "optimizer" in name] == [
        "optimizer.inner.optimizer", "optimizer.listed.0", "optimizer.named.b",
    ]  # fmt: skip


def test_weights_and_refusals(server: ForkServer, tmp_path: Path) -> None:
    """`state` matches layers with other numbers in their names; what cannot be is refused in words."""
    run = str(tmp_path / "run")
    server.run(f"{CASES}fit", run, epochs=1).checked()
    assert server.run(f"{CASES}weights_elsewhere", run).checked()
    mismatch, every, samples, callbacks, both, zero, outside = server.run(f"{CASES}refusals", run).checked()
    assert mismatch.startswith("StateMismatchError")
    assert "kernel: (6, 8) stored, (6, 9) in the model" in mismatch
    assert every.startswith("ConfigError")
    assert "give batches, epochs or a time" in samples
    assert "EarlyStopping" in callbacks
    assert "give one of them" in both
    assert "give one of them" in zero
    assert outside.startswith("SessionError")


def test_report(server: ForkServer, tmp_path: Path) -> None:
    """On workers of the function trainer, in a bucket: killed, restored from the file, same bits; the best two stay."""
    alone = server.run(f"{CASES}reported", str(tmp_path / "a"), epochs=4, fails_at=None).checked()
    there = {"storage": f"s3://{BUCKET}/keras/reported"}
    again = server.run(f"{CASES}reported", str(tmp_path / "b"), epochs=4, fails_at=2, **there).checked()
    assert (alone["attempts"], again["attempts"]) == (1, 2)
    assert again["digest"] == alone["digest"] == again["stored"]
    assert again["epochs"] == [0, 1, 2, 3]
    assert again["best"] == sorted(again["losses"])[1::-1]
    assert again["files"] == ["manifest.json", "model.keras"]


def test_report_by_steps(server: ForkServer, tmp_path: Path) -> None:
    """With `every_n_steps` checkpoints come with batches, and the epochs report metrics alone; rank 0 writes."""
    found = server.run(
        f"{CASES}reported", str(tmp_path / "a"), epochs=2, fails_at=None, workers=2, every_n_steps=4
    ).checked()
    assert found["steps"] == [4, 5, 8, 10]
    assert found["files"] == ["manifest.json", "model.keras"]


def test_report_by_steps_of_several_in_a_call(server: ForkServer, tmp_path: Path) -> None:
    """A checkpoint for each four batches, of which Keras trains two in a call; and the metrics of each epoch."""
    found = server.run(
        f"{CASES}reported", str(tmp_path / "a"), epochs=2, fails_at=None, batch_size=10, per_call=2, every_n_steps=4
    ).checked()
    assert found["steps"] == [4, 4, 8, 8]


def test_plain_files(tmp_path: Path) -> None:
    """What `model.save` writes is a checkpoint as it is, too."""
    (tmp_path / "model.keras").write_bytes(b"anything")
    assert hf.Checkpoint.from_directory(tmp_path / "model.keras").name == "model.keras"
