"""Verify the resume of any script, with or without Holdfast: the lives, their matching, and one report for both.

The first life is uninterrupted, and observed in both ways: a `Witness` reports if the script has a `Checkpointer`, and
then `resume` takes over; the steps of torch's optimizers are recorded else, and further lives are killed, started again
by the same command, and matched by content (`matching`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .lives import Command, Life, LifeFailedError, Process, check_script, run_life, split_command
from .matching import EARLY, Finding, Match, compare_fresh, match_life
from .report import LifeReport, Report, of_examined, of_findings
from .resume import Home, NothingToVerifyError, ResumeDivergedError, Twins, check_arguments, choose_by_rows
from .trace import LifePlan, Moment, Records, saved_after, saves_after, stages
from .workplace import OutputWatch, Workplace

COPY_BYTES = 2 << 30
_IN_PLACE = "; or run it where it is with --in-place and {run} in its arguments for the directory it writes to"
_ANEW = (
    "cannot resume",
    "no training",
    "optimizer lost",
    "optimizer rounded",
    "partial weights",
    "rounded weights",
    "starts over",
)
"""What can be said of a script of which two uninterrupted lives differ."""  # fmt: skip
_PASSED_OVER = 3  # saves that a life has to miss before it is said that it went back: the newest may not be whole yet
_CHECKPOINTS = (".pt", ".pth", ".ckpt", ".tar", ".safetensors", ".distcp", ".pkl", ".npz")
_NO_CHECKPOINTS = ("venv", "node_modules", "site-packages", "__pycache__")
_TORN = ("zip", "EOF", "end of", "truncated", "corrupt", "central directory", "unpickl", "incomplete", "JSONDecode")


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAt:
    """A planned kill: before which step of the uninterrupted life, and what is special about it."""

    step: int
    why: str


def choose_steps(steps: int, saves: Sequence[int], epochs: Sequence[int], count: int) -> list[KillAt]:
    """Choose ``count`` kills, ascending: between saves, at an epoch's end, at once after a save, then anywhere.

    Args:
        steps: of the uninterrupted life.
        saves: after how many steps files were written.
        epochs: the steps that begin an epoch.
        count: number of kills.
    """
    last = steps - 1
    chosen: dict[int, str] = {}

    def take(step: int, why: str) -> None:
        if 1 <= step <= last and len(chosen) < count and all(abs(step - other) > 1 for other in chosen):
            chosen[step] = why

    ends = [*saves[1:], steps]
    gaps = [(begin, end) for begin, end in zip(saves, ends, strict=False) if end - begin > 2]
    for begin, end in gaps[:1] or [(save, save + 1) for save in saves[:1]]:
        take(min((begin + end + 1) // 2, last), "between saves")
    for epoch in epochs:
        if any(save <= epoch for save in saves) and "at the end of an epoch" not in chosen.values():
            take(epoch, "at the end of an epoch")
    for save in reversed(saves):
        if "after a save" not in chosen.values():
            take(min(save + 1, last), "after a save")
    for save in saves:
        take(min(save + 1, last), "after a save")
    if not chosen:
        take(max(1, steps // 2), "nothing was saved")
    return [KillAt(step=step, why=chosen[step]) for step in sorted(chosen)]


def verify_script(
    command: Sequence[str],
    *,
    kills: int = 3,
    resume: Sequence[str] | None = None,
    steps: int | None = None,
    terminate: bool = False,
    seed: int = 0,
    every: int = 1,
    timeout_s: float = 600.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    keep_in: str | os.PathLike[str] | None = None,
    in_place: bool = False,
    copy_limit_bytes: int = COPY_BYTES,
    starter: Callable[[Sequence[str], Path], Process] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Run a script uninterrupted and killed, and say how its resume differs.

    Takes what `assert_resumes` takes. With a `Checkpointer` moments are chosen by ``seed``, and the state is compared
    after ``every`` so many steps. ``in_place`` runs the script in the working directory itself; else a copy of that is
    used, and refused beyond ``copy_limit_bytes``. ``starter`` makes what runs a command in a directory, by default an
    observed `Command`. ``say`` gets a line for each event.

    Raises:
        ConfigError: an argument is wrong, or the working directory too large.
        NothingToVerifyError: no torch optimizer made two steps, and there was no `Checkpointer`.
        LifeFailedError: a life that began anew ended with an error, or one took too long.
    """
    check_arguments(command, kills=kills, steps=steps, every=every, timeout_s=timeout_s)
    with Home(keep_in) as home:
        place = Path(cwd or ".")
        check_script(command, place)
        workplace = None if in_place else Workplace(place, home, limit_bytes=copy_limit_bytes, advice=_IN_PLACE)
        starter = starter or (lambda parts, folder: Command(parts, env=env, cwd=folder, observed=True))
        chains = Chains(command, resume or command, home, place, workplace, starter)
        end = None if steps is None else Moment(step=steps)
        twins = Twins(
            home, lambda run: chains.command("a"), timeout_s=timeout_s, every=every, redirect=True, end=end, say=say
        )
        (home / "a").mkdir(exist_ok=True)
        chains.make("a")
        with OutputWatch(home / "a", trace=home / "a.trace") as watch, chains.explained():
            first = twins.life("a", 0, end, None, observe_to=steps, observe=True, watch=watch)
        if first.rows:
            examined = twins.examine(choose_by_rows(kills, seed), first)
            return of_examined(examined, command, steps=steps)
        lives = _Lives(chains, first, watch, timeout_s=timeout_s, steps=steps, terminate=terminate, say=say)
        if in_place and not chains.has_run:
            raise NothingToVerifyError(
                "--in-place needs {run} in the arguments of a script without a Checkpointer, for the directory "
                "it writes to: else its lives would find each other's files"
            )
        return lives.verify(command, kills)


