"""What only an engine of this machine has: how its processes are made, die and are cleaned up."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from engine_kit import LIMIT_S, Driver, start_stubborn_children
from process_kit import wait_gone

import holdfast
from holdfast.trainers.function.engine import Dying, Exited, Started, TaskEnded
from holdfast.trainers.function.engines.process_engine import LocalEngine

HERE = Path(__file__).parent
SRC = Path(holdfast.__file__).parents[1]


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine(entry="engine_peer:serve", num_workers=2)
    yield engine
    engine.close()


@pytest.fixture
def driver(engine: LocalEngine) -> Iterator[Driver]:
    driver = Driver(engine)
    yield driver
    driver.clear()


def zygote_pid(engine: Any) -> int:
    return engine._supervisor._zygote.process.pid


# ---- what a forked process is


def test_workers_hold_no_descriptors_but_their_own(driver: Driver) -> None:
    """Standard streams, the control socket and for rank 0 the listening socket: an end of file means an end."""

    def descriptors(channel: Any, facts: Any) -> list[int]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                os.readlink(f"/proc/self/fd/{name}")
            except OSError:  # the one that listed them
                continue
            found.append(int(name))
        own = {0, 1, 2, channel.fileno(), facts["listen_fd"]} - {-1}
        return sorted(set(found) ^ own)

    driver.start(4)
    assert [driver.run(rank, descriptors) for rank in range(4)] == [[]] * 4


def test_workers_are_like_fresh_interpreters(driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Session, signals, folder, path, arguments, environment and streams are those of a process of its own."""

    def look(channel: Any, facts: Any) -> dict[str, Any]:
        import faulthandler
        import threading

        return {
            "leader": os.getsid(0) == os.getpid(),
            "signals": [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)],
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "folder": os.getcwd(),
            "path": sys.path,
            "arguments": sys.argv,
            "variables": (os.environ.get("HF_NEW"), os.environ.get("HF_OLD")),
            "lines": sys.stdout.line_buffering,
            "faults": faulthandler.is_enabled(),
            "main": threading.current_thread() is threading.main_thread(),
            "threads": threading.active_count(),
        }

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setenv("HF_NEW", "new")
    driver.start(1)
    found = driver.run(0, look)
    assert found["leader"]
    assert found["signals"] == [signal.SIG_DFL] * 4
    assert found["interrupt"]
    assert found["mask"] == set()
    assert found["folder"] == str(tmp_path)
    assert found["path"][0] == str(tmp_path / "modules")
    assert found["arguments"] == ["train.py", "--lr", "0.1"]
    assert found["variables"] == ("new", None)
    assert found["lines"]
    assert found["faults"]
    assert found["main"]
    assert found["threads"] == 1


