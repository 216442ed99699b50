"""Two ranks under torchrun: signals to the agent or to one rank, restarts, an agent that is killed alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from catalog_kit import index_of

import holdfast as hf

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
    import os, sys, time, torch
    import holdfast as hf
    root, last = sys.argv[1], int(sys.argv[2])
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    if os.environ.get("GROUP"):
        torch.distributed.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    code = "?"
    try:
        with hf.Checkpointer(root, {"m": model, "r": hf.PerRank(rank)}, every=None) as ck:
            with open(f"{root}.begun", "a") as file:
                file.write(f"{rank} {os.getpid()} {ck.global_step}\\n")
            while ck.global_step < last:
                model.weight.data.add_(1)
                if os.environ.get("GROUP"):
                    torch.distributed.all_reduce(model.weight.data)
                time.sleep(0.01)
                ck.step()
        code = 0
    except SystemExit as error:
        code = error.code
        raise
    finally:
        with open(f"{root}.ended", "a") as file:
            file.write(f"{rank} {code}\\n")
"""


class Launched:
    """A training of two ranks that runs."""

    def __init__(self, folder: Path, *options: str, steps: int = 10**9, group: bool = False) -> None:
        script = folder / "train.py"
        script.write_text(textwrap.dedent(SCRIPT))
        self.root = folder / "run"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", *options]
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GROUP": "1" if group else "",
        }  # fmt: skip
        self.output = folder / "output.txt"
        with self.output.open("ab") as file:
            self.agent = subprocess.Popen(
                [*command, str(script), str(self.root), str(steps)], env=environment, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def lines(self, name: str, count: int) -> list[list[int]]:
        """Wait for so many lines that the ranks have written."""
        path = Path(f"{self.root}.{name}")
        until = time.monotonic() + 100
        while True:
            found = path.read_text().splitlines() if path.exists() else []
            assert not any("?" in line for line in found), self.output.read_text()[-6000:]
            if len(found) >= count:
                return sorted([int(word) for word in line.split()] for line in found)
            assert time.monotonic() < until, f"{name}: {found}\n{self.output.read_text()[-4000:]}"
            time.sleep(0.05)

    def begun(self, count: int = 2) -> list[int]:
        """Wait until the ranks train; returns their process ids."""
        pids = [pid for _, pid, _ in self.lines("begun", count)]
        time.sleep(0.2)  # some steps: the moment does not matter
        return pids

    def newest(self) -> hf.Checkpoint:
        """The newest checkpoint, which has to be whole."""
        found = max((hf.Checkpoint(path) for path in self.root.glob("step_*")), key=lambda one: one.step or 0)
        assert found.verify(deep=True).ok
        assert found.manifest is not None
        assert found.manifest.writers == (0, 1)
        return found

    def reason(self) -> str | None:
        """How the run ended, as a job script may ask."""
        return index_of(self.root).attempts[-1].reason


@contextlib.contextmanager
def launched(folder: Path, *options: str, **more: object) -> Iterator[Launched]:
    """Start torchrun; whatever happens, nothing of it is left."""
    one = Launched(folder, *options, **more)  # type: ignore[arg-type]
    try:
        yield one
    finally:
        one.agent.kill()
        one.agent.wait()
        path = Path(f"{one.root}.begun")
        for line in path.read_text().splitlines() if path.exists() else []:
            pid = int(line.split()[1])
            with contextlib.suppress(OSError):
                if str(one.root) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)


def test_an_agent_that_dies_alone(tmp_path):
    """SIGKILL to the agent: its ranks save the same step and end with 85, instead of training on for ever."""
    with launched(tmp_path) as run:
        run.begun()
        run.agent.kill()
        assert run.lines("ended", 2) == [[0, 85], [1, 85]]
        assert run.newest().step > 0
        assert run.reason() == "stopped"
        assert f"torchrun's agent (process {run.agent.pid}) has died: saving" in run.output.read_text()


SIGNALS = [
    ("agent", "SIGTERM", (), False),
    ("agent", "SIGTERM", (), True),
    ("agent", "SIGUSR1", ("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",), False),
    ("rank", "SIGTERM", (), True),
    ("rank", "SIGUSR1", (), False),
]


@pytest.mark.parametrize(
    ("whom", "name", "options", "group"),
    [pytest.param(*case, marks=() if number == 0 else pytest.mark.slow) for number, case in enumerate(SIGNALS)],
)
def test_a_signal(tmp_path, whom, name, options, group):
    """To the agent or to one rank: both ranks save the same step and end with 85; torchrun itself ends with 1."""
    with launched(tmp_path, *options, group=group) as run:
        pids = run.begun()
        os.kill(run.agent.pid if whom == "agent" else pids[1], getattr(signal, name))
        assert run.lines("ended", 2) == [[0, 85], [1, 85]]
        assert run.agent.wait(60) == 1
        assert run.newest().step > 0
        assert run.reason() == "stopped"


@pytest.mark.slow
def test_usr1_that_the_agent_does_not_handle(tmp_path):
    """Without --signals-to-handle SIGUSR1 kills the agent; the ranks save and end all the same."""
    with launched(tmp_path) as run:
        run.begun()
        os.kill(run.agent.pid, signal.SIGUSR1)
        assert run.agent.wait(60) == -signal.SIGUSR1
        assert run.lines("ended", 2) == [[0, 85], [1, 85]]
        assert run.newest().step > 0


@pytest.mark.slow
def test_a_signal_to_one_rank_with_restarts(tmp_path):
    """With --max-restarts the agent takes 85 for a failure and starts all again: they go on from the saved step."""
    with launched(tmp_path, "--max-restarts=1") as run:
        pids = run.begun()
        os.kill(pids[0], signal.SIGTERM)
        begun = run.lines("begun", 4)
        starts = {step for _, _, step in begun}
        assert len(starts) == 2
        assert run.newest().step == max(starts)
        os.kill(run.agent.pid, signal.SIGTERM)  # this one ends it: the agent starts nobody again
        run.lines("ended", 4)
        assert run.agent.wait(60) == 1


@pytest.mark.slow
def test_a_run_that_finishes(tmp_path):
    """Exit status 0, and "finished": what tells a job script not to start it again."""
    with launched(tmp_path, steps=5) as run:
        assert run.agent.wait(100) == 0
        assert run.lines("ended", 2) == [[0, 0], [1, 0]]
        assert run.reason() == "finished"
