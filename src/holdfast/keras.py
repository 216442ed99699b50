"""Keras 3: `model.fit` that goes on where it was, and that reports on the workers of the function trainer.

`HoldfastCallback` is for a plain ``model.fit``, `ReportCallback` for ``fit`` in a ``train_func`` of `TorchTrainer`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ._optional import require
from ._units import Interval, IntervalLike, parse_interval
from .checkpoint.handle import Checkpoint
from .checkpointer.checkpointer import Checkpointer
from .config import Keep
from .errors import ConfigError
from .frameworks.keepers import verified_directory
from .frameworks.keras_state import Counters, FitRun, Variables, other_optimizers, surroundings
from .frameworks.reporting import epochs_between, reporting, scalars
from .trainers.function.worker.session import get_context, report

__all__ = ["HoldfastCallback", "ReportCallback", "ReportCheckpointCallback", "load_model", "state"]

_keras: Any = require("keras", extra="keras", purpose="holdfast.keras")
_Callback: Any = _keras.callbacks.Callback
Logs = Mapping[str, Any] | None


class HoldfastCallback(_Callback):  # type: ignore[misc]
    """Saves a run of ``model.fit`` and goes on from where it was; give it as the LAST callback.

    Saved are the variables of model, optimizer and metrics, the place in ``fit``, and all random generators, by a
    `Checkpointer`, with all that it does: background, any storage, retention, signals. A resume in the middle of an
    epoch draws the batches that were trained before again, without training them.

    Args:
        path: root of the run: a path or a URI.
        every: when to save: "1ep", a number of batches (500), a time ("15min"), or a list of these. Where Keras trains
            several batches in a call (``steps_per_execution``), at the end of the call that comes to it.
        keep: which checkpoints stay; ``best=`` by what ``fit`` logs ("loss", "val_accuracy"). None keeps all.
        callbacks: other callbacks of this ``fit`` whose counters belong to the run (EarlyStopping, ReduceLROnPlateau).
        options: more arguments of `holdfast.Checkpointer`.

    Raises:
        ConfigError: an argument is wrong, or (in ``fit``) the model is not built yet.
        StateMismatchError: (in ``fit``) the checkpoint is of another model.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: IntervalLike | Sequence[IntervalLike] | None = "1ep",
        keep: Keep | None = Keep(last=3),  # noqa: B008 - Keep is frozen
        callbacks: Iterable[Any] = (),
        **options: Any,
    ) -> None:
        super().__init__()
        self._arguments = {"path": path, "every": every, "keep": keep, **options}
        checked = Checkpointer(**self._arguments).options  # what is wrong is refused now
        if any(interval.unit == "sp" for interval in (*checked.intervals, *checked.rescue)):
            raise ConfigError(
                "every= and rescue= of HoldfastCallback take no samples ('1000sp'), for Keras does not say how many a "
                "batch has: give batches, epochs or a time"
            )
        self._counters = Counters(callbacks)
        self._run: Any = None  # Keras calls on_train_begin first

    @property
    def checkpointer(self) -> Checkpointer | None:
        """What saves (or has saved) the current ``fit``; None before the first."""
        return None if self._run is None else self._run.checkpointer

    def set_params(self, params: Any) -> None:  # noqa: D102 - Keras gives them to one callback after the other
        super().set_params(params)
        self._counters.look(params)

    def on_train_begin(self, logs: Logs = None) -> None:  # noqa: D102
        arguments = _in_calls(self._arguments, int(self.model.steps_per_execution))
        self._run = FitRun(lambda: self.model, self._counters, arguments)
        beside, source = surroundings(self)
        self._run.begin(self.params, beside=beside, source=source)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:  # noqa: D102
        self._run.enter_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:  # noqa: D102
        self._run.batch_done(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:  # noqa: D102
        self._run.leave_epoch(logs)

    def on_train_end(self, logs: Logs = None) -> None:  # noqa: D102
        self._run.end()


class ReportCallback(_Callback):  # type: ignore[misc]
    """Reports from a ``train_func``: what ``fit`` logs, "epoch" and "step", and the model as `CHECKPOINT_NAME`.

    Every rank needs it; rank 0 writes. In the ``.keras`` file are weights, optimizer and how the model is made; random
    generators (those of Dropout, too) and the place within an epoch are not.

    Args:
        every_n_epochs: a checkpoint with every so many epochs (default 1); the others report metrics alone.
        every_n_steps: a checkpoint every so many batches of this ``fit`` instead.

    Raises:
        ConfigError: both are given, or a number is not positive. In ``fit`` SessionError: not in a ``train_func``.
    """

    CHECKPOINT_NAME = "model.keras"

    def __init__(self, *, every_n_epochs: int | None = None, every_n_steps: int | None = None) -> None:
        super().__init__()
        self._epochs, self._steps = epochs_between(every_n_epochs, every_n_steps), every_n_steps
        self._epoch = self._step = 0

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:  # noqa: D102
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:  # noqa: D102
        before, self._step = self._step, self._step + int(self.model.steps_per_execution)
        if self._steps is not None and self._step // self._steps > before // self._steps:
            self._report(logs, saving=True)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:  # noqa: D102
        self._report(logs, saving=self._steps is None and (epoch + 1) % self._epochs == 0)

    def _report(self, logs: Logs, *, saving: bool) -> None:
        metrics = {**scalars(logs), "epoch": self._epoch, "step": int(self.model.optimizer.iterations)}
        if not saving:
            report(metrics)
            return
        with reporting(metrics) as directory:
            if get_context().get_world_rank() == 0:
                self.model.save(os.path.join(directory, self.CHECKPOINT_NAME))


ReportCheckpointCallback = ReportCallback  # its name in Ray Train


def _in_calls(arguments: Mapping[str, Any], per_call: int) -> Mapping[str, Any]:
    """Return arguments of a `Checkpointer` whose steps are calls of so many batches, from those that count batches."""

    def turned(every: Any) -> Any:
        if isinstance(every, (list, tuple)):
            return [turned(one) for one in every]
        interval = None if every in (None, "auto") else parse_interval(every)
        if interval is None or interval.unit != "ba":
            return every
        return Interval(math.ceil(interval.value / per_call), "ba")

    if per_call == 1:
        return arguments
    keep, every, rescue = arguments["keep"], arguments["every"], arguments.get("rescue")
    keep = None if keep is None else replace(keep, every=turned(keep.every))
    return {**arguments, "keep": keep, "every": turned(every), "rescue": turned(rescue)}


def load_model(checkpoint: str | os.PathLike[str] | Checkpoint, **options: Any) -> Any:
    """Return the model that `ReportCallback` reported; ``options`` are those of ``keras.models.load_model``."""
    with verified_directory(checkpoint) as directory:
        return _keras.models.load_model(os.path.join(directory, ReportCallback.CHECKPOINT_NAME), **options)


def state(model: Any) -> dict[str, Any]:
    """Return "model" and "optimizer" for `holdfast.save`, `holdfast.load` and ``report(state=...)``, on any backend.

    Other optimizers that the model has as attributes are "optimizer.NAME".
    """
    found = {"model": (weights := Variables("model", lambda: model.variables))}
    if getattr(model, "optimizer", None) is not None:
        model.optimizer.build(model.trainable_variables)
        found["optimizer"] = Variables("optimizer", lambda: model.optimizer.variables, trains=weights)
        found |= other_optimizers(model)
    return found


def __getattr__(name: str) -> Any:
    from ._not_here import missing

    raise missing(__name__, name)
