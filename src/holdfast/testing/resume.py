"""The twin run: train once without a break, once killed and resumed again and again, and compare everything.

Each life is a process of its own, killed by SIGKILL at chosen steps. After every step and after every resume the
whole live state is written down as one digest for each item, the batches and the metrics too, so that the first
difference has a name. If all that is saved was restored and the twins still part, something outside of the state
takes part in the training, and the error says that.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import runpy
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..checkpoint.runindex import RunIndex
from ..checkpointer import loop
from ..errors import ConfigError
from ..storage.local import LocalStorage
from .state import digests

__all__ = ["ResumeDivergedError", "ResumeReport", "verify_resume"]

_MAX_LIVES = 100


class ResumeDivergedError(AssertionError):
    """The resumed run differs from its twin.

    Attributes:
        step: first step at which it does.
        items: paths of what differs at that step.
        at_resume: the difference was there right after the resume, before any training.
    """

    def __init__(self, message: str, *, step: int, items: Sequence[str], at_resume: bool) -> None:
        super().__init__(message)
        self.step, self.items, self.at_resume = step, tuple(items), at_resume


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """What was compared.

    Attributes:
        steps: steps of the run.
        lives: for each life of the resumed run: step it began at, step it was killed after (None: it finished).
        items: number of state items compared at each step.
        compared: steps compared, repeated ones included.
    """

    steps: int
    lives: tuple[tuple[int, int | None], ...]
    items: int
    compared: int


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

    Args:
        target: a function of the run directory, or a script. It uses one `Checkpointer` on that directory and calls
            ``ck.step``. A function runs in forks of this process, so it must not need threads made before.
        args: arguments of a script; ``{run}`` stands for the run directory.
        kills: how many times the run is killed, at steps chosen by ``seed``.
        kill_after: the steps to kill after instead, ascending; the run goes on from its newest checkpoint each time.
        seed: of the choice.
        every: compare the state after every so many steps.
        timeout_s: bound for each life.
        keep_in: directory for the two runs and their traces; a temporary one is removed.

    Returns:
        What was compared.

    Raises:
        ResumeDivergedError: the runs differ; names step and items.
        AssertionError: a life failed by itself.

    Example:
        >>> verify_resume("train.py", args=["--out", "{run}"], kills=5)               # doctest: +SKIP
    """
    # The first step of an optimizer imports this, some seconds: here once instead of in each life.
    importlib.import_module("torch._dynamo")
    home = Path(tempfile.mkdtemp(prefix="holdfast-twin-") if keep_in is None else keep_in)
    home.mkdir(parents=True, exist_ok=True)
    try:
        twin = _Life(target, args, home / "a", every, timeout_s)
        twin.run(None)
        reference = _by_step(twin.trace())
        total = max(reference, default=0)
        if total < 2:
            raise ConfigError(f"verify_resume: the run made {total} step(s) with ck.step; at least 2 are needed")
        if kill_after is None:
            chance = random.Random(seed)
            kill_after = sorted(chance.sample(range(1, total), min(kills, total - 1)))
        other = _Life(target, args, home / "b", every, timeout_s)
        plan: list[int | None] = [*kill_after, None]
        for kill in plan:
            other.run(kill)
        rows = other.trace()
        compared = _compare(reference, rows, every)
        _compare_histories(home / "a", home / "b")
        lives = tuple((row["step"], kill) for row, kill in zip(_starts(rows), plan, strict=True))
        return ResumeReport(steps=total, lives=lives, items=len(reference[total]["items"]), compared=compared)
    finally:
        if keep_in is None:
            shutil.rmtree(home, ignore_errors=True)


# ---- one life


