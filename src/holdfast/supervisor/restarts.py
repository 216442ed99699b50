"""Whether a script that has ended is started again: a pure function of its lives."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Again", "Death", "End", "after"]

_PAUSES_S = (0.0, 1.0, 5.0, 30.0)
_SAME = 3  # lives that end alike
_IDLE = 10  # lives in a row without a new durable step
_LONG_S = 600.0  # a life that nothing is known of was no crash at the start


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of a life.

    Attributes:
        number: of the life, from 1.
        seconds: that it has lasted.
        cause: for people: "killed by SIGKILL", "exit status 1", "hang".
        error: type, message and place of the exception that ended it; "" if none is known.
        traceback: of that exception, or the stacks of a hang.
        step: steps done; -1 if not known.
        durable: newest durable step of each run, by its URI, as far as is known.
        trained: a step was made in this life.
        status: exit status in the manner of a shell.
        rolled_back: its guard has found a bad step, and the next life goes on from before that.
        given_up: its guard has found a bad step, and there must be no next life.
    """

    number: int
    seconds: float
    cause: str
    error: str = ""
    traceback: str = ""
    step: int = -1
    durable: Mapping[str, int] = field(default_factory=dict)
    trained: bool = False
    status: int = 1
    rolled_back: bool = False
    given_up: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the script has told of a run."""
        return bool(self.durable)

    def alike(self) -> str:
        """Return what two deaths have in common if they have the same reason; numbers in messages do not count."""
        return re.sub(r"0x[0-9a-f]+|\d+", "#", f"{self.cause} {self.error}")


@dataclass(frozen=True, slots=True)
class Again:
    """Start the script again after a pause."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class End:
    """Start it no more.

    Attributes:
        why: for people, what was the same.
    """

    why: str


def after(deaths: Sequence[Death]) -> Again | End:
    """Decide after the last of these deaths.

    Example:
        >>> after([Death(number=1, seconds=9.0, cause="killed by SIGKILL", step=7, durable={"run": 5})])
        Again(pause_s=0.0)
    """
    if deaths[-1].given_up:
        return End("its guard has found a bad step, and says above why the run must not go on")
    if deaths[-1].rolled_back:
        return Again(0.0)  # no crash: how often is bounded by `holdfast.Guard.max_rollbacks`
    idle = _without_progress(deaths)
    last = idle[-_SAME:]
    if len(last) == _SAME:
        trained = [death for death in last if death.trained]
        if len(trained) == _SAME and len({death.step for death in last}) == 1:
            return End(f"{_SAME} lives in a row have ended at step {last[-1].step}, and no new step became durable")
        if not trained and len({death.alike() for death in last}) == 1:
            where = "before their first step" if last[-1].is_known else "alike"
            unknown = "" if last[-1].is_known else "; how far the script came is not known, it has entered no run"
            what = f"{last[-1].cause}: {last[-1].error}" if last[-1].error else last[-1].cause
            return End(f"{_SAME} lives in a row have ended {where} ({what}){unknown}")
    if len(idle) >= _IDLE:
        return End(
            f"{_IDLE} lives in a row have ended without a new durable step: saves are too far apart for this rate of "
            'failures (every="auto" finds the best interval, rescue= keeps the steps between)'
        )
    return Again(_PAUSES_S[min(len(idle), len(_PAUSES_S)) - 1] if idle else 0.0)


def _without_progress(deaths: Sequence[Death]) -> list[Death]:
    """Return the last deaths after which nothing was durable that was not durable before; at least the last one."""
    known: dict[str, int] = {}
    idle: list[Death] = []
    for death in deaths:
        if death.rolled_back:  # what was durable before the bad step is the measure no more
            known, idle = {}, []
            continue
        # A run that no life before had: a script that names a new one at each start gets no further by that.
        best = max(known.values(), default=-1)
        is_new = any(step > known.get(uri, best) for uri, step in death.durable.items())
        if is_new or (not death.is_known and death.seconds >= _LONG_S):
            idle = []
        for uri, step in death.durable.items():
            known[uri] = max(known.get(uri, -1), step)
        idle.append(death)
    return idle
