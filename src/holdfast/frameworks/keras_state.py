"""What of a Keras training is state: variables, the place in `model.fit`, what other callbacks count, random numbers.

Everything here sees Keras through its variables alone (``path``, ``value``, ``assign``), so it is the same for every
backend, and a checkpoint of one backend loads on another.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import islice
from typing import Any
from weakref import WeakSet

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
_passed: WeakSet[Any] = WeakSet()  # datasets of tf.data that a fit of this process had: it has begun their passes
_open: dict[str, FitRun] = {}  # one that an exception has left stays here: nobody else could end it

_OPTIMIZER = ("variables", "apply", "iterations")
_LAYER = ("trainable_variables", "call")
_MANY = 1000  # a longer list is data, and to look at each would take long
_GENERATOR = "global_seed_generator"
_DATA_END = ("StopIteration", "OutOfRangeError")  # of TensorFlow
# Keras turns the sign of the argument min_delta round when it learns whether less is better; params are those of a fit.
_NOT_COUNTED = ("min_delta", "params")
_SCALARS = (type(None), bool, int, float, str, np.generic)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_UNCOUNTED = {"BackupAndRestore", "CSVLogger", "History", "ProgbarLogger", "RemoteMonitor", "TensorBoard"}
_SMALL = 1 << 20  # elements of a variable of which a copy is no burden
_SOURCE = ("steps_per_epoch", "data_adapter", "_num_batches", "_get_iterator", "_steps_seen")  # as of Keras 3.15


class Variables:
    """Variables of Keras as one item of a state: tensors by path.

    Keras numbers layers without a name through the life of a process (``dense``, ``dense_1``), so paths of equal models
    may differ: if they do, variables are matched in their order.

    Args:
        what: for messages.
        find: gives the variables, always in the same order.
        later: whether `load_state_dict` waits for `apply`.
        build: makes the variables where some were stored, if they are not there before training.
        trains: the variables of the model, of an optimizer whose own are called after them.
    """

    def __init__(
        self,
        what: str,
        find: Callable[[], Sequence[Any]],
        *,
        later: bool = False,
        build: Callable[[], None] | None = None,
        trains: Variables | None = None,
    ) -> None:
        self._what, self.find, self._later, self._build, self._trains = what, find, later, build, trains
        self._waiting: Mapping[str, torch.Tensor] | None = None
        self._has_stored_names = False

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return tensors over the memory of the variables where the backend allows it."""
        found: dict[str, torch.Tensor] = {}
        for number, variable in enumerate(self.find()):
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
        live = dict(zip(self.state_dict(), self.find(), strict=True))
        self._has_stored_names = live.keys() == saved.keys()
        if len(live) == len(saved) and not self._trains_others(live, saved):
            saved = saved if self._has_stored_names else dict(zip(live, saved.values(), strict=True))
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

    def _trains_others(self, live: Iterable[str], saved: Iterable[str]) -> bool:
        """Tell whether an optimizer has come to train other variables of a model that has its stored names."""
        if self._trains is None or not self._trains._has_stored_names:
            return False  # Keras may have numbered the layers anew
        return {name.rpartition("/")[2] for name in live} != {name.rpartition("/")[2] for name in saved}


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


def recurrent(model: Any) -> Sequence[Any]:
    """Return the states that stateful recurrent layers carry from batch to batch, which no list of variables has."""
    layers = model._flatten_layers() if hasattr(model, "_flatten_layers") else ()
    waiting = [layer.states for layer in layers if getattr(layer, "stateful", False) and hasattr(layer, "states")]
    found: dict[int, Any] = {}
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, (list, tuple)):
            waiting = [*value, *waiting]
        elif value is not None:
            found.setdefault(id(value), value)
    return list(found.values())


