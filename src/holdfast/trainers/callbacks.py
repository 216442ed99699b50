"""What callbacks of a run are told about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import RunConfig, ScalingConfig

__all__ = ["RunContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """First argument of ``after_report(context, metrics, checkpoint)`` and ``after_exception(context, errors)``.

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
