"""What is left after kills: the judgement and its report; pure functions.

Which checkpoint is the newest is known from the lives themselves: the steps that any life went on from, and, where no
file changed after the next step had begun (the script saves while its training waits), the steps after which files of
about the size of the largest were written. A save counts as complete when the script has made more steps since than
twice the most that a save took in the uninterrupted life.
"""

from __future__ import annotations

import shlex
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .records import Record
from .workplace import Change

__all__ = ["OUTCOMES", "Kill", "Survival", "Trial", "judge"]

OUTCOMES = {
    "newest": "went on from the newest checkpoint",
    "older, said": "went on from an older one, and said so",
    "older, silently": "went on from an older one, silently",
    "started over": "started over, although a checkpoint was complete",
    "refused": "refused to start, or ended with an error",
    "torn": "loaded a state that was never there",
}
"""What can follow a kill, the best first."""
_FINE = ("newest", "older, said")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A kill.

    Attributes:
        at: how many steps had been begun, as the uninterrupted life counts.
        began: the step that the life had gone on from.
        landed: the change after which it came.
        lost: files that lost bytes by the power cut; None: there was none.
    """

    at: int
    began: int
    landed: str
    lost: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A life that was started after a kill.

    Attributes:
        kill: the kill.
        life: its number.
        began: the step it went on from, None if its state was never there.
        refused: how it ended, if it did not start, or failed later.
        said: a line of its output that sounds like a warning.
        outcome: a key of `OUTCOMES`.
        newest: the step of the newest complete checkpoint.
    """

    kill: Kill
    life: int
    began: int | None = None
    refused: str = ""
    said: str = ""
    outcome: str = ""
    newest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """What an attack found.

    Attributes:
        command: program and arguments.
        steps: of the uninterrupted life.
        saved: the steps that can be gone on from, as far as they are known.
        lag: how many steps a save took at most, 0 where the training waits for it.
        trials: in order.
        notes: what else there is to know.
    """

    command: tuple[str, ...]
    steps: int
    saved: tuple[int, ...]
    lag: int
    trials: tuple[Trial, ...]
    notes: tuple[str, ...] = ()

    @property
    def survives(self) -> bool:
        """Tell whether no kill lost or tore anything."""
        return all(trial.outcome in _FINE for trial in self.trials)

    def counts(self, *, cut: bool) -> dict[str, int]:
        """Return how often each outcome came, after kills alone or after power cuts."""
        counted = Counter(trial.outcome for trial in self.trials if (trial.kill.lost is not None) == cut)
        return {outcome: counted[outcome] for outcome in OUTCOMES}

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "command": list(self.command), "survives": self.survives, "steps": self.steps, "saved": list(self.saved),
            "lag": self.lag, "kills": self.counts(cut=False), "power_cuts": self.counts(cut=True),
            "landed": dict(Counter(trial.kill.landed for trial in self.trials).most_common()),
            "trials": [
                {
                    **asdict(trial.kill), "life": trial.life, "newest": trial.newest, "resumed": trial.began,
                    "outcome": trial.outcome, "said": trial.said, "refused": trial.refused,
                }
                for trial in self.trials
            ],
            "notes": list(self.notes),
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Yield the report."""
        plain, cuts = self.counts(cut=False), self.counts(cut=True)
        columns = [("kills", plain)] + ([("power cuts", cuts)] if sum(cuts.values()) else [])
        width = max(map(len, OUTCOMES.values()))
        yield " " * width + "".join(f"  {name:>10}" for name, _ in columns)
        for outcome, text in OUTCOMES.items():
            yield f"{text:<{width}}" + "".join(f"  {counts[outcome]:>10}" for _, counts in columns)
        yield f"{'in all':<{width}}" + "".join(f"  {sum(counts.values()):>10}" for _, counts in columns)
        yield ""
        if self.survives:
            yield f"SURVIVES: no kill of {shlex.join(self.command)} lost or tore a complete checkpoint"
        else:
            yield f"DOES NOT SURVIVE: {sum(trial.outcome not in _FINE for trial in self.trials)} of {len(self.trials)}"
        shown = set()
        for trial in self.trials:
            if trial.outcome in _FINE or trial.outcome in shown:
                continue
            shown.add(trial.outcome)
            yield f"  {OUTCOMES[trial.outcome]}, first after kill {self.trials.index(trial) + 1}: {_account(trial)}"
        for note in self.notes:
            yield f"note: {note}"


def judge(
    trials: Sequence[Trial],
    *,
    command: Sequence[str],
    reference: Record,
    changes: Sequence[Change],
    notes: Sequence[str] = (),
) -> Survival:
    """Say of each trial what it went on from, and what it could have gone on from.

    Args:
        trials: in order.
        command: program and arguments.
        reference: the uninterrupted life.
        changes: of its output.
        notes: for the report.
    """
    begun = [step["now"] for step in reference.steps]
    largest = max((change.size for change in changes), default=0)
    carriers = [change for change in changes if 2 * change.size >= largest > 0]
    places = {bisect_right(begun, change.at) for change in carriers} - {0}
    finished = {bisect_right(begun, change.at) for change in carriers if change.finished} - {0}
    resumed = {trial.began for trial in trials if trial.began}
    # Changes in the step after which a file was complete, and in no other: the training waits for its saves.
    waits = places == finished and not any(place + 1 in finished for place in finished) and resumed <= finished
    saved = sorted(resumed | finished if waits else resumed)
    ends = [min((place for place in finished if place >= step), default=step) - step for step in saved]
    lag = max(ends, default=0)
    judged = []
    for trial in trials:
        kill = trial.kill
        newest = max((step for step in saved if step <= kill.at and kill.at - step > 2 * lag), default=0)
        newest = max(newest, kill.began)
        judged.append(replace(trial, newest=newest, outcome=_outcome(trial, newest)))
    return Survival(
        command=tuple(command), steps=len(reference.steps), saved=tuple(saved), lag=lag, trials=tuple(judged),
        notes=tuple(notes),
    )  # fmt: skip


def _outcome(trial: Trial, newest: int) -> str:
    if trial.refused:
        return "refused"
    if trial.began is None:
        return "torn"
    if trial.began >= newest:
        return "newest"
    if trial.began == 0:
        return "started over"
    return "older, said" if trial.said else "older, silently"


def _account(trial: Trial) -> str:
    kill = trial.kill
    text = f"killed after step {kill.at} ({kill.landed}), newest checkpoint: " + (
        f"step {trial.newest}" if trial.newest else "none yet"
    )
    if kill.lost is not None:
        text += f", power cut ({', '.join(kill.lost[:3]) or 'nothing'} lost bytes)"
    if trial.refused:
        return f"{text}; {trial.refused}"
    return f"{text}; went on from {'no known state' if trial.began is None else f'step {trial.began}'}"
