"""What is left after kills: the judgement and its report; pure functions.

A save has ended when each of the changes that come once with each save has come (`save_changes`). How many saves had
ended in a life before its kill says which of them were complete, so nothing depends on how long a save takes. Which
step a save holds is known from the lives themselves: the steps that any life went on from, and, where no file of about
the size of the largest changed after the next step had begun (the script waits for its saves), the steps at which saves
ended in the uninterrupted life. When something came is said in steps: how many had been begun.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .trace import Record
from .workplace import Change

__all__ = ["FINE", "OUTCOMES", "Kill", "Survival", "Trial", "ends_of_saves", "judge", "save_changes"]

OUTCOMES = {
    "newest": "went on from the newest checkpoint",
    "older, said": "went on from an older one, and said so",
    "older, silently": "went on from an older one, silently",
    "started over": "started over, although a checkpoint was complete",
    "refused": "refused to start, or ended with an error",
    "torn": "loaded a state that was never there",
}
"""What can follow a kill, the best first."""
FINE = ("newest", "older, said")
"""What loses nothing that was complete, or says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A kill.

    Attributes:
        at: how many steps had been begun, as the uninterrupted life counts.
        began: the step that the life had gone on from.
        ended: how many saves had ended in the life.
        landed: the change after which it came.
        lost: files that lost bytes by the power cut; None: there was none.
    """

    at: int
    began: int
    ended: int
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
        lag: how many steps a save took at most, 0 where the script waits for it.
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
        return all(trial.outcome in FINE for trial in self.trials)

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
            yield f"DOES NOT SURVIVE: {sum(trial.outcome not in FINE for trial in self.trials)} of {len(self.trials)}"
        shown = set()
        for trial in self.trials:
            if trial.outcome in FINE or trial.outcome in shown:
                continue
            shown.add(trial.outcome)
            yield f"  {OUTCOMES[trial.outcome]}, first after kill {self.trials.index(trial) + 1}: {_account(trial)}"
        for note in self.notes:
            yield f"note: {note}"


def save_changes(changes: Sequence[Change]) -> tuple[tuple[str, ...], int]:
    """Return the kinds of change that come once with each save, and the number of saves.

    Saves in the background may overlap: the last change of one comes after the first ones of the next, or of several.
    What belongs together is known then by the numbers in the names, which are those of the large files.

    Args:
        changes: of the uninterrupted life, between its first step and its end.
    """
    large = [change for change in _large(changes) if change.finished]
    num_places = len({change.begun for change in large})
    # What is deleted is of another save; a file is written as often as its writer likes.
    places: dict[str, list[int]] = {}
    for place, change in enumerate(changes):
        if change.what.startswith(("made ", "closed ", "renamed ")):
            places.setdefault(change.what, []).append(place)
    often = Counter(map(len, places.values()))
    # Files of a save in the background end at several steps, so there are no more saves than such steps. Of the counts
    # that remain most kinds share that of the saves: a lease or a log has one of its own.
    several = [count for count in often if 1 < count <= num_places] or list(often)
    number = min(several, key=lambda count: (-often[count], abs(count - num_places)))
    kinds = {what: where for what, where in places.items() if len(where) == number}
    # What has the same count by chance does not come once between the large files of two saves. And a file that is
    # there already is not made when a save that was torn is made again.
    own = [what for what in kinds if any(change.what == what for change in large)]
    first = min((kinds[what] for what in own), default=[])
    within = [what for what in kinds if _follow_each(kinds[what], first, len(changes))]
    names = {frozenset(names) for what in own for names in _names([changes[place] for place in kinds[what]])}
    named = [
        what
        for what in kinds
        if any(frozenset(one) in names for one in _names([changes[place] for place in kinds[what]]))
    ]
    if any(late >= next_one for what in named for late, next_one in zip(kinds[what], first[1:], strict=False)):
        last = [max(places) for places in zip(*(kinds[what] for what in named), strict=True)]
        within = [
            what for what in kinds if what in {*within, *named} or _follow_each(kinds[what], last, len(changes))
        ]  # fmt: skip
    finished = [what for what in within if not what.startswith("made ")]
    return tuple(finished or within or kinds), number


def _follow_each(places: Sequence[int], after: Sequence[int], end: int) -> bool:
    """Tell whether one place follows each of others, before the next of those."""
    return all(a <= b < c for a, b, c in zip(after, places, [*after[1:], end], strict=False))


def _names(changes: Sequence[Change]) -> list[tuple[str, ...]]:
    """Return the numbers in the names of changes of a kind by which each of them differs from all others."""
    columns = zip(*(change.numbers for change in changes), strict=False)
    return [column for column in columns if len({*column}) == len(changes)]


def ends_of_saves(changes: Iterable[Change], kinds: Sequence[str]) -> list[int]:
    """Return when saves had ended, each with the last of its changes of these kinds, ascending."""
    begun: dict[str, list[int]] = {what: [] for what in kinds}
    for change in changes:
        if change.what in begun:
            begun[change.what].append(change.begun)
    return [max(moments) for moments in zip(*begun.values(), strict=False)]


def _large(changes: Sequence[Change]) -> list[Change]:
    """Return the changes of files about as large as the largest: those hold the state."""
    largest = max((change.size for change in changes), default=0)
    sizes: dict[str, int] = {}
    for change in changes:
        sizes[change.name] = max(change.size, sizes.get(change.name, 0))
    return [change for change in changes if change.size and 2 * sizes[change.name] >= largest]


def judge(
    trials: Sequence[Trial],
    *,
    command: Sequence[str],
    reference: Record,
    changes: Sequence[Change],
    kinds: Sequence[str],
    notes: Sequence[str] = (),
) -> Survival:
    """Say of each trial what it went on from, and what it could have gone on from.

    Args:
        trials: in order.
        command: program and arguments.
        reference: the uninterrupted life.
        changes: of its output.
        kinds: the changes that come once with each save.
        notes: for the report.
    """
    large = {change.begun for change in _large(changes)}
    ends = ends_of_saves(changes, kinds)
    resumed = {trial.began for trial in trials if trial.began}
    waits = large | resumed <= {*ends} and not any(end + 1 in ends for end in ends)
    saved = sorted(resumed.union(ends) if waits else resumed)
    lag = 0 if waits else max((_end(step, ends, len(reference.steps)) - step for step in saved), default=0)
    judged = []
    for trial in trials:
        kill = trial.kill
        made = [step for step in saved if kill.began < step <= kill.at][: kill.ended]
        if not waits:  # a save that no life went on from is not known, so their numbers prove less
            made = [step for step in made if kill.at - step > 2 * lag]
        newest = max(made, default=kill.began)
        judged.append(replace(trial, newest=newest, outcome=_outcome(trial, newest)))
    return Survival(
        command=tuple(command), steps=len(reference.steps), saved=tuple(saved), lag=lag, trials=tuple(judged),
        notes=tuple(notes),
    )  # fmt: skip


def _end(step: int, ends: Sequence[int], steps: int) -> int:
    """Return when the save of a step had ended, at the latest.

    Where saves overlap or wait for each other it may be that of any save that ended later: the first of those is taken,
    or the one that has the same place among all saves as the step has among all steps, if that is later.
    """
    first = next((number for number, end in enumerate(ends) if end >= step), len(ends))
    number = max(first, -(-step * len(ends) // steps) - 1)
    return ends[number] if number < len(ends) else step


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
