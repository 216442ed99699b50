"""From SIGKILL of a trainer to its next finished step: `holdfast run` beside torchrun with torch.save, in turns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from .bench import Context, Goal, Outcome, remove

__all__ = ["run"]

_SCRIPT = Path(__file__).with_name("_restart_script.py")
_STATE = 1_400 << 20
_MODES = ("holdfast run", "holdfast run, rescue=1", "torchrun, torch.save", "torchrun, torch.save, mmap")
_LIMIT_S = 300.0
_KILL_AT = 7  # steps in a life; the fifth is saved
_READY_S = 2.0  # for the save to be durable, and the supervisor to have the memory; and that a spare has been idle


def run(context: Context) -> Outcome:
    """Kill the trainer of each kind again and again; `--scale` makes the state of 1.4 GiB smaller."""
    outcome = Outcome()
    nbytes = int((64 << 20) if context.quick else _STATE * context.scale)
    for turn in range(1 if context.quick else context.repeat + 1):
        for mode in _MODES:
            _life(context, outcome, mode, nbytes, first=not turn and not context.quick)
    median = outcome.median
    step_s = median(_MODES[0], "step_s")
    built_s = median(_MODES[0], "built_s")
    outcome.goals = [
        Goal(what="SIGKILL to the next finished step, holdfast run", value=median(_MODES[0], "restart_s"), unit="s",
             at_most=0.3 + step_s + built_s, note="0.3 s, a step, and what the script builds"),
        Goal(what="torchrun with torch.save / holdfast run", at_least=10.0,
             value=outcome.speedup(_MODES[2], _MODES[0], "restart_s")),
    ]  # fmt: skip
    outcome.notes = [
        f"state of {nbytes} bytes; a save every 5 steps, killed after step {_KILL_AT} of a life, page cache as it is",
        "restart_s: kill to the first step of the next life; begun_s, built_s, restored_s, step_s: its parts",
        "the next life of torch.save repeats two steps, as that of holdfast run without rescue=",
    ]
    return outcome


def _life(context: Context, outcome: Outcome, mode: str, nbytes: int, *, first: bool) -> None:
    """Start a training of one kind, kill it, and see how soon the next life has made a step."""
    home = context.folder("restart")
    home.mkdir(parents=True)
    log = home / "log"
    log.touch()
    script = [str(_SCRIPT), mode, str(home / "run"), str(log), str(nbytes)]
    python = [sys.executable, *script]
    command = [sys.executable, "-m", "holdfast", "run", "--", *python]
    if mode.startswith("torchrun"):
        agent = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "1000"]
        command = [sys.executable, *agent, *script]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())},
    )  # fmt: skip
    pids: list[int] = []
    try:
        pid = _wait_for_steps(process, log, pids, _KILL_AT)
        _wait_for_spare(process.pid)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        pids.append(pid)
        _wait_for_steps(process, log, pids, 1)
        parts = _parts(log, killed, pids)
        outcome.add(mode, first=first, **parts)
        context.say(f"{mode}: {parts}")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for _, pid, _ in _lines(log):
            if int(pid) not in pids:
                _kill(int(pid))
        for is_last in (False,) * 20 + (True,):
            try:
                remove(home)
                break
            except OSError:  # a writer still commits
                if is_last:
                    raise
                time.sleep(1.0)


def _wait_for_spare(supervisor: int) -> None:
    """Wait until a spare interpreter, if there is one, has done its imports."""
    until, before = time.monotonic() + _LIMIT_S / 2, -1.0
    while time.monotonic() < until:
        time.sleep(_READY_S)
        now = 0.0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(") ")[2].split()
                is_spare = int(fields[1]) == supervisor and b"spare.py" in (stat.parent / "cmdline").read_bytes()
            except OSError:
                continue
            now += sum(map(int, fields[11:13])) if is_spare else 0
        if now == before:
            return
        before = now


def _wait_for_steps(process: subprocess.Popen[bytes], log: Path, before: list[int], count: int) -> int:
    """Wait until a life that is not one of ``before`` has ended so many steps; return its process."""
    until = time.monotonic() + _LIMIT_S
    while time.monotonic() < until and process.poll() is None:
        lines = [line for line in _lines(log) if int(line[1]) not in before and line[0].startswith("step=")]
        if len(lines) >= count:
            return int(lines[-1][1])
        time.sleep(0.005)
    raise RuntimeError(f"no {count} steps within {_LIMIT_S:.0f} s; the command ended with {process.poll()}")


def _parts(log: Path, killed: float, before: list[int]) -> dict[str, float]:
    """Divide the time from the kill to the first step of the next life into its parts."""
    at: dict[str, float] = {}
    for what, pid, moment in _lines(log):
        if int(pid) not in before:
            at.setdefault(what.partition("=")[0], float(moment))
    return {
        "restart_s": at["step"] - killed, "begun_s": at["begun"] - killed, "built_s": at["built"] - at["begun"],
        "restored_s": at["restored"] - at["built"], "step_s": at["step"] - at["restored"],
    }  # fmt: skip


def _lines(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines() if len(line.split()) == 3]


def _kill(pid: int) -> None:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return
    if _SCRIPT.name.encode() in command or b"spare.py" in command:
        os.kill(pid, signal.SIGKILL)
