"""The states of a run of workers and which of them may follow which."""

from __future__ import annotations

from enum import Enum

__all__ = ["RunState", "check_transition"]


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
