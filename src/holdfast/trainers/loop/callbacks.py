"""`Callback`: code that runs at the events of training, and the ones that come with the trainer."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from holdfast._log import get_logger
from holdfast.errors import ConfigError

from .arguments import check_flags, check_path
from .events import Event
from .saving.schema import check_ignore_keys
from .times.time import TimeUnit
from .times.timestamp import Timestamp

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint

    from .loggers import Logger
    from .state import State

__all__ = ["Callback", "EarlyStopper", "EarlyStopping", "LoadCheckpoint", "ThresholdStopper"]

_LOG = get_logger("trainer")


class Callback:
    """Something that runs at events: override the methods named after them, or `run_event` for all of them.

    What has to survive a restart goes into `state_dict`; it is saved with every checkpoint under the class's name.

    Example:
        >>> class Count(Callback):
        ...     batches = 0
        ...     def batch_end(self, state, logger):
        ...         self.batches += 1
        ...     def state_dict(self):
        ...         return {"batches": self.batches}
        ...     def load_state_dict(self, state):
        ...         self.batches = state["batches"]
    """

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Run at every event; calls the method of its name."""
        method = getattr(self, event.value, None)
        if method is not None:
            method(state, logger)

    def state_dict(self) -> dict[str, Any]:
        """Return what has to survive a restart."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what an earlier life's `state_dict` gave."""

    def checkpoint_committed(self, checkpoint: Checkpoint) -> None:
        """Hear of a committed checkpoint: on rank 0, on a thread of the saver, which has to go on soon."""

    def close(self, state: State, logger: Logger) -> None:
        """Give resources back; called once, when the trainer is closed."""

    def post_close(self) -> None:
        """Run after every callback and logger has been closed."""


# One method for each event: they do nothing, and tell by their identity that nobody overrode them.
def _method(event: Event) -> Any:
    def method(self: Callback, state: State, logger: Logger) -> None:
        pass

    method.__name__ = event.value
    method.__doc__ = f"Run at {event.name}."
    return method


for _event in Event:
    setattr(Callback, _event.value, _method(_event))


_SMALL = ("loss", "error", "perplexity")  # in names of metrics of which less is better
_FALLS, _RISES = ("min", "less", "lt"), ("max", "greater", "gt")


