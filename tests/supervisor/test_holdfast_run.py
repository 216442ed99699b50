"""`holdfast run` with real processes: restarts, signals, hangs, ranks, what is printed and what is recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from catalog_kit import catalog_of

# A script that reports as a Checkpointer does, and imports no torch.
STEPS = """
import os, signal, sys, time
from pathlib import Path
from holdfast.run.life import LifeReport
here = Path(sys.argv[1])
kept = here / "kept"
step = int(kept.read_text()) if kept.exists() else 0
lives = here / "lives"
lives.write_text(f"{int(lives.read_text()) + 1 if lives.exists() else 1}")
life = LifeReport.begin(uri=str(here / "run"), attempt=1, rank=int(os.environ.get("RANK", 0)))
life.trains(step, requeue=85, wait_s=1)
def advance():
    global step
    step += 1
    kept.write_text(str(step))
    life.stepped(step)
    life.durable(step)
"""


def supervise(script: str, home: Path, *options: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    path = home / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "holdfast", "run", *options, "--", sys.executable, str(path), str(home)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )


def finished(script: str, home: Path, *options: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    process = supervise(script, home, *options, env=env)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def wait_for(path: Path) -> None:
    until = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_script_that_is_killed_at_each_step_is_started_again_until_it_is_done(tmp_path: Path) -> None:
    """Six lives that are killed after one step each, and a seventh that ends with 0: the status is 0."""
    script = STEPS + "advance()\nif step < 7: os.kill(os.getpid(), signal.SIGKILL)\nprint('done', step)"
    status, out, err = finished(script, tmp_path)
    assert (status, out) == (0, "done 7\n"), err
    assert err.count("killed by SIGKILL; the newest durable step it knew is") == 6
    assert "done, after 7 lives" in err


def test_a_crash_loop_ends_with_what_was_the_same_and_the_traceback(tmp_path: Path) -> None:
    """The same exception before the first step three times: no fourth life, its status, its traceback once more."""
    script = STEPS + "raise OSError(f'no disk at {time.time()}\\x1b[31m')"
    status, _, err = finished(script, tmp_path)
    assert status == 1
    assert all("\\x1b[31m" in line for line in err.splitlines() if line.startswith("holdfast run: life "))
    assert (tmp_path / "lives").read_text() == "3"
    last = err.partition("not started again: ")[2]
    assert "3 lives in a row have ended before their first step" in last
    assert "OSError: no disk" in last
    assert 'raise OSError(f"' not in last
    assert "Traceback" in last


def test_the_error_of_a_helper_is_not_the_cause_of_a_death(tmp_path: Path) -> None:
    """Another Python process of the life failed, harmlessly and long before; then the script was killed."""
    script = STEPS + "if step == 0:\n    import subprocess\n"
    script += "    subprocess.run([sys.executable, '-c', 'raise OSError(\"no git\")'])\n"
    script += "    advance(); os.kill(os.getpid(), signal.SIGKILL)"
    status, _, err = finished(script, tmp_path, "--no-warm")
    assert status == 0, err
    assert "killed by SIGKILL; the newest durable step it knew is 1" in err


def test_the_error_of_a_script_below_a_shell_is_the_cause_of_a_death(tmp_path: Path) -> None:
    """It is not the process that was started, and no run was entered, of which it could be known."""
    (tmp_path / "script.py").write_text("raise OSError('no data')")
    inner = f"{sys.executable} {tmp_path}/script.py; exit 3"
    command = [sys.executable, "-m", "holdfast", "run", "--", "sh", "-c", inner]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert found.returncode == 3
    assert found.stderr.count("exit status 3 (OSError: no data") == 3


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 85), ("SIGUSR1", 85), ("SIGINT", 130)])
def test_a_signal_while_the_script_still_imports_ends_with_the_requeue_status(
    tmp_path: Path, name: str, status: int
) -> None:
    """No handler is there yet, so the script dies of it; a chain of jobs goes on all the same."""
    script = "import sys, time\nfrom pathlib import Path\n(Path(sys.argv[1]) / 'up').touch()\n"
    if name == "SIGINT":
        script += "import signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n(Path(sys.argv[1]) / 'set').touch()\n"
    process = supervise(script + "time.sleep(60)", tmp_path)
    wait_for(tmp_path / ("set" if name == "SIGINT" else "up"))
    process.send_signal(getattr(signal, name))
    process.communicate(timeout=30)
    assert process.returncode == status


def test_the_status_of_a_script_that_handles_a_signal_is_passed_on(tmp_path: Path) -> None:
    """It is sent once, to the script alone, and the script ends with a status of its own."""
    script = """
