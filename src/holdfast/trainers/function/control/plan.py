"""What is asked for before a run of workers starts (`RunSpec`), and the decisions that follow from it, without effects.

Whether to try again, with how many workers and how much room there is for them (`Room`), whether values are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from holdfast.errors import TrainingError
from holdfast.run.life import REQUEUE_STATUS

from ..engine import Capacity

_SIGTERM = 15
_FREE_STARTS = 3
_MAX_DELAY_S = 30.0
_PAUSES, _MAX_PAUSE_S = 5.0, 60.0
_QUIET_S = 2.0  # a wait as short as this is not mentioned


class Cause(Enum):
    """Why a group of workers ended before its time."""

    FAILURE = "failure"
    PREEMPTION = "preemption"
    RESIZE = "resize"
    """More workers than before; no limit."""
    ROLLBACK = "rollback"
    """The guard of a training has found a bad step; its own ``max_rollbacks`` is the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Start all workers again, after a pause if the last starts made no report."""

    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """End with an error; ``why`` names the limit that is reached."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """How often a run may fail; see `holdfast.FailureConfig`."""

    max_failures: int = 0
    max_preemptions: int = -1
    max_rollbacks: int = -1
    """-1: the guard that takes a run back has its own limit; 0: whoever has started the processes starts them again."""

    def decide(self, history: Sequence[Cause], *, idle_starts: int = 0) -> Restart | GiveUp:
        """Decide what follows the newest entry of ``history``.

        Args:
            history: why each group ended so far; not empty.
            idle_starts: how many starts in a row ended without a single report; from the fourth on the next
                waits (1, 2, 4 ... 30 s), for an unlimited number of failures must not become a busy loop.
        """
        newest = history[-1]
        count = sum(1 for cause in history if cause is newest)
        name, limit = {
            Cause.FAILURE: ("max_failures", self.max_failures),
            Cause.PREEMPTION: ("max_preemptions", self.max_preemptions),
            Cause.RESIZE: ("", -1),
            Cause.ROLLBACK: ("max_rollbacks", self.max_rollbacks),
        }[newest]
        if limit >= 0 and count > limit:
            return GiveUp(why=f"{newest.value} {count} with {name}={limit}")
        excess = idle_starts - _FREE_STARTS
        return Restart(delay_s=0.0 if excess <= 0 else min(_MAX_DELAY_S, 2.0 ** (excess - 1)))


def ended_by_preemption(exit_code: int | None, signal: int | None) -> bool:
    """Return whether a worker that ended by itself was preempted: SIGTERM, or exit status 85."""
    return exit_code == REQUEUE_STATUS or signal == _SIGTERM


def growth_pause_s(grow_after_s: float | None, growth_s: float) -> float:
    """Return how long a group runs before it is ended in order to grow.

    Args:
        grow_after_s: what was asked for; None: nodes that come one after another cost a sixth of the time at most.
        growth_s: how long it took to end the smaller group and to start this one; 0 if this one has not grown.
    """
    return min(_MAX_PAUSE_S, _PAUSES * growth_s) if grow_after_s is None else grow_after_s


def is_worth_writing(score: Any, kept: Iterable[Any], *, num_to_keep: int | None, order: str) -> bool:
    """Decide whether a checkpoint of `save_checkpoint` goes to disk.

    With ``num_to_keep`` on disk, only a checkpoint that is strictly better than the worst of them does.

    Args:
        score: of the new checkpoint, None if it has none.
        kept: scores of those on disk or on their way there.
        num_to_keep: None keeps all, 0 none.
        order: "max" or "min".
    """
    if num_to_keep is None:
        return True
    places = sorted((_place(other, order) for other in kept), reverse=True)
    if num_to_keep == 0:
        return False
    return len(places) < num_to_keep or _place(score, order) > places[num_to_keep - 1]


def _place(score: Any, order: str) -> tuple[int, float]:
    """Return a sort key; what is missing, NaN or no number is worse than every number in both orders."""
    if not isinstance(score, (int, float)) or score != score:  # noqa: PLR0124  NaN is what differs from itself
        return (0, 0.0)
    return (1, score if order == "max" else -score)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    """Between two sizes, as many workers as there is room for.

    Attributes:
        least: fewer are not started.
        most: more are not started.
        settle_s: how long room for fewer than ``most`` has to be unchanged before it is taken: nodes come and go one
            after another.
    """

    least: int
    most: int
    settle_s: float = 0.0

    def size(self, room: int, unchanged_s: float) -> int | None:
        """Choose the size of the group to start now; None: wait.

        Args:
            room: number of workers that fit now.
            unchanged_s: for how long that has been so.
        """
        if room >= self.most:
            return self.most
        return room if room >= self.least and unchanged_s >= self.settle_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitLimits:
    """Bounds of every wait of the controller, in seconds.

    Attributes:
        place_s: how long room for the workers is waited for.
        settle_capacity_s: how long a number of workers below the largest is looked at before it is taken.
        grow_after_s: how long a group has run at least before it is ended in order to grow; None: see
            `holdfast.trainers.function.control.plan.growth_pause_s`.
        start_s: from the start of a group until train_func runs on all ranks.
        report_s: from the first rank that enters a report with data until the last.
        settle_s: after an error of a worker, how long to wait for a sign that another, its cause, has ended.
        drain_s: how long complete reports are finished after a failure, or when the run is stopped, and how long the
            exit of a worker that is seen to end by itself is waited for.
        end_s: how long the last commits may take after train_func has returned.
        grace_s: from SIGTERM to SIGKILL.
        stop_s: how long workers may take to end, beyond the grace.
        hang_s: silence of all ranks that counts as a hang; None: never.
        validation_s: for each validation, unless the report says otherwise.
    """

    place_s: float = 600.0
    settle_capacity_s: float = 3.0
    grow_after_s: float | None = None
    start_s: float = 600.0
    report_s: float = 600.0
    settle_s: float = 1.0
    drain_s: float = 10.0
    end_s: float = 600.0
    grace_s: float = 2.0
    stop_s: float = 30.0
    hang_s: float | None = None
    validation_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Everything the controller knows before the run is opened.

    Attributes:
        run_name: name of the run, its directory.
        storage: description of the run's root, for other processes.
        uri: of the run's root.
        local_dir: a disk of each node that states are stored on first.
        num_workers: ranks of a group; with ``min_workers`` the most there may be.
        min_workers: the fewest that a group is started with; None: always ``num_workers``.
        finds_places: the engine says how many workers there is room for, and nothing starts before.
        where: where the workers run, for people.
        inline: workers are calls in processes that exist, one of them in the driver's.
        policy: how often the run may fail.
        limits: bounds of all waits.
        score: {"attribute", "order"} of a CheckpointConfig that ranks by a metric.
        strategy: {"num_to_keep", "attribute", "order"} of a CheckpointStrategy.
        validates: there is a function that validates checkpoints.
        has_callbacks: the user has callbacks that take reports.
        first_checkpoint: where a run without checkpoints starts from.
        first_memory: the same as pickled values.
        versions: for manifests.
    """

    run_name: str
    storage: Mapping[str, Any]
    uri: str
    local_dir: str | None = None
    num_workers: int = 1
    min_workers: int | None = None
    finds_places: bool = False
    where: str = "on this machine"
    inline: bool = False
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    limits: WaitLimits = field(default_factory=WaitLimits)
    score: Mapping[str, Any] | None = None
    strategy: Mapping[str, Any] | None = None
    validates: bool = False
    has_callbacks: bool = False
    first_checkpoint: Mapping[str, Any] | None = None
    first_memory: bytes | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def scaling(self) -> ScalingPolicy:
        """How many workers a group has."""
        least = self.num_workers if self.min_workers is None else self.min_workers
        return ScalingPolicy(least=least, most=self.num_workers, settle_s=self.limits.settle_capacity_s)

    def location(self, name: str) -> dict[str, Any]:
        """Describe a checkpoint of the run for the wire."""
        return {"storage": dict(self.storage), "uri": self.uri, "name": name}


