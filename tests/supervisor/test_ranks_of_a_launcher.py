"""Ranks that a launcher below `holdfast run` has given sessions of their own, as torchrun and srun do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_holdfast_run import STEPS, finished, supervise, wait_for

from holdfast.run.process import birth, is_running, is_zombie, this_process

# As torchrun does: with 1 if a rank has failed.
ENDS_WITH_ITS_RANKS = "sys.exit(int(any([rank.wait() for rank in ranks])))"
LAUNCHES = f"""
import os, signal, subprocess, sys, time
from pathlib import Path
here = Path(sys.argv[1])
if len(sys.argv) == 2:
    (here / "launcher").write_text(str(os.getpid()))
    command = [sys.executable, __file__, sys.argv[1], "rank"]
    ranks = [subprocess.Popen(command, env={{**os.environ, "RANK": str(rank)}}, start_new_session=True)
             for rank in range(int(os.environ.get("RANKS", "1")))]
    {ENDS_WITH_ITS_RANKS}
{STEPS}
first = lives.read_text() == "1"
(here / f"rank-{{os.environ['RANK']}}-{{lives.read_text()}}").write_text(str(os.getpid()))
"""


def is_there(home: Path, name: str) -> bool:
    pid = int((home / name).read_text())
    return Path(f"/proc/{pid}").exists() and not is_zombie(pid)


def test_the_ranks_of_a_launcher_that_is_killed_are_ended(tmp_path: Path) -> None:
    """They would keep the device and the run: the next life finds the lock of the first one's rank free."""
    script = (
        LAUNCHES
        + """
import fcntl
lock = open(here / "lock", "w")
try: fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError: sys.exit("busy")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[lock.fileno()])
advance()
if first:
    os.kill(int((here / "launcher").read_text()), signal.SIGKILL)
    time.sleep(60)
child.kill()
child.wait()
"""
    )
    status, _, err = finished(script, tmp_path)
    assert status == 0, err
    assert "life 1 ended" in err
    assert "killed by SIGKILL; the newest durable step it knew is 1; starting again" in err
    assert "done, after 2 lives" in err


def test_a_rank_of_a_launcher_that_hangs_is_shown_and_ended(tmp_path: Path) -> None:
    """The stacks are those of the rank, and it is gone before the next life begins."""
    script = (
        LAUNCHES
        + """
def waits_for_a_device(): time.sleep(60)
advance()
if first: waits_for_a_device()
state = Path(f"/proc/{(here / 'rank-0-1').read_text()}/stat")
print(not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX")
"""
    )
    status, out, err = finished(script, tmp_path, "--hang", "1s")
    assert (status, out) == (0, "True\n"), err
    assert "waits_for_a_device" in err.partition("this is a hang")[2]


def test_ranks_whose_launcher_dies_of_a_signal_are_told_and_waited_for(tmp_path: Path) -> None:
    """SIGUSR1 means nothing to torchrun: its ranks hear of it, save, and only then is the job queued again."""
    script = (
        LAUNCHES
        + """
def stop(*_):
    time.sleep(0.5)
    (here / f"saved-{os.environ['RANK']}").touch()
    life.end("stopped")
    sys.exit(85)
signal.signal(signal.SIGUSR1, stop)
(here / f"up-{os.environ['RANK']}").touch()
while True: time.sleep(0.01)
"""
    )
    process = supervise(script, tmp_path, env={"RANKS": "2"})
    for rank in range(2):
        wait_for(tmp_path / f"up-{rank}")
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 85, err
    assert [(tmp_path / f"saved-{rank}").exists() for rank in range(2)] == [True, True]


def test_what_a_command_that_is_done_has_left_elsewhere_stays(tmp_path: Path) -> None:
    """With status 0 all is well: a process that it has put into a session of its own is meant to go on."""
    script = LAUNCHES.replace(
        ENDS_WITH_ITS_RANKS, "while not (here / 'up').exists(): time.sleep(0.01)\n    sys.exit(0)"
    )
    script += "for fd in (1, 2): os.dup2(os.open(os.devnull, os.O_WRONLY), fd)\n(here / 'up').touch()\ntime.sleep(60)"
    status, _, err = finished(script, tmp_path, "--no-warm")
    pid = int((tmp_path / "rank-0-1").read_text())
    try:
        assert (status, err) == (0, "")
        assert is_there(tmp_path, "rank-0-1")
    finally:
        os.kill(pid, signal.SIGKILL)


