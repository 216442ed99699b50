"""The loop of `holdfast run`: start the script, watch it, look at its end, start it again with the memory it had.

Whether it is started again is decided by `after`, a pure function of its lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast._outgoing import visible
from holdfast._ranks import rank_list
from holdfast._units import format_duration
from holdfast.errors import ConfigError, HoldfastError
from holdfast.run.life import ARENAS, DEATHS, KEPT, MODULES, REQUEUE_STATUS, RunReport, read_reports
from holdfast.run.python_command import PythonCommand

from . import STOPS, HeldSignals
from .processes import LifeProcesses, Spare, describe_status, first_error, shell_status

_LOOK_S = 1.0
_ENTERS_S = 10.0  # that a process may take from entering a run to training
_HANG_S = 300.0  # least time without a boundary that is a hang
_FIRST_S = 1800.0  # until the first boundary of a life
_HANG_STEPS = 10
_ASLEEP_S = 20.0  # between two looks
_UNCOUNTED_S = 20.0  # least time without a run, until it is said that --hang has nothing to look at
_OTHERS_S = 5.0  # for the other ranks to end after one has died
_STOPS = frozenset(getattr(signal, name) for name in STOPS)
_FOR_REQUEUE = frozenset({signal.SIGTERM, signal.SIGUSR1})
_SHOWN_DEATHS = 50
_MANY_STOPS = 3  # the first saves, the second stops at once: a third one is sent by someone who still waits
_MEMFD = "/memfd:holdfast-arena "  # see `holdfast.writer.arena`


class Supervisor:
    """Runs a command until it is done.

    Args:
        command: program and arguments.
        held: the signals.
        num_ranks: processes to start with the environment of torchrun; None: one, in the environment that there is.
        hang_s: time without a boundary of a step that is a hang; None: from the steps of the script; 0: off.
        warm: keep a spare interpreter for the next life, where the command is one of Python and one process.
        is_one_of: ranks that another launcher has started, each below a supervisor of its own. With more than one, a
            death is passed on: only the launcher can start all ranks again.
    """

    def __init__(
        self,
        command: Sequence[str],
        held: HeldSignals,
        *,
        num_ranks: int | None = None,
        hang_s: float | None = None,
        is_one_of: int = 1,
        warm: bool = True,
    ) -> None:
        self._command, self._held, self._num_ranks, self._hang_s = list(command), held, num_ranks, hang_s
        self._alone = is_one_of == 1
        self._deaths: list[Death] = []
        self._told: list[dict[str, Any]] = []  # deaths that no life has taken into the journals of their runs
        self._stopping: int | None = None  # the signal that asked for it
        self._stops = 0  # how often it was asked for
        self._requeue = REQUEUE_STATUS
        self._continued = 0.0  # when we were last continued after a Ctrl-Z
        self._is_uncounted_said = False
        self._hangs = 0  # in a row: each gives the next life four times the time
        self._before: LifeProcesses | None = None
        self._spare: Spare | None = None
        self._kept = KeptArenas()
        self._python = PythonCommand.parse(command) if warm and num_ranks is None and self._alone else None
        try:
            self._home = Path(tempfile.mkdtemp(prefix="holdfast-run-"))
        except OSError as error:
            raise ConfigError(
                f"no temporary folder, in which the script says how far it is: {error}; set TMPDIR to one with room"
            ) from error
        self._wake, wake = os.pipe()
        for fd in (self._wake, wake):
            os.set_blocking(fd, False)
        held.wake_by(wake)

    def run(self) -> int:
        """Run the command, again and again, and return the exit status for all of it.

        Raises:
            ConfigError: the command cannot be started.
        """
        try:
            while True:
                if self._take_signals(None):
                    return self._stop_status()
                status = self._live()
                if status is not None:
                    return status
        finally:
            signal.set_wakeup_fd(-1)
            if self._spare is not None:
                self._spare.close()
            self._reap()
            _record(self._told)
            self._kept.close()
            shutil.rmtree(self._home, ignore_errors=True)

    def _reap(self) -> None:
        """Reap the life before: late, for its writer reads from the kernel how it has ended."""
        if self._before is not None:
            self._before.reap()

    # -- one life

    def _live(self) -> int | None:
        """Live one life; return the exit status if it was the last one."""
        number = len(self._deaths) + 1
        folder, told = self._home / f"life-{number}", self._told[-_SHOWN_DEATHS:]
        try:
            folder.mkdir()
            (folder / DEATHS).write_text(json.dumps(told), encoding="utf-8")
            self._kept.begin(folder)
        except OSError as full:  # nothing that the script needs: it trains on
            told = []
            _say(f"{folder.parent}: {full.strerror}: less is known of this life, and it loads nothing from memory")
        began = time.monotonic()
        spare, self._spare = self._spare, None
        if spare is not None:
            self._look_at(spare)
        processes = LifeProcesses(
            self._command, folder, num_ranks=self._num_ranks, more=_environment(number), spare=spare
        )
        self._reap()
        self._before = processes
        try:
            hang = self._watch(processes, folder)
        finally:
            ended = dict(processes.statuses)  # by themselves: that others end now says nothing
            if left := processes.end():
                _say(f"killed, and still there: process {', '.join(map(str, left))}; the next life may find it busy")
        if spare is not None and spare.has_refused():  # it was still importing when it was to begin: no life was lost
            self._look_at(spare)
            shutil.rmtree(folder, ignore_errors=True)
            return None if self._stopping is None else self._stop_status()
        reports = self._read(folder)
        entered = {report.uri for report in reports}  # rank 0 has taken what is told into the journal
        self._told = [death for death in self._told if death not in told or death["uri"] not in entered]
        statuses = ended if any(ended.values()) else processes.statuses
        failed = [status for _, status in sorted(statuses.items()) if status != 0]
        worst = min(failed, key=lambda status: (status == self._requeue, status == -signal.SIGKILL), default=0)
        rank = next((rank for rank, status in statuses.items() if status == worst), 0)  # of those, the first to end
        if hang is None and (status := self._last_status(worst, reports)) is not None:
            if killed := processes.statuses.keys() - ended:
                _say(f"{rank_list(killed)} did not end after the others, which have left in order: killed")
            return status
        # Another process, a helper, may have failed long before. Where no run was entered it is not known which is one.
        ours = [*processes.pids, *(report.pid for report in reports)] if reports or worst < 0 else None
        error = first_error(folder, ours) or {}
        death = self._death(number, time.monotonic() - began, (rank, worst), reports, error, hang)
        self._deaths.append(death)
        self._hangs = self._hangs + 1 if hang is not None else 0
        # What a guard has found is in the journal already.
        if not (death.rolled_back or death.given_up):
            self._told += [self._tell(death, report) for report in {report.uri: report for report in reports}.values()]
        decision = self._decide()
        self._say_death(death, decision)
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(decision, End):
            return death.status
        if self._pause(decision.pause_s):
            return self._stop_status()
        return None

    def _watch(self, processes: LifeProcesses, folder: Path) -> str | None:
        """Wait for the end of a life; return the stacks if it hung and was ended, else None."""
        others_until, began = float("inf"), time.monotonic()
        looked = began
        while not processes.poll():
            self._take_signals(processes)
            now, reports = time.monotonic(), self._read(folder)
            if now - looked > _ASLEEP_S:  # all of us stood still (SIGSTOP, scontrol suspend, a frozen container)
                self._continued = now
            looked = now
            if self._stopping is not None:
                others_until = float("inf")  # ranks that save before they stop take the time they need
            elif any(processes.statuses.values()):
                others_until = min(others_until, now + self._others_s(processes.statuses, reports))
            if now >= others_until:
                return None
            running = [report for report in reports if report.rank not in processes.statuses and report.is_there]
            if (hang := self._hang(running, processes)) is not None:
                return hang
            self._say_uncounted(reports, now - began)
            self._get_ready(folder)
            self._kept.look(folder)
            self._sleep(min(_LOOK_S, max(0.0, others_until - now)))
        if self._stopping is not None:
            # The command was a shell that died of the signal: the script itself has yet to save.
            rest = processes.are_alive([report.pid for report in read_reports(folder)])
            processes.send_below(self._stopping, rest)
            while processes.are_alive(rest):
                below = [report for report in read_reports(folder) if report.pid in rest and report.is_there]
                if (hang := self._hang(below, processes)) is not None:
                    return hang
                self._take_signals(processes, rest)
                self._sleep(0.1)
        return None

    def _read(self, folder: Path) -> list[RunReport]:
        """Return what the processes of a life have reported; the requeue status is among it."""
        reports = read_reports(folder)
        self._requeue = next((report.requeue for report in reports if report.requeue >= 0), self._requeue)
        return reports

    def _others_s(self, statuses: Mapping[int, int], reports: Sequence[RunReport]) -> float:
        """Return how long the other ranks may take where these have ended, not all of them with 0.

        After a death they wait for the dead one. Where ranks have left in order the others leave, too, and rank 0 may
        have uploads to finish: as long as a step may take, and a save that holds it.
        """
        left = {report.rank for report in reports if report.stopped or report.rolled_back}
        if any(status not in (0, self._requeue) and rank not in left for rank, status in statuses.items()):
            return _OTHERS_S
        return (self._hang_s or _HANG_S) + max((report.wait_s for report in reports), default=0.0)

    def _get_ready(self, folder: Path) -> None:
        """Start a spare interpreter once this life has made a step: its imports would slow the start and that step."""
        told = folder / MODULES  # not there before the life has entered its run
        if self._python is None or self._spare is not None or not told.exists():
            return
        now = time.monotonic()
        for report in read_reports(folder):  # other doors than `Checkpointer` do not count steps
            if report.step <= report.resumed if report.trains else now - report.moment_s < _ENTERS_S:
                return
        try:
            self._spare = Spare(self._python, told, self._home)
        except OSError as error:  # of processes or memory there are no more
            _say(f"no spare interpreter is kept: {error.strerror}; each life imports anew")
            self._python = None

    def _look_at(self, spare: Spare) -> None:
        """Do without spare interpreters from now on if this one has given up."""
        if why := spare.refusal():
            _say(f"no spare interpreter is kept: {why}; each life imports anew")
            self._python = None

    def _hang(self, reports: Sequence[RunReport], processes: LifeProcesses) -> str | None:
        """Say which rank makes no steps any more, and print and return the stacks; None if all make some."""
        if (why := self._silent(reports)) is None:
            return None
        _say(f"{why}: this is a hang. The Python stacks of all threads:")
        stacks = processes.stacks() or "(no Python process of this life has registered to write them)\n"
        sys.stderr.write(stacks)
        sys.stderr.flush()
        return f"{why}\n{stacks}"

    def _silent(self, reports: Sequence[RunReport]) -> str | None:
        """Say which rank has ended no step for longer than its limit, also after a signal: a hang never answers it."""
        if self._hang_s == 0:
            return None
        now = time.monotonic()
        for report in reports:
            if not report.trains:
                continue
            first = report.step <= report.resumed
            limit_s = self._hang_s or (_FIRST_S if first else max(_HANG_S, _HANG_STEPS * report.longest_s))
            limit_s = limit_s * 4**self._hangs + (report.wait_s if report.waits else 0.0)
            silent_s = now - max(report.moment_s, self._continued)
            if silent_s > limit_s:
                return (
                    f"rank {report.rank} of {report.uri} has ended no step for {format_duration(silent_s)} "
                    f"(step {report.step}; the limit was {format_duration(limit_s)})"
                )
        return None

    def _say_uncounted(self, reports: Sequence[RunReport], seconds: float) -> None:
        """Say once that the limit which was given limits nothing, where a life has counted no steps for longer."""
        has_none = all(report.step < 0 for report in reports)
        if self._hang_s and has_none and seconds > max(self._hang_s, _UNCOUNTED_S) and not self._is_uncounted_said:
            self._is_uncounted_said = True
            _say(
                f"the script has entered no run that counts its steps for {format_duration(seconds)}: until then "
                "--hang finds no hang (a Checkpointer counts them, and a Trainer with a save_folder of directories)"
            )

    def _last_status(self, worst: int, reports: Sequence[RunReport]) -> int | None:
        """Return the exit status if a life that has ended by itself was the last one."""
        if worst == 0:
            if self._deaths:
                _say(f"done, after {len(self._deaths) + 1} lives")
            return 0
        if worst == self._requeue:
            return worst
        last = _newest(reports)
        if self._stopping is None:
            # A launcher (torchrun) has its own status for ranks that were told to stop, or whose deadline was near.
            return self._requeue if worst > 0 and last and all(report.stopped for report in last) else None
        has_stopped = any(report.stopped or report.rolled_back for report in last)
        if self._stopping in _FOR_REQUEUE and (worst == -self._stopping or has_stopped):
            # It died of the signal, before it could handle it or for the lack of a handler, or a launcher has its own
            # status for what its ranks did: the job is to be queued again.
            if not has_stopped:  # else the script has said it
                name = signal.Signals(self._stopping).name
                _say(f"{name} has ended the script; the same command starts it again (exit status {self._requeue})")
            return self._requeue
        return shell_status(worst)

    def _decide(self) -> Again | End:
        if self._stopping is not None:  # it hangs, or its own status would have been passed on
            name, status = signal.Signals(self._stopping).name, self._stop_status()
            return End(f"{name} has asked it to stop; the same command starts it again (exit status {status})")
        if not self._alone:
            return End(
                "this is one rank of several, and its launcher alone can start all of them again (torchrun "
                "--max-restarts; SLURM: `holdfast run -- srun ...` instead of `srun holdfast run -- ...`)"
            )
        return after(self._deaths)

    def _death(
        self,
        number: int,
        seconds: float,
        worst: tuple[int, int],
        reports: Sequence[RunReport],
        error: Mapping[str, Any],
        hang: str | None,
    ) -> Death:
        rank, status = worst
        durable: dict[str, int] = {}
        for report in reports:
            durable[report.uri] = max(durable.get(report.uri, -1), report.durable)
        text = f"{error['type']}: {error['message']}" if error else ""
        place = f" ({error['place']})" if error.get("place") else ""
        last = _newest(reports)
        given_up = hang is None and any(report.given_up for report in last)
        rolled_back = hang is None and not given_up and any(report.rolled_back for report in last)
        which = f"rank {rank}: " if self._num_ranks is not None else ""
        cause = "hang" if hang is not None else which + describe_status(status)
        if rolled_back:
            cause = f"rolled back by its guard ({describe_status(status)})"  # all ranks have found it
        return Death(
            number=number, seconds=seconds, cause=cause, error=text + place,
            traceback=hang or str(error.get("traceback", "")), step=reports[-1].step if reports else -1,
            durable=durable, trained=any(report.step > report.resumed >= 0 or report.step > 0 > report.resumed
                                         for report in reports),
            status=shell_status(status) if hang is None else 1 if self._stopping is None else self._stop_status(),
            rolled_back=rolled_back, given_up=given_up,
        )  # fmt: skip

    def _tell(self, death: Death, report: RunReport) -> dict[str, Any]:
        """Describe a death for the journal of a run."""
        why = death.cause + (f": {death.error}" if death.error and death.cause != "hang" else "")
        event: dict[str, Any] = {"what": "died", "time": time.time(), "attempt": report.attempt, "why": why}
        if report.step >= 0:
            event["step"] = report.step
        if death.cause == "hang":
            event["stacks"] = death.traceback
        return {"uri": report.uri, "event": event}

    def _say_death(self, death: Death, decision: Again | End) -> None:
        where = f" at step {death.step}" if death.step >= 0 else ""
        error = f" ({death.error})" if death.error and death.cause != "hang" else ""
        safe = max(death.durable.values(), default=-1)
        newest = f"; the newest durable step it knew is {safe}" if safe > 0 else ""
        if safe == 0:
            newest = "; it knew of no durable step"
        if isinstance(decision, End):
            what = f"not started again: {decision.why}"
        else:
            pause = f" in {decision.pause_s:g} s" if decision.pause_s else ""
            what = f"starting again{pause}"
        lasted = f"life {death.number} ended after {format_duration(death.seconds)}{where}"
        _say(f"{lasted}: {death.cause}{error}{newest}; {what}")
        if isinstance(decision, End) and death.traceback and death.cause != "hang" and not death.given_up:
            sys.stderr.write(death.traceback)
            sys.stderr.flush()

    # -- signals and pauses

    def _take_signals(self, processes: LifeProcesses | None, also: Sequence[int] = ()) -> bool:
        """Pass on the signals that have come; True if one of them asks to stop, now or before."""
        while self._held.waiting:
            number = self._held.waiting.pop(0)
            if number == signal.SIGTSTP:
                self._stand_still(processes)
                continue
            if number in _STOPS:
                self._stopping = self._stopping or number
                self._stops += 1
            if processes is not None:
                processes.send(number, also)
                if number in _STOPS and self._stops == _MANY_STOPS:
                    _say(f"the script was sent each signal and has not ended; to end it now: {processes.kill_line}")
        return self._stopping is not None

    def _stand_still(self, processes: LifeProcesses | None) -> None:
        """Stop with all processes of this life, as a Ctrl-Z asks, until we are continued (fg, bg)."""
        if processes is not None:
            processes.send_all(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if processes is not None:
            processes.send_all(signal.SIGCONT)
        self._continued = time.monotonic()

    def _stop_status(self) -> int:
        """Return the exit status after a signal that no life has answered: none was there, or it hangs."""
        assert self._stopping is not None
        return self._requeue if self._stopping in _FOR_REQUEUE else 128 + self._stopping

    def _pause(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._take_signals(None):
            if (left := until - time.monotonic()) <= 0:
                return False
            self._sleep(left)
        return True

    def _sleep(self, seconds: float) -> None:
        """Sleep, until a signal comes or a child ends."""
        select.select([self._wake], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)


class KeptArenas:
    """The arenas of the newest saves of the present life, and of the last life before it that had any.

    They are memory that the death of a life does not free, for the next one to load from. A process names its arenas in
    the folder of its life (`holdfast.run.life`); we open them through ``/proc`` while it lives, and name them to the
    next life in the same way. That life cuts them to nothing after its first step.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[tuple[int, dict[str, Any]]]] = {}  # of the present life, by run and process
        self._seen: set[str] = set()  # files that were read
        self._before: list[tuple[int, dict[str, Any]]] = []

    def begin(self, folder: Path) -> None:
        """Name to a life that is about to begin in ``folder`` what lives before have left."""
        held = [one for of_run in self._held.values() for one in of_run]
        if held:
            _close(self._before)
            self._before = held
        self._held, self._seen = {}, set()
        named = [{**about, "path": f"/proc/{os.getpid()}/fd/{fd}"} for fd, about in self._before]
        (folder / KEPT).write_text(json.dumps(named), encoding="utf-8")

    def look(self, folder: Path) -> None:
        """Open what the processes of the present life have named since the last look."""
        for path in sorted(folder.glob(f"{ARENAS}*"), key=lambda path: path.stat().st_mtime_ns):
            if path.name in self._seen:
                continue
            self._seen.add(path.name)
            run = path.name.rpartition("-")[0]
            _close(self._held.pop(run, []))  # it has other arenas now, or none
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                named = json.loads(path.read_bytes())
                self._held[run] = [*filter(None, (_open(named["pid"], arena) for arena in named["arenas"]))]

    def close(self) -> None:
        """Give everything back; idempotent."""
        for held in (self._before, *self._held.values()):
            _close(held)
        self._before, self._held = [], {}


