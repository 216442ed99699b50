"""Kill a script while it saves, at many moments, start it again, and count what it goes on from.

The uninterrupted life and the matching by content are those of `verify-resume` (`scripts`, `matching`). The output is
watched from outside: a kill is planned at the n-th time that a kind of change comes ("renamed out/step-#.pt"), or some
time after a change. A chain of lives goes on in one copy of the working directory: each life shows what the one before
it left, and is killed in its turn, as long as its states are those of the uninterrupted life.

The judgement (`judge`) is made of pure functions. A save has ended when each of the changes that come once with each
save has come (`save_changes`). How many saves had ended in a life before its kill says which of them were complete, so
nothing depends on how long a save takes. Which step a save holds is known from the lives themselves: the steps that any
life went on from, and, where no file of about the size of the largest changed after the next step had begun (the script
waits for its saves), the steps at which saves ended in the uninterrupted life. When something came is said in steps:
how many had been begun.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from holdfast._units import listed
from holdfast.errors import ConfigError

from .lives import (
    Command,
    Life,
    LifeFailedError,
    Process,
    WarmInterpreter,
    WarmLife,
    check_script,
    run_life,
    script_command,
)
from .matching import EARLY, compare_fresh, find_state, from_checkpoint, is_followed
from .report import advice, document, strip
from .resume import Home, check_arguments
from .scripts import COPY_BYTES, Chains, check_records
from .trace import LifePlan, Record, Records
from .workplace import Aim, Change, ChangeWatch, Workplace, cut_power, make_durable, sees_power_cuts

_RANDOM = 4  # one of so many kills comes at a random time after a change
_FIRST = 0.2  # the part of fresh lives that may be killed in their first save, when there is nothing to lose yet
_VARIABLE = re.compile(r"[0-9a-f]{6,}|\d+(\.\d+)?")
_WARNING = re.compile(
    r"warn|error|corrupt|damaged|incomplete|invalid|torn|truncated|skip|ignor|older|fall(s|ing)? back|fallback|"
    r"quarantin|can.?not|could not|fail|unreadable|bad |not (a |been )?(complete|committed|finali[sz]ed)",
    re.IGNORECASE,
)
"""What a script prints that does not take its newest checkpoint, and says so."""
_SHOWN = 150  # characters of the line that a life ended with
_SAVES_AT_MOST = 4  # without the planned change a life is killed after so many saves
_REFERENCES, _REFERENCE_S = 3, 60.0  # uninterrupted lives at most, where one takes less than this


def attack_script(
    command: Sequence[str],
    *,
    kills: int = 24,
    power_cuts: int = 8,
    resume: Sequence[str] | None = None,
    seed: int = 0,
    timeout_s: float = 600.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    keep_in: str | os.PathLike[str] | None = None,
    copy_limit_bytes: int = COPY_BYTES,
    cold: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Survival:
    """Kill a script while it saves, and count what it goes on from.

    Args:
        command: program and arguments; ``{run}`` in them stands for a directory that each chain of lives gets anew.
        kills: how many times it is killed by SIGKILL, with all that it has started.
        power_cuts: how many kills more are followed by the loss of what is not on the disk yet.
        resume: command that starts it again, default: the same.
        seed: of the choice of moments.
        timeout_s: bound for each life.
        env: added to the environment.
        cwd: working directory; a copy of it is used.
        keep_in: directory for copies, records and output; a temporary directory is removed.
        copy_limit_bytes: a larger working directory is refused.
        cold: start each life in an interpreter of its own; else a Python script runs in forks of one that has imported
            what the script imports at its top.
        say: gets a line for each event.

    Raises:
        ConfigError: an argument is wrong, or the working directory too large.
        NothingToVerifyError: no torch optimizer made two steps.
        LifeFailedError: the uninterrupted life ended with an error, saved nothing, or cannot be repeated; or the script
            does not go on from its state when it is killed between two saves.
    """
    check_arguments(command, kills=kills, steps=None, every=1, timeout_s=timeout_s)
    if power_cuts < 0:
        raise ConfigError(f"power_cuts={power_cuts}: give 0 or more")
    with Home(keep_in) as home:
        place = Path(cwd or ".")
        check_script(command, place)
        workplace = Workplace(place, home, limit_bytes=copy_limit_bytes)
        first, again = script_command(command), script_command(resume or command)
        warm = None
        if not cold and first is not None and again is not None:
            warm = WarmInterpreter(first, env=env, cwd=place.absolute())

        def starter(parts: Sequence[str], folder: Path) -> Process:
            if warm is None or (python := script_command(parts)) is None:
                return Command(parts, env=env, cwd=folder, observed=True)
            return WarmLife(warm, python, folder)

        chains = Chains(command, resume or command, home, place, workplace, starter)
        attack = _Attack(chains, home, timeout_s=timeout_s, keep=keep_in is not None, seed=seed, say=say)
        try:
            attack.watch_uninterrupted()
            attack.check_resume()
            attack.run(kills, cut=False)
            if power_cuts and (sees := sees_power_cuts(home)):
                attack.run(power_cuts, cut=True)
        finally:
            if warm is not None:
                warm.close()
        if power_cuts and not sees:
            attack.notes.append(
                f"no power cuts: the kernel or the file system of {home} does not say which bytes are on the disk "
                "(cachestat, Linux 6.5, on a file system of a disk)"
            )
        return judge(
            attack.trials, command=command, reference=attack.reference[0], changes=attack.changes,
            kinds=attack.save_changes, notes=attack.notes,
        )  # fmt: skip


@dataclass(slots=True)
class _Chain:
    """Lives that follow each other in one copy of the working directory."""

    name: str
    killed_at: int = 0  # how many steps had been begun
    began: int = 0  # the step that the last life that showed one went on from
    early: int = 0  # steps that the last life made before it loaded its checkpoint
    kills: list[Kill] = field(default_factory=list)  # of which nothing is known yet


class _Attack:
    """The lives of an attack."""

    def __init__(
        self, chains: Chains, home: Path, *, timeout_s: float, keep: bool, seed: int, say: Callable[[str], None]
    ) -> None:
        self._chains, self._home, self._timeout_s, self._keep, self._say = chains, home, timeout_s, keep, say
        self._chance = random.Random(seed)
        self._num_lives = self._num_chains = 0
        self.reference = Records()
        self.changes: list[Change] = []
        self._kinds: Counter[str] = Counter()
        self._num_saves = 1
        self.save_changes: tuple[str, ...] = ()
        self._usual: set[str] = set()  # what a resume prints where nothing is wrong
        self._early = 0  # steps that a resume makes before it loads its checkpoint
        self.trials: list[Trial] = []
        self.notes: list[str] = []

    def watch_uninterrupted(self) -> None:
        """Run the script without a break, again where the watch came too late for files."""
        lives: list[tuple[Life, ChangeWatch]] = []
        for _ in range(_REFERENCES):
            chain = self._chain()
            with self._watch(chain) as watch, self._chains.explained():
                life = self._life(chain, watch, whole=True)
                watch.read()
            self._end(chain)
            lives.append((life, watch))
            if not watch.num_found or life.seconds > _REFERENCE_S:
                break
        life, watch = min(lives, key=lambda one: (one[1].missed, one[1].num_found))
        if watch.missed:
            raise LifeFailedError(
                "the script changes more files at a time than the kernel notes; let it note more: "
                "sysctl fs.inotify.max_queued_events=1000000"
            )
        if watch.num_found:
            self.notes.append(
                f"uninterrupted: {_in_words(watch.num_found)} complete in a new directory before that was watched: "
                "if the script saves in the background, a save may count as complete some steps early"
            )
        self.reference = check_records(life.plan.records(), life, self._chains)
        steps = len(self.reference[0].steps)
        self.changes = [change for change in watch.seen if change.begun]
        self._kinds = Counter(change.what for change in self.changes)
        if not any(change.finished and change.size for change in self.changes if change.begun < steps):
            raise LifeFailedError(
                f"no file was written below the working directory or {{run}} between the {steps} steps of the "
                "script: it has to save at least once before its last step"
            )
        self.save_changes, self._num_saves = save_changes(self.changes)
        self._say(
            f"uninterrupted: {steps} steps in {life.seconds:.1f} s, {len(self.changes)} changes of "
            f"{len(self._kinds)} kinds in {self._num_saves} save{'s' * (self._num_saves != 1)}"
        )

    def check_resume(self) -> None:
        """Kill the script before its last step, at rest: what is wrong then is not the saving.

        Raises:
            LifeFailedError: it does not go on from a state of its own.
        """
        at = len(self.reference[0].steps) - 1
        chain = self._chain()
        with self._watch(chain) as watch:
            life = self._life(chain, watch, kill_at=at)
        self._look(chain, life)
        for kill_at in (0, EARLY):  # at step 0 it may be before it loads its checkpoint
            with self._watch(chain) as watch:
                life = self._life(chain, watch, kill_at=kill_at)
            made = life.plan.records()[0]
            num_seen, made = len(made.steps), from_checkpoint(self.reference[0], made, killed_at=at)
            began = find_state(self.reference[0], made, killed_at=at)[0] if made.steps else None
            if began != 0:
                break
        self._early = num_seen - len(made.steps)
        self._usual = {_VARIABLE.sub("#", line) for line in life.said().splitlines()}
        if not began:
            what = (
                "began at step 0"
                if began == 0
                else "went on from no state of the uninterrupted life"
                if made.steps
                else f"made no step (exit status {life.status}): {_last_line(life)}"
            )
            raise LifeFailedError(
                f"killed before its last step, {at}, and started again, the script {what}. Its saving cannot "
                "be judged before that is right: holdfast verify-resume says what it is. If it resumes only when it is "
                "told to, give --resume COMMAND"
            )
        self._end(chain)

    def run(self, count: int, *, cut: bool) -> None:
        """Make so many kills, with what follows."""
        aims = self._aims()
        most = -(-sum(self._kinds.values()) * _SAVES_AT_MOST // self._num_saves)
        left, idle, chain = count, 0, self._chain()
        while left > 0:
            before = len(self.trials)
            aim = next(aims)
            if chain.killed_at == 0:
                aim = self._later(aim)
            with self._watch(chain, replace(aim, at_most=most, cut=cut)) as watch:
                life = self._life(chain, watch)
            if self._look(chain, life) and life.killed and watch.seen and not watch.missed:
                changes = [change for change in watch.seen if change.begun > chain.early]
                lost = tuple(os.path.relpath(path, self._home / chain.name) for path in watch.unwritten)
                cut_power(watch.unwritten, self._chance)
                landed = "between changes" if aim.delay_s else watch.seen[-1].what
                chain.kills.append(
                    Kill(
                        at=chain.killed_at,
                        began=chain.began,
                        ended=len(ends_of_saves(changes, self.save_changes)),
                        landed=landed,
                        lost=lost if cut else None,
                    )
                )
            else:
                self._end(chain)
                chain = self._chain()
            made = len(self.trials) - before
            left -= made
            idle = 0 if made else idle + 1
            if idle > 20:
                raise LifeFailedError("20 lives in a row could not be killed while they saved, or told nothing")
        self._end(chain)

    # ---- moments

    def _aims(self) -> Iterator[Aim]:
        """Iterate over moments: each kind of change equally often, and times between changes."""
        per_save = {what: max(1, count // self._num_saves) for what, count in self._kinds.items()}
        total = sum(per_save.values())
        steps = self.reference[0].steps
        between_s = (steps[-1]["now"] - steps[0]["now"]) / self._num_saves
        while True:
            kinds = list(per_save)
            self._chance.shuffle(kinds)
            for what in kinds:
                if self._chance.random() * _RANDOM < 1:
                    yield Aim(nth=self._chance.randint(1, 2 * total), delay_s=self._chance.random() * between_s)
                else:
                    yield Aim(what=what, nth=self._chance.randint(1, 2 * per_save[what]))

    def _later(self, aim: Aim) -> Aim:
        """Move the moment of a life that begins anew behind its first save, if its change comes with each."""
        count = sum(self._kinds.values()) if aim.what is None else self._kinds[aim.what]
        if count < self._num_saves or self._chance.random() < _FIRST:
            return replace(aim, nth=min(aim.nth, count))
        return replace(aim, nth=aim.nth + -(-count // self._num_saves))

    # ---- lives

    def _chain(self) -> _Chain:
        self._num_chains += 1
        chain = _Chain(name=f"chain-{self._num_chains}")
        (self._home / chain.name).mkdir()
        self._chains.make(chain.name)
        make_durable(self._home / chain.name)
        return chain

    def _end(self, chain: _Chain) -> None:
        if not self._keep:
            shutil.rmtree(self._home / chain.name, ignore_errors=True)

    def _watch(self, chain: _Chain, aim: Aim | None = None) -> ChangeWatch:
        return ChangeWatch(self._home / chain.name, aim, trace=self._home / "trace")

    def _life(self, chain: _Chain, watch: ChangeWatch, *, whole: bool = False, kill_at: int | None = None) -> Life:
        trace = self._home / "trace"
        number, self._num_lives = self._num_lives, self._num_lives + 1
        again = chain.killed_at > 0
        plan = LifePlan(
            trace=os.fspath(trace), life=number, signal=os.fspath(trace / f"signal-{number}"), observe=True,
            witness=False, whole=whole, kill_at=kill_at, seed=number if again else 0,
        )  # fmt: skip
        return run_life(
            self._chains.command(chain.name, again=again), plan, timeout_s=self._timeout_s,
            failure_counts=not again, watch=watch,
        )  # fmt: skip

    def _look(self, chain: _Chain, life: Life) -> bool:
        """Look at a life; tell whether its own kill says something."""
        again = chain.killed_at > 0
        records = life.plan.records()
        made = records[0]
        if not again:
            other = compare_fresh(self.reference[0], made, to_end=not life.killed)
            if other is not None:
                if other.facts["goes_on"]:
                    cause = advice(other)
                    raise LifeFailedError(f"{cause.text}: {cause.why}. To mend it, {cause.without}")
                raise LifeFailedError(
                    f"two lives that begin anew differ from step {other.step} on "
                    f"({', '.join(item[0] for item in other.items) or 'their length'}), so states cannot be told "
                    "apart: seed the script; holdfast verify-resume says more"
                )
            chain.killed_at = len(made.steps)
            return bool(made.steps)
        shown = {
            rank: from_checkpoint(one, records[rank], killed_at=chain.killed_at)
            for rank, one in self.reference.items()
            if records[rank].steps
        }
        num_seen, made = len(made.steps), shown.get(0, made)
        chain.early = num_seen - len(made.steps)
        if life.killed and not chain.early and num_seen <= self._early:
            chain.early = num_seen
            return True  # killed before it could show anything: the next one will
        began, refused = None, ""
        if not made.steps:
            if life.status == 0 and chain.killed_at >= len(self.reference[0].steps):
                began = chain.killed_at  # all its steps had been made
            else:
                refused = f"exit status {life.status}: {_last_line(life)}"
        else:
            places = {
                find_state(self.reference[rank], one, killed_at=chain.killed_at)[0] for rank, one in shown.items()
            }
            began = places.pop() if len(places) == 1 else None
            if not life.killed and life.status != 0:
                refused = f"exit status {life.status}, later: {_last_line(life)}"
        self._add(chain, life, began, refused)
        if began is None or refused or not made.steps:
            return False
        chain.killed_at, chain.began = began + len(made.steps), began
        return is_followed(self.reference[0], made, began)

    def _add(self, chain: _Chain, life: Life, began: int | None, refused: str) -> None:
        """Add what a life has shown of the kills before it."""
        kills = chain.kills[:]
        chain.kills.clear()
        said = self._warned(life)
        self.trials += [
            Trial(kill=kill, life=life.plan.life + 1, began=began, refused=refused, said=said) for kill in kills
        ]
        what = f"went on from step {began}" if began else "began at step 0"
        if refused:
            what = f"ended with {refused}"
        elif began is None:
            what = "went on from a state that was never there"
        for number, kill in enumerate(kills, len(self.trials) - len(kills) + 1):
            lost = "" if kill.lost is None else f", power cut: {_in_words(len(kill.lost))} lost bytes"
            self._say(f"{number}: killed after step {kill.at} ({kill.landed}){lost}: {what}")

    def _warned(self, life: Life) -> str:
        """Return the first line that a resume does not print as a rule, and that sounds like a warning."""
        for line in life.said().splitlines():
            if _WARNING.search(line) and _VARIABLE.sub("#", line) not in self._usual:
                return line.strip()[:200]
        return ""


def _last_line(life: Life) -> str:
    line = life.last_line()
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def _in_words(num_files: int) -> str:
    return {0: "no file", 1: "1 file"}.get(num_files, f"{num_files} files")


# ---- the judgement


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
_WHOLE = "write to a temporary name (a file, or a directory with all parts), fsync, and rename"
_FIXES = {
    "older, silently": "print which checkpoint is loaded, and which newer ones are passed over and why",
    "started over": f"let an error in loading end the script, or take the checkpoint before; {_WHOLE}",
    "refused": f"{_WHOLE}; keep the checkpoint before until then",
    "torn": f"keep what belongs together (model, optimizer, counters) in one: {_WHOLE}",
}


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
            yield f"  fix: {_FIXES[trial.outcome]}"
        if not self.survives:
            yield "with Holdfast: a checkpoint counts when it is whole: a save that dies costs that save only"
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
        text += f", power cut ({listed(kill.lost, 3) or 'nothing'} lost bytes)"
    if trial.refused:
        return f"{text}; {trial.refused}"
    return f"{text}; went on from {'no known state' if trial.began is None else f'step {trial.began}'}"


# ---- as a page


_TRIALS = 300  # of more kills those that lost something are shown first


def survival_page(found: Survival, seconds: float) -> str:
    """Return the page of an attack."""
    trials = list(enumerate(found.trials, 1))
    shown = sorted(sorted(trials, key=lambda one: one[1].outcome in FINE)[:_TRIALS], key=lambda one: one[0])
    body = [] if len(shown) == len(trials) else [f"<p>{len(shown)} of {len(trials)} kills are shown.</p>"]
    for number, trial in shown:
        kill = trial.kill
        lost = "" if kill.lost is None else ", power cut"
        where = "" if trial.began is None else f" (step {trial.began})"
        name = f"{number}: killed after step {kill.at} ({kill.landed}){lost}: {OUTCOMES[trial.outcome]}{where}"
        body.append(f'<div class="name{"" if trial.outcome in FINE else " wrong"}">{escape(name)}</div>')
        body += _survival_strip(found, trial)
    return document(
        "attack", "Does the saving of {} survive?", found.command,
        "survives" if found.survives else "does not survive", is_good=found.survives,
        text=f"{found.steps} steps, {len(found.trials)} kills, {seconds:.0f} s. A strip for each kill. Green: steps "
        "that were still there after it. Grey: steps that no complete checkpoint had. Red: steps that one had, and "
        "that were lost. Yellow below: saved. Black edge: killed.",
        body=body, lines=found.lines(),
    )  # fmt: skip


def _survival_strip(found: Survival, trial: Trial) -> Iterator[str]:
    kept = 0 if trial.refused or trial.began is None else trial.began

    def mark(step: int) -> str:
        if step < kept:
            return "same"
        return "bad" if step < trial.newest else "none"

    return strip(found.steps, mark, saves=found.saved, killed=trial.kill.at)
