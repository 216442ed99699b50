"""Schedules of the learning rate in time strings: functions of how far training is, which keep no state of their own.

Each returns the factor that the rate of every parameter group is multiplied by. `compiled` makes schedulers of torch of
them. A time ("1dur", "5ep", "100ba") is brought to whole batches, or to whole units of ``max_duration``.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

from holdfast.errors import ConfigError

from .time import Time, TimeLike, TimeUnit

if TYPE_CHECKING:
    from .state import State


class ComposerScheduler(ABC):
    """A schedule: called with the state of training, it returns a factor. A function of a state is a schedule, too."""

    @abstractmethod
    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor of the learning rate.

        Args:
            state: of the training.
            ssr: factor of all times in the schedule, apart from shares.
        """


def _in_steps(time: TimeLike, state: State, ssr: float = 1.0) -> Time:
    """Bring a time to a unit that moves within epochs.

    Raises:
        ConfigError: it is in seconds, or the length of an epoch is not known.
    """
    given = Time.from_input(time, TimeUnit.EPOCH)
    if given.unit is TimeUnit.SECOND:
        raise ConfigError(f"a schedule cannot follow the clock ({given}): give epochs, batches, samples or tokens")
    whole = state.max_duration
    if given.unit is TimeUnit.DURATION:
        if whole is None:
            raise ConfigError(f"a schedule over {given} is a share of max_duration: give one to the Trainer")
        if whole.unit is not TimeUnit.EPOCH:
            return Time(int(given.value * whole.value), whole.unit)
        return Time(int(given.value * _epoch(state, given) * whole.value), TimeUnit.BATCH)
    if given.unit is TimeUnit.EPOCH:
        given = Time(given.value * _epoch(state, given), TimeUnit.BATCH)
    return Time(int(given.value * ssr), given.unit)


def _epoch(state: State, time: Time) -> int:
    length = state.num_batches
    if length is None:
        raise ConfigError(
            f"a schedule over {time} needs the number of batches of an epoch, and the training loader does not know "
            "it: give batches, or max_duration in batches"
        )
    return length


def _passed(state: State, time: Time) -> float:
    """Return how much of ``time`` has passed, from 0 up."""
    return state.timestamp.value(time.unit) / time.value if time.value else math.inf


class StepScheduler(ComposerScheduler):
    """Multiplies by ``gamma`` after each ``step_size``."""

    def __init__(self, step_size: TimeLike, gamma: float = 0.1) -> None:
        self.step_size, self.gamma = step_size, gamma

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """See `ComposerScheduler`."""
        return float(self.gamma ** int(_passed(state, _in_steps(self.step_size, state, ssr))))


class MultiStepScheduler(ComposerScheduler):
    """Multiplies by ``gamma`` at each of ``milestones``."""

    def __init__(self, milestones: Sequence[TimeLike], gamma: float = 0.1) -> None:
        self.milestones, self.gamma = list(milestones), gamma

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """See `ComposerScheduler`."""
        return float(
            self.gamma ** sum(state.timestamp >= _in_steps(milestone, state, ssr) for milestone in self.milestones)
        )


class ConstantScheduler(ComposerScheduler):
    """The factor ``alpha`` until ``t_max``, 1 afterwards."""

    def __init__(self, alpha: float = 1.0, t_max: TimeLike = "1dur") -> None:
        self.alpha, self.t_max = alpha, t_max

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """See `ComposerScheduler`."""
        return self.alpha if state.timestamp < _in_steps(self.t_max, state, ssr) else 1.0


class _OverTime(ComposerScheduler):
    """A schedule that ends at ``t_max``."""

    t_max: TimeLike

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """See `ComposerScheduler`."""
        return self.at(_passed(state, _in_steps(self.t_max, state, ssr)))

    @abstractmethod
    def at(self, share: float) -> float:
        """Return the factor when this share of the schedule is over."""


