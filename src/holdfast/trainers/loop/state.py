"""`State`: everything a training is made of, and which of it is saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from holdfast._version import __version__
from holdfast.errors import ConfigError
from holdfast.state.tree.rng import RNG
from holdfast.state.tree.values import PerRank

from .data import DataPosition, DataSpec
from .evaluator import Evaluator
from .parallel import Ranks
from .time import Span, Time, Timestamp, finished, parse_every

ATTRIBUTES = (
    "model", "optimizers", "schedulers", "algorithms", "callbacks", "scaler", "timestamp", "rank_zero_seed",
    "train_metrics", "eval_metrics", "run_name", "dataset_state",
)  # fmt: skip
_BESIDE = ("integrations", "metadata")  # what a checkpoint has beside them
_PREVIOUS = ("epoch", "batch", "sample", "token")  # what tells which intervals were crossed last
_BY_CLASS = ("optimizers", "schedulers", "algorithms", "callbacks")


class Stateful:
    """Something that may have a state of its own in a checkpoint, under the name of its class."""

    def state_dict(self) -> dict[str, Any]:
        """Return what has to survive a restart."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what an earlier life's `state_dict` gave."""


class State:
    """The live objects of a training; callbacks and algorithms read and change it.

    Attributes:
        model, optimizers, schedulers, algorithms, callbacks, scaler: what trains.
        train_dataloader, eval_dataloaders: the data; evaluation by label.
        train_spec, evaluators: how their batches are treated; evaluators by label.
        train_metrics, eval_metrics: metric objects by name; those of evaluation by label first.
        own_eval_metrics: what is saved while ``eval_metrics`` shows those of an evaluation on other data; else None.
        train_metric_values, eval_metric_values: what they last came to.
        evaluated_at: the batch after which that was, by label.
        batch, outputs, loss: of the current batch.
        dataloader_label: "train", or the label of the evaluation that is going on.
        timestamp, previous_timestamp: where training is, and where it was one batch (or epoch) ago.
        eval_timestamp: where the evaluation on the current loader is.
        run_name, rank_zero_seed, device, precision, grad_accum: as given.
        dataset_state: the position in the training data.
        as_in_training: a context with the weights and generators of training, also within an evaluation.
        fit_starts: where each ``fit(duration)`` of this run began, in any of its lives.
        stopped: whether `stop_training` has ended this run; setting ``max_duration`` lets it go on.
        ranks: the processes that train; ``state.ranks.rank`` and ``state.ranks.world_size`` are numbers.
        serialized_attributes: names of the attributes that are saved; add your own, or remove some.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        schedulers: Sequence[Any] = (),
        run_name: str = "",
        rank_zero_seed: int = 0,
        device: torch.device | None = None,
        precision: str = "fp32",
        scaler: Any = None,
        max_duration: Time | None = None,
        train_dataloader: Any = None,
        evaluators: Mapping[str, Evaluator] | None = None,
        train_spec: DataSpec | None = None,
        grad_accum: int = 1,
        save_metrics: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self.ranks = ranks if ranks is not None else Ranks()
        self.optimizers, self.schedulers = list(optimizers), list(schedulers)
        self.algorithms: list[Any] = []
        self.callbacks: list[Any] = []
        self.scaler = scaler
        self.run_name, self.rank_zero_seed = run_name, rank_zero_seed
        self.device = device if device is not None else torch.device("cpu")
        self.precision = precision
        self._max_duration: Time | None = None
        self.stopped = False
        self.max_duration = max_duration
        self.as_in_training: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        self.fit_starts: list[Timestamp] = []
        self._of_run: Mapping[str, Any] = {}
        self._late: dict[str, Any] = {}
        self.train_dataloader, self.train_spec = train_dataloader, train_spec
        self.evaluators: dict[str, Evaluator] = dict(evaluators or {})
        self.eval_dataloaders: dict[str, Any] = {
            label: evaluator.dataloader for label, evaluator in self.evaluators.items()
        }
        self.train_metrics: dict[str, Any] = {}
        self.eval_metrics: dict[str, dict[str, Any]] = {}
        self.own_eval_metrics: dict[str, dict[str, Any]] | None = None
        self.train_metric_values: dict[str, Any] = {}
        self.eval_metric_values: dict[str, dict[str, Any]] = {}
        self.evaluated_at: dict[str, int] = {}
        self.grad_accum, self.save_metrics = grad_accum, save_metrics
        self.batch: Any = None
        self.outputs: Any = None
        self.loss: Any = None
        self.dataloader_label = "train"
        self.timestamp = self.previous_timestamp = self.eval_timestamp = Timestamp()
        self.dataset_state = DataPosition(rank=self.ranks.rank, world_size=self.ranks.world_size)
        self.serialized_attributes: list[str] = list(ATTRIBUTES)

    # -- the batch

    def batch_get_item(self, key: Any) -> Any:
        """Return a part of the current batch: by index, by name, or what ``key(batch)`` returns."""
        return key(self.batch) if callable(key) else self.batch[key]

    def batch_set_item(self, key: Any, value: Any) -> None:
        """Replace a part of the current batch: by index, by name, or by ``key(batch, value) -> batch``."""
        if callable(key):
            self.batch = key(self.batch, value)
        elif isinstance(self.batch, tuple):
            parts = list(self.batch)
            parts[key] = value
            make = getattr(self.batch, "_make", type(self.batch))
            self.batch = make(parts)
        else:
            self.batch[key] = value

    # -- how far it is

    @property
    def max_duration(self) -> Time | None:
        """How long training lasts; callbacks may set it, to a `Time`, a time string or a number of epochs."""
        return self._max_duration

    @max_duration.setter
    def max_duration(self, value: Any) -> None:
        self.stopped = False
        # A training that is to end at once has a duration of nothing, which no interval may have.
        self._max_duration = (
            value if value is None or isinstance(value, Time) else parse_every(value, "max_duration").interval
        )

    @property
    def num_batches(self) -> int | None:
        """Batches of one epoch, on this rank; None if the loader does not know."""
        return self.dataset_state.num_batches(self.train_dataloader)

    @property
    def is_epoch_over(self) -> bool:
        """True when the last batch of the epoch is trained, on this rank; False if nobody knows how many it has."""
        epoch = self.timestamp.count("epoch")
        return self.dataset_state.is_over(self.train_dataloader, seed=self.rank_zero_seed, epoch=epoch)

    @property
    def dataloader_len(self) -> Time | None:
        """Batches of one epoch as a `Time`."""
        count = self.num_batches
        return None if count is None else Time(count, "ba")

    @property
    def span(self) -> Span:
        """How long training lasts, for intervals."""
        return Span(duration=self.max_duration, num_batches=self.num_batches)

    @property
    def is_finished(self) -> bool:
        """True when training has lasted as long as it should."""
        return finished(self.timestamp, self.max_duration)

    def get_elapsed_duration(self) -> Time | None:
        """Return the share of ``max_duration`` that is done; None while nobody knows how long it lasts."""
        if self.max_duration is None:
            return None
        return Time(self.timestamp.value(self.max_duration.unit) / max(self.max_duration.value, 1e-12), "dur")

    def stop_training(self) -> None:
        """End training after the current batch; a last checkpoint is saved, and the run is over in later lives too."""
        self.max_duration = self.timestamp.batch
        self.stopped = True

    # -- what is saved

    def live(self, *, weights_only: bool = False) -> dict[str, Any]:
        """Return what is saved: live objects in the anatomy of a checkpoint.

        Raises:
            ConfigError: ``serialized_attributes`` names something this state does not have.
        """
        if weights_only:
            kept: dict[str, Any] = {"model": self.model, "integrations": {}, "metadata": self._metadata()}
            return {"state": kept}
        missing = [name for name in self.serialized_attributes if not hasattr(self, name)]
        if missing:
            raise ConfigError(
                f"state.serialized_attributes names {', '.join(sorted(missing))}, which the state does not have: set "
                "it (state.NAME = ...), or take it off the list"
            )
        state = {name: self._saved(name) for name in self.serialized_attributes}
        return {"state": {**state, "integrations": {}, "metadata": self._metadata()}, "rng": RNG}

    def _saved(self, name: str) -> Any:
        value = getattr(self, name)
        if name in _BY_CLASS:
            return by_class(value)
        if name == "timestamp":
            return {"Timestamp": _TimestampOf(self)}
        if name == "train_metrics":  # each rank has gathered its own part of the epoch
            return PerRank(value) if value and self.save_metrics else {}
        if name == "eval_metrics":
            own = value if self.own_eval_metrics is None else self.own_eval_metrics
            return own if self.save_metrics else {}
        return {} if value is None else value

    def _metadata(self) -> dict[str, Any]:
        return {
            "holdfast_version": __version__,
            "torch_version": str(torch.__version__),
            "device": self.device.type,
            "precision": self.precision,
            "world_size": self.ranks.world_size,
            "train_dataloader_batch_size": getattr(self.train_dataloader, "batch_size", None),
        }

    def show_own_metrics(self) -> None:
        """Let ``eval_metrics`` be those of the trainer's own data again."""
        if self.own_eval_metrics is not None:
            self.eval_metrics, self.own_eval_metrics = self.own_eval_metrics, None

    def take(self, loaded: Mapping[str, Any]) -> list[str]:
        """Take over the plain data of a loaded checkpoint; objects have got theirs already.

        Args:
            loaded: the content of "state". The name of the run is never taken over.

        Returns:
            The attributes in it that ``serialized_attributes`` does not name; `take_late` can still set them.
        """
        if "rank_zero_seed" in loaded and "rank_zero_seed" in self.serialized_attributes:
            self.rank_zero_seed = int(loaded["rank_zero_seed"])
        for name in self.serialized_attributes:
            if name not in ATTRIBUTES and name in loaded:
                setattr(self, name, loaded[name])
        for label, values in self.dataset_state.evaluated.items():  # before the moment that training goes on from
            self.eval_metric_values[label] = dict(values)
            self.evaluated_at[label] = self.timestamp.count("batch")
        named = {*ATTRIBUTES, *_BESIDE, *self.serialized_attributes}
        self._late = {name: value for name, value in loaded.items() if name not in named}
        return list(self._late)

    def take_late(self) -> None:
        """Set the attributes of the loaded checkpoint that ``serialized_attributes`` has come to name since."""
        for name in self.serialized_attributes:
            if name in self._late:
                setattr(self, name, self._late.pop(name))

    def go_on_with_run(self) -> None:
        """Take over what the loaded checkpoint says of its run, which this is a further life of."""
        self.fit_starts = [Timestamp.from_state_dict(start) for start in self._of_run.get("fit_starts", ())]
        if self._of_run.get("stopped"):
            self.stop_training()


class _TimestampOf:
    """The timestamp of a state as an object to save: a timestamp itself never changes."""

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        state, previous = self._state, self._state.previous_timestamp
        run = {"fit_starts": [start.state_dict() for start in state.fit_starts], "stopped": state.stopped}
        before = {name: previous.count(name) for name in _PREVIOUS}
        return {**state.timestamp.state_dict(), "previous": before, "run": run}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        now = Timestamp.from_state_dict(state)
        self._state.timestamp, self._state.previous_timestamp = now, now.copy(**state.get("previous", {}))
        self._state._of_run = state.get("run", {})


def by_class(objects: Sequence[Any]) -> dict[str, Any]:
    """Key objects that have state by the name of their class, "Name-1" for the second object of a class."""
    found: dict[str, Any] = {}
    for item in objects:
        kind = type(item)
        # The empty `state_dict` that every callback and algorithm inherits is no state.
        if not hasattr(item, "state_dict") or kind.state_dict is Stateful.state_dict:
            continue
        name, number = kind.__name__, 0
        while name in found:
            number += 1
            name = f"{kind.__name__}-{number}"
        found[name] = item
    return found
