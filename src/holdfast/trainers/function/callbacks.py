"""The interface of a run's callbacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.config import RunConfig, ScalingConfig

__all__ = ["RunContext", "UserCallback"]


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