def test_variables_that_the_driver_dropped_are_gone(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is that of the driver at the start of the group, not of the zygote's start."""
    monkeypatch.delenv("PATH")
    driver.start(1)
    assert driver.run(0, lambda channel, facts: "PATH" in os.environ) is False


def test_generators_differ_between_ranks_and_starts(driver: Driver) -> None:
    """No two forked processes draw the same numbers unless the user seeds them."""

    def draw(channel: Any, facts: Any) -> list[float]:
        import random

        import numpy as np
        import torch

        return [random.random(), float(np.random.rand()), float(torch.rand(())), os.urandom(8)]

    drawn = []
    for _ in range(2):
        driver.start(2)
        drawn += [driver.run(rank, draw) for rank in (0, 1)]
        driver.clear()
    assert all(len(set(numbers)) == 4 for numbers in zip(*drawn, strict=True))


@pytest.mark.parametrize("given", [None, "3"])
def test_threads(driver: Driver, monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    """Workers share the cores unless OMP_NUM_THREADS says otherwise; torch follows."""

    def look(channel: Any, facts: Any) -> tuple[str, int]:
        import torch

        return os.environ["OMP_NUM_THREADS"], torch.get_num_threads()

    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    wanted = int(given or max(1, len(os.sched_getaffinity(0)) // 2))
    driver.start(2)
    assert driver.run(1, look) == (str(wanted), wanted)


def test_accelerators_are_hidden_unless_asked_for(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without use_gpu no device is seen; with it every worker sees all that the driver sees, as under torchrun."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    driver.start(1)
    assert driver.run(0, lambda channel, facts: os.environ["CUDA_VISIBLE_DEVICES"]) == ""
    driver.clear()
    driver.start(2, use_gpu=True)
    for rank in (0, 1):
        assert driver.run(rank, lambda channel, facts: os.environ["CUDA_VISIBLE_DEVICES"]) == "4,5"


def test_processes_that_a_worker_forks_do_not_keep_it_alive(driver: Driver) -> None:
    """The exit is told though a daemon of the worker, in a session of its own, holds its streams."""

    def daemon(channel: Any, facts: Any) -> int:
        code = "import time;time.sleep(600)"
        return subprocess.Popen([sys.executable, "-c", code], start_new_session=True, close_fds=False).pid

    driver.start(1)
    pid = driver.run(0, daemon)
    driver.ask(0, lambda channel, facts: os._exit(4))
    try:
        assert driver.next(Exited).exit_code == 4
    finally:
        os.kill(pid, signal.SIGKILL)


# ---- deaths of the zygote and of the driver


@pytest.mark.usefixtures("forked")
def test_workers_outlive_the_zygote(driver: Driver, engine: LocalEngine) -> None:
    """They go on; only their status is not known at their end, and that is told. The next start works."""
    driver.start(2)
    driver.run(1, start_stubborn_children)
    os.kill(zygote_pid(engine), signal.SIGKILL)
    helpers = driver.run(0, start_stubborn_children)
    event = driver.leave([0])[0]
    assert (event.exit_code, event.signal) == (None, None)
    assert "status is not known" in event.detail
    assert all(wait_gone(pid) for pid in helpers)
    driver.clear()
    driver.start(1)
    assert driver.run(0, lambda channel, facts: "again") == "again"


@pytest.mark.usefixtures("forked")
def test_zygote_killed_before_it_has_forked() -> None:
    """Workers that were asked for and never started are told as exited, with the reason; then it works again."""
    engine = LocalEngine(entry="engine_peer:serve")
    driver = Driver(engine)
    try:
        os.kill(zygote_pid(engine), signal.SIGSTOP)
        driver.begin(2)
        os.kill(zygote_pid(engine), signal.SIGKILL)
        ends = [driver.next(Exited) for _ in (0, 1)]
        assert all("signal 9" in event.detail for event in ends)
        assert not any(isinstance(event, Started) for event in driver.seen)
        assert driver.start(1)
    finally:
        engine.close()


@pytest.mark.usefixtures("forked")
def test_zygote_killed_while_nothing_ran() -> None:
    """The next start begins with a new one at once."""
    engine = LocalEngine(entry="engine_peer:serve")
    try:
        pid = zygote_pid(engine)
        os.kill(pid, signal.SIGKILL)
        assert wait_gone(pid)
        driver = Driver(engine)
        driver.start(1)
        assert driver.leave([0])[0].exit_code == 0
    finally:
        engine.close()


def test_zygote_that_does_not_answer(driver: Driver, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stopped zygote a death is seen at once, and told after a bounded wait without its status."""
    monkeypatch.setattr("holdfast.trainers.function.engines.supervisor._STATUS_S", 0.3)
    pids = driver.start(1)
    os.kill(zygote_pid(engine), signal.SIGSTOP)
    try:
        os.kill(pids[0], signal.SIGKILL)
        assert driver.next(Dying).rank == 0
        assert not any(isinstance(event, Exited) for event in driver.seen)
        event = driver.next(Exited)
        assert (event.exit_code, event.signal) == (None, None)
        assert "does not answer" in event.detail
    finally:
        os.kill(zygote_pid(engine), signal.SIGCONT)


def run_script(tmp_path: Path, text: str, **options: Any) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{SRC}{os.pathsep}{HERE}"},
        **options,
    )


DRIVER_SCRIPT = """
from engine_kit import *
from holdfast.trainers.function.engines.process_engine import LocalEngine

def hold(channel, facts):  # neither the end of the stream nor SIGTERM ends this one
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel.send({"on": "holding"})
    while True:
        time.sleep(0.05)

engine = LocalEngine(entry="engine_peer:serve")
driver = Driver(engine)
pids = driver.start(2)
helpers = driver.run(0, start_stubborn_children)
driver.ask(1, hold)
driver.next(Received, 1)
print(engine._supervisor._zygote.process.pid, *pids.values(), *helpers, flush=True)
time.sleep(600)
"""


def test_nothing_survives_the_driver(tmp_path: Path) -> None:
    """A kill -9 of the driver ends workers, what they started, and the zygote, which would go on for ten minutes."""
    with run_script(tmp_path, DRIVER_SCRIPT) as driver:
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 5
        driver.kill()
        assert all(wait_gone(pid) for pid in pids)


INTERRUPT_SCRIPT = """
import os, signal, sys, time
from engine_kit import *
from forked_kit import forks_itself
from holdfast.trainers.function.engines.process_engine import LocalEngine

with forks_itself():
    engine = LocalEngine(entry="engine_peer:serve")
driver = Driver(engine)
pids = driver.start(1)
try:
    os.killpg(0, signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    print(driver.run(0, lambda channel, facts: "alive"), flush=True)
engine.close()
"""


@pytest.mark.usefixtures("forked")
def test_an_interrupt_does_not_reach_workers(tmp_path: Path) -> None:
    """A Ctrl-C signals the driver's process group; workers and zygote are in others."""
    with run_script(tmp_path, INTERRUPT_SCRIPT, start_new_session=True) as driver:
        assert driver.stdout.readline() == "alive\n"
        assert driver.wait(LIMIT_S) == 0


def test_a_fork_of_the_driver_holds_nothing(engine: LocalEngine, driver: Driver) -> None:
    """A process forked from the driver (a loader worker) has none of the engine's descriptors."""
    driver.start(1)
    child = engine._ranks[0]
    zygote = engine._supervisor._zygote
    held = [child.fileno(), child.pidfd, *(log.fd for log in (*child.logs, *zygote.logs)), zygote.sock.fileno()]
    targets = {os.readlink(f"/proc/self/fd/{fd}") for fd in held if fd != child.pidfd}
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            open_ones = {os.readlink(f"/proc/self/fd/{fd}") for fd in held if os.path.exists(f"/proc/self/fd/{fd}")}
            status = 2 if open_ones & targets else 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert driver.run(0, lambda channel, facts: "fine") == "fine"


def open_files() -> set[tuple[str, str]]:
    """Descriptors and what they lead to; what other tests have left in this process may end at any moment."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


@pytest.mark.slow
def test_close_leaves_no_descriptor(tmp_path: Path) -> None:
    """An engine that ran workers and a task leaves nothing open, no thread and no child."""
    gc.collect()
    before, threads = open_files(), set(threading.enumerate())
    for _ in range(2):
        engine = LocalEngine(entry="engine_peer:serve")
        driver = Driver(engine)
        pids = driver.start(2, log_directory=tmp_path)
        pid = zygote_pid(engine)
        engine.run_task(cloudpickle.dumps(lambda: 1))
        driver.next(TaskEnded)
        driver.leave([0])
        engine.close()
        assert wait_gone(pid, 0)
        assert all(wait_gone(pid) for pid in pids.values())
        del engine, driver
    gc.collect()
    assert open_files() <= before
    assert set(threading.enumerate()) <= threads