import signal, sys, time
from pathlib import Path
def stop(*_): sys.exit(33)
signal.signal(signal.SIGTERM, stop)
(Path(sys.argv[1]) / "up").touch()
time.sleep(60)
"""
    process = supervise(script, tmp_path)
    wait_for(tmp_path / "up")
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 33


def test_a_script_in_a_run_that_stops_in_order_ends_with_its_status(tmp_path: Path) -> None:
    """It is told once, saves, and its requeue status is passed on: that of the script, not of the supervisor."""
    script = (
        STEPS.replace("requeue=85", "requeue=75")
        + """
def stop(*_):
    life.end("stopped")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
(here / "up").touch()
while True:
    advance()
    time.sleep(0.01)
"""
    )
    process = supervise(script, tmp_path)
    wait_for(tmp_path / "up")
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 75


def test_the_script_below_a_shell_is_told_and_waited_for(tmp_path: Path) -> None:
    """The shell dies of SIGTERM at once; the script in it, which has a run, still stops in order."""
    script = (
        STEPS
        + """
def stop(*_):
    time.sleep(0.3)
    (here / "saved").touch()
    life.end("stopped")
    sys.exit(85)
signal.signal(signal.SIGTERM, stop)
(here / "up").touch()
while True: time.sleep(0.01)
"""
    )
    (tmp_path / "script.py").write_text(script)
    inner = f"{sys.executable} {tmp_path}/script.py {tmp_path}; exit 3"
    command = [sys.executable, "-m", "holdfast", "run", "--", "sh", "-c", inner]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "up")
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 85
    assert (tmp_path / "saved").exists()


def test_a_signal_between_two_lives_ends_the_pause(tmp_path: Path) -> None:
    """While the supervisor waits for the next start it ends at once, with the requeue status."""
    script = STEPS + "raise OSError('abcdefgh'[int(lives.read_text())])"
    process = supervise(script, tmp_path)
    assert process.stderr is not None
    while "starting again in 5 s" not in (line := process.stderr.readline()):
        assert line
    process.terminate()
    process.communicate(timeout=4)
    assert process.returncode == 85


def test_what_a_dead_script_leaves_behind_is_ended(tmp_path: Path) -> None:
    """A child of the first life in its process group does not live on beside the second life."""
    script = (
        STEPS
        + """
import subprocess
advance()
if step == 1:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (here / "child").write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
pid = (here / "child").read_text()
try:
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
except OSError:
    state = "gone"
print(state in ("Z", "X", "gone"))
"""
    )
    status, out, err = finished(script, tmp_path)
    assert (status, out) == (0, "True\n"), err


def test_a_hang_ends_the_life_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    """Steps, then silence: the place where the main thread waits is printed, and the next life goes on."""
    script = (
        STEPS
        + """
import threading
def waits_in_a_thread(): time.sleep(60)
def waits_for_ever(): time.sleep(60)
advance()
if int(lives.read_text()) == 1:
    threading.Thread(target=waits_in_a_thread, daemon=True).start()
    waits_for_ever()
