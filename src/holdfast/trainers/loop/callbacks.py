"""What is asked at the events of training (`Callback`, `Algorithm`, `LoggerDestination`), and the engine that asks it.

A callback looks on, and may end a training (`EarlyStopping`); an algorithm changes the training itself (`EMA`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from holdfast._log import get_logger
from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import ConfigError
from holdfast.state.tree.arrays import reshard
from holdfast.state.tree.objects import unwrap

from .arguments import check_flags
from .evaluator import computed
from .parallel import is_sharded
from .state import State, Stateful
from .time import Event, Time, Timestamp, TimeUnit, parse_every

_LOG = get_logger("trainers.loop")


class Callback(Stateful):
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


class LoggerDestination(Callback):
    """Somewhere metrics go. It is a `Callback` too, so it hears of every event."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Take metrics of a batch; values may be tensors on a device."""

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Take what a run was started with."""

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool = False) -> None:
        """Take a file; a destination that stores none does nothing.

        Args:
            state: of the training.
            remote_file_name: name at the destination.
            file_path: the file; it may be changed or deleted when this returns.
            overwrite: replace what has this name.
        """


class Logger:
    """Passes on to every destination what is logged; given to callbacks and algorithms.

    Attributes:
        destinations: where it goes.
    """

    def __init__(self, state: State, destinations: Sequence[LoggerDestination] = ()) -> None:
        self._state = state
        self.destinations = tuple(destinations)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics of the current batch, or of ``step``."""
        if self.destinations:
            step = self._state.timestamp.count("batch") if step is None else step
            for destination in self.destinations:
                destination.log_metrics(metrics, step)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Log what the run was started with."""
        for destination in self.destinations:
            destination.log_hyperparameters(hyperparameters)

    def upload_file(self, remote_file_name: str, file_path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Send a file of yours to every destination that stores files; returns before it is there.

        Args:
            remote_file_name: name at the destination; ``{run_name}`` is filled in.
            file_path: the file; it may be changed or deleted when this returns.
            overwrite: replace what has this name.
        """
        name = remote_file_name.replace("{run_name}", self._state.run_name)
        for destination in self.destinations:
            destination.upload_file(self._state, name, Path(file_path), overwrite=overwrite)


_SMALL = ("loss", "error", "perplexity")  # in names of metrics of which less is better
_FALLS, _RISES = ("min", "less", "lt"), ("max", "greater", "gt")


class _MetricStopper(Callback):
    """Ends training by a metric, of an evaluation or of training, where the end of epochs is not always soon enough."""

    in_epochs = True  # for "train", look at the end of epochs alone

    def __init__(self, monitor: str, dataloader_label: str, comp: Any, arguments: str) -> None:
        if comp is None:
            comp = "min" if any(word in monitor.lower() for word in _SMALL) else "max"
        known = comp.lower() in (*_FALLS, *_RISES) if isinstance(comp, str) else callable(comp)
        if not known:
            raise ConfigError(
                f"{type(self).__name__}(comp={comp!r}): use 'min' ('less'), 'max' ('greater') or a function "
                f"({arguments}) -> bool"
            )
        self.monitor, self.dataloader_label, self._comp = monitor, dataloader_label, comp

    def _beats(self, value: float, other: float) -> bool:
        if callable(self._comp):
            try:
                return bool(self._comp(*torch.tensor([value, other], dtype=torch.float64, device="cpu")))
            except TypeError:  # of numbers, such as a function that rounds them
                return bool(self._comp(value, other))
        return value < other if self._comp.lower() in _FALLS else value > other

    def _judge(self, state: State, value: float) -> None:
        raise NotImplementedError

    def _look(self, state: State, values: Mapping[str, Any]) -> None:
        if self.monitor not in values:
            raise ConfigError(
                f"{type(self).__name__}(monitor={self.monitor!r}): {self.dataloader_label!r} has no such metric; there "
                f"are {', '.join(sorted(values)) or 'none'}"
            )
        self._judge(state, float(values[self.monitor]))

    def eval_end(self, state: State, logger: Logger) -> None:
        """Look at the metric of the evaluation that has just ended."""
        if state.dataloader_label == self.dataloader_label:
            self._look(state, state.eval_metric_values.get(self.dataloader_label, {}))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Look at the metric of training so far."""
        if self.dataloader_label == "train" and not self.in_epochs:
            self._look(state, computed(state.train_metrics, state.ranks))

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Look at the metric of training."""
        if self.dataloader_label == "train":
            self._look(state, state.train_metric_values)


