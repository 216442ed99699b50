"""A real SLURM of two nodes runs the job scripts of docs/slurm.md: stopped jobs go on as if they never stopped."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_kit import ROOT, blocks
from slurm_kit import Cluster, wait_until, why_not

import holdfast as hf

_reason = why_not()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))
STEPS = 60
SCRIPTS = {re.search(r"--job-name=(\w+)", text).group(1): text for text in blocks(ROOT / "docs/slurm.md", "sh")}  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="hf-slurm-", dir="/tmp") as folder, Cluster(Path(folder)) as one:
        bin_folder = os.path.dirname(sys.executable)
        one.environment |= {
            "PATH": os.pathsep.join([bin_folder, os.environ["PATH"]]), "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1", "TRAIN_STEPS": str(STEPS),
        }  # fmt: skip
        yield one


class Job:
    """One that was sent to the cluster from a folder of its own."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        name: str,
        *options: str,
        run: str = "",
        signal_option: bool = True,
        **more: str,
    ) -> None:
        self.cluster, self.folder, self.run = cluster, folder, folder / "runs" / (run or name)
        self.run.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests/ranks/slurm_training.py", folder / "train.py")
        script = folder / f"{name}.sh"
        lines = SCRIPTS[name].splitlines(keepends=True)
        script.write_text("".join(one for one in lines if signal_option or "--signal" not in one))
        cluster.environment |= {"TRAIN_PAUSE_S": "0.3", "TRAIN_WORKERS": "0", **more}
        self.id = cluster.submit(script, *options)

    def log(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("*.log"))

    def lives(self) -> list[dict[str, object]]:
        path = Path(f"{self.run}.lives")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def trains(self, num_ranks: int = 1, life: int = 0) -> list[dict[str, object]]:
        """Wait until all ranks of a life train; returns what they say."""

        def there() -> list[dict[str, object]]:
            return [one for one in self.lives() if one["restarts"] == life]

        wait_until(lambda: len(there()) == num_ranks, 150, self.log)
        return there()

    def restarts(self) -> int:
        return int(self.cluster.show(self.id)["Restarts"])

    def send(self, name: str, *, batch: bool = False) -> bool:
        """Send a signal as --signal does: to the steps, or with B: to the batch shell."""
        sent = self.cluster.run("scancel", f"--signal={name}", *(["--batch"] if batch else []), self.id)
        assert sent.returncode == 0, sent.stderr
        return True

    def check_requeued(self, num_ranks: int = 1, *, step: int | None = None) -> None:
        """Under the same id all ranks go on from the step that was saved, to the end of an uninterrupted twin."""
        lives = self.trains(num_ranks, life=1)
        assert {one["job"] for one in self.lives()} == {self.id}
        first = {one["step"] for one in lives}
        assert len(first) == 1
        if step is None:
            saved = re.findall(r"step (\d+) is saved in", self.log())
            assert {int(saved[0])} == first, self.log()
        self.cluster.wait(self.id, lambda job: job["JobState"] == "COMPLETED")
        check_end(self.run, num_ranks, self.folder)


def check_end(run: Path, num_ranks: int, folder: Path) -> None:
    """Compare with a twin that nobody stopped."""
    twin = folder / "twin"
    if not list(folder.glob("twin.end-*")):
        ranks = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"] if num_ranks > 1 else []
        )
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "TRAIN_STEPS": str(STEPS),
            "TRAIN_PAUSE_S": "0",
        }  # fmt: skip
        subprocess.run(
            [sys.executable, *ranks, folder / "train.py", twin], env=environment, check=True, timeout=150,
            capture_output=True,
        )  # fmt: skip
    for rank in range(num_ranks):
        assert Path(f"{run}.end-{rank}").read_text() == Path(f"{twin}.end-{rank}").read_text()


@pytest.mark.slow
def test_a_signal_to_the_steps(cluster, tmp_path):
    """--signal=USR1: every process of the step gets it, loader workers too; the script requeues the job."""
    job = Job(cluster, tmp_path, "plain", run="gpt", TRAIN_WORKERS="1")
    job.trains()
    job.send("USR1")
    job.check_requeued()


@pytest.mark.slow
def test_signals_at_any_moment(cluster, tmp_path):
    """From the first millisecond of a life on, through Python's imports: no signal ends the chain of requeues."""
    moments = random.Random(16)
    job = Job(cluster, tmp_path, "plain", run="gpt", TRAIN_PAUSE_S="0.05")
    ended_early = 0
    for life in range(4):
        cluster.wait(job.id, lambda told, life=life: told["JobState"] == "RUNNING" and told["Restarts"] == str(life))
        time.sleep(moments.uniform(0, 2) if life else 0)
        while job.restarts() == life and job.send("USR1"):  # one that came before the step was there is lost
            time.sleep(1)
        ended_early += not [one for one in job.lives() if one["restarts"] == life]
    cluster.wait(job.id, "COMPLETED", 240)
    assert ended_early
    check_end(job.run, 1, tmp_path)


@pytest.mark.slow
def test_ranks_of_srun_on_two_nodes(cluster, tmp_path):
    """The ranks agree on a step and all end with 85, which is srun's status."""
    job = Job(cluster, tmp_path, "ranks")
    assert {one["node"] for one in job.trains(2)} == {"n1", "n2"}
    job.send("USR1")
    job.check_requeued(2)