"""
    )
    status, _, err = finished(script, tmp_path, "--hang", "1s")
    assert status == 0, err
    assert "this is a hang" in err
    assert "waits_for_ever" in err
    assert "waits_in_a_thread" in err


@pytest.mark.parametrize("below_a_shell", [False, True])
def test_a_hang_after_a_signal_ends_the_life_with_the_requeue_status(tmp_path: Path, below_a_shell: bool) -> None:
    """A script that hangs answers no signal: SLURM gets its 85, a person the stacks, and no life is started again."""
    script = STEPS + "def waits_for_ever(): time.sleep(60)\n"
    script += "signal.signal(signal.SIGTERM, lambda *_: (here / 'told').touch())\n"
    script += "advance(); (here / 'up').touch()\nwhile not (here / 'told').exists(): time.sleep(0.01); advance()\n"
    (tmp_path / "script.py").write_text(f"{script}waits_for_ever()")
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    command = ["sh", "-c", f"{' '.join(command)}; exit 3"] if below_a_shell else command
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "run", "--hang", "1s", "--", *command], stderr=subprocess.PIPE, text=True
    )
    wait_for(tmp_path / "up")
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert (process.returncode, (tmp_path / "lives").read_text()) == (85, "1"), err
    assert "this is a hang" in err
    assert "waits_for_ever" in err
    assert "not started again: SIGTERM has asked it to stop; the same command starts it again (exit status 85)" in err


def test_ctrl_z_stops_the_script_too_and_is_no_hang(tmp_path: Path) -> None:
    """Both stand still until the supervisor is continued, as by `fg`, and the time in between does not count."""
    script = STEPS + "advance(); advance()\n(here / 'pid').write_text(str(os.getpid()))\n(here / 'up').touch()\n"
    script += "while not (here / 'go').exists():\n    time.sleep(0.1); advance()\nprint('done')"
    process = supervise(script, tmp_path, "--hang", "1s")
    wait_for(tmp_path / "up")
    pids = [process.pid, int((tmp_path / "pid").read_text())]
    process.send_signal(signal.SIGTSTP)
    wait_for_state(pids, "T")
    time.sleep(1.2)
    (tmp_path / "go").touch()
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "done\n", "")


def wait_for_state(pids: list[int], state: str) -> None:
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != state for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_life_that_hangs_tells_what_was_committed_meanwhile(tmp_path: Path) -> None:
    """The loop hangs in the step after a save, and takes nothing in: the supervisor knows of the checkpoint."""
    script = """
import sys, time
from pathlib import Path
here = Path(sys.argv[1])
if (here / "run" / "run.json").exists(): sys.exit(0)
import holdfast, torch
with holdfast.Checkpointer(here / "run", {"w": torch.zeros(4)}, every=3) as ck:
    for _ in range(3): ck.step()
    time.sleep(60)
"""
    status, _, err = finished(script, tmp_path, "--hang", "1s", "--no-warm")
    assert status == 0, err
    assert "the newest durable step it knew is 3;" in err


def test_hangs_are_looked_for_only_where_steps_are_counted(tmp_path: Path) -> None:
    """A script that has entered no run may be silent for longer than --hang."""
    status, out, _ = finished("import time; time.sleep(2.5); print('fine')", tmp_path, "--hang", "1s")
    assert (status, out) == (0, "fine\n")


@pytest.mark.slow
def test_that_a_given_limit_finds_no_hang_is_said_once(tmp_path: Path) -> None:
    """A script that enters no run is waited for, and whoever has given --hang knows it."""
    status, _, err = finished("import time; time.sleep(26)", tmp_path, "--hang", "1s")
    assert status == 0
    assert err.count("until then --hang finds no hang") == 1


def test_nproc_gives_the_environment_of_torchrun_and_restarts_all_ranks(tmp_path: Path) -> None:
    """Rank 1 dies; rank 0, which would wait for it for ever, is ended, and both start again."""
    script = """
import os, sys, time
from pathlib import Path
here, rank = Path(sys.argv[1]), os.environ["RANK"]
first = not (here / f"seen-{rank}").exists()
(here / f"seen-{rank}").touch()
names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
(here / f"env-{rank}").write_text(" ".join(os.environ[name] for name in names))
if first and rank == "1":
    while not (here / "seen-0").exists(): time.sleep(0.01)
    raise RuntimeError("rank 1 has no more memory")
