"""One `model.fit` of Keras as a run of `Checkpointer`: what its callback does at each of Keras's calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast._log import get_logger
from holdfast.checkpointer.checkpointer import Checkpointer
from holdfast.errors import ConfigError

from .keras_state import Counters, Position, Variables, capture, other_optimizers, restore
from .metrics import scalars

__all__ = ["FitRun"]

_LOG = get_logger("keras")
_open: weakref.WeakValueDictionary[str, FitRun] = weakref.WeakValueDictionary()


class FitRun:
    """Saves and resumes one ``fit``.

    Args:
        model: gives the model, brought up to date (the JAX backend keeps its weights elsewhere during an epoch).
        counters: of other callbacks.
        arguments: of the `Checkpointer`.

    Attributes:
        checkpointer: what saves.
    """

    def __init__(self, model: Callable[[], Any], counters: Counters, arguments: Mapping[str, Any]) -> None:
        self._model, self._counters = model, counters
        self._position = Position()
        self._metrics = Variables("metrics", lambda: model().metrics_variables, later=True)
        self._skip: _Skip | None = None
        self._fresh = True  # nothing was trained since the resume
        self._main = main = getattr(model(), "optimizer", None)
        optimizers = {} if main is None else {"optimizer": Variables("optimizer", lambda: main.variables)}
        optimizers |= other_optimizers(model())
        self._trained = bool(optimizers)
        state: dict[str, Any] = {
            "model": Variables("model", lambda: model().variables),
            **optimizers,
            "metrics": self._metrics,
            "fit": self._position,
            "callbacks": counters,
        }
        more = arguments.get("state") or {}
        if taken := sorted(state.keys() & more.keys()):
            raise ConfigError(f"state has {taken}: what HoldfastCallback saves itself has that name; take another")
        self.checkpointer = Checkpointer(**{**arguments, "state": {**state, **more}})

    def begin(self, params: Mapping[str, Any]) -> None:
        """Resume, and tell Keras where to go on.

        Args:
            params: of Keras: one object for all callbacks of one ``fit``.
        """
        model, ck, epochs = self._model(), self.checkpointer, int(params["epochs"])
        self._params = params
        if not (model.built and self._trained):
            raise ConfigError(
                "HoldfastCallback needs a model that is compiled and built before fit(): let it begin with a "
                "keras.Input, or call it on one batch"
            )
        if self._main is not None and not self._main.built:
            self._main.build(model.trainable_variables)
        skipping = getattr(model.train_function, "__self__", None)
        if isinstance(skipping, _Skip):
            skipping.end()  # an exception left fit() in the middle of it
        if (before := _open.pop(ck.storage.uri, None)) is not None:
            before.close(RuntimeError("an exception left model.fit()"))
            if before._params is params:
                raise ConfigError(f"two HoldfastCallbacks of one fit() save to {ck.storage.uri}: leave one of them out")
        ck.__enter__()
        _open[ck.storage.uri] = self
        self._first_epoch = model._initial_epoch
        if ck.resumed_from is not None:
            model._initial_epoch = epochs if self._position.stopped else min(self._position.epoch, epochs)
        self._epochs: Iterator[int] = ck.epochs(epochs)
        next(self._epochs, None)
        while ck.epoch < self._position.epoch and next(self._epochs, None) is not None:
            pass  # it was saved between Keras's end of the epoch and ours

    def enter_epoch(self, epoch: int) -> None:
        """Begin an epoch, or enter one again in its middle."""
        if self._fresh:
            self._fresh = False
            self._model()._initial_epoch = self._first_epoch  # it has been read; another fit() is not to see it
            self._counters.apply()
            if self._position.batch:
                if not self._metrics.apply():
                    _LOG.warning("epoch %d: its metrics cover what is left of it", epoch + 1)
                self._skip = _Skip(self._model(), self._position)
                return
        self._position.enter(epoch)

    def batch_done(self, logs: Mapping[str, Any] | None) -> None:
        """Count a call of the train function; saves when due."""
        if self._skip is not None and self._skip.left:
            self._skip.counted()
            return
        self._skip = None
        metrics = scalars(logs)
        self._position.count(metrics)
        with self._leaving():
            self.checkpointer.step(**metrics)

    def leave_epoch(self, logs: Mapping[str, Any] | None) -> None:
        """Record what the epoch has come to; saves when due."""
        if self._skip is not None:
            self._skip.end()
            self._skip = None
        self._position.leave(stopped=bool(self._model().stop_training))
        with self._leaving():
            self.checkpointer.report(**scalars(logs))
            next(self._epochs, None)

    def end(self) -> None:
        """Save the final step, and wait until everything is durable."""
        self._model()._initial_epoch = self._first_epoch
        _open.pop(self.checkpointer.storage.uri, None)
        self.checkpointer.__exit__(None, None, None)

    def close(self, error: BaseException) -> None:
        """Leave the run as after an exception: what is under way is finished, nothing more is saved."""
        _open.pop(self.checkpointer.storage.uri, None)
        self.checkpointer.__exit__(type(error), error, error.__traceback__)

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Keras calls nobody after an exception, so the run is left here."""
        try:
            yield
        except BaseException as error:
            self.close(error)
            raise


class _Skip:
    """Lets Keras draw the batches that were trained before, in their order, without training them.

    Attributes:
        left: how many are still to be skipped.
    """

    def __init__(self, model: Any, position: Position) -> None:
        self.left = position.batch
        self._model, self._logs, self._train = model, position.logs, model.train_function
        self._after = capture()  # as the checkpoint had them: for what comes after the skipped batches
        restore(position.begin)
        model.train_function = self._call

    def counted(self) -> None:
        """Count a batch that was skipped."""
        self.left -= 1
        if not self.left:
            restore(self._after)
            # If no batch follows, Keras asks for the metrics of the epoch, and not every backend has built them.
            object.__setattr__(self._model, "get_metrics_result", self._once)

    def end(self) -> None:
        """Train again."""
        vars(self._model).pop("get_metrics_result", None)
        self._model.train_function = self._train
        if self.left:
            restore(self._after)
        self.left = 0

    def _call(self, *given: Any) -> Any:
        """Stand in for the train function."""
        if not self.left:
            self.end()
            return self._train(*given)
        batches = given[-1]
        if hasattr(batches, "__next__"):  # some backends draw them in the train function
            for _ in range(self._model.steps_per_execution):
                next(batches)
        return self._logs if len(given) == 1 else (self._logs, *given[:-1])  # JAX hands its state through

    def _once(self) -> dict[str, Any]:
        vars(self._model).pop("get_metrics_result", None)
        return dict(self._logs)
