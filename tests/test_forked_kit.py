"""Interpreters that tests fork are like those that they would start (`tests/kits/forked_kit.py`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_kit import WRITERS, WriterServer, forked_interpreters
from ranks_kit import RankServer

import holdfast as hf

LOOK = """
import atexit, json, os, sys, threading
print(json.dumps({
    "torch": "torch" in sys.modules, "arguments": sys.argv, "first path": sys.path[:2], "name": __name__,
    "folder": os.getcwd(), "environment": dict(os.environ), "leads": os.getsid(0) == os.getpid(),
    "parent": os.getppid(), "umask": os.umask(0o77),
    "input": sys.stdin.read(), "main": hasattr(sys.modules["__main__"], "LOOKED"),
    "descriptors": [fd for fd in range(200) if os.path.exists(f"/proc/self/fd/{fd}")],
}), flush=True) if (LOOKED := 1) else None
atexit.register(print, "exit")
threading.Timer(0.3, lambda: print("thread", flush=True)).start()
END
"""
ENDS = {"sys.exit(7)": 7, "sys.exit('why')": 1, "1 / 0": 1, "raise KeyboardInterrupt": -signal.SIGINT,
        "os.kill(os.getpid(), 9)": -signal.SIGKILL, "pass": 0}  # fmt: skip


def look(*command: str, **options: Any) -> tuple[int, dict[str, Any], list[str], str]:
    """Status, what it has seen, what it printed after that, and the end of its stderr."""
    done = subprocess.run(
        [sys.executable, *command, "more"],
        input="some",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **options,
    )
    first, *others = done.stdout.splitlines()
    return done.returncode, json.loads(first), others, "".join(done.stderr.splitlines()[-1:])


@pytest.mark.parametrize("end", ENDS)
def test_a_forked_interpreter_is_as_a_new_one_but_for_torch(ranks: RankServer, tmp_path: Path, end: str) -> None:
    """Arguments, paths, environment, folder, session, parent, streams, descriptors, what comes last, and status."""
    script = tmp_path / "look.py"
    script.write_text(LOOK.replace("END", end))
    read, write = os.pipe()
    options: dict[str, Any] = {
        "cwd": tmp_path,
        "env": {"LC_ALL": "C.UTF-8", "PYTHONPATH": "/a:/b"},
        "start_new_session": True,
    }
    before = os.umask(0o27)
    for command in (["-c", script.read_text()], [str(script)]):
        new = look(*command, **options, pass_fds=[write])
        with forked_interpreters(ranks):
            forked = look(*command, **options, pass_fds=[write])
        assert (new[1].pop("torch"), forked[1].pop("torch")) == (False, True)
        assert forked == new
        assert new[0] == ENDS[end]
        assert (new[1]["parent"], new[1]["umask"]) == (os.getpid(), 0o27)
    os.umask(before)
    os.close(read)
    os.close(write)


def test_a_forked_interpreter_is_waited_for_and_signalled(ranks: RankServer) -> None:
    """As a child of this process, of which nothing is left behind; and what has options is a new interpreter."""
    with forked_interpreters(ranks):
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as sleeping:
            assert sleeping.poll() is None
            sleeping.send_signal(signal.SIGTERM)
            assert sleeping.wait(30) == -signal.SIGTERM
        code = "import sys; print('torch' in sys.modules, sys.flags.isolated)"
        isolated = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert isolated.stdout == "False 1\n"


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_a_test_starts_real_ones(ranks: RankServer) -> None:
    """It would not be their parent, and would not hear how they end."""
    with forked_interpreters(ranks):
        child = os.fork()
        if child == 0:
            done = subprocess.run(
                [sys.executable, "-c", "import sys; sys.exit(4 + ('torch' in sys.modules))"], check=False
            )
            os._exit(done.returncode)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4


def test_a_forked_writer_is_as_a_new_one_but_for_its_modules(
    ranks: RankServer, writers: WriterServer, tmp_path: Path
) -> None:
    """It finds the standard library alone, has no torch, and is one beside forked scripts; a save goes through it."""
    code = (
        "import json, sys; print(json.dumps([sys.path, sys.argv, 'torch' in sys.modules, 'holdfast' in sys.modules]))"
    )
    command = [sys.executable, *WRITERS, "-c", code, "more"]
    new = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    with forked_interpreters(ranks), forked_interpreters(writers, WRITERS):
        forked = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        script = f"import holdfast as hf; hf.save({str(tmp_path / 'script')!r}, {{'a': 1}})"
        subprocess.run([sys.executable, "-c", script], check=True)
        hf.save(tmp_path / "own", {"a": 2})
    assert (new.pop(), forked.pop()) == (False, True)
    assert forked == new
    assert [hf.load(tmp_path / name)["a"] for name in ("script", "own")] == [1, 2]


def start_two() -> list[Any]:
    """In a case: one that ends by itself, and one that is killed; whether they had modules, and how they ended."""
    command = [sys.executable, *WRITERS, "-c", "import sys; print('holdfast' in sys.modules); sys.exit(7)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    with subprocess.Popen([*command[:-1], "import time; time.sleep(60)"]) as sleeping:
        alive = sleeping.poll() is None
        sleeping.kill()
    return [done.stdout.strip(), done.returncode, alive, sleeping.returncode, sleeping.poll()]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_writers_of_cases_and_of_forks_are_forked(ranks: RankServer, writers: WriterServer, tmp_path: Path) -> None:
    """They tell how they ended, although they are no children there; without `forked_interpreters` they are new."""
    ended = [7, True, -signal.SIGKILL, -signal.SIGKILL]
    case = f"{__file__}:start_two"
    assert ranks.run(case).checked() == ["False", *ended]
    with forked_interpreters(writers, WRITERS):
        assert ranks.run(case).checked() == ["True", *ended]
        assert ranks.checked(case, group=False) == [["True", *ended]] * 2
        child = os.fork()
        if child == 0:
            (tmp_path / "told").write_text(json.dumps(start_two()))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert json.loads((tmp_path / "told").read_text()) == ["True", *ended]


@pytest.mark.slow
def test_a_server_that_died_is_replaced() -> None:
    """The next one who needs it gets another, with a script under `forked` too."""
    with RankServer() as own, forked_interpreters(own):
        own._process.kill()
        own._process.wait()
        assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=True).stdout == b"1\n"
        assert own.run("os:getpid").checked() != os.getpid()
        assert own.is_alive
