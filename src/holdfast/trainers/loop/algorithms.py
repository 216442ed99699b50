"""`Algorithm`: changes training itself at some events, and keeps state. Two real ones: EMA and label smoothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from holdfast.errors import ConfigError
from holdfast.state.tree.arrays import reshard
from holdfast.state.tree.objects import unwrap

from .callbacks import Logger
from .events import Event
from .state import State, Stateful
from .times.time import Time, TimeUnit
from .times.timestamp import parse_every
from .training.parallel import is_sharded

__all__ = ["EMA", "Algorithm", "LabelSmoothing"]


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