class Kept:
    """Variables as they are now, to be put back after callbacks have seen what is not trained again.

    Of small ones there is a copy (a learning rate, say). Others are known by torch's count of their changes.
    """

    def __init__(self, items: Mapping[str, Variables]) -> None:
        self._small: list[tuple[Any, Any]] = []
        self._big: list[tuple[str, Any, Any]] = []
        for name, item in items.items():
            for variable in item.find():
                value = variable.value
                if math.prod(variable.shape) > _SMALL:
                    self._big.append((name, variable, _changes(variable)))
                else:
                    copy = value.detach().clone() if isinstance(value, torch.Tensor) else np.array(value)
                    self._small.append((variable, copy))

    def put_back(self) -> list[str]:
        """Put the small ones back; return which items have others that were changed."""
        for variable, copy in self._small:
            variable.assign(copy)
        return sorted({name for name, variable, before in self._big if _changes(variable) != before})


def _changes(variable: Any) -> Any:
    value = variable.value
    return (value.data_ptr(), value._version) if isinstance(value, torch.Tensor) else None


class Position:
    """Where `model.fit` is, which trains ``per_call`` batches in a call of its train function.

    Attributes:
        epoch: number of the epoch to go on with.
        batch: calls of the train function that this epoch has had.
        stopped: whether a callback has ended the training.
        stopping: whether one has asked for it at this batch.
        begin: generators as they were when the epoch began: they decide its order.
        logs: running metrics of the epoch.
    """

    def __init__(self, per_call: int) -> None:
        self._per_call = per_call
        self.epoch, self.batch, self.stopped, self.stopping = 0, 0, False, False
        self.logs: dict[str, Any] = {}
        self.begin: dict[str, Any] = capture()

    def enter(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch, self.batch, self.begin = epoch, 0, capture()

    def count(self, logs: Mapping[str, Any], *, stopping: bool) -> None:
        """Count a call of the train function."""
        self.batch, self.logs, self.stopping = self.batch + 1, dict(logs), stopping

    def leave(self, *, stopped: bool) -> None:
        """End the epoch."""
        self.epoch, self.batch, self.stopped, self.stopping = self.epoch + 1, 0, stopped, False

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain data; generators are those of each rank."""
        fields = {"epoch": self.epoch, "batch": self.batch, "stopped": self.stopped, "logs": self.logs}
        fields |= {"stopping": self.stopping, "per_call": self._per_call}
        return {**fields, "begin": PerRank(self.begin), "seeds": PerRank(seeds())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved.

        Raises:
            StateMismatchError: no call ends at this batch any more.
        """
        self.epoch, self.stopped = int(state["epoch"]), bool(state["stopped"])
        self.stopping = bool(state.get("stopping"))  # older checkpoints lack it
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

    Numbers, text, arrays, and containers of these. What an argument of a callback said is not among them: a new
    ``patience`` counts after a resume. Callbacks may come and go between two lives of a run; they are known by class
    name, a second callback of a class as ``Name-1``.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._callbacks: dict[str, Any] = {}
        for callback in callbacks:
            if not hasattr(callback, "on_epoch_end"):
                raise ConfigError(f"callbacks={callback!r}: give callbacks of Keras that count, such as EarlyStopping")
            kind = type(callback).__name__
            number = sum(type(other).__name__ == kind for other in self._callbacks.values())
            self._callbacks[f"{kind}-{number}" if number else kind] = callback
        self._given = {name: _given(callback) for name, callback in self._callbacks.items()}
        self._first = {
            name: deepcopy(_plain(callback, self._given[name])) for name, callback in self._callbacks.items()
        }
        self._loaded: Mapping[str, Mapping[str, Any]] = {}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the attributes of each."""
        found = {}
        for name, callback in self._callbacks.items():
            first = self._first[name]
            now = _plain(callback, self._given[name])
            found[name] = {key: now[key] for key in now if key not in first or not _is_same(now[key], first[key])}
        return found

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Set them, and keep them for `apply`: callbacks behind this one have yet to begin, which resets them."""
        self._loaded = dict(state)
        self.apply()

    def apply(self, *, late: bool = False) -> None:
        """Set what was loaded.

        Args:
            late: only where nothing has been counted since: of callbacks that do nothing as an epoch begins.
        """
        for name, values in self._loaded.items():
            callback = self._callbacks.get(name)
            if callback is None or (late and _begins_epochs(callback)):
                continue
            for key, value in values.items():
                if key not in _NOT_COUNTED:  # checkpoints of earlier versions have one of them
                    setattr(callback, key, deepcopy(value))

    def look(self, params: Any) -> None:
        """Say which callbacks Keras does not call before the one that saves: it has just got the params of a fit."""
        behind = [name for name, callback in self._callbacks.items() if getattr(callback, "params", None) is not params]
        if behind:
            _LOG.warning(
                "%s: give it to fit() before HoldfastCallback, which has to be the last: what it does at the end of an "
                "epoch is not in the checkpoint of that epoch now", ", ".join(behind),
            )  # fmt: skip

    def without(self, callbacks: Iterable[Any]) -> Counters:
        """Return the counters of those that are not among these."""
        known = [id(one) for one in self._callbacks.values()]
        return Counters(one for one in callbacks if id(one) not in known and type(one).__name__ not in _UNCOUNTED)

    def say_what_is_lost(self) -> None:
        """Name what has been counted here, where nobody saves it; what begins with "_" says little to a reader."""
        counts = {name: sorted(key for key in found if key[0] != "_") for name, found in self.state_dict().items()}
        if named := [f"{name} ({', '.join(keys)})" for name, keys in counts.items() if keys]:
            _LOG.warning(
                "%s: what these callbacks count is not saved, so after a resume they begin anew: give them to "
                "HoldfastCallback(callbacks=[...]) as well", "; ".join(named),
            )  # fmt: skip

    def forget(self) -> None:
        """Forget what was loaded: from now on it is the callbacks that count."""
        self._loaded = {}


def _of_rank(value: Any) -> Any:
    return value.value if isinstance(value, PerRank) else value


def _begins_epochs(callback: Any) -> bool:
    home = next((kind for kind in type(callback).__mro__ if "on_epoch_begin" in vars(kind)), None)
    return "on_epoch_begin" in vars(callback) or (home is not None and home.__name__ != "Callback")


def _given(callback: Any) -> dict[str, Any]:
    """Return the attributes of a callback that are data which somebody gave it, too long to be looked at."""
    return {name: value for name, value in vars(callback).items() if _length(value) > _MANY}


def _length(value: Any) -> int:
    return value.size if isinstance(value, np.ndarray) else len(value) if isinstance(value, _CONTAINERS) else 0


def _plain(callback: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(callback).items()
        if name not in _NOT_COUNTED and given.get(name, callback) is not value and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, _SCALARS) and _is_plain(item) for key, item in value.items())
    if isinstance(value, _CONTAINERS):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _SCALARS) or (isinstance(value, np.ndarray) and not value.dtype.hasobject)