if first: time.sleep(60)
"""
    status, _, err = finished(script, tmp_path, "--nproc", "2")
    assert status == 0, err
    assert "rank 1: exit status 1 (RuntimeError: rank 1 has no more memory" in err
    ranks = [(tmp_path / f"env-{rank}").read_text().split() for rank in (0, 1)]
    assert ranks[0][:4] == ["2", "0", "2", "127.0.0.1"]
    assert ranks[1][:4] == ["2", "1", "2", "127.0.0.1"]
    assert ranks[0][4] == ranks[1][4]


REPORTS = """
import os, sys, time
from pathlib import Path
from holdfast.run.life import LifeReport
here, rank = Path(sys.argv[1]), os.environ.get("RANK", "0")
first = not (here / f"seen-{rank}").exists()
(here / f"seen-{rank}").touch()
life = LifeReport.begin(uri=str(here / "run"), attempt=1, rank=int(rank))
life.trains(0, requeue=75, wait_s=1)
"""


@pytest.mark.slow
def test_rank_0_may_take_longer_to_leave_than_the_others(tmp_path: Path) -> None:
    """All have saved and leave, and rank 0 has uploads to finish: it is not killed, and the status is passed on."""
    script = "if rank == '0': time.sleep(7); (here / 'uploaded').touch()\nsys.exit(75)"
    status, _, err = finished(REPORTS + script, tmp_path, "--nproc", "2")
    assert (status, err) == (75, "")
    assert (tmp_path / "uploaded").exists()


@pytest.mark.slow
def test_a_guard_is_waited_for_that_has_yet_to_say_what_it_found(tmp_path: Path) -> None:
    """The other ranks have left for it with 86; rank 0 writes to a slow store where the next life goes on from."""
    script = "if not first: sys.exit(0 if (here / 'said').exists() else 3)\n"
    script += "if rank == '0': time.sleep(7); (here / 'said').touch()\nlife.end('rolled back'); sys.exit(86)"
    status, _, err = finished(REPORTS + script, tmp_path, "--nproc", "2")
    assert status == 0, err
    assert err.count("rolled back by its guard (exit status 86)") == 1


def test_a_rank_that_does_not_leave_with_the_others_is_killed_in_the_end(tmp_path: Path) -> None:
    """It has as long as a step may take; what the others have said counts, and not our SIGKILL."""
    script = "import os, sys, time\nif os.environ['RANK'] == '0': time.sleep(60)\nsys.exit(85)"
    status, _, err = finished(script, tmp_path, "--nproc", "2", "--hang", "1s")
    assert (status, err.count("holdfast run:")) == (85, 1), err
    assert "rank 0 did not end after the others, which have left in order: killed" in err


def test_a_launcher_with_a_status_of_its_own_for_a_script_that_stopped_is_not_started_again(tmp_path: Path) -> None:
    """As torchrun ends with 1 when its ranks, near their deadline, have saved and left with theirs."""
    (tmp_path / "script.py").write_text(REPORTS + "life.end('stopped')\nsys.exit(75)")
    inner = f"{sys.executable} {tmp_path}/script.py {tmp_path}; exit 1"
    command = [sys.executable, "-m", "holdfast", "run", "--", "sh", "-c", inner]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stderr) == (75, "")


@pytest.mark.parametrize(
    "env",
    [{"WORLD_SIZE": "2", "RANK": "1"}, {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}],
    ids=["torchrun", "srun"],
)
def test_one_rank_of_several_is_not_started_again_alone(tmp_path: Path, env: dict[str, str]) -> None:
    """Its launcher starts all ranks again, so the supervisor of a rank passes the death on, and says so."""
    status, _, err = finished(STEPS + "advance(); sys.exit(7)", tmp_path, env=env)
    assert status == 7
    assert "its launcher alone can start all of them again" in err
    status, _, err = finished("", tmp_path, "--nproc", "2", env=env)
    assert status == 2
    assert "one of 2 that another launcher has started: leave --nproc out" in err


def test_a_command_that_cannot_be_started_is_an_error_of_usage(tmp_path: Path) -> None:
    """A misspelt program is named at once, with status 2."""
    command = [sys.executable, "-m", "holdfast", "run", "--", "pyhton", "train.py"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert found.returncode == 2
    assert "'pyhton' cannot be started" in found.stderr


def test_the_start_file_gives_way_to_a_sitecustomize_of_the_user(tmp_path: Path) -> None:
    """A sitecustomize on PYTHONPATH is still imported, and ours is not left on sys.path."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import sys; sys.own = True")
    script = (
        "import sys; print(sys.own, [p for p in sys.path if 'startup' in p], sys.modules['sitecustomize'].__file__)"
    )
    status, out, _ = finished(script, tmp_path, env={"PYTHONPATH": str(tmp_path / "own")})
    assert (status, out) == (0, f"True [] {tmp_path / 'own' / 'sitecustomize.py'}\n")