class _Life:
    """Runs the target on one directory, as often as asked, and keeps its trace beside the directory."""

    def __init__(self, target: Any, args: Sequence[str], run: Path, every: int, timeout_s: float) -> None:
        self._target, self._args, self._every, self._timeout_s = target, args, every, timeout_s
        self.run_directory = run
        self._trace = run.with_name(f"{run.name}.trace.jsonl")
        self._output = run.with_name(f"{run.name}.output.txt")

    def run(self, kill_after: int | None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: see the docstring
            pid = os.fork()
        if pid == 0:
            self._child(kill_after)
        status = self._wait(pid)
        killed = status == -signal.SIGKILL
        if status != 0 and not (killed and kill_after is not None):
            said = self._output.read_text(errors="replace")[-4000:]
            raise AssertionError(f"a life of the run ended with exit status {status}:\n{said}")
        if kill_after is not None and not killed:
            raise AssertionError(f"the run ended before step {kill_after}, at which it should be killed")

    def _wait(self, pid: int) -> int:
        watch = os.pidfd_open(pid)
        try:
            if not select.select([watch], [], [], self._timeout_s)[0]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise AssertionError(f"a life of the run did not end within {self._timeout_s:.0f} s")
        finally:
            os.close(watch)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _child(self, kill_after: int | None) -> NoReturn:
        status = 1
        try:
            output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(output, 1)
            os.dup2(output, 2)
            self._body(kill_after)
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except BaseException:  # noqa: BLE001 - a process edge: the parent shows what was printed
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _body(self, kill_after: int | None) -> None:
        import torch

        torch.set_num_threads(1)  # the parent's pool of threads did not come along
        _seed()
        _Tracer(self._trace, self._every, kill_after).install()
        run = os.fspath(self.run_directory)
        if callable(self._target):
            self._target(run)
            return
        script = os.fspath(self._target)
        sys.argv = [script, *(one.replace("{run}", run) for one in self._args)]
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(script, run_name="__main__")

    def trace(self) -> list[dict[str, Any]]:
        """Read the rows of all lives."""
        if not self._trace.exists():
            raise ConfigError("verify_resume: the run entered no Checkpointer")
        return [json.loads(line) for line in self._trace.read_text().splitlines()]


def _seed() -> None:
    """Start all lives alike: a run that seeds nothing would differ from its twin for that reason alone."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


class _Tracer:
    """Watches the `Checkpointer` of this process, and kills the process when its time has come."""

    def __init__(self, path: Path, every: int, kill_after: int | None) -> None:
        self._file = path.open("a", buffering=1)
        self._every, self._kill_after = every, kill_after
        self._batch = ""

    def install(self) -> None:
        """Put this tracer between the user's code and the class; the process ends with it."""
        enter, step, batches = loop.Checkpointer.__enter__, loop.Checkpointer.step, loop.Checkpointer.batches
        tracer = self

        def traced_enter(ck: loop.Checkpointer) -> loop.Checkpointer:
            enter(ck)
            source = ck.resumed_from
            tracer._row("start", ck, {"saved": 0 if source is None else source.step})
            return ck

        def traced_step(ck: loop.Checkpointer, **metrics: Any) -> None:
            # The order counts: what `step` saves is the state from before it draws or changes anything itself.
            step(ck, **metrics)
            tracer._row("step", ck, {"batch": tracer._batch, "metrics": digests(metrics)})
            if ck.global_step == tracer._kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

        def traced_batches(ck: loop.Checkpointer, loader: Any, **options: Any) -> Iterator[Any]:
            for batch in batches(ck, loader, **options):
                tracer._batch = json.dumps(digests(batch))
                yield batch

        for name, traced in (("__enter__", traced_enter), ("step", traced_step), ("batches", traced_batches)):
            setattr(loop.Checkpointer, name, traced)

    def _row(self, event: str, ck: loop.Checkpointer, more: Mapping[str, Any]) -> None:
        if event == "step" and ck.global_step % self._every and ck.global_step != self._kill_after:
            return
        row = {"event": event, "step": ck.global_step, "items": digests(ck._full_state()), **more}
        self._file.write(json.dumps(row) + "\n")


# ---- comparing


def _by_step(rows: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Map steps to rows; step 0 is the state before training."""
    return {row["step"]: row for row in rows if row["event"] == "step" or row["step"] == 0}


def _starts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["event"] == "start"]


def _compare(reference: Mapping[int, dict[str, Any]], rows: Sequence[dict[str, Any]], every: int) -> int:
    """Compare each row with the twin's of the same step."""
    compared = 0
    resumed = 0
    for row in rows:
        is_start = row["event"] == "start"
        if is_start:
            resumed = row["step"]
            if row["saved"] != resumed:
                raise ResumeDivergedError(
                    f"right after the resume of step {row['saved']}, holdfast/progress/step is {resumed}",
                    step=row["saved"], items=("holdfast/progress/step",), at_resume=True,
                )  # fmt: skip
        there = reference.get(row["step"])
        if there is None:
            if is_start or row["step"] % every:
                continue  # a resume between two traced steps
            raise ResumeDivergedError(
                f"the resumed run made step {row['step']}, the uninterrupted one did not: it ended after step "
                f"{max(reference)}",
                step=row["step"], items=("holdfast/progress/step",), at_resume=False,
            )  # fmt: skip
        wrong = list(_wrong(there, row, is_start))
        if wrong:
            raise ResumeDivergedError(
                _message(row["step"], resumed, wrong, is_start),
                step=row["step"], items=[path for path, _ in wrong], at_resume=is_start,
            )  # fmt: skip
        compared += 1
    last, end = max(reference), rows[-1]["step"]
    if end - end % every != last - last % every:
        raise ResumeDivergedError(
            f"the uninterrupted run made {last} steps, the resumed one ended at {end}",
            step=end, items=("holdfast/progress/step",), at_resume=False,
        )  # fmt: skip
    return compared


def _wrong(there: dict[str, Any], here: dict[str, Any], is_start: bool) -> Iterator[tuple[str, str]]:
    if not is_start and there.get("batch", "") != here["batch"]:
        yield "batch", "another batch (samples, their order or their augmentation)"
    for path in there["items"].keys() | here["items"].keys():
        left, right = there["items"].get(path, "nothing"), here["items"].get(path, "nothing")
        if left != right:
            yield path, f"{left[:60]} in the uninterrupted run, {right[:60]} in the resumed one"
    if not is_start and there.get("metrics", {}) != here["metrics"]:
        yield "metrics", f"{there.get('metrics')} in the uninterrupted run, {here['metrics']} in the resumed one"


def _message(step: int, resumed: int, wrong: list[tuple[str, str]], is_start: bool) -> str:
    rows = "\n".join(f"  {path}: {what}" for path, what in wrong[:10])
    more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
    if is_start:
        return f"right after the resume at step {step}, {len(wrong)} item(s) are not what they were:\n{rows}{more}"
    return (
        f"the resumed run differs from its twin after step {step}; first:\n{rows}{more}\n"
        f"Everything that is saved was right at the resume (step {resumed}), so something that is NOT in the state "
        "takes part in training: an object missing from the state given to Checkpointer, a random generator of your "
        "own, a global, data that do not come from ck.batches, or an operation that is not deterministic"
    )


def _compare_histories(a: Path, b: Path) -> None:
    """Compare the metric rows of both runs."""
    left, right = _history(a), _history(b)
    for step in sorted(left.keys() | right.keys()):
        if left.get(step) != right.get(step):
            raise ResumeDivergedError(
                f"the history of metrics differs at step {step}: {left.get(step)} in the uninterrupted run, "
                f"{right.get(step)} in the resumed one",
                step=step, items=("history",), at_resume=False,
            )  # fmt: skip


def _history(run: Path) -> dict[int, dict[str, str]]:
    rows = RunIndex.load(LocalStorage(run)).history()
    return {int(row["step"]): digests(row["metrics"]) for row in rows if row.get("step") is not None}
