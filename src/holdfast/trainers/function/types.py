"""Small values of the function trainer, and the interface of its callbacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from holdfast.checkpoint.handle import Checkpoint

from .config import RunConfig, ScalingConfig

__all__ = [
    "TIMESTAMP",
    "VALIDATED",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "RunContext",
    "UserCallback",
    "without_marks",
]

TIMESTAMP = "_timestamp"
"""Score attribute that means the time of the save."""

VALIDATED = "_validated"
"""Late metric that says how a validation ended: true, "failed" or "timeout"."""


def without_marks(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics without what Holdfast notes among them for itself."""
    return {name: value for name, value in metrics.items() if name != VALIDATED}


class CheckpointUploadMode(Enum):
    """How `report` brings a checkpoint's directory to storage."""

    SYNC = "SYNC"
    """``report`` returns when the checkpoint is committed."""

    ASYNC = "ASYNC"
    """``report`` returns once the directory has been taken over; it may be written again or deleted then."""

    NO_UPLOAD = "NO_UPLOAD"
    """The directory lies in the run's storage already and is committed where it is."""


class CheckpointConsistencyMode(Enum):
    """What `get_all_reported_checkpoints` waits for."""

    COMMITTED = "COMMITTED"
    """Commits of what was reported before."""

    VALIDATED = "VALIDATED"
    """Their validations as well."""


class ReportedCheckpointStatus(Enum):
    """How far a reported checkpoint has come."""

    COMMITTED = "COMMITTED"
    """Safe; no validation was requested."""

    PENDING_VALIDATION = "PENDING_VALIDATION"
    """Safe; its validation waits or runs."""

    VALIDATED = "VALIDATED"
    """Safe; the metrics of the validation are among its metrics."""

    VALIDATION_FAILED = "VALIDATION_FAILED"
    """Safe; its validation raised or returned no metrics."""

    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
    """Safe; its validation took too long and was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedCheckpoint:
    """One checkpoint of the run that still exists.

    Attributes:
        metrics: what was reported with it, and what its validation added.
        status: how far it has come.
    """

    checkpoint: Checkpoint
    metrics: Mapping[str, Any] = field(default_factory=dict)
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """First argument of the methods of callbacks: ``after_report(context, metrics, checkpoint)`` and the others.

    Attributes:
        name: of the run.
        path: of the run's directory, or its URI.
        train_loop_config: what train_func gets.
    """

    name: str
    path: str
    run_config: RunConfig
    scaling_config: ScalingConfig
    train_loop_config: Mapping[str, Any] | None = None

    def get_run_config(self) -> RunConfig:
        """The same as ``run_config``."""
        return self.run_config


class UserCallback:
    """What `RunConfig` takes as ``callbacks``, doing nothing; a callback may be any object with one of the methods.

    All are called in the driver. What they raise is logged and stops nothing.
    """

    def before_run(self, run_context: RunContext) -> None:
        """Called once, when the run has been opened and before its first workers are started."""

    def after_run(self, run_context: RunContext) -> None:
        """Called once, when the run has ended, well or not; what was reported is committed."""

    def after_report(
        self, run_context: RunContext, metrics: Sequence[Mapping[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        """Called after a report that all ranks have made; if it has a checkpoint, once that is committed.

        Args:
            run_context: of the run.
            metrics: what each rank reported, in the order of the ranks.
            checkpoint: None if no rank reported a checkpoint.
        """

    def after_exception(self, run_context: RunContext, worker_exceptions: Mapping[int, BaseException]) -> None:
        """Called after a failure, with the exceptions by rank."""
