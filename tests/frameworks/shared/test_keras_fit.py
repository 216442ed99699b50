"""`FitRun`, which saves a ``model.fit`` of Keras, with a model that has what it asks of one and no Keras."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.frameworks import keras_state
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


def test_a_batch_that_is_not_saved_does_not_bring_the_model_up_to_date(tmp_path: Path) -> None:
    """With JAX as backend that is an assignment for each variable."""
    model, asked = make_model(), []
    run = FitRun(lambda: asked.append(1) or model, Counters(()), {"path": tmp_path, "every": 2, "keep": None})
    run.begin({"epochs": 1})
    run.enter_epoch(0)
    before = len(asked)
    run.batch_done({"loss": 0.5})
    assert len(asked) == before
    run.batch_done({"loss": 0.5})
    assert len(asked) > before
    run.close(Killed())


class Rates:
    """A callback as people write them: a smaller rate with each epoch and each batch, and what it has seen."""

    def __init__(self, *, stops_at: int = 0) -> None:
        self.stops_at = stops_at
        self.batches, self.seen, self.ends, self.rows = 0, [], {"batches": 0}, np.zeros(2)
        self.params: Any = None

    def on_train_begin(self, params: Any) -> None:
        self.params = params
        self.began = True

    def on_epoch_begin(self, model: Any, epoch: int) -> None:
        model.optimizer.variables[1].assign(model.optimizer.variables[1].value * 0.5)
        self.seen.append(epoch)

    def on_train_batch_end(self, model: Any) -> None:
        model.optimizer.variables[1].assign(model.optimizer.variables[1].value * 0.9)
        self.batches += 1
        self.ends["batches"] += 1
        self.rows[0] += 1
        if self.batches == self.stops_at:
            model.stop_training = True

    def on_epoch_end(self, model: Any, epoch: int) -> None:
        self.ends[f"of epoch {epoch}"] = self.batches


class Killed(Exception):
    pass


def life(path: Path, *, epochs: int = 3, dies_at: int = 0, stops_at: int = 0, first: int = 0) -> dict[str, Any]:
    """A fit with a callback in front, as Keras goes through one; perhaps until a batch of this life."""
    model, rates = make_model(), Rates(stops_at=stops_at)
    model.optimizer.variables.append(Variable("optimizer/rate"))
    model.optimizer.variables[1].assign(np.ones(2, "float32"))
    model._initial_epoch = None
    left = [dies_at]

    def train(batch: int) -> dict[str, float]:
        value = model.variables[0].value + model.optimizer.variables[1].value * (batch + 1)
        model.variables[0].assign(value.astype("float32"))
        return {"loss": 0.5}

    model.train_function = train
    run = FitRun(lambda: model, Counters([rates]), {"path": path, "every": 2, "keep": None})
    rates.on_train_begin(params := {"epochs": epochs})
    run.begin(params)
    for epoch in range(model._initial_epoch or first, epochs):
        rates.on_epoch_begin(model, epoch)
        run.enter_epoch(epoch)
        for batch in range(5):
            logs = model.train_function(batch)
            rates.on_train_batch_end(model)
            run.batch_done(logs)
            left[0] -= 1
            if not left[0]:
                run.close(Killed())
                return {}
            if model.stop_training:
                break
        rates.on_epoch_end(model, epoch)
        run.leave_epoch({"loss": 0.5})
        if model.stop_training:
            break
    run.end()
    found = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(rates).items()}
    del found["params"]
    tensors = [variable.value.tolist() for variable in (*model.variables, *model.optimizer.variables)]
    return {"counted": found, "tensors": tensors, "epoch": run.checkpointer.epoch}


@pytest.mark.parametrize("small", [1 << 20, 0], ids=["copies", "loads again"])
@pytest.mark.parametrize("deaths", [(3,), (9,), (7, 4), (10,)], ids=str)
def test_what_callbacks_do_about_skipped_batches_is_undone(
    deaths: tuple[int, ...], small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is drawn again only to come to the next one counts once: in rates, counters and lists."""
    monkeypatch.setattr(keras_state, "_SMALL", small)
    monkeypatch.setattr(keras_state, "_changes", lambda variable: variable.value.tobytes())
    whole = life(tmp_path / "whole")
    assert whole["counted"]["batches"] == 15
    for dies_at in deaths:
        assert life(tmp_path / "cut", dies_at=dies_at) == {}
    assert life(tmp_path / "cut") == whole
    assert life(tmp_path / "cut") == whole  # a start of a finished run has no epoch, and its counters all the same


