"""The specification of a run of workers, fixed before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .policy import FailurePolicy, ScalingPolicy
from .validation import DEFAULT_TIMEOUT_S

__all__ = ["RunSpec", "WaitLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitLimits:
    """Bounds of every wait of the controller, in seconds.

    Attributes:
        place_s: how long room for the workers is waited for.
        settle_capacity_s: how long a number of workers below the largest is looked at before it is taken.
        grow_after_s: how long a group has run at least before it is ended in order to grow; None: see
            `holdfast.trainers.function.control.policy.growth_pause_s`.
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
    validation_s: float = DEFAULT_TIMEOUT_S


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