def _is_same(value: Any, first: Any) -> bool:
    if type(value) is not type(first):
        return False
    if isinstance(value, np.ndarray):
        return value.dtype == first.dtype and np.array_equal(value, first)
    if isinstance(value, dict):
        return value.keys() == first.keys() and all(_is_same(value[key], first[key]) for key in value)
    if isinstance(value, (list, tuple, deque)):
        return len(value) == len(first) and all(map(_is_same, value, first))
    return bool(value == first)


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


# -- what Keras does not tell a callback


def surroundings(callback: Any) -> tuple[list[Any], Any]:
    """Return the other callbacks of the fit that is calling one, and what it draws batches with (None if unknown)."""
    others: list[Any] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        here = frame.f_locals
        listed = getattr(here.get("self"), "callbacks", None)
        if isinstance(listed, list) and any(one is callback for one in listed):
            others = [one for one in listed if one is not callback]
        if "epoch_iterator" in here:
            source = here["epoch_iterator"]
            return others, source if all(hasattr(source, name) for name in _SOURCE) else None
        frame = frame.f_back
    return others, None


def _begin_passes(source: Any, passes: int) -> None:
    """Begin passes over a `tf.data.Dataset` as earlier epochs did: the order of each depends on how many were before.

    With TensorFlow as backend Keras begins another one at the end of an epoch, and leaves it.
    """
    eager, whole = type(source).__name__ == "TFEpochIterator", source._num_batches
    if eager and not source.steps_per_epoch:
        passes = 2 * passes if whole else max(2 * passes - 1, 0)  # how many batches there are it may learn at the end
    for _ in range(passes):
        iter(source._get_iterator() if eager else source.data_adapter.get_tf_dataset())


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
        self._bare = model()  # for what is asked at every batch: to bring it up to date takes time
        self._position = Position(int(model().steps_per_execution))
        self._metrics = Variables("metrics", lambda: model().metrics_variables, later=True)
        self._skip: _Skip | None = None
        self._fresh = True  # nothing was trained since the resume
        self._main = main = getattr(model(), "optimizer", None)
        weights, optimizers = Variables("model", lambda: model().variables), {}
        if main is not None:
            optimizers["optimizer"] = Variables("optimizer", lambda: main.variables, trains=weights)
        optimizers |= other_optimizers(model())
        self._trained = bool(optimizers)
        self._items = {"model": weights, **optimizers}
        if recurrent(model()):
            self._items["recurrent"] = Variables("recurrent layers", lambda: recurrent(model()))
            missing = arguments.get("allow_missing", ())  # checkpoints of earlier versions lack it
            allowed = ["recurrent", *([missing] if isinstance(missing, str) else missing)]
            arguments = {**arguments, "allow_missing": allowed}
        self._kept: Kept | None = None
        self._beside: Counters | None = None
        state: dict[str, Any] = {
            **self._items,
            "metrics": self._metrics,
            "fit": self._position,
            "callbacks": counters,
        }
        more = arguments.get("state") or {}
        if taken := sorted(state.keys() & more.keys()):
            raise ConfigError(f"state has {taken}: what HoldfastCallback saves itself has that name; take another")
        self.checkpointer = Checkpointer(**{**arguments, "state": {**state, **more}})

    def begin(self, params: Mapping[str, Any], *, beside: Iterable[Any] = (), source: Any = None) -> None:
        """Resume, and tell Keras where to go on.

        Args:
            params: of Keras: one object for all callbacks of one ``fit``.
            beside: the other callbacks.
            source: what Keras draws batches with, if that is known.
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
        if self._position.batch:
            self._kept, self._generators = Kept(self._items), capture()
        if ck.resumed_from is not None:
            model._initial_epoch = epochs if self._position.stopped else min(self._position.epoch, epochs)
        ck._progress.has_own_place = True
        self._epochs: Iterator[int] = ck.epochs(epochs)
        next(self._epochs, None)
        self._count_up_to(self._position.epoch)  # it was saved between Keras's end of the epoch and ours
        self._beside = self._counters.without(beside)
        self._draw_earlier(source, resumed=ck.resumed_from is not None and model._initial_epoch < epochs)

    def _draw_earlier(self, source: Any, *, resumed: bool) -> None:
        """Bring the data to where they were, as far as earlier epochs decide it and Keras does not see to it."""
        is_tf = type(getattr(source, "data_adapter", None)).__name__ == "TFDatasetAdapter"
        is_known = is_tf and source.data_adapter.get_tf_dataset() in _passed
        if is_tf:
            _passed.add(source.data_adapter.get_tf_dataset())
        if source is None or not resumed:
            return
        passes, seen, per_call = 0, 0, int(self._model().steps_per_execution)
        per_epoch, whole = source.steps_per_epoch, source._num_batches
        for _ in range(self._position.epoch - (self._first_epoch or 0)):
            seen += math.ceil(per_epoch / per_call) * per_call if per_epoch else 0
            if not per_epoch or (whole and seen >= whole):  # Keras begins a new pass with the next epoch
                passes, seen = passes + 1, 0
        if is_tf and not is_known:
            _begin_passes(source, passes)
        if not seen:
            return
        _LOG.warning(
            "fit(steps_per_epoch=%d): drawing %d batches of earlier epochs again to get back to the position in the "
            "data. That takes time, and is exact only if they come in the same order, not shuffled as a pass begins",
            per_epoch, seen,
        )  # fmt: skip
        generators, batches = capture(), iter(source._get_iterator())
        for _ in islice(batches, seen):
            pass
        source._current_iterator, source._steps_seen = batches, seen
        restore(generators)

    def _count_up_to(self, epoch: int) -> None:
        while self.checkpointer.epoch < epoch and next(self._epochs, None) is not None:
            pass

    def enter_epoch(self, epoch: int) -> None:
        """Begin an epoch, or enter one again in its middle."""
        if self._fresh:
            self._fresh = False
            self._model()._initial_epoch = self._first_epoch  # it has been read; another fit() is not to see it
            if self._position.batch:
                self._put_back()
                if not self._metrics.apply():
                    _LOG.warning("epoch %d: its metrics cover what is left of it", epoch + 1)
                self._skip = _Skip(self._model(), self._position, self._generators)
                return
            self._count_up_to(epoch)  # fit(initial_epoch=...)
            self._counters.apply(late=True)  # a callback behind this one has begun to count anew
            self._counters.forget()
        self._position.enter(epoch)

    def _put_back(self) -> None:
        """Undo what callbacks have done about batches that were trained before: the checkpoint has it already."""
        self._counters.apply()
        names = [] if self._kept is None else self._kept.put_back()
        resumed = self.checkpointer.resumed_from
        if names and resumed is not None:
            resumed.load(into={name: self._items[name] for name in names}, only=names)
            self._kept = Kept(self._items)
        self._model().stop_training = self._position.stopping

    def batch_done(self, logs: Mapping[str, Any] | None) -> None:
        """Count a call of the train function; saves when due."""
        if self._skip is not None and self._skip.left:
            self._skip.counted()
            self._bare.stop_training = False  # nobody had asked for it by then
            if not self._skip.left:
                self._put_back()
                self._kept = None
                self._counters.forget()
            return
        self._skip = None
        metrics = scalars(logs)
        self._position.count(metrics, stopping=bool(self._bare.stop_training))
        with self._leaving():
            self.checkpointer.step(**metrics)

    def leave_epoch(self, logs: Mapping[str, Any] | None) -> None:
        """Record what the epoch has come to; saves when due."""
        if self._skip is not None:
            self._skip.end()
            self._skip = None
        if self._beside is not None:
            self._beside.say_what_is_lost()
            self._beside = None
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

    Args:
        model: of Keras.
        position: which the checkpoint had.
        generators: as the checkpoint had them: for what comes after the skipped batches.
    """

    def __init__(self, model: Any, position: Position, generators: dict[str, Any]) -> None:
        self.left = position.batch
        self._model, self._logs, self._train = model, position.logs, model.train_function
        self._after = generators
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
            try:
                return self._train(*given)
            except Exception as error:
                if type(error).__name__ in _DATA_END:  # all were skipped, and Keras did not know how many there are
                    object.__setattr__(self._model, "get_metrics_result", self._once)
                raise
        batches = given[-1]
        if hasattr(batches, "__next__"):  # some backends draw them in the train function
            for _ in range(self._model.steps_per_execution):
                next(batches)
        return self._logs if len(given) == 1 else (self._logs, *given[:-1])  # JAX hands its state through

    def _once(self) -> dict[str, Any]:
        vars(self._model).pop("get_metrics_result", None)
        return dict(self._logs)
