"""The guard of a run: looks at a metric as its values arrive, and decides what a bad one means.

`Judge` tells bad values from sound ones; its window is part of a checkpoint, so a life that goes on judges as the one
before. `GuardWatch` belongs to one life: it waits for values without making anybody else wait, has retention keep the
last sound checkpoint, and turns what was found into a `Rollback`.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast._log import get_logger
from holdfast._outgoing import on_one_line
from holdfast.config import Guard
from holdfast.errors import ConfigError, TrainingError
from holdfast.run.data_ring import BatchSpan
from holdfast.run.names import ROLLBACKS
from holdfast.run.record import metric_value
from holdfast.run.rollbacks import Rollback, in_words
from holdfast.state.accelerator import has_streams

from .metrics import is_foreign_array
from .pending_saves import PendingSaves
from .run_session import RunSession

_LOG = get_logger("guard")
_LEAST = 20  # values from which on spikes are told
_LEAST_SCALE = 0.01  # of the median: a window without any noise would make each change a spike
_MOST_SAVED = 8  # checkpoints that wait for a sound value of a later step
_SILENT_STEPS = 1000  # after which it is said that the metric does not come

Place = tuple[BatchSpan, ...]


@dataclass(frozen=True, slots=True)
class Alarm:
    """A bad step.

    Attributes:
        step: the first bad one.
        why: for people.
        place: its batches.
    """

    step: int
    why: str
    place: Place


class Judge:
    """Tells whether values of a metric are sound, one after the other.

    A value is a spike if it lies more than ``spike`` scales above the median of the last sound values. The scale is the
    median absolute deviation from the median (Hampel 1974, "The influence curve and its role in robust estimation"),
    of which one outlier in the window moves neither. It is not computed for each value: v is a spike if and only if
    more than half of the window lies nearer to the median than (v - median) / spike, which two bisections tell.

    Args:
        guard: the limits.

    Attributes:
        judged: newest step with a judged value, -1 before the first.
        sound: newest step with a sound value, -1 before the first.
        proven: step of the newest checkpoint with a sound step after it; 0 where a run that began afresh has none yet,
            -1 if that is not known.

    Example:
        >>> judge = Judge(Guard(spike=8.0))
        >>> [judge.take(step, 1.0 + step % 3 / 10, ()) for step in range(30)].count(None)
        30
        >>> judge.take(30, 9.0, ()).why
        'loss is 9, 79 deviations above the median 1.1 of the last 30 values'
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._values: deque[float] = deque()
        self._sorted: list[float] = []
        self._streak: tuple[Alarm, int] | None = None  # bad values in a row: the first, and how many
        self.judged = self.sound = self.proven = -1

    @property
    def is_calm(self) -> bool:
        """Whether the newest value was sound."""
        return self._streak is None

    def take(self, step: int, value: float, place: Place) -> Alarm | None:
        """Judge the value of a step; return what it means if that is more than one may be patient with."""
        self.judged = step
        why = self._why(value)
        if why is None:
            self._streak, self.sound = None, step
            self._add(value)
            return None
        if self._guard.action == "warn" and math.isfinite(value):
            self._add(value)  # a level that stays is the new one
        first, count = self._streak or (Alarm(step, why, place), 0)
        self._streak = first, count + 1
        return first if count + 1 == self._guard.patience else None

    def _why(self, value: float) -> str | None:
        name, known, spike = self._guard.metric, self._sorted, self._guard.spike
        if not math.isfinite(value):
            return f"{name} is {value}"
        num = len(known)
        if spike is None or num < min(_LEAST, self._guard.window):
            return None
        median = (known[(num - 1) // 2] + known[num // 2]) / 2
        limit = (value - median) / spike
        if limit <= _LEAST_SCALE * abs(median) or (median == 0 and known[0] == known[-1]):
            return None
        nearer = bisect_left(known, median + limit) - bisect_right(known, median - limit)
        if 2 * nearer <= num:
            return None
        scale = max(sorted(abs(one - median) for one in known)[num // 2], _LEAST_SCALE * abs(median))
        times = f"{(value - median) / scale:.0f} deviations" if scale > 0 else "far"
        return f"{name} is {value:.6g}, {times} above the median {median:.6g} of the last {num} values"

    def _add(self, value: float) -> None:
        self._values.append(value)
        insort(self._sorted, value)
        if len(self._values) > self._guard.window:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        streak = self._streak and [self._streak[0].step, self._streak[0].why, self._streak[1]]
        place = self._streak and [list(span) for span in self._streak[0].place]
        metric = self._guard.metric
        steps = {"judged": self.judged, "sound": self.sound, "proven": self.proven}
        return {"metric": metric, "values": list(self._values), "streak": streak, "place": place, **steps}

    def load_state_dict(self, state: Any) -> None:
        """Take over what an earlier life has seen, if that was of the same metric."""
        if not isinstance(state, Mapping) or state.get("metric") != self._guard.metric:
            return
        self._values = deque([float(value) for value in state["values"]][-self._guard.window :])
        self._sorted = sorted(self._values)
        self.judged, self.sound = int(state["judged"]), int(state["sound"])
        self.proven = int(state["proven"])
        if state["streak"] is not None:
            step, why, count = state["streak"]
            place = tuple(BatchSpan.from_json(span) for span in state["place"])
            self._streak = Alarm(int(step), str(why), place), min(int(count), self._guard.patience - 1)


@dataclass(slots=True)
class _Saved:
    """A checkpoint that may be gone back to.

    Attributes:
        step: it was saved at.
        name: None for the beginning of the life, which retention keeps anyway.
        since: batches trained since then.
    """

    step: int
    name: str | None
    since: list[BatchSpan] = field(default_factory=list)


class GuardWatch:
    """The guard in one life, on the rank whose metrics are recorded. For the training thread.

    Args:
        guard: what is watched, and what follows.
        judge: judges values; part of the state.
        session: the run.
        rollbacks: what the run remembers of bad steps.
        step: that the life begins with.
        name: of the checkpoint that the life begins with; None where retention keeps that anyway.
        before: step and name of the sound checkpoint before that.
        saves: those of the session that are watched; default: those that it names itself.

    Attributes:
        alarm: the bad step that this life ends for; None while all is sound.
    """

    def __init__(
        self,
        guard: Guard,
        judge: Judge,
        session: RunSession,
        rollbacks: Sequence[Rollback],
        *,
        step: int,
        name: str | None = None,
        before: tuple[int, str] | None = None,
        saves: PendingSaves | None = None,
    ) -> None:
        self.guard, self._judge, self._session, self._rollbacks = guard, judge, session, list(rollbacks)
        self._began, self._saves = step, session.saves if saves is None else saves
        self._pending: deque[tuple[int, Callable[[], bool], Callable[[], float], Place]] = deque()
        self._saved = deque([*([] if before is None else [_Saved(*before)]), _Saved(step, name)])
        self._protected: list[str] = []  # names, as retention was told last
        self._has_come, self._silent = False, 0
        if step == 0:
            judge.proven = 0
        self.alarm: Alarm | None = None
        self._decided: Rollback | None = None
        if left_out := [list(span) for rollback in rollbacks for span in rollback.left_out]:
            session.extra["left_out"] = left_out

    # -- values

    def take(self, step: int, metrics: Mapping[str, Any], place: Place) -> None:
        """Take the metrics of a step, which the caller does not change any more.

        Raises:
            ConfigError: the metric is not a number.
        """
        value = metric_value(metrics, self.guard.metric)
        if value is None:
            return
        self._has_come = True
        kind = type(value)
        if (kind is float or kind is int) and not self._pending:
            self._judge_value(step, value, place)
        elif isinstance(value, torch.Tensor) and has_streams(value.device):
            self._pending.append((step, *_on_its_way(value, self.guard.metric), place))
        elif is_foreign_array(value):
            ready = getattr(value, "is_ready", None)  # of JAX
            self._pending.append((step, ready if callable(ready) else _yes, lambda: float(value), place))
        else:
            number = _number(value, self.guard.metric)
            self._pending.append((step, _yes, lambda: number, place))

    def begin(self, metrics: Mapping[str, Any], place: Place) -> None:
        """Judge the step that this life begins with, if the life that saved it had not come to that."""
        if self._judge.judged < self._began:
            value = metric_value(metrics, self.guard.metric)
            if isinstance(value, (int, float)):
                self._judge_value(self._began, float(value), place)

    def look(self, *, waits: bool = False) -> Alarm | None:
        """Judge what has arrived, and return the bad step if there is one.

        Args:
            waits: for values that have not arrived yet.
        """
        while self._pending and self.alarm is None and (waits or self._pending[0][1]()):
            step, _, read, place = self._pending.popleft()
            self._judge_value(step, read(), place)
        return self.alarm

    def _judge_value(self, step: int, value: float, place: Place) -> None:
        if self.alarm is not None:
            return
        alarm = self._judge.take(step, value, place)
        if alarm is None:
            if self._judge.is_calm:
                self._let_go()
        elif self.guard.action == "warn":
            where = f" ({in_words(alarm.place)})" if alarm.place else ""
            _LOG.warning("step %d: %s%s", alarm.step, alarm.why, where)
            self._session.journal("guard", step=alarm.step, why=f"{alarm.why}{where}; training goes on")
        else:
            self.alarm = alarm

    # -- steps and saves

    def stepped(self, step: int, place: Place) -> None:
        """Note the batches of a step."""
        if self.guard.skip == "since":
            for saved in self._saved:
                _extend(saved.since, place)
        if not self._has_come:
            self._silent += 1
            if self._silent == _SILENT_STEPS:
                self._say_silence("yet, so nothing is")

    def ended(self) -> None:
        """Say at the end of the run if no step of this life has had the metric, and that was not said yet."""
        if not self._has_come and 0 < self._silent < _SILENT_STEPS:
            self._say_silence("in this life, so nothing was")

    def _say_silence(self, what: str) -> None:
        metric = self.guard.metric
        _LOG.warning(
            "guard=Guard(metric=%r): no step has reported that metric %s watched: pass it, as in ck.step(%s=...), or "
            "name one that the Trainer logs at each batch",
            metric, what, metric,
        )  # fmt: skip

    def saving(self, step: int, name: str) -> None:
        """Have retention keep what may be needed yet, before a checkpoint of this name can push it out."""
        if self.guard.action == "warn":
            return
        self.protect()
        self._saved.append(_Saved(step, name))
        if len(self._saved) > _MOST_SAVED:  # values come rarely, or never: not all checkpoints are kept for that
            del self._saved[1]

    def protect(self) -> None:
        """Have retention keep what may be needed yet: a newer checkpoint (or a rescued snapshot) may push it out."""
        if self.guard.action == "warn":
            return
        self._let_go()
        names = [saved.name for saved in self._saved if saved.name is not None]
        if names != self._protected:
            self._session.client.run_op("protect", names=names)
            self._protected = names

    @property
    def protected(self) -> frozenset[str]:
        """Names that retention has to keep, as it was told last; for any thread."""
        return frozenset(self._protected)

    def _let_go(self, *, of_all: bool = False) -> None:
        """Forget checkpoints before a proven one: its weights have given a sound value, that of the step after it.

        Args:
            of_all: also if it is still being written; a save that was lost proves nothing in any case.
        """
        session, saved = self._session, self._saved
        while len(saved) > 1 and (newer := saved[1]).step < self._judge.sound:
            if newer.name is not None and self._saves.is_lost(newer.name):
                del saved[1]
            elif of_all or newer.name is None or newer.step <= session.stats.last_durable_step:
                saved.popleft()
                self._judge.proven = newer.step
            else:
                return

    # -- decisions

    def decide(self) -> Rollback:
        """Turn the alarm into what later lives will know, and make that durable.

        Raises:
            TrainingError: the run must not go on: ``action="stop"``, ``max_rollbacks``, or nothing can be left out.
            HoldfastError: it cannot be made durable.
        """
        alarm, guard, session = self.alarm, self.guard, self._session
        assert alarm is not None
        if self._decided is not None:
            return self._decided
        self._let_go(of_all=True)
        before = next(saved for saved in self._saved if saved.step >= self._began)
        known = [rollback for rollback in self._rollbacks if rollback.key == (alarm.place or (alarm.step,))]
        others = {rollback.key for rollback in self._rollbacks} - {rollback.key for rollback in known}
        what = f"step {alarm.step}: {alarm.why}"
        if guard.action == "stop":
            raise self._ended(f"{what}. The guard has action='stop': nothing of that step was saved")
        if not known and len(others) >= guard.max_rollbacks:
            if not others:
                raise self._ended(f"{what}. The guard has max_rollbacks=0: the run is not taken back")
            raise self._ended(
                f"{what}. This run was taken back for {len(others)} bad step{'s' * (len(others) != 1)} already "
                f"(max_rollbacks={guard.max_rollbacks}): `holdfast log {session.root.uri}` lists them. Look at the "
                "learning rate and the data; a greater max_rollbacks goes on"
            )
        if any(rollback.left_out for rollback in known):
            raise self._ended(f"{what}, although its batches were left out: the damage is not done by them")
        if known and not alarm.place:
            raise self._ended(
                f"{what}, again after a rollback, and its batches cannot be left out, for the loop does not take them "
                "from ck.batches()"
            )
        left_out: Place = ()
        after = self._judge.sound - 1  # weights that have given no sound value yet are not trusted
        if known:
            left_out = tuple(before.since) if guard.skip == "since" else alarm.place
            after = before.step if guard.skip == "since" else alarm.step - 1
        found = Rollback(
            attempt=session.opened.attempt, step=alarm.step, why=on_one_line(alarm.why), place=alarm.place,
            left_out=left_out, after=after, proven=self._judge.proven, time=time.time(),
            num_ranks=session.meeting.world_size,
        )  # fmt: skip
        session.ask("note", key=ROLLBACKS, value=[one.to_json() for one in (*self._rollbacks, found)])
        session.journal("guard", step=alarm.step, why=found.in_words())
        self._decided = found
        return found

    def _ended(self, text: str) -> TrainingError:
        assert self.alarm is not None
        self._session.journal("guard", step=self.alarm.step, why=text.removeprefix(f"step {self.alarm.step}: "))
        self._session.life.end("given up")
        return TrainingError(text)


def _on_its_way(value: torch.Tensor, name: str) -> tuple[Callable[[], bool], Callable[[], float]]:
    """Begin to copy a value from a device; return what tells that it has arrived, and what reads it."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.numel() != 1:
        raise ConfigError(_NO_NUMBER.format(name, f"a {type(value).__name__} of shape {tuple(value.shape)}"))
    host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
    host.copy_(value, non_blocking=True)
    module = torch.get_device_module(value.device)
    event = module.Event()
    event.record(module.current_stream(value.device))

    def read() -> float:
        event.synchronize()  # returns at once where it was asked before
        return float(host)

    return event.query, read


_NO_NUMBER = "the guard watches metric {!r}, which is {}: give one number, such as loss.detach().mean()"


def _number(value: Any, name: str) -> float:
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        pass
    raise ConfigError(_NO_NUMBER.format(name, f"a {type(value).__name__}"))


def _extend(spans: list[BatchSpan], more: Sequence[BatchSpan]) -> None:
    for span in more:
        last = next((index for index, one in enumerate(spans) if one[:2] == span[:2] and one.end == span.first), None)
        if last is None:
            spans.append(span)
        else:
            spans[last] = spans[last]._replace(end=span.end)


def _yes() -> bool:
    return True
