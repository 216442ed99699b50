"""Validations of checkpoints in the background: a queue of which at most one runs, and the task that runs.

Which validation is next, and its outcome, is decided here without side effects; `drive` runs the task in a process of
its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.identity import plain_metrics
from holdfast.errors import ConfigError

from ..transit import TravellingSecrets, pack_value
from ..types import ReportedCheckpointStatus
from ..values import VALIDATED

__all__ = ["DEFAULT_TIMEOUT_S", "WANTED", "Validations", "pack_validation", "status_of"]

WANTED = "wanted"
"""``manifest.extra["validation"]`` of a checkpoint that is to be validated, when the report gave no arguments."""

DEFAULT_TIMEOUT_S = 3600.0

_OUTCOMES = {
    True: ReportedCheckpointStatus.VALIDATED,
    "failed": ReportedCheckpointStatus.VALIDATION_FAILED,
    "timeout": ReportedCheckpointStatus.VALIDATION_TIMEOUT,
}


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

    def __init__(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._queue: deque[Waiting] = deque()
        self.running: Waiting | None = None
        self.deadline: float | None = None
        self.expired = False

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self.running is None and not self._queue

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


def pack_validation(
    function: Callable[..., Any], checkpoint: Checkpoint, arguments: Mapping[str, Any], *, secrets: bytes = b""
) -> bytes:
    """Make the task of a validation: bytes for `Engine.run_task`.

    Args:
        function: the user's.
        checkpoint: what it validates.
        arguments: more of them, by name.
        secrets: credentials of the storage, from `pack_secrets`.

    Raises:
        ConfigError: the function cannot travel to another process.
    """
    return pack_value(_Task(function, checkpoint, dict(arguments), secrets), "validation")


class _Task:
    """A validation, ready to be called where it runs."""

    def __init__(
        self, function: Callable[..., Any], checkpoint: Checkpoint, arguments: dict[str, Any], secrets: bytes
    ) -> None:
        self.function, self.checkpoint, self.arguments, self._secrets = function, checkpoint, arguments, secrets

    def __reduce__(self) -> tuple[Any, ...]:
        # In this order: the storage of the checkpoint is rebuilt when its credentials are there.
        return _rebuilt, (TravellingSecrets(self._secrets), self.function, self.checkpoint, self.arguments)

    def __call__(self) -> Any:
        found = self.function(self.checkpoint, **self.arguments)
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"validation={getattr(self.function, '__name__', self.function)!r} returned {type(found).__name__}: "
                "return a dict of metrics"
            )
        return plain_metrics(found)  # here, where the devices of its tensors are


def _rebuilt(_: None, function: Callable[..., Any], checkpoint: Checkpoint, arguments: dict[str, Any]) -> _Task:
    return _Task(function, checkpoint, arguments, b"")
