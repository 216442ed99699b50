"""What of a Keras training is state: variables, the place in `model.fit`, what other callbacks count, random numbers.

Everything here sees Keras through its variables alone (``path``, ``value``, ``assign``), so it is the same for every
backend, and a checkpoint of one backend loads on another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from holdfast._log import get_logger
from holdfast.checkpointer.checkpointer import Checkpointer
from holdfast.errors import ConfigError, StateMismatchError
from holdfast.state.tree import rng
from holdfast.state.tree.arrays import array_of, tensor_of
from holdfast.state.tree.values import PerRank

from .reporting import scalars

_LOG = get_logger("keras")
_open: weakref.WeakValueDictionary[str, FitRun] = weakref.WeakValueDictionary()

_OPTIMIZER = ("variables", "apply", "iterations")
_LAYER = ("trainable_variables", "call")
_MANY = 1000  # a longer list is data, and to look at each would take long
_GENERATOR = "global_seed_generator"
_NOT_COUNTED = "min_delta"  # an argument: Keras turns its sign round when it learns whether less is better


class Variables:
    """Variables of Keras as one item of a state: tensors by path.

    Keras numbers layers without a name through the life of a process (``dense``, ``dense_1``), so paths of equal models
    may differ: if they do, variables are matched in their order.

    Args:
        what: for messages.
        find: gives the variables, always in the same order.
        later: whether `load_state_dict` waits for `apply`.
        build: makes the variables where some were stored, if they are not there before training.
    """

    def __init__(
        self,
        what: str,
        find: Callable[[], Sequence[Any]],
        *,
        later: bool = False,
        build: Callable[[], None] | None = None,
    ) -> None:
        self._what, self._find, self._later, self._build = what, find, later, build
        self._waiting: Mapping[str, torch.Tensor] | None = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return tensors over the memory of the variables where the backend allows it."""
        found: dict[str, torch.Tensor] = {}
        for number, variable in enumerate(self._find()):
            name = variable.path if variable.path not in found else f"{variable.path}~{number}"
            value = variable.value
            found[name] = value.detach() if isinstance(value, torch.Tensor) else tensor_of(np.asarray(value))
        return found

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Assign stored values.

        Raises:
            StateMismatchError: other variables, or other shapes; nothing is assigned.
        """
        if self._later:
            self._waiting = dict(saved)
        else:
            self._assign(saved)

    def apply(self) -> bool:
        """Assign what waits; False if it does not fit, and nothing is assigned."""
        waiting, self._waiting = self._waiting, None
        try:
            self._assign(waiting or {})
        except StateMismatchError:
            return False
        return True

    def _assign(self, saved: Mapping[str, torch.Tensor]) -> None:
        if saved and self._build is not None:
            self._build()
        live = dict(zip(self.state_dict(), self._find(), strict=True))
        if live.keys() != saved.keys() and len(live) == len(saved):
            saved = dict(zip(live, saved.values(), strict=True))
        problems = [f"missing: {name}" for name in live.keys() - saved.keys()]
        problems += [f"unexpected: {name}" for name in saved.keys() - live.keys()]
        for name, variable in live.items():
            have = tuple(saved[name].shape) if name in saved else None
            if have is not None and have != tuple(variable.shape):
                problems.append(f"{name}: {have} stored, {tuple(variable.shape)} in the model")
        if problems:
            shown = "; ".join(sorted(problems)[:20])
            raise StateMismatchError(f"{len(problems)} variables of the {self._what} do not fit: {shown}")
        for name, variable in live.items():
            on_torch = isinstance(variable.value, torch.Tensor)
            variable.assign(saved[name] if on_torch else array_of(saved[name]))


def other_optimizers(model: Any) -> dict[str, Variables]:
    """Return the optimizers of a model beside its own ``optimizer``, by name, as items of a state.

    They are found in attributes of the model and of its layers and inner models, and in lists and dictionaries there.

    Raises:
        ConfigError: an optimizer is not built yet, so that there is nothing to save or to restore.
    """
    found: dict[str, Variables] = {}
    for path, home, value in _optimizers(model, "", _parts(getattr(model, "optimizer", None))):
        own = home is not model and getattr(home, "optimizer", None) is value
        if not (own or value.built):
            raise ConfigError(
                f"model.{path} is an optimizer that is not built: call model.{path}.build(variables) with what it "
                "trains before fit(), so that its state is saved and comes back"
            )
        build = partial(_build, value, home) if own else None
        found[f"optimizer.{path}"] = Variables(f"optimizer {path}", partial(_of_built, value), build=build)
    return found


def _optimizers(home: Any, prefix: str, seen: dict[int, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, owner and optimizer; ``seen``, by id, are not looked at again."""
    attributes = {**vars(home), **getattr(home, "_modules", {})}  # the torch backend has layers there
    attributes = dict(sorted(attributes.items(), key=lambda item: item[0].startswith("_")))  # Keras's own lists last
    waiting = [(f"{prefix}{name.lstrip('_')}", value) for name, value in attributes.items()]
    while waiting:
        path, value = waiting.pop(0)
        if id(value) in seen:
            continue
        if isinstance(value, (list, tuple, dict)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{path}.{key}", item) for key, item in items] if len(value) <= _MANY else []
        elif all(hasattr(value, part) for part in _OPTIMIZER):
            seen |= _parts(value)
            yield path, home, value
        elif all(hasattr(value, part) for part in _LAYER):
            seen[id(value)] = value
            yield from _optimizers(value, f"{path}.", seen)


def _parts(optimizer: Any) -> dict[int, Any]:
    """Return an optimizer and what it is made of, whose variables are among its own, by id."""
    parts = [optimizer, getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    return {id(part): part for part in parts}


def _of_built(optimizer: Any) -> Sequence[Any]:
    """Return the variables of an optimizer: none before it knows what it trains."""
    return optimizer.variables if optimizer.built else ()


def _build(optimizer: Any, home: Any) -> None:
    if not optimizer.built:
        optimizer.build(home.trainable_variables)


class Position:
    """Where `model.fit` is, which trains ``per_call`` batches in a call of its train function.

    Attributes:
        epoch: number of the epoch to go on with.
        batch: calls of the train function that this epoch has had.
        stopped: whether a callback has ended the training.
        begin: generators as they were when the epoch began: they decide its order.
        logs: running metrics of the epoch.
    """

    def __init__(self, per_call: int) -> None:
        self._per_call = per_call
        self.epoch, self.batch, self.stopped = 0, 0, False
        self.logs: dict[str, Any] = {}
        self.begin: dict[str, Any] = capture()

    def enter(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch, self.batch, self.begin = epoch, 0, capture()

    def count(self, logs: Mapping[str, Any]) -> None:
        """Count a call of the train function."""
        self.batch, self.logs = self.batch + 1, dict(logs)

    def leave(self, *, stopped: bool) -> None:
        """End the epoch."""
        self.epoch, self.batch, self.stopped = self.epoch + 1, 0, stopped

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain data; generators are those of each rank."""
        fields = {"epoch": self.epoch, "batch": self.batch, "stopped": self.stopped, "logs": self.logs}
        return {**fields, "per_call": self._per_call, "begin": PerRank(self.begin), "seeds": PerRank(seeds())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved.

        Raises:
            StateMismatchError: no call ends at this batch any more.
        """
        self.epoch, self.stopped = int(state["epoch"]), bool(state["stopped"])
        batches = int(state["batch"]) * int(state.get("per_call", self._per_call))  # older checkpoints lack it
        self.batch, rest = divmod(batches, self._per_call)
        if rest:
            what = f"the checkpoint lies {batches} batches into epoch {self.epoch + 1}, where no call of "
            raise StateMismatchError(f"{what}{self._per_call} batches ends: compile(steps_per_execution=...) as before")
        self.logs, self.begin = dict(state["logs"]), _of_rank(state["begin"])
        if "seeds" in state:
            set_seeds(_of_rank(state["seeds"]))


class Counters:
    """What callbacks have counted: plain attributes that are no longer as they were when this was made.

    What an argument of a callback said is not among them: a new ``patience`` counts after a resume. Callbacks may come
    and go between two lives of a run; they are known by class name, a second callback of a class as ``Name-1``.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._callbacks: dict[str, Any] = {}
        for callback in callbacks:
            if not hasattr(callback, "on_epoch_end"):
                raise ConfigError(f"callbacks={callback!r}: give callbacks of Keras that count, such as EarlyStopping")
            kind = type(callback).__name__
            number = sum(type(other).__name__ == kind for other in self._callbacks.values())
            self._callbacks[f"{kind}-{number}" if number else kind] = callback
        self._first = {name: _plain(callback) for name, callback in self._callbacks.items()}
        self._waiting: Mapping[str, Mapping[str, Any]] = {}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the attributes of each."""
        found = {}
        for name, callback in self._callbacks.items():
            first = self._first[name]
            now = _plain(callback)
            found[name] = {key: now[key] for key in now if key not in first or not _is_same(now[key], first[key])}
        return found

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep them for `apply`: callbacks start to count anew in ``on_train_begin``."""
        self._waiting = dict(state)

    def apply(self) -> None:
        """Set what was loaded, once."""
        for name, values in self._waiting.items():
            for key, value in values.items() if name in self._callbacks else ():
                if key != _NOT_COUNTED:  # checkpoints of earlier versions have it
                    setattr(self._callbacks[name], key, value)
        self._waiting = {}


def _of_rank(value: Any) -> Any:
    return value.value if isinstance(value, PerRank) else value


def _plain(callback: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(callback).items() if name != _NOT_COUNTED and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, np.ndarray) for item in value)  # best_weights
    return value is None or isinstance(value, (bool, int, float, str, np.generic))


def _is_same(value: Any, first: Any) -> bool:
    return value is first or (not isinstance(value, list) and type(value) is type(first) and value == first)


# -- random generators: those of `holdfast.RNG`, and the one that Keras draws from without a seed


def capture() -> dict[str, Any]:
    """Describe the state of every generator; nothing is advanced."""
    return {**rng.capture(), "keras": seeds()}


def restore(state: Mapping[str, Any]) -> None:
    """Put every generator back into the state that `capture` described."""
    if "keras" in state:
        set_seeds(state["keras"])
    rng.restore(state)  # to make Keras's generator draws from python's


def seeds() -> list[int] | None:
    """Return the state of the generator that ``keras.random`` draws from without a seed; None if nobody has yet."""
    found = _keras_state()
    generator = None if found is None else found.get_global_attribute(_GENERATOR)
    return None if generator is None else [int(number) for number in generator.state.value]


def set_seeds(saved: list[int] | None) -> None:
    """Undo `seeds`."""
    found = _keras_state()
    if found is None:
        return
    if saved is None:
        found.set_global_attribute(_GENERATOR, None)
        return
    if found.get_global_attribute(_GENERATOR) is None:
        import keras

        found.set_global_attribute(_GENERATOR, keras.random.SeedGenerator())
    found.get_global_attribute(_GENERATOR).state.assign(np.asarray(saved, dtype="uint32"))


def _keras_state() -> Any:
    """Return where Keras keeps it, which it tells nobody; None if it is elsewhere in this version."""
    try:
        from keras.src.backend.common import global_state
    except ImportError:
        return None
    return global_state


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
        self._position = Position(int(model().steps_per_execution))
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
        ck._progress.has_own_place = True
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