class EarlyStopping(_MetricStopper):
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
        super().__init__(monitor, dataloader_label, comp, "new, best")
        self.min_delta = abs(min_delta)
        self.patience = parse_every(patience, "patience").interval
        if self.patience.unit is TimeUnit.DURATION:
            raise ConfigError(f"EarlyStopping(patience={patience!r}): give epochs, batches, samples or a time")
        self.in_epochs = self.patience.unit is TimeUnit.EPOCH
        self.best: float | None = None
        self.best_at: Timestamp | None = None

    def _improved(self, new: float) -> bool:
        if self.best is None:
            return not math.isnan(new)
        return self._beats(new, self.best) and abs(new - self.best) > self.min_delta

    def _judge(self, state: State, value: float) -> None:
        new, now = value, _with_epoch(state)
        if self.best_at is None or self._improved(new):
            self.best, self.best_at = (None if math.isnan(new) else new), now
            return
        unit = self.patience.unit
        if now.value(unit) - self.best_at.value(unit) > self.patience.value:
            _LOG.warning(
                "%s %s has not been better than %s since batch %d: training ends at batch %d",
                self.dataloader_label, self.monitor, self.best, int(self.best_at.batch), int(state.timestamp.batch),
            )  # fmt: skip
            state.stop_training()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Say if there is nothing to look at."""
        if self.dataloader_label not in ("train", *state.eval_dataloaders):
            _LOG.warning(
                "EarlyStopping(%r, dataloader_label=%r) never stops this training: there is no eval_dataloader of that "
                "name (there are %s)", self.monitor, self.dataloader_label, ", ".join(state.eval_dataloaders) or "none",
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and when it was."""
        best_at = None if self.best_at is None else self.best_at.state_dict()
        return {"best": self.best, "best_at": best_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on waiting where the earlier life was."""
        self.best = state["best"]
        self.best_at = None if state["best_at"] is None else Timestamp.from_state_dict(state["best_at"])


def _with_epoch(state: State) -> Timestamp:
    """Return where training is; an epoch counts from its last batch on, for its evaluation may come before its end."""
    now = state.timestamp
    return now.to_next_epoch() if state.is_epoch_over else now


EarlyStopper = EarlyStopping


class ThresholdStopper(_MetricStopper):
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
        super().__init__(monitor, dataloader_label, comp, "value, threshold")
        check_flags(stop_on_batch=stop_on_batch)
        self.threshold, self.stop_on_batch, self.in_epochs = threshold, stop_on_batch, not stop_on_batch

    def _judge(self, state: State, value: float) -> None:
        if self._beats(value, self.threshold):
            _LOG.warning(
                "%s %s is %s, past %s: training ends at batch %d",
                self.dataloader_label, self.monitor, value, self.threshold, int(state.timestamp.batch),
            )  # fmt: skip
            state.stop_training()


class EventEngine:
    """Runs what listens to each event: algorithms first, then callbacks and loggers in their order, savers last.

    At INIT it is loggers, callbacks, algorithms: what logs is there for the others. At events whose names begin
    with AFTER_ algorithms undo what they did before, so the last algorithm comes first there.
    """

    def __init__(self, state: State, logger: Logger) -> None:
        self._state, self._logger = state, logger
        # By the value of the event: an Enum's own hash is a Python function, asked a dozen times for each batch.
        self._handlers: dict[str, list[Callable[..., object]]] = {}
        self._callbacks: Sequence[Any] = ()
        self._begun = False

    def listen(self, callbacks: Sequence[Any]) -> None:
        """Set what listens, apart from the algorithms of the state."""
        self._callbacks = tuple(callbacks)
        self._handlers = {
            event._value_: [h for callback in callbacks for h in _handlers(callback, event)] for event in Event
        }

    def run(self, event: Event) -> None:
        """Tell everybody who listens to ``event``."""
        state, logger = self._state, self._logger
        if event is Event.INIT:
            first = [callback for callback in self._callbacks if isinstance(callback, LoggerDestination)]
            for callback in (*first, *(other for other in self._callbacks if other not in first)):
                for handler in _handlers(callback, event):
                    handler(state, logger)
        if state.algorithms:
            self.run_algorithms(event)
        if event is Event.INIT:
            self._begun = True
            return
        for handler in self._handlers[event._value_]:
            handler(state, logger)

    def run_algorithms(self, event: Event) -> None:
        """Tell the algorithms alone."""
        state, logger = self._state, self._logger
        matching = [algorithm for algorithm in state.algorithms if algorithm.match(event, state)]
        for algorithm in reversed(matching) if event.name.startswith("AFTER_") else matching:
            algorithm.apply(event, state, logger)

    def close(self) -> None:
        """Close everything that listens, once; the first error is raised after all have been closed."""
        if not self._begun:
            return
        self._begun = False
        problem: Exception | None = None
        for call in ("close", "post_close"):
            for callback in self._callbacks:
                try:
                    method = getattr(callback, call, None)
                    if method is not None:
                        _ = method(self._state, self._logger) if call == "close" else method()
                except Exception as error:  # noqa: BLE001 - raised below: the others have to be closed as well
                    problem = problem or error
        if problem is not None:
            raise problem


def _handlers(callback: Any, event: Event) -> list[Callable[..., object]]:
    kind = type(callback)
    if getattr(kind, "run_event", None) is not Callback.run_event:
        return [lambda state, logger: callback.run_event(event, state, logger)]
    own = event.value in vars(callback)
    if getattr(kind, event.value, None) is getattr(Callback, event.value) and not own:
        return []
    return [getattr(callback, event.value)]


class Algorithm(Stateful):
    """A method that changes training: `match` says at which events, `apply` does it, `state_dict` is saved."""

    def match(self, event: Event, state: State) -> bool:
        """Tell whether to run at ``event``."""
        raise NotImplementedError(f"{type(self).__name__} does not say when it runs: override match(event, state)")

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Run."""
        raise NotImplementedError(f"{type(self).__name__} does nothing: override apply(event, state, logger)")


class EMA(Algorithm):
    """Keeps an exponential moving average of the weights and evaluates with it.

    The average of a parameter p after an update is ``smoothing * average + (1 - smoothing) * p``. Buffers are copied.

    Args:
        half_life: the time after which a value counts half, in batches or epochs; "1000ba" if nothing else is given.
        smoothing: instead of it: the weight of the old average, from 0 to 1.
        ema_start: when the average begins: a time, or a share of training such as "0.5dur".
        update_interval: how often the average is brought up to date, in the unit of ``half_life``; 1 by default.
    """

    def __init__(
        self, half_life: Any = None, smoothing: float | None = None, ema_start: Any = "0.0dur",
        update_interval: Any = None,
    ) -> None:  # fmt: skip
        if half_life is not None and smoothing is not None:
            raise ConfigError("EMA: give either smoothing (0.999) or half_life ('100ba')")
        if isinstance(half_life, float):
            raise ConfigError(f"EMA({half_life!r}): the first is half_life ('100ba'), so write smoothing={half_life!r}")
        half = None if smoothing is not None else _steps("1000ba" if half_life is None else half_life, "half_life")
        unit = TimeUnit.BATCH if half is None else half.unit
        every = Time(1, unit) if update_interval is None else _steps(update_interval, "update_interval")
        if half is not None:
            if every.unit is not half.unit:
                raise ConfigError(f"EMA(half_life={half}, update_interval={every}): give both in batches or in epochs")
            smoothing = 2.0 ** -(every.value / half.value)
        if smoothing is None or not 0 <= smoothing < 1:
            raise ConfigError(f"EMA(smoothing={smoothing!r}): give a number from 0 up to, not including, 1")
        self.smoothing, self.update_interval = float(smoothing), every
        self.ema_start = Time.from_input(ema_start)
        self.average: dict[str, torch.Tensor] = {}
        self._begun = self._swapped = False

    def match(self, event: Event, state: State) -> bool:
        """Run after each interval, and around evaluations."""
        every = self.update_interval
        if event is (Event.BATCH_END if every.unit is TimeUnit.BATCH else Event.EPOCH_END):
            return self._has_started(state) and state.timestamp.value(every.unit) % every.value == 0
        if event is Event.FIT_START:
            return self._has_started(state)
        return event in (Event.INIT, Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL)

    def _has_started(self, state: State) -> bool:
        start = self.ema_start
        if self._begun or not start.value:
            return True
        if start.unit is not TimeUnit.DURATION:
            return state.timestamp >= start
        done = state.get_elapsed_duration()
        return done is not None and done.value >= start.value

    @torch.no_grad()
    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Bring the average up to date, or exchange it with the weights."""
        if event is Event.EVAL_BEFORE_ALL or event is Event.EVAL_AFTER_ALL:
            self._swap(state, back=event is Event.EVAL_AFTER_ALL)
        elif event is Event.INIT:
            if is_sharded(state.model):  # what is loaded is laid out as this
                self._take(state)
        elif not self._begun:
            self._take(state)
            self._begun = True
        elif event in (Event.BATCH_END, Event.EPOCH_END):
            for name, live in _tensors(state.model):
                kept = self._kept(name, live)
                if live.is_floating_point() and isinstance(live, torch.nn.Parameter):
                    kept.lerp_(live.to(kept.dtype), 1 - self.smoothing)
                else:
                    kept.copy_(live)

    def _take(self, state: State) -> None:
        self.average = {name: tensor.detach().clone() for name, tensor in _tensors(state.model)}

    def _kept(self, name: str, live: torch.Tensor) -> torch.Tensor:
        kept = self.average[name]
        if kept.device != live.device:  # what was loaded lies on the host
            kept = self.average[name] = kept.to(live.device)
        return kept

    def _swap(self, state: State, *, back: bool) -> None:
        if not self._begun or back is not self._swapped:
            return
        for name, live in _tensors(state.model):
            kept = self._kept(name, live)
            mine = live.detach().clone()
            live.detach().copy_(kept)
            kept.copy_(mine)
        self._swapped = not back

    def state_dict(self) -> dict[str, Any]:
        """Return the average, and whether it has begun: of a sharded model there is one from the start."""
        return {"average": dict(self.average), "begun": self._begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the average of the earlier life."""
        self.average = {name: tensor.clone() for name, tensor in state["average"].items()}
        self._begun = bool(state.get("begun", self.average))


class LabelSmoothing(Algorithm):
    """Trains against targets that are mixed with a uniform distribution (Szegedy et al. 2016, arXiv:1512.00567).

    Args:
        smoothing: share of the uniform distribution, from 0 to 1.
    """

    def __init__(self, smoothing: float = 0.1) -> None:
        if not 0 < smoothing <= 1:
            raise ConfigError(f"LabelSmoothing(smoothing={smoothing!r}): give a number above 0, at most 1")
        self.smoothing = float(smoothing)
        self._hard: Any = None

    def match(self, event: Event, state: State) -> bool:
        """Run around the loss of a training batch."""
        return event in (Event.BEFORE_LOSS, Event.AFTER_LOSS)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace class indices by distributions for the loss, and put them back."""
        inputs, targets = state.batch
        if event is Event.AFTER_LOSS:
            state.batch = (inputs, self._hard)
            self._hard = None
            return
        self._hard = targets
        classes = state.outputs.shape[1]
        hard = functional.one_hot(targets, classes).movedim(-1, 1) if not targets.is_floating_point() else targets
        smooth = hard.to(state.outputs.dtype) * (1 - self.smoothing) + self.smoothing / classes
        state.batch = (inputs, smooth)


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    module = unwrap(model)
    reshard(module)  # after a forward without a backward it may be gathered still
    yield from module.named_parameters()
    yield from module.named_buffers()


def _steps(value: Any, what: str) -> Time:
    interval = parse_every(value, what).interval
    if interval.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH):
        raise ConfigError(f"EMA({what}={value!r}): give batches ('100ba') or epochs ('2ep')")
    return interval
