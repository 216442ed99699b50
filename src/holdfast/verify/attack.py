"""Kill a script while it saves, at many moments, start it again, and count what it goes on from.

The uninterrupted life and the matching by content are those of `verify-resume` (`scripts`, `matching`). The output is
watched from outside: a kill is planned at the n-th time that a kind of change comes ("renamed out/step-#.pt"), or some
time after a change. A chain of lives goes on in one copy of the working directory: each life shows what the one before
it left, and is killed in its turn, as long as its states are those of the uninterrupted life.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

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
from .resume import Home, check_arguments
from .scripts import COPY_BYTES, Chains, check_records
from .survival import Kill, Survival, Trial, ends_of_saves, judge, save_changes
from .trace import LifePlan, Records
from .workplace import Aim, Change, ChangeWatch, Workplace, cut_power, make_durable, sees_power_cuts

__all__ = ["attack_script"]

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
