"""Small public values of the function trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from holdfast.checkpoint.handle import Checkpoint

__all__ = ["CheckpointConsistencyMode", "CheckpointUploadMode", "ReportedCheckpoint", "ReportedCheckpointStatus"]


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
