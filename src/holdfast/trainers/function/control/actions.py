"""Inputs and outputs of the controller: frozen values, so that each of its steps can be tested alone.

Into it go the engine's events, `ActionResult` of what it asked for, `Tick` and `StopRequested`; out come actions, which
`holdfast.trainers.function.control.drive` carries out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from holdfast.writer.messages import IngestSource

from ..engine import Event

# -- out: the run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """Take the lease and register the first attempt. Outcome: `Opened`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextAttempt:
    """End the attempt for ``reason`` and register another. Outcome: {"attempt", "start_id"}."""

    reason: str
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindStart:
    """Find the newest good checkpoint and set damaged ones aside. Outcome: `RunContents` of `.checkpoints`.

    Attributes:
        deep: names of checkpoints of which every byte is read, not just sizes.
    """

    deep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Note the checkpoint that this attempt goes on from."""

    name: str
    step: int
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """Add to what is noted of this attempt."""

    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Keep a small JSON value in the run's index."""

    key: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRows:
    """Store reported metrics."""

    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Protect:
    """Keep these from retention, and no others any more."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LateMetrics:
    """Add metrics to a checkpoint that is committed, which ranks it anew."""

    name: str
    metrics: Mapping[str, Any]


# -- out: checkpoints -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Commit a checkpoint: of parts that writers have stored, or of directories. Outcome: `SaveResult`.

    Attributes:
        index: of the report.
        directory: of the checkpoint.
        save_id: of the save.
        manifest: its fields.
        writers: ranks whose writers have stored a part each; () for reported directories.
        wait_s: how long parts are waited for, more than 0 where a worker is dead whose writer finishes its part.
        sources: what ranks reported, merged into one.
        uploaded: the user has put files into ``directory``: they stay, and those of ``sources`` are copied beside them.
    """

    index: int
    directory: str
    save_id: str
    manifest: Mapping[str, Any]
    writers: tuple[int, ...] = ()
    wait_s: float = 0.0
    sources: tuple[IngestSource, ...] = ()
    uploaded: bool = False


# -- out: workers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGroup:
    """Start so many workers."""

    attempt: int
    num_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillGroup:
    """End all workers: SIGTERM first, SIGKILL after the grace."""

    grace_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Make a worker run train_func, which the executor attaches.

    Attributes:
        memory: pickled values to start from, in place of a stored checkpoint.
    """

    rank: int
    header: Mapping[str, Any]
    memory: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer a call of a worker with a value (``memory`` behind it), or with an error that is raised there."""

    rank: int
    call: int
    value: Mapping[str, Any] | None = None
    error: BaseException | None = None
    memory: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a worker a message; ``error`` travels with it."""

    rank: int
    header: Mapping[str, Any]
    error: BaseException | None = None


# -- out: the rest ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Validate:
    """Start the validation of a checkpoint. Outcome: {"metrics": ...}, or the error."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopValidation:
    """Stop the validation that runs."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call a hook of the user's callbacks."""

    hook: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """Print one line for people."""

    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Nothing follows.

    Attributes:
        state: FINISHED, ERRORED or ABORTED.
        reason: for the index of the run.
        error: what `fit` raises.
        details: for the index of the run too: failures, seconds of each phase.
    """

    state: RunState
    reason: str
    error: BaseException | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


Action: TypeAlias = (
    OpenRun | NextAttempt | FindStart | Resumed | Details | Note | StoreRows | Protect | LateMetrics | Commit
    | StartGroup | KillGroup | Begin | Answer | Send | Validate | StopValidation | Call | Say | End
)  # fmt: skip

# -- in ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionResult:
    """How an action ended: with a value or an error."""

    action: Action
    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """A signal asks for the end of the run: Ctrl-C or SIGTERM; a second signal for an immediate end."""

    why: str


Input: TypeAlias = Event | ActionResult | Tick | StopRequested


class RunState(Enum):
    """What the controller is doing.

    ::

        INITIALIZING ──> SCHEDULING ──> RUNNING ──> FINISHED
              │            │    ^          │
              │            v    │          v
              │          RESTARTING <──────┘
              v               v
           ERRORED, ABORTED: from every state that is not an end
    """

    INITIALIZING = "initializing"
    """The run is opened (the lease is taken) and its newest good checkpoint is looked for."""

    SCHEDULING = "scheduling"
    """Workers start; train_func does not run on all of them yet."""

    RUNNING = "running"
    """train_func runs, or has ended and its last checkpoints and validations are waited for."""

    RESTARTING = "restarting"
    """A worker failed: what was complete is committed, the others are stopped, the next attempt is prepared."""

    FINISHED = "finished"
    """train_func returned on all ranks and everything it reported is safe."""

    ERRORED = "errored"
    """The failure policy gave up, or the run could not go on."""

    ABORTED = "aborted"
    """Somebody stopped the run: Ctrl-C or SIGTERM."""

    @property
    def is_end(self) -> bool:
        """Whether nothing follows."""
        return self in (RunState.FINISHED, RunState.ERRORED, RunState.ABORTED)


_STOPS = frozenset({RunState.ERRORED, RunState.ABORTED})
_FOLLOWING = {
    RunState.INITIALIZING: _STOPS | {RunState.SCHEDULING},
    RunState.SCHEDULING: _STOPS | {RunState.RUNNING, RunState.RESTARTING},
    RunState.RUNNING: _STOPS | {RunState.FINISHED, RunState.RESTARTING},
    RunState.RESTARTING: _STOPS | {RunState.SCHEDULING},
}


def check_transition(state: RunState, following: RunState) -> RunState:
    """Return ``following`` if it may follow ``state``.

    Raises:
        RuntimeError: it may not; a mistake in the controller, never of a user.
    """
    if following not in _FOLLOWING.get(state, ()):
        raise RuntimeError(f"the controller cannot go from {state.value} to {following.value}")
    return following