class Room:
    """How much room an engine says that it has; one machine, which says nothing, has room for every worker.

    Args:
        plan: of the run.

    Attributes:
        num_workers: how many workers there is room for; None: not known yet.
    """

    def __init__(self, plan: RunSpec) -> None:
        self._plan, self._policy = plan, plan.scaling
        self.num_workers: int | None = None if plan.finds_places else plan.num_workers
        self._num_ready: int | None = None
        self._detail = "nothing is known of the cluster yet"
        self._since = 0.0
        self._waiting_since: float | None = None
        self._said: str | None = None

    def update(self, event: Capacity, now: float) -> None:
        """Take in what the engine says."""
        if event.num_workers != self.num_workers:
            self._since = now
        self.num_workers, self._num_ready, self._detail = event.num_workers, event.num_ready, event.detail

    def wait(self, now: float) -> None:
        """Begin to wait for the start of a group; a wait that was not `satisfied` goes on."""
        if self._waiting_since is None:
            self._waiting_since, self._said = now, None

    def satisfied(self) -> None:
        """Note that a group runs."""
        self._waiting_since = None

    def size(self, now: float) -> int | None:
        """Return the size of the group to start; None: there is too little room, or its size still changes."""
        return None if self.num_workers is None else self._policy.size(self.num_workers, now - self._since)

    def deadline(self) -> float | None:
        """Return when `size`, `words` or `error` changes if nothing happens; None: never."""
        if self._waiting_since is None:
            return None
        times = [self._waiting_since + self._plan.limits.place_s]
        if self._said is None:
            times.append(self._waiting_since + _QUIET_S)
        if self.num_workers is not None and self._policy.least <= self.num_workers < self._policy.most:
            times.append(self._since + self._policy.settle_s)
        return min(times)

    def words(self, now: float) -> str | None:
        """Return what the run waits for, once, and again when it changes; else None."""
        if self._waiting_since is None or now < self._waiting_since + _QUIET_S or self._said == self._detail:
            return None
        self._said = self._detail
        until = self._waiting_since + self._plan.limits.place_s
        return f"waiting for room for {self._wanted}, for {max(0.0, until - now):.0f} s at most: {self._detail}"

    def error(self, now: float) -> TrainingError | None:
        """Return the error that ends the run if the wait was too long, else None."""
        limit = self._plan.limits.place_s
        if self._waiting_since is None or now < self._waiting_since + limit:
            return None
        return TrainingError(
            f"there was no room for {self._wanted} within {limit:g} s (HOLDFAST_PLACEMENT_TIMEOUT_S): {self._detail}. "
            "Add nodes, end what else runs there, or ask for less in ScalingConfig; the same command again goes on"
        )

    def growth(self, size: int, running_since: float, growth_s: float) -> float | None:
        """Return when a group of ``size`` that runs since ``running_since`` should grow; None: it should not.

        It trains on until workers start at once in the new places. ``growth_s``: see `growth_pause_s`.
        """
        room = None if self.num_workers is None else min(self.num_workers, self._policy.most)
        if room is None or room <= size or (self._num_ready is not None and self._num_ready < room):
            return None
        limits = self._plan.limits
        pause_s = growth_pause_s(limits.grow_after_s, growth_s)
        return max(self._since + limits.settle_capacity_s, running_since + pause_s)

    @property
    def _wanted(self) -> str:
        least, most = self._policy.least, self._policy.most
        return f"{most} worker{'s' if most > 1 else ''}" if least == most else f"{least} to {most} workers"