def test_a_callback_that_stops_at_a_batch(tmp_path: Path) -> None:
    """Batches that are drawn again stop nobody; the one at which the training was stopped does."""
    whole = life(tmp_path / "whole", stops_at=9)
    assert whole["counted"]["batches"] == 9
    life(tmp_path / "cut", stops_at=9, dies_at=8)
    assert life(tmp_path / "cut", stops_at=9) == whole
    life(tmp_path / "at", stops_at=8, dies_at=8)  # saved at the batch that stops
    assert life(tmp_path / "at", stops_at=8) == life(tmp_path / "whole of at", stops_at=8)


def test_epochs_of_a_fit_that_begins_at_a_later_one(tmp_path: Path) -> None:
    """With `fit(initial_epoch=1)` the run counts epochs as Keras does, in its first life as in later ones."""
    whole = life(tmp_path / "whole", first=1)
    assert whole["epoch"] == 3
    life(tmp_path / "cut", first=1, dies_at=7)
    assert life(tmp_path / "cut", first=1) == whole


def test_a_fit_that_an_exception_left_is_ended_by_the_next(tmp_path: Path) -> None:
    """Also when nobody has a reference to it any more, so that its owner could not end it."""
    for _ in range(2):
        run = FitRun(make_model, Counters(()), {"path": tmp_path, "every": "1ep", "keep": None})
        run.begin({"epochs": 3})
        run.enter_epoch(0)
        del run
        gc.collect()
    fit(tmp_path, epochs=1)


def test_a_callback_behind_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Keras gives params in the order of its list: who has none yet comes behind the callback that saves."""
    first, second = Rates(), Rates()
    params = first.params = {"epochs": 3}
    Counters([first]).look(params)
    assert caplog.messages == []
    Counters([first, second]).look(params)
    assert "Rates-1: give it to fit() before HoldfastCallback" in caplog.text


@pytest.mark.parametrize(
    ("kernel", "moment", "fits"),
    [
        ("a/kernel", "adam_1/a_kernel_momentum", True),  # the second Adam of a process
        ("a_1/kernel", "adam/a_1_kernel_momentum", True),  # the second model of a process
        ("a/kernel", "adam/b_kernel_momentum", False),  # another layer is frozen now
    ],
)
def test_moments_of_other_variables(kernel: str, moment: str, fits: bool, tmp_path: Path) -> None:
    """Variables come back in their order where Keras has numbered anew, not where the optimizer trains others."""

    def begin(kernel: str, moment: str) -> FitRun:
        model = make_model()
        model.variables, model.optimizer.variables = [Variable(kernel), Variable("b/kernel")], [Variable(moment)]
        run = FitRun(lambda: model, Counters(()), {"path": tmp_path, "every": "1ep", "keep": None})
        run.begin({"epochs": 1})
        return run

    run = begin("a/kernel", "adam/a_kernel_momentum")
    run.enter_epoch(0)
    run.batch_done({"loss": 0.5})
    run.leave_epoch({"loss": 0.5})
    run.end()
    if fits:
        begin(kernel, moment).end()
        return
    with pytest.raises(hf.StateMismatchError, match="missing: adam/b_kernel_momentum; unexpected: adam/a_kernel"):
        begin(kernel, moment)


class Batches:
    """What Keras draws batches with in ``fit(steps_per_epoch=4)``: a pass spans epochs."""

    def __init__(self, whole: int | None) -> None:
        self.steps_per_epoch, self._num_batches, self.data_adapter = 4, whole, None
        self._current_iterator: Any = None
        self._steps_seen = 0

    def _get_iterator(self) -> Any:
        np.random.rand()
        return iter(range(self._num_batches or 99))

    def epoch(self) -> list[int]:
        """As Keras goes through an epoch."""
        found = []
        if self._current_iterator is None:
            self._current_iterator, self._steps_seen = self._get_iterator(), 0
        for _ in range(self.steps_per_epoch):
            if self._num_batches and self._steps_seen >= self._num_batches:
                break
            self._steps_seen += 1
            found.append(next(self._current_iterator))
        if self._num_batches and self._steps_seen >= self._num_batches:
            self._current_iterator, self._steps_seen = self._get_iterator(), 0
        return found


@pytest.mark.parametrize("whole", [None, 6, 8, 4])
def test_a_pass_over_the_data_that_spans_epochs(
    whole: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `steps_per_epoch` a resume goes on where the pass is, says so, and leaves the generators as they were."""
    np.random.seed(0)
    alone = Batches(whole)
    drawn = [alone.epoch() for _ in range(5)]
    found = []
    for epoch in range(5):  # a life for each
        model, source = make_model(), Batches(whole)
        run = FitRun(lambda model=model: model, Counters(()), {"path": tmp_path, "every": "1ep", "keep": None})
        run.begin({"epochs": epoch + 1}, source=source)
        run.enter_epoch(epoch)
        found.append(source.epoch())
        for _ in found[-1]:
            run.batch_done({"loss": 0.5})
        run.leave_epoch({"loss": 0.5})
        run.end()
    assert found == drawn
    assert ("drawing 4 batches of earlier epochs" in caplog.text) == (whole != 4)