class LinearScheduler(_OverTime):
    """From ``alpha_i`` to ``alpha_f`` in a straight line over ``t_max``."""

    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: TimeLike = "1dur") -> None:
        self.alpha_i, self.alpha_f, self.t_max = alpha_i, alpha_f, t_max

    def at(self, share: float) -> float:
        """See `_OverTime`."""
        return self.alpha_i + min(1.0, share) * (self.alpha_f - self.alpha_i)


class ExponentialScheduler(ComposerScheduler):
    """Falls by the factor ``gamma`` in each ``decay_period``, smoothly."""

    def __init__(self, gamma: float, decay_period: TimeLike = "1ep") -> None:
        self.gamma, self.decay_period = gamma, decay_period

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """See `ComposerScheduler`."""
        return float(self.gamma ** _passed(state, _in_steps(self.decay_period, state, ssr)))


class CosineAnnealingScheduler(_OverTime):
    """From 1 to ``alpha_f`` along half a wave of a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983)."""

    def __init__(self, t_max: TimeLike = "1dur", alpha_f: float = 0.0) -> None:
        self.t_max, self.alpha_f = t_max, alpha_f

    def at(self, share: float) -> float:
        """See `_OverTime`."""
        wave = (1 + math.cos(math.pi * min(max(share, 0.0), 1.0))) / 2
        return self.alpha_f + (1 - self.alpha_f) * wave


class CosineAnnealingWarmRestartsScheduler(ComposerScheduler):
    """Cosines one after another: the first lasts ``t_0``, each further one ``t_mult`` times as long."""

    def __init__(self, t_0: TimeLike, t_mult: float = 1.0, alpha_f: float = 0.0) -> None:
        self.t_0, self.t_mult, self.alpha_f = t_0, t_mult, alpha_f

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """See `ComposerScheduler`."""
        length = _in_steps(self.t_0, state, ssr)
        now, begin, size = state.timestamp.value(length.unit), 0, int(length.value)
        while begin + size <= now:
            begin, size = begin + size, int(self.t_mult * size)
            if size == 0:
                raise ConfigError(
                    f"{type(self).__name__}(t_0={self.t_0!r}, t_mult={self.t_mult!r}): cycles have no length"
                )
        return CosineAnnealingScheduler(alpha_f=self.alpha_f).at((now - begin) / size if size else 1.0)


class PolynomialScheduler(_OverTime):
    """From 1 to ``alpha_f``, with the share of time that is left to the power of ``power``."""

    def __init__(self, power: float, t_max: TimeLike = "1dur", alpha_f: float = 0.0) -> None:
        self.power, self.t_max, self.alpha_f = power, t_max, alpha_f

    def at(self, share: float) -> float:
        """See `_OverTime`."""
        return float(self.alpha_f + (1 - min(1.0, share)) ** self.power * (1 - self.alpha_f))


class _WithWarmup(ComposerScheduler):
    """A straight line from 0 to ``peak`` over ``t_warmup``, then another schedule, in the time that is left of it."""

    def __init__(self, then: ComposerScheduler, t_warmup: TimeLike, *, peak: float = 1.0, scale_warmup: bool) -> None:
        self.t_warmup, self.scale_warmup, self._peak, self._then = t_warmup, scale_warmup, peak, then

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """See `ComposerScheduler`."""
        warmup = _in_steps(self.t_warmup, state, ssr if self.scale_warmup else 1.0)
        if state.timestamp < warmup:
            return self._peak * _passed(state, warmup)
        if isinstance(self._then, _OverTime):
            return self._then.at(self._left(self._then.t_max, state, ssr, warmup))
        return self._then(state, ssr)

    def _left(self, t_max: TimeLike, state: State, ssr: float, warmup: Time) -> float:
        """Return which share of the time after the warm-up is over."""
        whole = _in_steps(t_max, state, ssr)
        if whole.unit is not warmup.unit:
            raise ConfigError(
                f"{type(self).__name__}: t_warmup={self.t_warmup!r} comes to {warmup} and t_max={t_max!r} to {whole}: "
                "give both in units that can be compared"
            )
        now, size = state.timestamp.value(whole.unit), whole.value - warmup.value
        return (now - warmup.value) / size if size > 0 else 1.0