def assert_resumes(
    command: str | Sequence[str],
    *,
    kills: int = 3,
    resume: str | Sequence[str] | None = None,
    steps: int | None = None,
    terminate: bool = False,
    timeout_s: float = 600.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    keep_in: str | os.PathLike[str] | None = None,
) -> Report:
    """Check that a training script, with or without Holdfast, goes on exactly after being killed.

    ``holdfast verify-resume`` for a pytest of one's own. The script runs in copies of its working directory.

    Args:
        command: program and arguments; ``{run}`` in them stands for a directory that each run gets anew.
        kills: how many times it is killed.
        resume: command that starts it again, default: the same.
        steps: compare the first so many steps only, and end the script there.
        terminate: send SIGTERM and give it 30 seconds, instead of SIGKILL.
        timeout_s: bound for each life.
        env: added to the environment.
        cwd: working directory, default: this one.
        keep_in: directory for copies, records and output; a temporary directory is removed.

    Returns:
        What was compared.

    Raises:
        ResumeDivergedError: the resume is not exact; the message names the first difference, its cause and the fix.
        AssertionError: the script failed by itself, or made no step that can be seen.
        ConfigError: an argument is wrong.

    Example:
        >>> assert_resumes("python train.py --epochs 2", kills=1)               # doctest: +SKIP
    """
    parts = split_command(command) if isinstance(command, str) else list(command)
    again = split_command(resume) if isinstance(resume, str) else resume
    report = verify_script(
        parts, kills=kills, resume=again, steps=steps, terminate=terminate, timeout_s=timeout_s, env=env, cwd=cwd,
        keep_in=keep_in,
    )  # fmt: skip
    if not report.exact:
        first = report.first or {"step": 0, "items": [], "kind": ""}
        raise ResumeDivergedError(
            "\n".join(report.lines()), step=first["step"], items=[item["item"] for item in first["items"]],
            at_resume=first["kind"] == "at resume", causes=[cause.why or cause.text for cause in report.causes],
        )  # fmt: skip
    return report