def test_callbacks_that_count_and_are_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are named at the end of the first epoch, once, with what they count; those of `callbacks=` are not."""
    model, saved, lost = make_model(), Rates(), Rates()
    model.optimizer.variables.append(Variable("optimizer/rate"))
    run = FitRun(lambda: model, Counters([saved]), {"path": tmp_path, "every": "1ep", "keep": None})
    run.begin({"epochs": 2}, beside=[saved, lost, SimpleNamespace(on_epoch_end=None, idle=1)])
    for epoch in range(2):
        run.enter_epoch(epoch)
        for callback in (saved, lost):
            callback.on_train_batch_end(model)
        run.batch_done({"loss": 0.5})
        run.leave_epoch({"loss": 0.5})
    run.end()
    assert caplog.text.count("Rates (batches, ends, rows): what these callbacks count is not saved") == 1
    assert "idle" not in caplog.text


def test_an_epoch_of_which_nothing_is_left(tmp_path: Path) -> None:
    """Where Keras learns only from the data that an epoch is over, its metrics are those of the batches skipped."""

    class Model(SimpleNamespace):
        def get_metrics_result(self) -> dict[str, float]:
            return {"loss": 0.0}

    def life(*, dies: bool) -> Any:
        model, batches = Model(**vars(make_model())), iter(range(3))
        model._initial_epoch = None
        model.train_function = lambda batches: {"loss": float(next(batches))}
        run = FitRun(lambda: model, Counters(()), {"path": tmp_path, "every": 1, "keep": None})
        run.begin({"epochs": 1})
        run.enter_epoch(0)
        try:
            while True:
                run.batch_done(model.train_function(batches))
        except StopIteration:
            pass
        if dies:
            return run.close(Killed())
        logs = model.get_metrics_result()
        run.leave_epoch(logs)
        run.end()
        return logs, model.get_metrics_result()

    life(dies=True)
    assert life(dies=False) == ({"loss": 2.0}, {"loss": 0.0})


class Shuffled:
    """A `tf.data.Dataset`: the order of a pass depends on how many were begun before."""

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Any:
        self.begun += 1
        return iter(range(6))


class TFDatasetAdapter:
    def __init__(self, dataset: Shuffled) -> None:
        self.dataset = dataset

    def get_tf_dataset(self) -> Shuffled:
        return self.dataset


class TFEpochIterator:
    """What Keras draws batches with where TensorFlow is the backend."""

    def __init__(self, dataset: Shuffled, steps_per_epoch: int | None, whole: int | None) -> None:
        self.steps_per_epoch, self._num_batches, self.data_adapter = steps_per_epoch, whole, TFDatasetAdapter(dataset)
        self._get_iterator = self.data_adapter.get_tf_dataset


class JAXEpochIterator(TFEpochIterator):
    """The same with JAX: a pass begins when its first batch is drawn."""


@pytest.mark.parametrize(
    ("kind", "steps_per_epoch", "whole", "begun"),
    [
        (TFEpochIterator, None, 6, 4),  # Keras begins another pass at the end of each epoch, and leaves it
        (TFEpochIterator, None, None, 3),  # not in the first epoch, where the number of batches is not known
        (TFEpochIterator, 3, 6, 1),  # two epochs were one pass
        (JAXEpochIterator, None, 6, 2),
    ],
)
def test_passes_that_earlier_epochs_have_begun(
    kind: type[TFEpochIterator], steps_per_epoch: int | None, whole: int | None, begun: int, tmp_path: Path
) -> None:
    """A dataset that shuffles anew for each pass is as far as it was; one that this process has had is so already."""
    dataset = Shuffled()
    half = 1 if steps_per_epoch else 0  # the third life begins the pass again of which it has but the second half
    for epochs, found in ((2, 0), (3, begun), (4, begun + half)):
        model = make_model()
        run = FitRun(lambda model=model: model, Counters(()), {"path": tmp_path, "every": "1ep", "keep": None})
        if epochs == 3:  # a new process has a new one
            dataset = Shuffled()
        run.begin({"epochs": epochs}, source=kind(dataset, steps_per_epoch, whole))
        assert dataset.begun == found
        for epoch in range(model._initial_epoch, epochs):
            run.enter_epoch(epoch)
            run.batch_done({"loss": 0.5})
            run.leave_epoch({"loss": 0.5})
        run.end()
