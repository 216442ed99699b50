"""`FitRun`, which saves a ``model.fit`` of Keras, with a model that has what it asks of one and no Keras."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.frameworks.keras_state import Counters, FitRun


class Variable:
    """A variable of Keras: a value under a path."""

    def __init__(self, path: str) -> None:
        self.path, self.value, self.shape = path, np.zeros(2, "float32"), (2,)

    def assign(self, value: Any) -> None:
        self.value = np.asarray(value)


def make_model() -> Any:
    """A compiled model: weights, an optimizer, a metric."""
    optimizer = SimpleNamespace(variables=[Variable("optimizer/iteration")], built=True)
    return SimpleNamespace(
        variables=[Variable("dense/kernel")], metrics_variables=[Variable("loss/total")], optimizer=optimizer,
        steps_per_execution=1, built=True, train_function=None, stop_training=False, _initial_epoch=0,
    )  # fmt: skip


def fit(path: Path, *, epochs: int, steps: int = 3, **options: Any) -> hf.Checkpointer:
    """Go through a fit as Keras does, which calls callbacks at these places."""
    model = make_model()
    run = FitRun(lambda: model, Counters(()), {"path": path, "every": "1ep", "keep": None, **options})
    run.begin({"epochs": epochs})
    for epoch in range(model._initial_epoch, epochs):
        run.enter_epoch(epoch)
        for _ in range(steps):
            model.variables[0].assign(model.variables[0].value + 1)
            run.batch_done({"loss": 0.5})
        run.leave_epoch({"loss": 0.5})
    run.end()
    return run.checkpointer


def test_a_fit_is_not_told_of_calls_that_it_cannot_make(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keras draws the batches, and the place among them is saved: nobody hears that ck.batches() is missing."""
    with caplog.at_level(logging.WARNING, "holdfast"):
        for epochs in (2, 4):
            ck = fit(tmp_path, epochs=epochs)
    assert caplog.messages == []
    assert [(one.step, one.manifest.epoch) for one in ck.checkpoints()] == [(12, 4), (9, 3), (6, 2), (3, 1)]


@pytest.mark.parametrize("every", [1, 4])
def test_a_fit_that_is_done_has_nothing_left_to_do(every: int, tmp_path: Path) -> None:
    """Wherever its last save was due, the newest checkpoint is that of its end; a further start trains nothing."""
    for _ in range(2):
        ck = fit(tmp_path, epochs=2, every=every)
        assert hf.load(tmp_path)["fit"]["epoch"] == 2
        assert ck.latest().step == 6
