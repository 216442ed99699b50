"""Keras on TensorFlow: the trainings of the group keras, with the other backend."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.testing import ForkServer

CASES = f"{Path(__file__).parents[1] / 'keras/fit_cases.py'}:"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """A process that has imported TensorFlow once; each case runs in a fork of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "tensorflow")
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
        with ForkServer(preload=["torch", "tensorflow", "keras", "holdfast.checkpointer", CASES[:-1]]) as running:
            yield running


def test_backend(server: ForkServer) -> None:
    """The backend is TensorFlow, and `tf.keras` is the Keras that the callbacks are of."""
    assert server.run(f"{CASES}backend").checked() == ["tensorflow", True]


@pytest.mark.parametrize(("every", "stop", "found"), [("1ep", 6, 4), (2, 7, 6), (3, 4, 3), (4, 5, 4)])
def test_kill(server: ForkServer, tmp_path: Path, every: Any, stop: int, found: int) -> None:
    """Killed in and between epochs, a run over a PyDataset ends with the same bits."""
    alone = server.run(f"{CASES}fit", str(tmp_path / "alone"), data="dataset").checked()
    run = str(tmp_path / "run")
    assert server.run(f"{CASES}fit", run, data="dataset", every=every, stop=stop).status == -signal.SIGKILL
    again = server.run(f"{CASES}fit", run, data="dataset", every=every).checked()
    assert again["from"] == found
    assert again["digest"] == alone["digest"]


@pytest.mark.parametrize(("every", "stop"), [("1ep", 10), (3, 8)])
@pytest.mark.parametrize("data", ["tf.data", "generator"])
def test_data_that_go_on_from_epoch_to_epoch(
    server: ForkServer, tmp_path: Path, data: str, every: Any, stop: int
) -> None:
    """Killed in the third epoch or the second, a run over data whose epochs differ ends with the same bits."""
    alone = server.run(f"{CASES}fit", str(tmp_path / "alone"), data=data).checked()
    run = str(tmp_path / "run")
    assert server.run(f"{CASES}fit", run, data=data, every=every, stop=stop).status == -signal.SIGKILL
    assert server.run(f"{CASES}fit", run, data=data, every=every).checked()["digest"] == alone["digest"]


def test_sigterm_and_best(server: ForkServer, tmp_path: Path) -> None:
    """SIGTERM saves the batch it met; the best by val_loss stays beside the newest."""
    run = str(tmp_path / "run")
    keep = {"last": 1, "best": 1, "metric": "val_loss"}
    stopped = server.run(f"{CASES}fit", run, stop=6, number=signal.SIGTERM, keep=keep)
    assert stopped.error.endswith("SystemExit: 85\n"), stopped.error
    again = server.run(f"{CASES}fit", run, keep=keep).checked()
    assert again["from"] == 6
    scores = {step: loss for step, loss in again["kept"] if loss is not None}
    assert min(scores.values()) <= min(again["val_loss"])
    assert again["kept"][-1][0] == 12


def test_report(server: ForkServer, tmp_path: Path) -> None:
    """On a worker of the function trainer: killed, restored from the reported `.keras` file, same bits."""
    alone = server.run(f"{CASES}reported", str(tmp_path / "a"), epochs=3, fails_at=None).checked()
    again = server.run(f"{CASES}reported", str(tmp_path / "b"), epochs=3, fails_at=2).checked()
    assert again["attempts"] == 2
    assert again["digest"] == alone["digest"] == again["stored"]
    assert again["epochs"] == [0, 1, 2]


def test_weights_elsewhere(server: ForkServer, tmp_path: Path) -> None:
    """`state` gives the weights of a run to a model whose layers have other numbers in their names."""
    run = str(tmp_path / "run")
    server.run(f"{CASES}fit", run, epochs=1).checked()
    assert server.run(f"{CASES}weights_elsewhere", run).checked()