class Chains:
    """The commands of the chains of lives, each in a copy of the working directory of its own."""

    def __init__(
        self,
        command: Sequence[str],
        resume: Sequence[str],
        home: Path,
        cwd: Path,
        workplace: Workplace | None,
        starter: Callable[[Sequence[str], Path], Process],
    ) -> None:
        self.home = home
        self.has_run = any("{run}" in part for part in command)
        self._command, self._resume, self._cwd, self._workplace = command, resume, cwd, workplace
        self._starter = starter
        self._places: dict[str, Path] = {}

    def make(self, name: str) -> None:
        """Make the copy for the chain called ``name``."""
        self._places[name] = self._cwd if self._workplace is None else self._workplace.copy(name)
        (self.home / name / "run").mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Add to the failure of a life what its command does not find in a copy."""
        try:
            yield
        except LifeFailedError as error:
            hint = "" if self._workplace is None else self._workplace.hint(self._command)
            raise type(error)(f"{error}{hint}") from error

    def checkpoints_before(self) -> list[str]:
        """Name what may be a checkpoint in the working directory, before any life: three of the newest files."""
        found = []
        for folder, folders, files in os.walk(self._cwd):
            folders[:] = [name for name in folders if name not in _NO_CHECKPOINTS and name[0] != "."]
            found += [Path(folder, name) for name in files if name.endswith(_CHECKPOINTS)]
        ages = {path: path.stat().st_mtime for path in found if path.exists()}
        newest = sorted(ages, key=lambda path: -ages[path])[:3]
        return [os.fspath(path.relative_to(self._cwd)) for path in newest]

    def command(self, name: str, *, again: bool = False) -> Process:
        """Return what starts a life of a chain."""
        place = self._places[name]
        run = str(self.home / name / "run")
        parts = [part.replace("{run}", run) for part in (self._resume if again else self._command)]
        if self._workplace is not None:
            parts = self._workplace.moved(parts, place)
        return self._starter(parts, place)


class _Lives:
    """The lives of a script without a `Checkpointer`, after the first one."""

    def __init__(
        self,
        chains: Chains,
        first: Life,
        watch: OutputWatch,
        *,
        timeout_s: float,
        steps: int | None,
        terminate: bool,
        say: Callable[[str], None],
    ) -> None:
        self._chains, self._timeout_s, self._steps = chains, timeout_s, steps
        self._terminate, self._say = terminate, say
        self._first = first
        self._reference = check_records(first.plan.records(), first, chains)
        self._steps_in_all = len(self._reference[0].steps) - (steps is not None)
        self._saves = saved_after(self._reference[0], watch.changes)
        self._lives: list[LifeReport] = []
        self._started: Counter[str] = Counter()  # lives of each chain
        self._notes: list[str] = []

    def verify(self, command: Sequence[str], kills: int) -> Report:
        reference = self._reference[0]
        self._say(f"uninterrupted: {self._steps_in_all} steps in {self._first.seconds:.1f} s")
        chosen = choose_steps(self._steps_in_all, self._saves, stages(reference.steps), kills)
        self._chains.make("b")
        findings = self._killed(chosen)
        return of_findings(
            findings, command=command, steps=self._steps_in_all, lives=self._lives, notes=self._notes,
            kills=chosen, saves=self._saves, ranks=len(self._reference), first=self._first,
            reference=self._reference,
        )  # fmt: skip

    def _killed(self, chosen: Sequence[KillAt]) -> list[tuple[int, int, Finding]]:
        """Run the lives that are killed and the last one; return (life, rank, finding), those of one life."""
        died, wrote, proven, early = 0, False, 0, 0
        from_newest, back = False, list[tuple[int, int, Finding]]()
        killed: tuple[int, OutputWatch] | None = None  # the life before, by the step it counted from
        fresh = Records()
        noise: Finding | None = None
        unsaved: list[tuple[int, int, Finding]] = []
        doubted: tuple[Life, Match, list[tuple[int, int, Finding]]] | None = None
        plan: list[KillAt | None] = [*chosen, None]
        while plan:
            kill, number = plan.pop(0), len(self._lives)
            expected = max((save for save in self._saves if save <= died), default=0) if wrote else 0
            stop = self._steps if kill is None else kill.step
            kill_at = None if stop is None else max(1, stop - expected) + (early if doubted is None else EARLY)
            with OutputWatch(self._chains.home / "b", trace=self._chains.home / "b.trace") as watch:
                life = self._life("b", kill_at, watch)
            records = life.plan.records()
            # What is written before the first step (arguments, a vocabulary) is no save.
            had, wrote = wrote, wrote or any(watch.changes)
            to_end = not life.killed and self._steps is None
            if number == 0:
                fresh = records
                found = [compare_fresh(one, records[rank], to_end=to_end) for rank, one in self._reference.items()]
                noise = next((one for one in found if one is not None), None)
                proven = died = len(records[0].steps) - 1 if 0 in records else 0
                killed = 0, watch
                self._note(life, kill, 0, len(records[0].steps))
                if not life.killed:
                    return [(0, 0, noise)] if noise is not None else []
                continue
            matches = self._match(life, records, fresh if noise is not None else self._reference, died, had, to_end)
            began, made, early = matches[0].began, matches[0].steps, matches[0].early or early
            refused = not life.killed and life.status != 0
            if doubted is not None and not early and not refused and not began:  # it has begun at step 0 indeed
                life, match, findings = doubted
                self._note(life, kill, 0, match.steps, finding=findings[0][2])
                return [*findings, (0, 0, noise)] if noise is not None else self._confirmed(findings, proven)
            findings = [(number, rank, found) for rank, match in matches.items() for found in match.findings]
            if self._saves and not had and findings and all(one[2].kind == "starts over" for one in findings):
                unsaved, findings = findings, []  # it saves by the clock, and was killed before its first save
            few = life.killed and made <= EARLY and doubted is None and not early
            if few and findings and all(one[2].kind == "starts over" for one in findings):
                doubted = life, matches[0], findings  # or it would have loaded its checkpoint some steps later
                plan.insert(0, kill)
                continue
            doubted = None
            self._note(life, kill, began, made, finding=findings[0][2] if findings else None)
            if not findings and len({match.began for match in matches.values()}) > 1:
                facts = {"began": ", ".join(f"rank {rank}: {match.began}" for rank, match in matches.items())}
                findings = [(number, 0, Finding(kind="ranks", step=began or 0, at_resume=True, facts=facts))]
            if noise is not None:
                findings = [one for one in findings if one[2].kind in _ANEW]
                return [*findings, (0, 0, noise)]
            if findings:
                return self._confirmed(findings, proven)
            self._notes = [
                *dict.fromkeys([*self._notes, *(note for match in matches.values() for note in match.notes)])
            ]
            if killed is not None and began and not early:
                passed_over = saves_after(killed[1].written, began - killed[0])
                from_newest = from_newest or (passed_over == 0 and bool(killed[1].written))
                if passed_over >= _PASSED_OVER and not back:
                    older = {"died": died, "passed_over": passed_over}
                    back = [(number, 0, Finding(kind="goes back", step=began, at_resume=True, facts=older))]
            killed = (began or 0, watch) if life.killed else None
            if not life.killed:
                if any(plan):
                    self._notes.append("it came to its end before all planned kills: it makes steps before it loads")
                break
            died = (began or 0) + made - 1
        # Saves in the background end some steps late: who never went on from the newest file may wait for none.
        if back and from_newest:
            return back
        return [] if any(life.began for life in self._lives) else unsaved

    def _match(
        self,
        life: Life,
        records: Records,
        reference: Records,
        died: int,
        wrote: bool,
        to_end: bool,
    ) -> dict[int, Match]:
        if not life.killed and life.status != 0:
            last = life.last_line()
            torn = any(word in last for word in _TORN)
            made = len(records[0].steps)
            facts = {"status": life.status, "said": last[:200], "torn": torn}
            finding = Finding(kind="cannot resume", step=died, at_resume=made == 0, facts=facts)
            return {0: Match(began=None, steps=made, findings=(finding,))}
        before = () if wrote else self._chains.checkpoints_before()
        return {
            rank: match_life(one, records[rank], killed_at=died, saved=wrote, to_end=to_end, before=before)
            for rank, one in reference.items()
        }

    def _confirmed(self, findings: list[tuple[int, int, Finding]], proven: int) -> list[tuple[int, int, Finding]]:
        """Return the findings, or that two uninterrupted lives differ already where they are."""
        _, rank, finding = findings[0]
        if finding.at_resume or finding.step <= proven or finding.kind in _ANEW:
            return findings
        self._say("they differ: the script runs once more without a break, to see what it never repeats")
        self._chains.make("c")
        with OutputWatch(self._chains.home / "c") as watch:
            life = self._life("c", self._steps, watch)
        noise = compare_fresh(self._reference[rank], life.plan.records()[rank], to_end=self._steps is None)
        return [(0, rank, noise)] if noise is not None and noise.step <= finding.step else findings

    def _life(self, chain: str, kill_at: int | None, watch: OutputWatch) -> Life:
        trace = self._chains.home / f"{chain}.trace"
        trace.mkdir(exist_ok=True)
        number = self._started[chain]
        self._started[chain] += 1
        plan = LifePlan(
            trace=os.fspath(trace), life=number, signal=os.fspath(trace / "signal"), observe=True, kill_at=kill_at,
            # A fresh process draws its seeds by chance: alike where lives begin alike, and others when one goes on.
            seed=number, gentle=self._terminate and chain == "b",
        )  # fmt: skip
        return run_life(
            self._chains.command(chain, again=number > 0), plan, timeout_s=self._timeout_s, failure_counts=number == 0,
            watch=watch,
        )  # fmt: skip

    def _note(
        self, life: Life, kill: KillAt | None, began: int | None, made: int, *, finding: Finding | None = None
    ) -> None:
        number = len(self._lives)
        where = f"went on from step {began}" if number and began else "began"
        if number and not began:
            where = "began at step 0" if began == 0 else "went on from no step that is known"
        if not life.killed and life.status != 0:
            where = f"ended with exit status {life.status}"
        end = f"killed after step {(began or 0) + made - 1} ({kill.why})" if life.killed and kill else "not killed"
        self._say(f"life {number + 1}: {where}, {end} ({life.seconds:.1f} s)")
        self._lives.append(
            LifeReport(
                began=began, steps=made, killed_after=(began or 0) + made - 1 if life.killed else None,
                why=kill.why if kill is not None and life.killed else "", seconds=life.seconds, status=life.status,
                differs_from=None if finding is None else finding.step,
            )
        )  # fmt: skip


def check_records(records: Records, first: Life, chains: Chains) -> Records:
    """Return the records of a life that can be verified, the first one of ``chains``.

    Raises:
        NothingToVerifyError: too few steps were seen.
        LifeFailedError: the observation failed.
    """
    for record in records.values():
        if record.error:
            raise LifeFailedError(f"the steps of the script could not be observed: {record.error}. Please report this")
    made = len(records[0].steps)
    if made < 2:
        before = chains.checkpoints_before() if first.status == 0 else []
        seen = (
            "Steps are seen where torch.optim.Optimizer.step is called in an interpreter that reads PYTHONPATH (not "
            f"python -I or -E); this is {sys.executable}"
        )
        if before:
            seen = (
                f"It ended with status 0: if it has taken {' or '.join(before)} for the end of its training, made "
                f"before, verify it in a folder without that. Else, s{seen[1:]}"
            )
        elif made:
            seen = "Give it a longer training: a few dozen steps, with two saves or more"
        elif first.status == 0:
            seen = (
                "It ended with status 0: if a checkpoint outside of the working directory says that its training is "
                f"finished, name the place of that in the arguments as {{run}}. Else, s{seen[1:]}"
            )
        raise NothingToVerifyError(
            f"the script made {made} step{'' if made == 1 else 's'} with an optimizer of torch, and entered no "
            f"Checkpointer: at least 2 steps are needed to resume in between. {seen}"
        )
    return records