class ConstantWithWarmupScheduler(_WithWarmup):
    """`ConstantScheduler` after a warm-up."""

    def __init__(
        self, t_warmup: TimeLike, alpha: float = 1.0, t_max: TimeLike = "1dur", scale_warmup: bool = False
    ) -> None:
        super().__init__(ConstantScheduler(alpha, t_max), t_warmup, peak=alpha, scale_warmup=scale_warmup)


class MultiStepWithWarmupScheduler(_WithWarmup):
    """`MultiStepScheduler` after a warm-up."""

    def __init__(
        self, t_warmup: TimeLike, milestones: Sequence[TimeLike], gamma: float = 0.1, scale_warmup: bool = False
    ) -> None:
        super().__init__(MultiStepScheduler(milestones, gamma), t_warmup, scale_warmup=scale_warmup)


class LinearWithWarmupScheduler(_WithWarmup):
    """`LinearScheduler` after a warm-up to ``alpha_i``; it ends at ``t_max``."""

    def __init__(
        self, t_warmup: TimeLike, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: TimeLike = "1dur",
        scale_warmup: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(LinearScheduler(alpha_i, alpha_f, t_max), t_warmup, peak=alpha_i, scale_warmup=scale_warmup)


class CosineAnnealingWithWarmupScheduler(_WithWarmup):
    """`CosineAnnealingScheduler` after a warm-up; it ends at ``t_max``."""

    def __init__(
        self, t_warmup: TimeLike, t_max: TimeLike = "1dur", alpha_f: float = 0.0, scale_warmup: bool = False
    ) -> None:
        super().__init__(CosineAnnealingScheduler(t_max, alpha_f), t_warmup, scale_warmup=scale_warmup)


class PolynomialWithWarmupScheduler(_WithWarmup):
    """`PolynomialScheduler` after a warm-up; it ends at ``t_max``."""

    def __init__(
        self, t_warmup: TimeLike, power: float = 2.0, t_max: TimeLike = "1dur", alpha_f: float = 0.0,
        scale_warmup: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(PolynomialScheduler(power, t_max, alpha_f), t_warmup, scale_warmup=scale_warmup)


def _factor(schedule: Callable[..., float], state: State, ssr: float = 1.0) -> Callable[[int], float]:
    alone = len(inspect.signature(schedule).parameters) == 1

    def factor(_: int) -> float:
        # Until it is known how long training lasts nobody asks for the rate: `refresh` sets it then.
        if state.max_duration is None:
            return 1.0
        return float(schedule(state) if alone else schedule(state, ssr))

    return factor


def compile_composer_scheduler(scheduler: Callable[..., float], state: State, ssr: float = 1.0) -> LambdaLR:
    """Return a scheduler of torch that follows a schedule, for the first optimizer of ``state``."""
    return LambdaLR(state.optimizers[0], _factor(scheduler, state, ssr))


def compiled(schedulers: Sequence[Any], state: State) -> list[Any]:
    """Return schedulers of torch, one for each optimizer where a schedule was given."""
    found: list[Any] = []
    for scheduler in schedulers:
        if hasattr(scheduler, "step"):
            found.append(scheduler)
        else:
            found += [LambdaLR(optimizer, _factor(scheduler, state)) for optimizer in state.optimizers]
    return found


def refresh(state: State) -> None:
    """Set the rates of optimizers that begin now to what the step before would have set them to.

    How long training lasts was not known when the schedulers were made.
    """
    now, state.timestamp = state.timestamp, state.previous_timestamp
    try:
        for scheduler in state.schedulers:
            names = {getattr(factor, "__qualname__", "") for factor in getattr(scheduler, "lr_lambdas", ())}
            if names == {f"{_factor.__qualname__}.<locals>.factor"}:
                for group, base, factor in zip(
                    scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
                ):
                    group["lr"] = base * factor(scheduler.last_epoch)
    finally:
        state.timestamp = now