@pytest.mark.long
def test_a_signal_to_the_batch_shell(cluster, tmp_path):
    """--signal=B:USR1: the trap passes it on."""
    job = Job(cluster, tmp_path, "shell", run="gpt")
    job.trains()
    job.send("USR1", batch=True)
    job.check_requeued()


@pytest.mark.long
def test_ranks_of_torchrun_on_two_nodes(cluster, tmp_path):
    """The script is told, and has the agents stop their ranks."""
    job = Job(cluster, tmp_path, "torchrun")
    job.trains(2)
    job.send("USR1", batch=True)
    job.check_requeued(2)


@pytest.mark.long
def test_an_array(cluster, tmp_path):
    """Each task has a run of its own; one that is stopped is requeued, the other goes on."""
    job = Job(cluster, tmp_path, "sweep", run="sweep-1")
    array, job.id = job.id, f"{job.id}_1"
    other = tmp_path / "runs/sweep-0"
    own = str(job.trains()[0]["job"])
    job.send("USR1")
    job.id = own
    job.check_requeued()
    wait_until(lambda: not cluster.run("squeue", "--noheader", f"--jobs={array}").stdout.strip(), 100, job.log)
    check_end(other, 1, tmp_path)
    assert len(Path(f"{other}.lives").read_text().splitlines()) == 1


@pytest.mark.long
def test_preemption(cluster, tmp_path):
    """A job of a higher partition takes the node: SIGTERM, a save, and SLURM requeues by itself."""
    job = Job(cluster, tmp_path, "plain", "--nodelist=n1", run="gpt", TRAIN_WORKERS="1")
    job.trains()
    short = tmp_path / "short.sh"
    short.write_text("#!/bin/bash\n#SBATCH --output=/dev/null\nsleep 1\n")
    cluster.submit(short, "--partition=high", "--exclusive", "--nodelist=n1")
    job.check_requeued()


@pytest.mark.long
def test_a_job_that_is_cancelled(cluster, tmp_path):
    """Scancel: the step is saved, the job stays cancelled, and another job goes on."""
    job = Job(cluster, tmp_path, "plain", run="gpt")
    job.trains()
    assert cluster.run("scancel", job.id).returncode == 0
    cluster.wait(job.id, "CANCELLED")
    saved = re.findall(r"step (\d+) is saved in", job.log())
    assert len(saved) == 1
    again = Job(cluster, tmp_path, "plain", run="gpt", TRAIN_PAUSE_S="0")
    cluster.wait(again.id, "COMPLETED")
    assert [one["step"] for one in job.lives()] == [0, int(saved[0])]
    check_end(job.run, 1, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("how", ["none", "deadline"])
def test_the_time_limit(cluster, tmp_path, how):
    """Without --signal SIGTERM saves, and the script requeues the job; so it does after deadline="slurm"."""
    deadline = {"TRAIN_DEADLINE": "slurm"} if how == "deadline" else {}
    job = Job(cluster, tmp_path, "plain", "--time=1", run="gpt", signal_option=False, TRAIN_PAUSE_S="1.5", **deadline)
    try:
        job.trains()
        (life,) = job.trains(life=1)
        why = "SIGTERM" if how == "none" else "the deadline"
        assert re.findall(rf"stopped by {why}: step (\d+) is saved", job.log()) == [str(life["step"])]
        cluster.run("scancel", job.id)
        cluster.wait(job.id, "CANCELLED")
    finally:
        cluster.environment.pop("TRAIN_DEADLINE", None)


@pytest.mark.long
def test_a_node_that_is_lost(cluster, tmp_path):
    """SLURM requeues the job on the other node, which goes on from the newest save."""
    job = Job(cluster, tmp_path, "plain", run="gpt")
    node = str(job.trains()[0]["node"])
    wait_until(lambda: any(hf.Checkpoint(path).step for path in job.run.glob("step_*")), 60, job.log)
    cluster.lose_node(node)
    try:
        life = job.trains(life=1)[0]
        assert life["node"] != node
        assert int(str(life["step"])) >= 20
        job.check_requeued(step=20)
    finally:
        revive(cluster, node)


@pytest.mark.long
def test_a_node_that_slurm_cannot_see(cluster, tmp_path):
    """Slurmd dies alone, its job trains on: the new life waits for it, and goes on when it has ended."""
    job = Job(cluster, tmp_path, "plain", run="gpt", TRAIN_PAUSE_S="2")
    first = job.trains()[0]
    node, trainer = str(first["node"]), int(str(first["pid"]))
    cluster.lose_node(node, and_its_jobs=False)
    try:
        cluster.wait(job.id, lambda told: told["Restarts"] == "1" and told["JobState"] == "RUNNING")
        assert os.path.exists(f"/proc/{trainer}")
        os.kill(trainer, signal.SIGTERM)
        life = job.trains(life=1)[0]
        assert life["node"] != node
        assert int(str(life["step"])) > 0
        cluster.run("scancel", job.id)
    finally:
        revive(cluster, node)


def revive(cluster: Cluster, node: str) -> None:
    cluster.start_node(node)
    wait_until(lambda: cluster.states()[node] == "idle", 60, str)
