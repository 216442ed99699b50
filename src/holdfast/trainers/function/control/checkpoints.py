"""The checkpoints of a run as the controller knows them, what a group of workers starts from, and validations.

The newest checkpoint that is whole is found, damaged ones are set aside; a start is never silently from zero.
`KnownCheckpoints`: which exist, the name of the next, which is the newest. `Validations`: those that are validated in
the background, one at a time.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.verify import verify
from holdfast.errors import CheckpointError, ConfigError, StorageError
from holdfast.format.commit import read_manifest
from holdfast.run.candidates import GONE, newest_good
from holdfast.run.index import RunIndex
from holdfast.run.names import LATEST, RUN_NAMES, is_checkpoint_name
from holdfast.run.record import Record, metric_value, unpack
from holdfast.storage.base import Storage, check_path

from ..config import VALIDATED, ReportedCheckpointStatus
from .actions import Resumed
from .plan import RunSpec

_LOOKED_AT = 1000  # most checkpoints whose manifests are searched for validations that did not run
WANTED = "wanted"
"""``manifest.extra["validation"]`` of a checkpoint that is to be validated, when the report gave no arguments."""
_OUTCOMES = {
    True: ReportedCheckpointStatus.VALIDATED,
    "failed": ReportedCheckpointStatus.VALIDATION_FAILED,
    "timeout": ReportedCheckpointStatus.VALIDATION_TIMEOUT,
}
_NUMBERED = re.compile(r"checkpoint_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContents:
    """What a run holds.

    Attributes:
        kept: every committed checkpoint that may be used.
        start: the newest good checkpoint.
        skipped: (name, reason) of those set aside now.
        taken: every name under the run.
        set_aside: names of damaged checkpoints, found now or earlier.
        unvalidated: validations that were asked for and have no result, by checkpoint.
        starts: start ids of all attempts so far, the current one included, oldest first.
    """

    kept: tuple[Record, ...] = ()
    start: Record | None = None
    skipped: tuple[tuple[str, str], ...] = ()
    taken: frozenset[str] = frozenset()
    set_aside: frozenset[str] = frozenset()
    unvalidated: Mapping[str, Any] = field(default_factory=dict)
    starts: tuple[str, ...] = ()


def find_start(
    storage: Storage,
    rows: Iterable[Sequence[Any]],
    *,
    quarantined: Mapping[str, str],
    quarantine: Callable[[str, str], None],
    deep: Collection[str] = (),
    dead: Collection[str] = (),
    validations: bool = False,
) -> RunContents:
    """Find the newest checkpoint whose files are all there and, if nobody compares them later, whose bytes are right.

    What was saved as a state is compared with its digests when it is loaded, and a download while it comes. Files that
    users reported to a run on a disk are opened by them where they lie: they are read here once, before a life begins.

    Args:
        storage: root of the run.
        rows: of its committed checkpoints, newest first.
        quarantined: those set aside earlier, with reasons.
        quarantine: sets a checkpoint aside; takes its name and the reason.
        deep: names of checkpoints that are compared byte by byte with their digests.
        dead: names at which an owner that was taken over may still be at work.
        validations: look for validations without a result too.

    Raises:
        CorruptCheckpointError: there are checkpoints and none of them is good.
        StorageError: the storage failed.
    """
    kept = [unpack(row) for row in rows]
    where_they_lie = ("user",) if storage.local_root is not None else ()

    def check(record: Record) -> str | None:
        outcome = verify(storage, record.name, deep=record.name in deep or where_they_lie, beside=False)
        if outcome.ok:
            return None
        if outcome.state == "missing":
            return GONE  # deleted since it was listed
        reason = "; ".join(outcome.problems) or outcome.state
        if outcome.state == "unreadable":
            raise StorageError(f"{storage.uri}/{record.name} cannot be read: {reason}")
        quarantine(record.name, reason)
        return reason

    found = newest_good(
        [(record.name, record) for record in kept],
        check,
        bad=quarantined,
        where=storage.uri,
        advice="start a run of another name with resume_from_checkpoint=<path>, or delete the run's directory",
    )
    start, skipped = found
    bad = {**quarantined, **dict(skipped)}
    usable = tuple(record for record in kept if record.name not in bad)
    return RunContents(
        kept=usable,
        start=start,
        skipped=tuple(skipped),
        taken=frozenset(info.path.rstrip("/") for info in storage.list("", recursive=False)),
        set_aside=frozenset({*bad, *dead}),
        unvalidated=find_unvalidated(storage, usable) if validations else {},
        starts=tuple(attempt.start_id for attempt in RunIndex.load(storage, head_only=True).attempts),
    )


def find_unvalidated(storage: Storage, kept: Iterable[Record]) -> dict[str, Any]:
    """Find validations that were asked for and have no result, oldest first."""
    wanted: dict[str, Any] = {}
    for record in sorted(kept, key=lambda record: record.order)[-_LOOKED_AT:]:
        if VALIDATED in record.metrics:
            continue
        try:
            validation = read_manifest(storage, record.name).extra.get("validation")
        except (CheckpointError, StorageError):
            continue  # gone meanwhile, or damaged: its next reader raises that
        if validation:
            wanted[record.name] = validation
    return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a group begins.

    Attributes:
        location: checkpoint to go on from; None: there is none, or it is in memory.
        memory: packed values to go on from.
        step: number of the last report that is part of it.
        kept: the checkpoint, if it is of this run.
        resumed: what the index of the run notes; None for a fresh start.
        words: the same for people.
    """

    location: Mapping[str, Any] | None = None
    memory: bytes | None = None
    step: int = 0
    kept: Record | None = None
    resumed: Resumed | None = None
    words: str = "the beginning"


