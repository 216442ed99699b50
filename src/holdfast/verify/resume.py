"""The twin run: train once without a break, once killed and resumed again and again, and compare everything.

Each life is a process of its own, killed by SIGKILL at chosen moments. At every boundary of a step and after every
resume the whole live state is recorded as a digest for each item (`witness`), the batches and the metrics too, so that
the first difference has a name. If there is a difference, a second uninterrupted life shows what never repeats.

`choose` decides when a run is saved and killed, as a pure function of the rows of an uninterrupted life. Nothing here
imports torch: the processes of the script do.
"""

from __future__ import annotations

import importlib
import os
import random
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast._units import listed
from holdfast.errors import ConfigError
from holdfast.run.index import RunIndex
from holdfast.storage.local.local_storage import LocalStorage

from .lives import Command, Forked, Life, LifeFailedError, Process, run_life
from .trace import Difference, LifePlan, Moment, Row, Unsteady, first_difference, likely_causes, unsteady

if TYPE_CHECKING:
    from .workplace import OutputWatch

_SHOWN = 10
Say = Callable[[str], None]


class NothingToVerifyError(LifeFailedError, ConfigError):
    """The script did nothing that could be compared."""


class ResumeDivergedError(AssertionError):
    """The resumed run differs from its twin.

    Attributes:
        step: first step at which it differs.
        items: paths of the items that differ at that step.
        at_resume: the runs differed right after the resume, before any training.
        causes: the likely causes, the likeliest first.
    """

    def __init__(
        self, message: str, *, step: int, items: Sequence[str], at_resume: bool, causes: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.step, self.items, self.at_resume, self.causes = step, tuple(items), at_resume, tuple(causes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """What was compared.

    Attributes:
        steps: steps of the run.
        lives: for each life of the resumed run: step it began at, step it was killed after (None: it finished).
        items: number of state items compared at each step.
        compared: steps compared, repeated ones included.
        notes: items that were not compared, and why.
    """

    steps: int
    lives: tuple[tuple[int, int | None], ...]
    items: int
    compared: int
    notes: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Examined:
    """The result of an examination.

    Attributes:
        difference: the first difference, None if the resume is exact.
        causes: its likely causes.
        noise: the differences of two uninterrupted lives, if they had to be compared.
        kills: the kills, in order.
        report: what was compared.
    """

    difference: Difference | None
    causes: list[str]
    noise: Unsteady | None
    kills: list[Kill]
    report: ResumeReport

    @property
    def verdict(self) -> str:
        """Return "exact", "differs", or "not repeatable": two uninterrupted runs differ already."""
        if self.difference is None:
            return "exact"
        noisy = self.noise is not None and self.noise.first is not None
        return "not repeatable" if noisy and self.difference.kind != "at resume" else "differs"

    @property
    def why(self) -> str:
        """What was special about the saved moment from which the life with the difference went on."""
        difference = self.difference
        return _why(self.kills, difference.life) if difference is not None else ""

    def what(self) -> str:
        """Return a text about the first difference, and where it is."""
        difference = self.difference
        if difference is None:
            return "exact"
        rows = [
            f"  {path}: {left[:60]} in the uninterrupted run, {right[:60]} in the resumed one"
            for path, left, right in difference.items[:_SHOWN]
        ]
        if difference.batches:
            said = f": {difference.text}" if difference.text else " (samples, their order or their augmentation)"
            rows.insert(0, f"  batch: another batch{said}")
        if len(difference.items) > _SHOWN:
            rows.append(f"  and {len(difference.items) - _SHOWN} more")
        return "\n".join([_headline(difference, self.noise), *rows])

    def check(self) -> ResumeReport:
        """Return the report.

        Raises:
            ResumeDivergedError: the resume is not exact.
        """
        difference = self.difference
        if difference is None:
            return self.report
        items = [path for path, _, _ in difference.items] or ["holdfast/progress/step"] * (difference.kind == "length")
        raise ResumeDivergedError(
            "\n".join([self.what(), *self.causes]), step=difference.step,
            items=[*["batch"] * difference.batches, *items], at_resume=difference.kind == "at resume",
            causes=self.causes,
        )  # fmt: skip


def verify_resume(
    target: Callable[[str], object] | str | os.PathLike[str],
    *,
    args: Sequence[str] = ("{run}",),
    kills: int = 3,
    kill_after: Sequence[int] | None = None,
    seed: int = 0,
    every: int = 1,
    timeout_s: float = 600.0,
    keep_in: str | os.PathLike[str] | None = None,
) -> ResumeReport:
    """Check that a killed and resumed training equals an uninterrupted one, bit by bit.

    For a training that takes the directory of its run as an argument, and saves as it wants to. For any script as it
    is, see `verify_resume_script`.

    Args:
        target: a function of the run directory, or a script. It uses one `Checkpointer` on that directory and calls
            ``ck.step``. A function runs in forks of this process, so it must not need threads made before.
        args: arguments of a script; ``{run}`` stands for the run directory.
        kills: how many times the run is killed, at steps chosen by ``seed``.
        kill_after: the steps to kill after instead, ascending; the run goes on from its newest checkpoint each time.
        seed: of the choice.
        every: compare the state after every so many steps.
        timeout_s: bound for each life.
        keep_in: directory for the two runs and their traces; a temporary directory is removed.

    Returns:
        What was compared.

    Raises:
        ResumeDivergedError: the runs differ; names step and items.
        AssertionError: a life failed by itself.

    Example:
        >>> verify_resume("train.py", args=["--out", "{run}"], kills=5)               # doctest: +SKIP
    """

    def forked(run: Path) -> Forked:
        return _forked(lambda: _body(target, args, os.fspath(run)))

    def chosen(rows: Sequence[Row]) -> list[Kill]:
        total = rows[-1]["step"]
        steps = kill_after
        if steps is None:
            steps = sorted(random.Random(seed).sample(range(1, total), min(kills, total - 1)))
        return [Kill(save=None, stop=Moment(step=step)) for step in steps]

    with Home(keep_in) as home:
        twins = Twins(home, forked, timeout_s=timeout_s, every=every)
        return twins.examine(chosen).check()


def verify_resume_script(
    command: Sequence[str] | Callable[[], object],
    *,
    kills: int = 3,
    steps: int | None = None,
    seed: int = 0,
    every: int = 1,
    timeout_s: float = 600.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    keep_in: str | os.PathLike[str] | None = None,
) -> ResumeReport:
    """Check that any script, as it is, goes on exactly after being killed: ``holdfast verify-resume`` in a test.

    Args:
        command: program and arguments, such as ``[sys.executable, "train.py", "--epochs", "2"]``; torchrun, too. Or a
            function, which is called in forks of this process.
        kills: how many times it is killed; see `examine`.
        steps: compare the first so many steps only.
        seed: of the choice of moments.
        every: compare the state after every so many steps.
        timeout_s: bound for each life.
        env: added to the environment of a command.
        cwd: working directory of a command.
        keep_in: directory for runs, traces and output; a temporary directory is removed.

    Raises:
        ResumeDivergedError: the resumed run differs; names step, items and likely causes.
        AssertionError: a life failed by itself, or entered no `Checkpointer`.

    Example:
        >>> verify_resume_script(["python", "train.py", "--epochs", "2"])               # doctest: +SKIP
    """
    return examine(
        command, kills=kills, steps=steps, seed=seed, every=every, timeout_s=timeout_s, env=env, cwd=cwd,
        keep_in=keep_in,
    ).check()  # fmt: skip


def examine(
    command: Sequence[str] | Callable[[], object],
    *,
    kills: int = 3,
    steps: int | None = None,
    seed: int = 0,
    every: int = 1,
    timeout_s: float = 600.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    keep_in: str | os.PathLike[str] | None = None,
) -> Examined:
    """Run a script uninterrupted and killed, and compare.

    Takes what `verify_resume_script` takes. The run of each `Checkpointer` is
    redirected into a temporary directory, where it is saved at the chosen moments alone: after a report, in the middle
    of an epoch, at the end of an epoch, then anywhere. One or two steps later all processes of the script are killed,
    and it is started again. An uninterrupted run is compared with that, step by step. If they differ, the script runs a
    second time without a break, which tells what it never repeats.

    Raises:
        ConfigError: an argument is wrong.
        NothingToVerifyError: the script entered no `Checkpointer`, or made too few steps.
        LifeFailedError: a life ended with an error.
    """
    check_arguments(command, kills=kills, steps=steps, every=every, timeout_s=timeout_s)
    runner: Process
    if callable(command):
        body = command
        runner = _forked(lambda: _alone(body))
    else:
        runner = Command(command, env=env, cwd=cwd)
    end = None if steps is None else Moment(step=steps)
    with Home(keep_in) as home:
        twins = Twins(home, lambda run: runner, timeout_s=timeout_s, every=every, redirect=True, end=end)
        return twins.examine(choose_by_rows(kills, seed))


def check_arguments(command: object, *, kills: int, steps: int | None, every: int, timeout_s: float) -> None:
    """Check what `examine` and `holdfast.verify.scripts.verify_script` are given.

    Raises:
        ConfigError: there is no command, a number is out of its range, or the system has no pidfd.
    """
    if not command:
        raise ConfigError("no command: holdfast verify-resume -- python train.py")
    for name, value, least in (("kills", kills, 1), ("every", every, 1), ("steps", steps, 2)):
        if value is not None and value < least:
            raise ConfigError(f"{name}={value}: give {least} or more")
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s={timeout_s:g}: give a positive number of seconds")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        raise ConfigError(
            f"processes are watched and killed here by pidfd_open(2), which does not work ({error}): use Linux 5.3 or "
            "newer, and a container whose seccomp profile allows it"
        ) from error


def choose_by_rows(kills: int, seed: int) -> Callable[[Sequence[Row]], list[Kill]]:
    """Return the choice of kills by the rows of an uninterrupted life."""
    return lambda rows: choose([row for row in rows if row["rank"] == 0], kills, seed=seed)


class Home:
    """The directory of an examination; a temporary directory is removed with it."""

    def __init__(self, keep_in: str | os.PathLike[str] | None) -> None:
        self._keep = keep_in is not None
        self.path = Path(tempfile.mkdtemp(prefix="holdfast-twin-") if keep_in is None else keep_in).absolute()

    def __enter__(self) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        return self.path

    def __exit__(self, *_: object) -> None:
        if not self._keep:
            shutil.rmtree(self.path, ignore_errors=True)


@dataclass(slots=True)
class Twins:
    """The lives of one examination.

    Attributes:
        home: directory of everything.
        target: starts a life on the directory of a run.
        timeout_s: bound of a life.
        every: compare every so many steps.
        redirect: take the runs of the script into ``home``, and decide what is saved; else the script gets it.
        end: where every life ends, None: where the script ends.
        say: gets a line for each event.
    """

    home: Path
    target: Callable[[Path], Process]
    timeout_s: float
    every: int
    redirect: bool = False
    end: Moment | None = None
    say: Say = field(default=lambda line: None)

    def examine(self, choose_kills: Callable[[Sequence[Row]], list[Kill]], first: Life | None = None) -> Examined:
        """Run all lives, of which the uninterrupted one may be there already, and compare them."""
        twin = first or self.life("a", 0, self.end, None)
        self._check_useful(twin)
        reference = twin.rows
        total = reference[-1]["step"]
        self.say(f"uninterrupted: {total} steps in {twin.seconds:.1f} s")
        kills = choose_kills(reference)
        lives, early = [], None
        for number, kill in enumerate([*kills, None]):
            life = self.life("b", number, self.end if kill is None else kill.stop, kill)
            lives.append(life)
            self.say(_account(life, kill))
            if kill is not None and not life.killed:
                # It has made other steps than the uninterrupted one, which is a difference to be named.
                early, kills = kill, kills[:number]
                break
        saved = [None, *(None if kill.save is None else kill.save.step for kill in kills)]
        rows = [life.rows for life in lives]
        difference, compared = self._compare(reference, rows, saved, Unsteady())
        ended = None
        if (
            early is not None
            and lives[-1].rows
            and not _begins_after(lives[-1].rows, early.stop)
            and _runs(lives[-1].rows) <= _runs(reference)
        ):
            text = f"the script ended before step {early.stop.step}, at which it should be killed"
            ended = Difference(kind="length", step=lives[-1].rows[-1]["step"], life=len(lives) - 1, text=text)
        difference = difference or ended
        noise = None
        if difference is not None and difference.kind not in ("path", "not resumed"):
            self.say("they differ: the script runs once more without a break, to see what it never repeats")
            noise = unsteady(reference, self.life("c", 0, self.end, None).rows)
            difference, compared = self._compare(reference, rows, saved, noise)
            difference = difference or ended
        report = ResumeReport(
            steps=total, items=len(reference[-1]["items"]), compared=compared, notes=tuple(_notes(noise, rows)),
            lives=tuple(
                (life.rows[0]["step"], None if kill is None else kill.stop.step)
                for life, kill in zip(lives, [*kills, None], strict=True)
            ),
        )  # fmt: skip
        causes = [] if difference is None else likely_causes(difference, _why(kills, difference.life), noise=noise)
        return Examined(difference=difference, causes=causes, noise=noise, kills=kills, report=report)

    def life(
        self,
        name: str,
        number: int,
        stop: Moment | None,
        kill: Kill | None,
        *,
        observe: bool = False,
        observe_to: int | None = None,
        watch: OutputWatch | None = None,
    ) -> Life:
        """Run a life; where it is observed, it is so until the Witness of a Checkpointer takes over."""
        run, trace = self.home / name, self.home / f"{name}.trace"
        trace.mkdir(exist_ok=True)
        save = () if kill is None or kill.save is None else (kill.save,)
        plan = LifePlan(
            trace=os.fspath(trace), life=number, signal=os.fspath(trace / "signal"), save=save, stop=stop,
            every=self.every,
            home=os.fspath(run) if self.redirect else None,
            root=None if self.redirect else os.fspath(run),
            initial=os.fspath(self.home / "initial") if self.redirect else None,
            observe=observe, kill_at=observe_to, seed=0 if observe else None,
        )  # fmt: skip
        return run_life(self.target(run), plan, timeout_s=self.timeout_s, watch=watch)

    def _check_useful(self, twin: Life) -> None:
        """Check that the run can be compared.

        Raises:
            NothingToVerifyError: it has no rows, or a single step.
        """
        if not twin.rows:
            raise NothingToVerifyError(
                "the script entered no Checkpointer: what is verified are runs of holdfast.Checkpointer, in a loop of "
                "your own. With holdfast.Trainer, TorchTrainer or a framework's own trainer, compare as their pages say"
            )
        total = twin.rows[-1]["step"]
        if total < 2:
            raise NothingToVerifyError(
                f"the run made {'1 step' if total == 1 else f'{total} steps'} with ck.step: at least 2 are needed to "
                "resume in between"
            )

    def _compare(
        self, reference: Sequence[Row], lives: Sequence[Sequence[Row]], saved: Sequence[int | None], noise: Unsteady
    ) -> tuple[Difference | None, int]:
        found, compared = first_difference(reference, lives, saved=saved, ignore=noise, every=self.every)
        return found or self._histories(noise), compared

    def _histories(self, noise: Unsteady) -> Difference | None:
        """Compare the metrics that both runs have stored; None for a run that was cut short."""
        if self.end is not None:
            return None
        for run in sorted(self._runs("a")):
            left, right = _history(self.home / "a" / run, noise), _history(self.home / "b" / run, noise)
            for step in sorted(left.keys() | right.keys()):
                if left.get(step) != right.get(step):
                    item = ("history", str(left.get(step)), str(right.get(step)))
                    return Difference(kind="metrics", step=step, items=[item])
        return None

    def _runs(self, name: str) -> list[str]:
        if not self.redirect:
            return ["."]
        return [entry.name for entry in (self.home / name).iterdir() if entry.is_dir()]


def _forked(body: Callable[[], object]) -> Forked:
    # The first step of an optimizer imports this, some seconds: here once instead of in each life.
    importlib.import_module("torch._dynamo")
    return Forked(body)


def _body(target: Any, args: Sequence[str], run: str) -> None:
    """Run a life of a function or of a script in this process."""
    _one_thread()
    _seed()
    if callable(target):
        target(run)
        return
    script = os.fspath(target)
    sys.argv = [script, *(argument.replace("{run}", run) for argument in args)]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


def _alone(body: Callable[[], object]) -> None:
    _one_thread()
    body()


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # the parent's pool of threads did not come along


def _seed() -> None:
    """Start all lives alike: a run that seeds nothing would differ from its twin for that reason alone."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


# ---- texts


def _headline(difference: Difference, noise: Unsteady | None) -> str:
    where = f" (rank {difference.rank})" if difference.rank else ""
    if difference.kind == "at resume":
        return (
            f"right after the resume at step {difference.step}{where}, {len(difference.items)} item(s) are not what "
            "they were when the step was saved:"
        )
    if difference.kind in ("path", "not resumed"):
        return f"life {difference.life + 1} did not go on from what the life before it had saved{where}"
    if difference.kind == "length":
        return f"the runs do not make the same steps{where}: {difference.text}"
    what = "the metrics of the resumed run differ" if difference.kind == "metrics" else "the resumed run differs"
    if noise is not None and noise.first is not None:
        return f"{what} from its twin after step {difference.step}{where}, but so do two uninterrupted runs; first:"
    since = "" if difference.resumed is None else f", in the life that went on from step {difference.resumed}"
    return f"{what} from its twin after step {difference.step}{where}{since}; first:"


def _runs(rows: Sequence[Row]) -> set[str]:
    return {row["run"] for row in rows}


def _begins_after(rows: Sequence[Row], stop: Moment) -> bool:
    """Tell whether a life went on from the step of its own kill or a later one: the script itself had saved there."""
    starts = [row for row in rows if row["event"] == "start" and stop.run in (None, row["run"])]
    return any(row["step"] >= stop.step for row in starts)


def _why(kills: Sequence[Kill], life: int) -> str:
    return kills[life - 1].why if 0 < life <= len(kills) else ""


def _account(life: Life, kill: Kill | None) -> str:
    start = next((row for row in life.rows if row["event"] == "start"), None)
    begun = "began" if start is None or start["resumed"] is None else f"went on from step {start['resumed']}"
    if kill is None or not life.killed:
        return f"life {life.plan.life + 1}: {begun}, not killed ({life.seconds:.1f} s)"
    save = "" if kill.save is None else f"saved step {kill.save.step} ({kill.why}), "
    return f"life {life.plan.life + 1}: {begun}, {save}killed after step {kill.stop.step} ({life.seconds:.1f} s)"


def _notes(noise: Unsteady | None, lives: Sequence[Sequence[Row]]) -> list[str]:
    notes = []
    anew = sorted({path for rows in lives for row in rows for path in row.get("drawn_anew", ())})
    names = sorted({path.partition("/")[0] for path in anew} - {"holdfast"})
    if names:
        notes.append(
            f"{', '.join(names)}: not the same at every start of the script, which seeds nothing; each fresh start was "
            "given the values of the first"
        )
    if noise is not None and noise.items:
        notes.append(f"not compared, for two uninterrupted runs differ in it: {listed(sorted(noise.items))}")
    if noise is not None and noise.metrics:
        notes.append(f"metrics not compared, for the same reason: {listed(sorted(noise.metrics))}")
    return notes


def _history(run: Path, noise: Unsteady) -> dict[int, dict[str, str]]:
    rows = RunIndex.load(LocalStorage(run)).history()
    return {
        int(row["step"]): {name: repr(value) for name, value in row["metrics"].items() if name not in noise.metrics}
        for row in rows
        if row.get("step") is not None
    }


_LATER = 2  # rows from the save to the kill, at most: the steps in between are trained again


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A planned kill.

    Attributes:
        save: the save before it, which the next life goes on from; None: the script decides what it saves.
        stop: when the processes are killed.
        why: what is special about the moment of the save.
    """

    save: Moment | None
    stop: Moment
    why: str = ""


def choose(rows: Sequence[Row], count: int, *, seed: int = 0) -> list[Kill]:
    """Choose ``count`` kills, ascending: after a report, in the middle of an epoch, at an epoch's end, then anywhere.

    Args:
        rows: of a single rank of an uninterrupted life, in order.
        count: number of kills; fewer where the run is too short.
        seed: of the random choices.
    """
    chance = random.Random(seed)
    steps = [row for row in rows if row["event"] == "boundary" and row["step"] > 0]
    kinds = _kinds(steps, {(row["run"], row["step"]) for row in rows if row["event"] == "report"})
    last = len(steps) - 1
    chosen: dict[int, str] = {}  # index of the save -> why

    def take(why: str, among: Sequence[int]) -> None:
        # Two lives may not be killed in the same step; and each should train some steps of its own.
        free = [index for index in among if index < last and all(abs(index - other) > 1 for other in chosen)]
        if free and len(chosen) < count:
            chosen[chance.choice(free)] = why

    for why in ("after a report", "in the middle of an epoch", "at the end of an epoch"):
        take(why, kinds.get(why, ()))
    while len(chosen) < count:
        before = len(chosen)
        take("anywhere", range(last))
        if len(chosen) == before:
            break
    if not chosen and count and len(steps) > 1:
        chosen[0] = "anywhere"
    kills = []
    order = sorted(chosen)
    for place, index in enumerate(order):
        end = order[place + 1] - 1 if place + 1 < len(order) else last
        stop = min(index + chance.randint(1, _LATER), max(end, index + 1), last)
        kills.append(Kill(save=_moment(steps[index]), stop=_moment(steps[stop]), why=chosen[index]))
    return kills


def epoch_of(row: Row) -> int | None:
    """Return the number of the epoch a row was written in."""
    text = row.get("items", {}).get("holdfast/progress/epoch", "")
    return int(text.split()[1]) if text.startswith("int ") else None


def _kinds(steps: Sequence[Row], reported: set[tuple[str, int]]) -> dict[str, list[int]]:
    """Return the boundaries (by index) by what is special about them."""
    kinds: dict[str, list[int]] = {}
    for index, row in enumerate(steps):
        after = steps[index + 1] if index + 1 < len(steps) else None
        if after is None:
            continue
        is_last_here = (after["run"], after["step"]) != (row["run"], row["step"])  # its epoch may end with it
        ends = after["run"] != row["run"] or epoch_of(after) != epoch_of(row)
        if (row["run"], row["step"]) in reported and is_last_here:
            kinds.setdefault("after a report", []).append(index)
        elif ends or not is_last_here:
            kinds.setdefault("at the end of an epoch", []).append(index)
        elif index and row["nth"] == 0 and epoch_of(steps[index - 1]) == epoch_of(row):
            kinds.setdefault("in the middle of an epoch", []).append(index)
    return kinds


def _moment(row: Row) -> Moment:
    return Moment(step=row["step"], event=row["event"], nth=row["nth"], run=row["run"])