def test_ctrl_c_reaches_a_script_below_a_shell(tmp_path: Path) -> None:
    """A shell passes no SIGINT on, it waits for the script: a terminal sends it to both, and so do we."""
    (tmp_path / "script.py").write_text(STEPS + "(here / 'up').touch()\ntime.sleep(60)\n")
    inner = f"{sys.executable} {tmp_path}/script.py {tmp_path}; exit 3"
    command = [sys.executable, "-m", "holdfast", "run", "--", "bash", "-c", inner]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "up")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in err
    assert process.returncode == 130


def test_a_script_whose_launcher_ends_at_ctrl_c_is_interrupted_once(tmp_path: Path) -> None:
    """`accelerate launch` leaves at once; the script below it saves, and a second SIGINT would keep it from that."""
    script = LAUNCHES.replace("start_new_session=True", "") + (
        "got = []\nsignal.signal(signal.SIGINT, lambda *_: got.append(1))\n(here / 'up').touch()\n"
        "while not got: time.sleep(0.01)\ntime.sleep(1)\n(here / 'got').write_text(str(len(got)))\n"
    )
    process = supervise(script, tmp_path)
    wait_for(tmp_path / "up")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert (tmp_path / "got").read_text() == "1"


def test_the_newest_report_of_a_rank_says_how_it_has_ended(tmp_path: Path) -> None:
    """A launcher started a rank anew after its guard had taken it back, and that one was killed: this is a crash."""
    script = (
        LAUNCHES.replace(
            ENDS_WITH_ITS_RANKS,
            """ranks[0].wait()
    again = subprocess.Popen([*command, "again"], env={**os.environ, "RANK": "0"}, start_new_session=True)
    sys.exit(int(again.wait() != 0))
""",
        )
        + """
if len(sys.argv) == 3 and first: life.end("rolled back"); sys.exit(86)
if lives.read_text() == "2": os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    status, _, err = finished(script, tmp_path)
    assert status == 0, err
    assert "life 1 ended" in err
    assert "rolled back" not in err


def test_a_process_is_known_to_run_by_its_birth() -> None:
    """An id that another process has got, or one of another machine, is not signalled."""
    mine = this_process()
    assert is_running(mine)
    assert not is_running({**mine, "pid_birth": str(int(birth(os.getpid())) + 1)})
    assert not is_running({**mine, "host": "another"})
    assert not is_running({**mine, "pid_birth": ""})
    child = subprocess.Popen([sys.executable, "-c", ""])
    theirs = {**mine, "pid": child.pid, "pid_birth": birth(child.pid)}
    until = time.monotonic() + 30
    while not is_zombie(child.pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_running(theirs)
    child.wait()


TRAINS = """
import os, signal, sys, time
from pathlib import Path
import torch, holdfast
home, rank = Path(sys.argv[1]), os.environ["RANK"]
first = not (home / f"began-{rank}").exists()
(home / f"began-{rank}").touch()
torch.distributed.init_process_group("gloo")
with holdfast.Checkpointer(home / "run", {"w": torch.zeros(2)}, every=2, rescue=1) as ck:
    print(f"rank {rank} at {ck.global_step}", flush=True)
    while ck.global_step < 12:
        torch.distributed.barrier()
        ck.step()
        if first and ck.global_step == 7 and rank == "1":
            if sys.argv[2] == "hang": time.sleep(600)
            ck.wait()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hang", "kill"])
def test_a_training_below_torchrun_goes_on_after_a_hang_and_after_the_death_of_its_agent(
    tmp_path: Path, how: str
) -> None:
    """Ranks that train on alone would hold the run: the second life would find it busy, three times."""
    (tmp_path / "script.py").write_text(TRAINS)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, "-m", "holdfast", "run", "--hang", "8s", "--", sys.executable, *launcher]
    command += [str(tmp_path / "script.py"), str(tmp_path), how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "done, after 2 lives" in done.stderr
    assert re.search(r"rank 1 at [67]", done.stdout), done.stdout
    if how == "hang":
        assert "time.sleep(600)" in done.stderr or 'script.py", line 15' in done.stderr
