"""What of a Keras training is state: variables, the place in `model.fit`, what other callbacks count, random numbers.

Everything here sees Keras through its variables alone (``path``, ``value``, ``assign``), so it is the same for every
backend, and a checkpoint of one backend loads on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from holdfast.errors import ConfigError, StateMismatchError
from holdfast.state.tree import rng
from holdfast.state.tree.values import PerRank

from .array_views import array_of, tensor_of

__all__ = ["Counters", "Position", "Variables", "capture", "other_optimizers", "restore", "seeds", "set_seeds"]

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
    """Where `model.fit` is.

    Attributes:
        epoch: number of the epoch to go on with.
        batch: calls of the train function that this epoch has had.
        stopped: whether a callback has ended the training.
        begin: generators as they were when the epoch began: they decide its order.
        logs: running metrics of the epoch.
    """

    def __init__(self) -> None:
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
        return {**fields, "begin": PerRank(self.begin), "seeds": PerRank(seeds())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved."""
        self.epoch, self.batch, self.stopped = int(state["epoch"]), int(state["batch"]), bool(state["stopped"])
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