TRAINS = """
import os, signal, sys, torch, holdfast as hf
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
with hf.Checkpointer(sys.argv[1] + "/run", {"model": model}, every=1) as ck:
    if ck.global_step == 4: sys.exit(0)
    while ck.global_step < 4:
        with torch.no_grad(): model.weight += torch.rand(4, 4)
        ck.step()
        if ck.global_step == 2:
            ck.wait()
            os.kill(os.getpid(), signal.SIGKILL if ck.attempt == 1 else signal.SIGTERM)
        if ck.attempt == 1 and ck.global_step == 3: os.kill(os.getpid(), 9)
"""


def test_a_checkpointer_below_it_goes_on_and_its_run_knows_how_it_died(tmp_path: Path) -> None:
    """A real run, killed at step 2: the second life goes on there, and the journal says what the supervisor saw."""
    status, _, err = finished(TRAINS, tmp_path)
    assert status == 0, err
    assert "killed by SIGKILL; the newest durable step it knew is 2; starting again" in err
    events = catalog_of(tmp_path / "run").index.read_history().events
    died = [(event.attempt, event.step, event.why) for event in events if event.what == "died"]
    assert died == [(1, 2, "killed by SIGKILL")]


def test_a_death_stays_known_where_no_later_life_enters_the_run(tmp_path: Path) -> None:
    """The second life is still importing when the job is stopped: the journal has the end of the first."""
    script = """
import os, sys, time
from pathlib import Path
home = Path(sys.argv[1])
if (home / "run").exists():
    (home / "up").touch()
    time.sleep(60)
import torch, holdfast
with holdfast.Checkpointer(home / "run", {"w": torch.zeros(4)}, every=1) as ck:
    ck.step()
    ck.wait()
    os.kill(os.getpid(), 9)
"""
    process = supervise(script, tmp_path, "--no-warm")
    wait_for(tmp_path / "up")
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 85, err
    events = catalog_of(tmp_path / "run").index.read_history().events
    died = [(event.attempt, event.step, event.why) for event in events if event.what == "died"]
    assert died == [(1, 1, "killed by SIGKILL")]


def test_a_life_begins_where_there_is_no_room_for_its_reports(tmp_path: Path) -> None:
    """A temporary folder that is full, or gone, costs what is known of a life, and no life."""
    script = """
import os, shutil, signal, sys
from pathlib import Path
home = Path(os.environ["HOLDFAST_LIFE"]).parent
if home.is_dir():
    shutil.rmtree(home)
    home.touch()
    os.kill(os.getpid(), signal.SIGKILL)
home.unlink()
print("done")
"""
    status, out, err = finished(script, tmp_path)
    assert (status, out) == (0, "done\n"), err
    assert "less is known of this life" in err


def test_a_long_step_is_a_hang_once(tmp_path: Path) -> None:
    """A step of 3.4 s, as one with an evaluation inside, at --hang 1s: the life after it has four times the time."""
    script = STEPS + "advance()\ntime.sleep(3.4)\nadvance()\n"
    status, _, err = finished(script, tmp_path, "--hang", "1s", "--no-warm")
    assert status == 0, err
    assert err.count("this is a hang") == 1


BEGINS = """
import os, signal, sys, torch, holdfast as hf
home, w = sys.argv[1], torch.zeros(4)
if not os.path.exists(home + "/base"): hf.save(home + "/base", {"w": w}, step=10)
with hf.Checkpointer(home + "/run", {"w": w}, every=1, resume=home + "/base") as ck:
    print("begins at", ck.global_step, flush=True)
    while ck.global_step < 14:
        w += 1
        ck.step()
        if ck.global_step == 12 and ck.attempt == 1:
            ck.wait()
            os.kill(os.getpid(), signal.SIGKILL)
print("ends with", w.tolist())
"""


@pytest.mark.slow
def test_a_script_that_names_where_to_begin_goes_on_from_its_own_saves(tmp_path: Path) -> None:
    """``resume=PATH`` of another checkpoint: the life after a kill does not begin there again."""
    status, out, err = finished(BEGINS, tmp_path)
    assert (status, out) == (0, "begins at 10\nbegins at 12\nends with [4.0, 4.0, 4.0, 4.0]\n"), err


def test_a_script_interrupted_by_ctrl_c_ends_as_without_us(tmp_path: Path) -> None:
    """SIGINT ends a script that handles nothing with status 130: noting the error does not hide it from CPython."""
    script = "import sys, time\nfrom pathlib import Path\n(Path(sys.argv[1]) / 'up').touch()\ntime.sleep(60)\n"
    process = supervise(script, tmp_path)
    wait_for(tmp_path / "up")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in err
    assert process.returncode == 130