def _open(pid: int, arena: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    place = f"/proc/{int(pid)}/fd/{int(arena['fd'])}"
    try:
        if not os.readlink(place).startswith(_MEMFD):  # closed meanwhile, and something else opened
            return None
        return os.open(place, os.O_RDWR | os.O_CLOEXEC), arena
    except OSError:
        return None


def _close(held: list[tuple[int, dict[str, Any]]]) -> None:
    for fd, _ in held:
        os.close(fd)


def _newest(reports: Sequence[RunReport]) -> list[RunReport]:
    """Return the last report of each rank of each run: a launcher may have replaced a worker inside of a life."""
    return list({(report.uri, report.rank): report for report in reports}.values())


def _environment(number: int) -> dict[str, str]:
    """Return variables of a life: where the store of torchrun's agent outlives it, its keys begin anew."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if number > 1 and count.isdigit():
        return {"TORCHELASTIC_RESTART_COUNT": str(int(count) + number - 1)}
    return {}


def _record(told: Sequence[Mapping[str, Any]]) -> None:
    """Write deaths into the journals of their runs: no later life will."""
    if not told:
        return
    from holdfast.run.catalog import upkeep  # not above: only a run that is given up needs them
    from holdfast.run.index import RUN_FILE
    from holdfast.storage.resolve import resolve

    for uri in dict.fromkeys(death["uri"] for death in told):
        try:
            storage = resolve(uri)
            if not storage.exists(RUN_FILE):  # somebody has deleted the run meanwhile
                continue
            with upkeep(storage, wait_s=60.0) as catalog:
                catalog.index.journal.take([death["event"] for death in told if death["uri"] == uri])
        except HoldfastError as error:
            _say(f"how lives have ended could not be recorded in {uri}: {error}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"holdfast run: {visible(line)}\n".encode(errors="replace"))


# ---- whether it is started again


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
        end = idle[-1]
        what = f"{end.cause}: {end.error}" if end.error else end.cause
        if not any(death.is_known for death in idle):
            return End(
                f"{_IDLE} lives in a row have ended, the last with {what}; how far the script came is not known, it "
                "has entered no run"
            )
        if not any(death.trained for death in idle):
            return End(f"{_IDLE} lives in a row have ended before their first step, the last with {what}")
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