class EarlyStopping(Callback):
    """Ends training when a metric has stopped getting better. Composer calls it ``EarlyStopper``, a name it also has.

    Args:
        monitor: name of the metric.
        dataloader_label: "train", or the label of the evaluation data ("eval" if there is one loader).
        comp: when a value is better: "min" ("less", "lt"), "max" ("greater", "gt") or a function
            ``(new, best) -> bool`` of two tensors, such as ``torch.less``, or of numbers; by default smaller is better
            for names with "loss", "error" or "perplexity", greater otherwise.
        min_delta: how much better it has to be to count.
        patience: how long nothing better is put up with: a time, or a number of epochs. Training ends at the first
            look after more than that: an evaluation; for "train" the end of an epoch, or, if patience is given in
            another unit, every batch.
    """

    def __init__(
        self,
        monitor: str,
        dataloader_label: str = "eval",
        comp: Any = None,
        min_delta: float = 0.0,
        patience: Any = 1,
    ) -> None:
        from .times.intervals import parse_every

        if comp is None:
            falls = any(word in monitor.lower() for word in _SMALL)
            comp = "min" if falls else "max"
        known = comp.lower() in (*_FALLS, *_RISES) if isinstance(comp, str) else callable(comp)
        if not known:
            raise ConfigError(
                f"EarlyStopping(comp={comp!r}): use 'min' ('less'), 'max' ('greater') or a function (new, best) -> bool"
            )
        self.monitor, self.dataloader_label, self.min_delta = monitor, dataloader_label, abs(min_delta)
        self._better = comp
        self.patience = parse_every(patience, "patience").interval
        if self.patience.unit is TimeUnit.DURATION:
            raise ConfigError(f"EarlyStopping(patience={patience!r}): give epochs, batches, samples or a time")
        self.best: float | None = None
        self.best_at: Timestamp | None = None
        self.stopped = False

    def _improved(self, new: float) -> bool:
        if self.best is None:
            return not math.isnan(new)
        if callable(self._better):
            try:
                better = self._better(*torch.tensor([new, self.best], dtype=torch.float64))
            except TypeError:  # of numbers, such as one that rounds them
                better = self._better(new, self.best)
            return bool(better) and abs(new - self.best) > self.min_delta
        gain = self.best - new if self._better.lower() in _FALLS else new - self.best
        return bool(gain > self.min_delta)

    def _look(self, state: State, values: Mapping[str, Any]) -> None:
        if self.monitor not in values:
            raise ConfigError(
                f"EarlyStopping(monitor={self.monitor!r}): {self.dataloader_label!r} has no such metric; there are "
                f"{', '.join(sorted(values)) or 'none'}"
            )
        new = float(values[self.monitor])
        if self.best_at is None or self._improved(new):
            self.best, self.best_at = (None if math.isnan(new) else new), state.timestamp
            return
        unit = self.patience.unit
        if state.timestamp.value(unit) - self.best_at.value(unit) > self.patience.value:
            _LOG.warning(
                "%s %s has not been better than %s since batch %d: training ends at batch %d",
                self.dataloader_label, self.monitor, self.best, int(self.best_at.batch), int(state.timestamp.batch),
            )  # fmt: skip
            self.stopped = True
            state.stop_training()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Leave a training that was ended by this in an earlier life as it is; say if there is nothing to look at."""
        if self.dataloader_label not in ("train", *state.eval_dataloaders):
            _LOG.warning(
                "EarlyStopping(%r, dataloader_label=%r) never stops this training: there is no eval_dataloader of that "
                "name (there are %s)", self.monitor, self.dataloader_label, ", ".join(state.eval_dataloaders) or "none",
            )  # fmt: skip
        if self.stopped:
            _LOG.warning("%s stopped getting better in an earlier life of this training: it is over", self.monitor)
            state.stop_training()

    def eval_end(self, state: State, logger: Logger) -> None:
        """Look at the metric of the evaluation that has just ended."""
        if state.dataloader_label == self.dataloader_label:
            self._look(state, state.eval_metric_values.get(self.dataloader_label, {}))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Look at the metric of training so far, where patience is shorter than epochs."""
        if self.dataloader_label == "train" and self.patience.unit is not TimeUnit.EPOCH:
            from .training.metrics import computed

            self._look(state, computed(state.train_metrics, state.ranks))

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Look at the metric of training."""
        if self.dataloader_label == "train":
            self._look(state, state.train_metric_values)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and when it was."""
        best_at = None if self.best_at is None else self.best_at.state_dict()
        return {"best": self.best, "best_at": best_at, "stopped": self.stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on waiting where the earlier life was."""
        self.best, self.stopped = state["best"], state.get("stopped", False)
        self.best_at = None if state["best_at"] is None else Timestamp.from_state_dict(state["best_at"])


EarlyStopper = EarlyStopping


class ThresholdStopper(Callback):
    """Ends training when a metric has come past a threshold.

    Args:
        monitor: name of the metric.
        dataloader_label: "train", or the label of the evaluation data.
        threshold: to be passed.
        comp: what passing is: "greater" ("gt"), "less" ("lt") or a function ``(value, threshold) -> bool``; by default
            less for names with "loss", "error" or "perplexity", greater otherwise.
        stop_on_batch: for "train", look after every batch and not at the end of epochs alone.
    """

    def __init__(
        self, monitor: str, dataloader_label: str, threshold: float, *, comp: Any = None, stop_on_batch: bool = False
    ) -> None:
        if comp is None:
            comp = "less" if any(word in monitor.lower() for word in _SMALL) else "greater"
        if not callable(comp) and comp not in (*_FALLS, *_RISES):
            raise ConfigError(
                f"ThresholdStopper(comp={comp!r}): use 'greater', 'less' or a function (value, threshold)"
            )
        check_flags(stop_on_batch=stop_on_batch)
        self.monitor, self.dataloader_label, self.threshold = monitor, dataloader_label, threshold
        self._passes, self.stop_on_batch = comp, stop_on_batch

    def _look(self, state: State, values: Mapping[str, Any]) -> None:
        if self.monitor not in values:
            raise ConfigError(
                f"ThresholdStopper(monitor={self.monitor!r}): {self.dataloader_label!r} has no such metric; there are "
                f"{', '.join(sorted(values)) or 'none'}"
            )
        value = float(values[self.monitor])
        if callable(self._passes):
            passed = bool(self._passes(*torch.tensor([value, self.threshold], dtype=torch.float64)))
        else:
            passed = value < self.threshold if self._passes in _FALLS else value > self.threshold
        if passed:
            _LOG.warning(
                "%s %s is %s, past %s: training ends at batch %d",
                self.dataloader_label, self.monitor, value, self.threshold, int(state.timestamp.batch),
            )  # fmt: skip
            state.stop_training()

    def eval_end(self, state: State, logger: Logger) -> None:
        """Look at the metric of the evaluation that has just ended."""
        if state.dataloader_label == self.dataloader_label:
            self._look(state, state.eval_metric_values.get(self.dataloader_label, {}))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Look at the metric of training so far."""
        if self.stop_on_batch and self.dataloader_label == "train":
            from .training.metrics import computed

            self._look(state, computed(state.train_metrics, state.ranks))

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Look at the metric of training."""
        if self.dataloader_label == "train":
            self._look(state, state.train_metric_values)


class LoadCheckpoint(Callback):
    """Loads another checkpoint at an event: weights in layers, a base under an adapter.

    Args:
        load_path: path or URI.
        load_weights_only: only the weights.
        strict_model_weights: every weight has to be there and none may be left over.
        ignore_keys: globs over "/"-joined paths, or a function that changes the loaded dictionary.
        event: when; "BEFORE_LOAD" comes before ``load_path`` of the trainer.
    """

    def __init__(
        self,
        load_path: str | os.PathLike[str],
        load_weights_only: bool = False,
        strict_model_weights: bool = True,
        ignore_keys: Sequence[str] | Any = None,
        event: str | Event = Event.BEFORE_LOAD,
    ) -> None:
        self.load_path = check_path(load_path, "LoadCheckpoint(load_path)")
        check_flags(load_weights_only=load_weights_only, strict_model_weights=strict_model_weights)
        self.load_weights_only, self.strict_model_weights = load_weights_only, strict_model_weights
        self.ignore_keys = check_ignore_keys(ignore_keys, "LoadCheckpoint(ignore_keys)")
        try:
            self.event = Event.of(event)
        except (AttributeError, ValueError):
            names = ", ".join(one.name for one in Event)
            raise ConfigError(f"LoadCheckpoint(event={event!r}): there is no such event; use one of {names}") from None

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Load when the event has come."""
        if event is not self.event:
            return
        from .saving.load import LoadOptions, load_path

        options = LoadOptions(
            weights_only=self.load_weights_only, strict_model_weights=self.strict_model_weights,
            ignore_keys=self.ignore_keys,
        )  # fmt: skip
        report = load_path(self.load_path, state, options=options)
        if state.ranks.leads:
            report.show()


def as_number(value: Any) -> float:
    """Return a metric as a number; reads a device if it lives on one."""
    return float(value.item() if isinstance(value, torch.Tensor) else value)