def test_a_script_that_ignores_signals_is_waited_for_and_the_third_says_how_to_end_it(tmp_path: Path) -> None:
    """It ends with its own status; the line that is printed names its process group."""
    ready = "import os, signal, sys, time\nfrom pathlib import Path\nhere = Path(sys.argv[1])\n"
    script = ready + (
        "got = []\nsignal.signal(signal.SIGTERM, lambda *_: (got.append(1), (here / str(len(got))).touch()))\n"
        "(here / 'up').write_text(str(os.getpid()))\n"
        "while len(got) < 3: time.sleep(0.01)\ntime.sleep(0.2)\nsys.exit(0)\n"
    )
    process = supervise(script, tmp_path)
    for name in ("up", "1", "2"):
        wait_for(tmp_path / name)
        process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert err.count("kill -KILL -- -" + (tmp_path / "up").read_text()) == 1


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("train.py", "-- python train.py`"),
        ("./go.sh", "-- bash ./go.sh`"),
        ("pyth train.py", "run -- pyth train.py`"),
        ("a && b", "bash -c 'a && b'`"),
    ],
)
def test_a_command_that_is_no_program_is_told_what_it_should_be(tmp_path: Path, command: str, advice: str) -> None:
    """A script without its interpreter, a whole command in quotes, and a line for a shell."""
    line = [sys.executable, "-m", "holdfast", "run", command]
    found = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path)
    assert found.returncode == 2
    assert advice in found.stderr


def test_a_script_that_its_guard_takes_back_is_started_again(tmp_path: Path) -> None:
    """Five times at the same step, with nothing durable in between: no crash loop; 86 without a guard is one."""
    script = STEPS + "life.stepped(9)\nif int(lives.read_text()) < 6:\n    life.end('rolled back')\n    sys.exit(86)\n"
    status, _, err = finished(script, tmp_path)
    assert status == 0, err
    assert err.count("at step 9: rolled back by its guard (exit status 86)") == 5
    (tmp_path / "lives").unlink()
    status, _, err = finished(script.replace("life.end('rolled back')", "pass"), tmp_path)
    assert status == 86
    assert (tmp_path / "lives").read_text() == "3"


def test_a_script_that_its_guard_gives_up_is_not_started_again(tmp_path: Path) -> None:
    """One life, its status, its error once."""
    status, _, err = finished(STEPS + "life.stepped(9)\nlife.end('given up')\nraise ValueError('bad')", tmp_path)
    assert (status, (tmp_path / "lives").read_text()) == (1, "1"), err
    assert "not started again: its guard has found a bad step" in err
    assert err.count("Traceback") == 1


def test_a_worker_that_was_killed_and_replaced_within_a_life_is_no_hang(tmp_path: Path) -> None:
    """A launcher inside of the script starts another process in its place: the old report says nothing more."""
    script = """
import os, subprocess, sys, time
if len(sys.argv) > 2:
    from holdfast.run.life import LifeReport
    life = LifeReport.begin(uri=sys.argv[1] + "/run", attempt=1, rank=0)
    life.trains(1, requeue=85, wait_s=0)
    life.stepped(2)
    life.stepped(3)
    os.kill(os.getpid(), 9)
subprocess.run([sys.executable, __file__, sys.argv[1], "worker"])
time.sleep(4)
print("done")
"""
    status, out, err = finished(script, tmp_path, "--hang", "2s")
    assert (status, out) == (0, "done\n"), err
    assert "hang" not in err


def test_a_life_that_stood_still_with_its_supervisor_is_no_hang(tmp_path: Path) -> None:
    """A job that is suspended for longer than the limit (scontrol suspend) goes on: nobody has looked in between."""
    script = STEPS + "for _ in range(80):\n    advance()\n    time.sleep(0.05)\nprint('done')"
    code = "import holdfast.supervisor.supervisor as s; s._ASLEEP_S = 2.0; from holdfast.cli.main import main; main()"
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-c", code, "run", "--hang", "3s", "--", sys.executable, str(tmp_path / "script.py")]
    process = subprocess.Popen([*command, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "kept")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, children)):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    for pid in (process.pid, *map(int, children)):  # the supervisor looks before the others have made a step
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "done\n"), err
    assert "hang" not in err
