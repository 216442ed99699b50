"""Frozen configuration values, checked when they are made."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ._meant import suggests_fields
from ._units import Interval, IntervalLike, parse_interval
from .errors import ConfigError

__all__ = [
    "KEEP_TEXT", "VERIFY_VARIABLE", "Guard", "Keep", "Mirror", "Rule", "check_kind", "check_silence", "check_timeout",
    "is_int", "is_number", "keep_from_text", "ranking_of", "rules_of", "stored_keep",
]  # fmt: skip

VERIFY_VARIABLE = "HOLDFAST_VERIFY"
"""Set in the processes of a script whose resume is being verified; see `holdfast.checkpointer.boundaries`."""

_LEAST_SILENCE_S, _MOST_SILENCE_S = 1.0, 86_400.0


@suggests_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which checkpoints of a run stay: the union of all rules given.

    The newest checkpoint, pinned ones and that resumed from always stay. A bare ``Keep()`` keeps everything.

    Example:
        >>> Keep(last=3, best=2, metric="val_loss", mode="min", every="10000ba").last
        3

    Attributes:
        last: number of newest checkpoints.
        best: number of best checkpoints by ``metric``.
        metric: name of the metric that ranks, ``/`` leading into nested ones; a missing or NaN value ranks below
            everything.
        mode: "min" or "max".
        every: milestones that stay for ever: one for each multiple of this interval in steps ("10000ba"),
            epochs ("5ep") or wall time ("6h"; the first checkpoint in each span).
    """

    last: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: str = "min"
    every: IntervalLike | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value < 1):
                raise ConfigError(f"Keep({name}={value!r}): give a whole number of at least 1, or leave it out")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"Keep(mode={self.mode!r}): use 'min' (smaller is better) or 'max'")
        if self.metric is not None and not isinstance(self.metric, str):
            raise ConfigError(f"Keep(metric={self.metric!r}): give the name of a metric, as in metric='val_loss'")
        if self.best is not None and not self.metric:
            raise ConfigError(f"Keep(best={self.best}) needs the metric that ranks, as in metric='val_loss'")
        if self.every is not None and self.interval.unit not in ("ba", "ep", "sec"):  # type: ignore[union-attr]
            raise ConfigError(f"Keep(every={self.every!r}): give steps ('1000ba'), epochs ('5ep') or a time ('6h')")

    @property
    def interval(self) -> Interval | None:
        """The parsed ``every``."""
        return None if self.every is None else parse_interval(self.every)

    def to_json(self) -> dict[str, Any]:
        """Describe this value so that the writer process can rebuild it with `from_json`."""
        every = self.interval
        return {
            "last": self.last,
            "best": self.best,
            "metric": self.metric,
            "mode": self.mode,
            "every": None if every is None else f"{every.value:g}s" if every.unit == "sec" else str(every),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Keep:
        """Rebuild what `to_json` described.

        Raises:
            ConfigError: another version has written rules that this one does not know.
        """
        unknown = sorted(data.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(
                f"the rules of this run are of another version of holdfast ({', '.join(unknown)}): update, or give "
                "rules (the command line: --keep)"
            )
        return cls(**data)


_COUNTS = ("last", "best")
KEEP_TEXT = "give rules such as last=3,best=2,metric=val_loss,mode=min,every=10000ba"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of a `Keep`, for those who show it or reckon with it; `holdfast.run.retention` applies it.

    Attributes:
        short: its name where a reason is given: "last 3".
        long: what it keeps, within a sentence: "the last 3".
        most: how many checkpoints it keeps at most; None without a bound.
        keeps_newest: the newest checkpoint is always among them.
    """

    short: str
    long: str
    most: int | None
    keeps_newest: bool = False


def rules_of(keep: Keep | None) -> tuple[Rule, ...]:
    """Return the rules that are given; none: nothing is ever deleted."""
    rules = []
    if keep is not None and keep.last is not None:
        rules.append(Rule(short=f"last {keep.last}", long=f"the last {keep.last}", most=keep.last, keeps_newest=True))
    if keep is not None and keep.best is not None:
        short = f"best {keep.best} by {keep.metric}"
        rules.append(Rule(short=short, long=f"the {short} ({keep.mode})", most=keep.best))
    if keep is not None and keep.interval is not None:
        rules.append(Rule(short=f"every {keep.interval}", long=f"one every {keep.interval}", most=None))
    return tuple(rules)


def keep_from_text(text: str, *, option: str) -> Keep:
    """Read rules from a command line, as `KEEP_TEXT` shows them.

    Raises:
        ConfigError: naming the ``option`` and what cannot be read, or that no rule is among them.
    """
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in {each.name for each in fields(Keep)} or name in values:
            raise ConfigError(f"{option} {text!r}: cannot read {part.strip()!r}; {KEEP_TEXT}")
        values[name] = int(value) if name in _COUNTS and value.isdigit() else value
    keep = Keep(**values)
    if not rules_of(keep):
        raise ConfigError(f"{option} {text!r} names no rule, which keeps everything; {KEEP_TEXT}")
    return keep


def ranking_of(keep: Keep | None, metric: str | None, mode: str | None, *, what: str) -> tuple[str, str]:
    """Return the metric and the mode by which a user's ``what`` ranks: those given, else those of ``keep``.

    The mode of ``keep`` is that of its own metric: of another one, the greatest loss would be the best.

    Raises:
        ConfigError: there is no metric, or no such mode.
    """
    name = metric or (keep.metric if keep is not None else None)
    if not isinstance(name, str):
        raise ConfigError(f"{what} needs the name of a metric, or keep=Keep(best=..., metric=...)")
    order = mode or (keep.mode if keep is not None and keep.metric == name else "min")
    if order not in ("min", "max"):
        raise ConfigError(f"mode={order!r}: use 'min' (smaller is better) or 'max'")
    return name, order


def stored_keep(data: Mapping[str, Any] | None) -> Keep:
    """Rebuild rules that a run has stored, to show or order something by them; those of a newer version are none."""
    try:
        return Keep.from_json(dict(data or {}))
    except (ConfigError, TypeError, ValueError, AttributeError):
        return Keep()


@suggests_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Watches a metric, and takes the run back to a sound checkpoint when it breaks; see docs/run.md.

    A value is bad if it is not finite, or lies more than ``spike`` times the scale above the median of the last
    ``window`` sound values. The scale is their median absolute deviation, and at least 1 % of the median.

    Example:
        >>> Guard(metric="loss", spike=8.0, action="rollback", skip="bad").max_rollbacks
        5

    Attributes:
        metric: name of the metric, as `holdfast.Checkpointer.step` or `report` gets it; ``/`` leads into nested ones.
        spike: how many deviations above the median are bad, from the 20th value on; None: only what is not finite.
        window: number of values that the median is taken of.
        patience: bad values in a row before anything is done; the first of them is the bad step.
        action: "rollback" (end with status 86; the next start goes on from before the bad step), "stop" (end with an
            error; the bad state is not saved) or "warn".
        max_rollbacks: for how many bad steps a run may be taken back in all; the next one is an error.
        skip: which batches are left out when a step was bad again after a rollback: "bad" (those of that step) or
            "since" (all since the checkpoint before it).
    """

    metric: str = "loss"
    spike: float | None = 8.0
    window: int = 200
    patience: int = 1
    action: str = "rollback"
    max_rollbacks: int = 5
    skip: str = "bad"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(f"Guard(metric={self.metric!r}): give the name of a metric, as in metric='loss'")
        spike = self.spike
        if spike is not None and (isinstance(spike, bool) or not isinstance(spike, (int, float)) or not spike > 0):
            raise ConfigError(f"Guard(spike={spike!r}): give a number of deviations above 0, or None")
        for name, least in (("window", 2), ("patience", 1), ("max_rollbacks", 0)):
            value = getattr(self, name)
            if not is_int(value) or value < least:
                raise ConfigError(f"Guard({name}={value!r}): give a whole number of at least {least}")
        for name, words in (("action", ("rollback", "stop", "warn")), ("skip", ("bad", "since"))):
            if getattr(self, name) not in words:
                raise ConfigError(f"Guard({name}={getattr(self, name)!r}): use one of {', '.join(map(repr, words))}")


@suggests_fields
@dataclass(frozen=True, slots=True)
class Mirror:
    """A local directory in front of a remote run: saves go there first and are uploaded in the background.

    Example:
        >>> Mirror("/scratch/gpt", keep=Keep(last=2), when_behind="wait").max_behind
        2

    Attributes:
        path: directory of the local side; made absolute now.
        keep: which checkpoints stay there, besides those that are not uploaded yet; None keeps all. The remote side
            has the ``keep`` of the `Checkpointer`.
        max_behind: how many checkpoints may wait for their upload.
        when_behind: at a save beyond that: "skip" (give up the oldest that waits), "wait" or "raise".
        delete_after_upload: remove a checkpoint from the local side as soon as the remote has it, whatever ``keep``
            says.
        warn_after: how long nothing may arrive at the remote while something waits, before that is said.
    """

    path: str | os.PathLike[str]
    keep: Keep | None = field(default_factory=lambda: Keep(last=1), kw_only=True)
    max_behind: int = field(default=2, kw_only=True)
    when_behind: str = field(default="skip", kw_only=True)
    delete_after_upload: bool = field(default=False, kw_only=True)
    warn_after: IntervalLike = field(default="30min", kw_only=True)

    def __post_init__(self) -> None:
        path = os.fspath(self.path) if isinstance(self.path, (str, os.PathLike)) else ""
        if not path or "://" in path.removeprefix("file:///"):
            raise ConfigError(f"Mirror({self.path!r}): give a directory of this machine, as in Mirror('/scratch/gpt')")
        object.__setattr__(self, "path", os.path.abspath(os.path.expanduser(path.removeprefix("file://"))))
        check_kind(self, "keep", Keep)
        if not is_int(self.max_behind) or self.max_behind < 1:
            raise ConfigError(f"Mirror(max_behind={self.max_behind!r}): give a whole number of at least 1")
        if self.when_behind not in ("skip", "wait", "raise"):
            raise ConfigError(f"Mirror(when_behind={self.when_behind!r}): use 'skip', 'wait' or 'raise'")
        if not isinstance(self.delete_after_upload, bool):
            raise ConfigError(f"Mirror(delete_after_upload={self.delete_after_upload!r}): give True or False")
        if parse_interval(self.warn_after).unit != "sec":
            raise ConfigError(f"Mirror(warn_after={self.warn_after!r}): give a time, as in '30min'")

    @property
    def warn_after_s(self) -> float:
        """``warn_after`` in seconds."""
        return float(parse_interval(self.warn_after).value)


def check_silence(silence_s: Any, name: str = "silence_s={!r}") -> None:
    """Refuse what cannot be the seconds after which somebody that says nothing is given up.

    Args:
        silence_s: what the user gave.
        name: of the argument in the message, with a place for the value.

    Raises:
        ConfigError: it is no number of seconds from 1 to a day.
    """
    if not is_number(silence_s) or not _LEAST_SILENCE_S <= silence_s <= _MOST_SILENCE_S:
        raise ConfigError(
            f"{name.format(silence_s)}: give seconds from {_LEAST_SILENCE_S:g} to {_MOST_SILENCE_S:g}; a machine is "
            "silent for a few seconds now and then"
        )


def check_timeout(timeout_s: Any) -> None:
    """Refuse what cannot be the argument ``timeout_s``.

    Raises:
        ConfigError: it is no positive number of seconds.
    """
    if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise ConfigError(f"timeout_s={timeout_s!r}: it must be a positive number of seconds")


def check_kind(config: Any, name: str, *kinds: type) -> None:
    """Refuse a field of a configuration that is neither None nor of one of these classes.

    Raises:
        ConfigError: it is something else.
    """
    value = getattr(config, name)
    if value is not None and not isinstance(value, kinds):
        wanted = " or ".join(f"holdfast.{kind.__name__}" for kind in kinds)
        raise ConfigError(f"{type(config).__name__}({name}={value!r}): give a {wanted}")


def is_int(value: Any) -> bool:
    """Tell whether a value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Tell whether a value is a number; True, False and NaN are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