def choose_start(plan: RunSpec, kept: Record | None, memory: UnwrittenValues | None) -> Start:
    """Choose the newest of what there is.

    Args:
        plan: of the run; it may name a checkpoint for runs that have none of their own.
        kept: the newest good checkpoint of the run.
        memory: the newest values that were not written.
    """
    if memory is not None and (kept is None or memory.order > kept.order[:2]):
        name = f"{memory.name} (in memory)"
        resumed = Resumed(name=name, step=memory.step, attempt=memory.attempt)
        return Start(memory=memory.values, step=memory.step, resumed=resumed, words=name)
    if kept is not None:
        resumed = Resumed(name=kept.name, step=kept.step, attempt=kept.attempt)
        location = plan.location(kept.name)
        return Start(location=location, step=kept.step, kept=kept, resumed=resumed, words=kept.name)
    first = plan.first_checkpoint
    if first is not None:
        uri = f"{first['uri'].rstrip('/')}/{first['name']}"
        return Start(location=first, resumed=Resumed(name=uri, step=0), words=uri)
    if plan.first_memory is not None:
        return Start(memory=plan.first_memory, words="the values of resume_from_checkpoint")
    return Start()


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A checkpoint whose validation waits or runs."""

    name: str
    timeout_s: float
    arguments: Mapping[str, Any]


class Validations:
    """First come, first served, one at a time.

    Attributes:
        running: the validation that runs.
        deadline: when it has run for too long.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._queue: deque[Waiting] = deque()
        self.running: Waiting | None = None
        self.deadline: float | None = None
        self.expired = False

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of checkpoints whose validation runs or waits."""
        running = (self.running.name,) if self.running is not None else ()
        return (*running, *(waiting.name for waiting in self._queue))

    def add(self, name: str, wanted: Any) -> None:
        """Queue a checkpoint.

        Args:
            name: of the checkpoint.
            wanted: True or `WANTED`, or {"timeout_s", "fn_kwargs"}.
        """
        if name in self.pending:
            return
        options = dict(wanted) if isinstance(wanted, Mapping) else {}
        timeout_s = options.get("timeout_s")
        self._queue.append(
            Waiting(
                name=name,
                timeout_s=self._timeout_s if timeout_s is None else float(timeout_s),
                arguments=dict(options.get("fn_kwargs") or {}),
            )
        )

    def forget(self, name: str) -> None:
        """Drop a validation that waits: its checkpoint is gone."""
        self._queue = deque(waiting for waiting in self._queue if waiting.name != name)

    def start(self, now: float) -> Waiting | None:
        """Begin the next validation if none runs; return it, or None."""
        if self.running is not None or not self._queue:
            return None
        self.running = self._queue.popleft()
        self.deadline, self.expired = now + self.running.timeout_s, False
        return self.running

    def is_overdue(self, now: float) -> bool:
        """Whether the running validation has to be stopped; True once."""
        if self.deadline is None or now < self.deadline:
            return False
        self.deadline, self.expired = None, True
        return True

    def end(self, value: Mapping[str, Any], error: BaseException | None) -> tuple[Waiting, dict[str, Any], str | None]:
        """End the running validation, and say what its checkpoint gets.

        Returns:
            What ran, its late metrics, and what went wrong in one line.
        """
        done = self.running
        if done is None:
            raise RuntimeError("no validation runs")
        self.running = self.deadline = None
        if self.expired:
            return done, {VALIDATED: "timeout"}, f"stopped after {done.timeout_s:g} s (timeout_s)"
        if error is not None:
            return done, {VALIDATED: "failed"}, f"{type(error).__name__}: {error}".partition("\n")[0]
        return done, {**value, VALIDATED: True}, None


def status_of(name: str, metrics: Mapping[str, Any], pending: tuple[str, ...]) -> ReportedCheckpointStatus:
    """Return how far a committed checkpoint has come."""
    if name in pending:
        return ReportedCheckpointStatus.PENDING_VALIDATION
    mark = metrics.get(VALIDATED)
    known = isinstance(mark, (bool, str))  # a metric of a user may have this name
    return _OUTCOMES.get(mark, ReportedCheckpointStatus.COMMITTED) if known else ReportedCheckpointStatus.COMMITTED


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwrittenValues:
    """The newest values of `save_checkpoint` that were not written."""

    attempt: int
    step: int
    name: str
    values: bytes

    @property
    def order(self) -> tuple[int, int]:
        """The highest is the newest."""
        return (self.attempt, self.step)


class KnownCheckpoints:
    """Names and order of checkpoints.

    Args:
        first_number: number of the first directory of a run.

    Attributes:
        kept: committed checkpoints by name.
        memory: what is kept in memory only.
        number: the highest number a checkpoint of this run ever had; below ``first_number`` if none had.
    """

    def __init__(self, first_number: int = 0) -> None:
        self.kept: dict[str, Record] = {}
        self.memory: UnwrittenValues | None = None
        self.number = first_number - 1
        self._taken: set[str] = set()
        self._set_aside: frozenset[str] = frozenset()
        self._pending: dict[str, Any] = {}

    def refresh(self, kept: Iterable[Record], *, taken: Iterable[str] = (), set_aside: Iterable[str] = ()) -> None:
        """Take over what was found under the run: checkpoints, all names, and names of damaged checkpoints."""
        self.kept = {record.name: record for record in kept}
        self._set_aside = frozenset(set_aside)
        self._taken = {*taken, *self.kept, *self._set_aside}
        numbers = (int(match[1]) for name in self._taken if (match := _NUMBERED.fullmatch(name)))
        self.number = max(self.number, *numbers, -1)

    def allocate(self, name: str | None = None, *, score: Any = None, uploaded: bool = False) -> str:
        """Return the directory of a new checkpoint, and reserve it.

        Args:
            name: what the user chose; None numbers it. The name of a checkpoint that was set aside gets a number added.
            score: of a dict checkpoint on its way to the disk.
            uploaded: the directory is there already.

        Raises:
            ConfigError: the name is taken, or not allowed.
        """
        if name is None:
            self.number += 1
            name = f"checkpoint_{self.number:06d}"
        elif name in self._set_aside and not uploaded:
            others = (f"{name}-{number}" for number in itertools.count(2))
            name = next(other for other in others if other not in self._taken and other not in self._pending)
        else:
            self._check(name, uploaded=uploaded)
        self._pending[name] = score
        return name

    def skip(self) -> str:
        """Return the name of a checkpoint that is not written: it takes a number all the same."""
        self.number += 1
        return f"checkpoint_{self.number:06d}"

    def _check(self, name: str, *, uploaded: bool) -> None:
        if not is_checkpoint_name(check_path(name)):
            raise ConfigError(
                f"checkpoint_dir_name={name!r}: it becomes the name of a directory of the run; give a plain name "
                f"that does not begin with a dot and is none of {', '.join((*RUN_NAMES, LATEST))}"
            )
        if name in self.kept or name in self._pending or (name in self._taken and not uploaded):
            raise ConfigError(
                f"checkpoint_dir_name={name!r} is taken in this run: every checkpoint needs a name of its own; put the "
                "epoch or step into it, or leave it out to have them numbered"
            )

    def committed(self, record: Record) -> None:
        """Enter a checkpoint."""
        self._pending.pop(record.name, None)
        self._taken.add(record.name)
        self.kept[record.name] = record

    def failed(self, name: str) -> None:
        """Note that a checkpoint was not saved: its name is free again."""
        self._pending.pop(name, None)

    def newest(self) -> Record | None:
        """Return the newest committed checkpoint; None if there is none."""
        return max(self.kept.values(), key=lambda record: record.order, default=None)

    def in_order(self) -> list[Record]:
        """Return all committed checkpoints, oldest first."""
        return sorted(self.kept.values(), key=lambda record: record.order)

    def scores(self, attribute: str) -> list[Any]:
        """Return the scores of checkpoints on the disk and on their way to it."""
        return [*(metric_value(record.metrics, attribute) for record in self.kept.values()), *self._pending.values()]
