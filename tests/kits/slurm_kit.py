"""A SLURM cluster of several nodes on this machine, from the system's packages, with real jobs.

    python tests/kits/slurm_kit.py [--install] FOLDER [NODES]

starts one (with ``--install`` its packages are installed by apt first, as root) and says how to send jobs to it.

Every node is a slurmd with a name and a port of its own; there are no cgroups, no accounting and no authentication, so
only its owner's jobs run. A partition ``high`` preempts the partition ``low``, whose jobs are requeued then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client")
INSTALL_S = 300
REQUEUE_S = 5  # before a requeued job may start again; 120 by default
KILL_S = 20  # from SIGTERM to SIGKILL at the time limit, at scancel and at preemption
AWAY_S = 10  # until a slurmd that does not answer counts as a dead node

_CONF = """\
ClusterName=holdfast
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire={requeue_s}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait={kill_s}
SlurmdTimeout={away_s}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime={kill_s}
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Return why there can be no such cluster here, None if there can."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "srun", "scontrol") if shutil.which(name) is None]
    return f"SLURM's packages are not installed ({', '.join(missing)} missing)" if missing else None


class Cluster:
    """A context manager; between its ends `sbatch` and its kin of this process reach the cluster.

    Args:
        folder: of its files; short, since sockets lie there.
        nodes: their names.
        cpus: of each node, which need not be there.
    """

    def __init__(self, folder: Path, nodes: tuple[str, ...] = ("n1", "n2"), *, cpus: int = 4) -> None:
        self.folder, self.nodes = folder.resolve(), nodes
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._cpus = cpus
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        ports = _free_ports(len(self.nodes) + 1)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus}"
            for name, port in zip(self.nodes, ports[1:], strict=True)
        )
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "slurm.conf").write_text(
            _CONF.format(
                host=socket.gethostname(), port=ports[0], user=pwd.getpwuid(os.geteuid()).pw_name, folder=self.folder,
                nodes=nodes, requeue_s=REQUEUE_S, kill_s=KILL_S, away_s=AWAY_S,
            )
        )  # fmt: skip
        try:
            self._daemons["slurmctld"] = self._daemon("slurmctld", "-D")
            for node in self.nodes:
                self.start_node(node)
            wait_until(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), 60, self._logs)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if "slurmctld" in self._daemons:
            with contextlib.suppress(subprocess.SubprocessError):
                self.run("scancel", "--state=PENDING"), self.run("scancel", "--full", "--signal=KILL", "--me")
                self.run("scancel", "--me")
                wait_until(lambda: not self.run("squeue", "--noheader").stdout, 30, self._logs)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def start_node(self, node: str) -> None:
        """Start a node; it takes jobs as soon as the controller has seen it."""
        self._daemons[node] = self._daemon("slurmd", "-D", "-N", node)

    def lose_node(self, node: str, *, and_its_jobs: bool = True) -> None:
        """Kill a node's slurmd, and everything that runs there with it unless only the daemon is to die."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        pids = list(_processes_of(node)) if and_its_jobs else []
        # What watches over a step goes first: it must not tell of the end of the step.
        for pid in [*_watchers_of(pids), *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def run(self, *command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run one of SLURM's commands.

        Raises:
            subprocess.TimeoutExpired: it hangs.
        """
        return subprocess.run(
            command, env=self.environment, cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )

    def submit(self, script: Path, *options: str) -> str:
        """Send a job script from its folder; returns the id of the job."""
        sent = self.run("sbatch", "--parsable", *options, str(script), folder=script.parent)
        assert sent.returncode == 0, sent.stderr
        return sent.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` says of a job, by its names."""
        told = self.run("scontrol", "show", "job", job).stdout
        return dict(word.split("=", 1) for word in told.split() if "=" in word)

    def states(self) -> dict[str, str]:
        """Return the state of each node."""
        told = self.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%N %T").stdout
        return dict(line.split() for line in told.splitlines())

    def wait(self, job: str, what: Callable[[dict[str, str]], bool] | str, limit_s: float = 150) -> dict[str, str]:
        """Wait until a job is in a state, by its name or by what `show` returns; returns that."""
        found: dict[str, str] = {}

        def there() -> bool:
            found.clear()
            found.update(self.show(job))
            return found.get("JobState") == what if isinstance(what, str) else what(found)

        wait_until(there, limit_s, lambda: f"{job}: {what}: {found}")
        return dict(found)

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "daemons.txt").open("ab") as output:
            return subprocess.Popen(command, env=self.environment, stdout=output, stderr=output, start_new_session=True)

    def _logs(self) -> str:
        return "\n".join(f"{path}\n{path.read_text()[-1500:]}" for path in self.folder.glob("*.log"))


def wait_until(there: Callable[[], bool], limit_s: float, say: Callable[[], str]) -> None:
    """Wait for a condition; what ``say`` returns explains that it did not come."""
    until = time.monotonic() + limit_s
    while not there():
        assert time.monotonic() < until, say()
        time.sleep(0.2)


def _processes_of(node: str) -> Iterator[int]:
    """Yield the processes that jobs run on a node."""
    mark = f"SLURMD_NODENAME={node}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0"):
                yield int(path.name)


def _watchers_of(pids: list[int]) -> set[int]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
                found.add(parent)
    return found


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


def main() -> None:
    """Start a cluster and keep it until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("nodes", type=int, nargs="?", default=2)
    parser.add_argument("--install", action="store_true", help="install the packages first")
    options = parser.parse_args()
    if options.install and why_not():
        for command in (("update",), ("install", "--yes", "--no-install-recommends", *PACKAGES)):
            subprocess.run(["apt-get", *command], check=True, timeout=INSTALL_S)
    if reason := why_not():
        sys.exit(f"{reason}: run this with --install as root, or install {', '.join(PACKAGES)}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with Cluster(options.folder, tuple(f"n{number + 1}" for number in range(options.nodes))) as cluster:
        print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}\n{cluster.states()}; Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
