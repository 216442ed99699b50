"""`Checkpointer` and `save` with many ranks where others start the processes: torchrun, and the function trainer."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.torch import TorchTrainer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
    import os, sys, torch
    import holdfast as hf
    rank = int(os.environ["RANK"])
    if sys.argv[2] == "group":
        torch.distributed.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hf.Checkpointer(sys.argv[1], {"m": model, "o": optimizer, "r": hf.PerRank(rank)}, every=2, keep=None) as ck:
        begun = ck.global_step
        while ck.global_step < 5:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            ck.step()
            if ck.global_step == 3 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                ck.wait()
                os._exit(7)
    hf.save(sys.argv[1] + "-alone", {"m": model})
    print(f"rank {rank} began at {begun}", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["group", "store"])
def test_torchrun_starts_it_again(tmp_path, how):
    """With a process group or without one: a rank dies, torchrun starts all again, and they go on from step 2."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(script), str(tmp_path / "run"), how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    if how == "group":
        # Else gloo itself finds addresses of the earlier life in the store, and cannot connect (torch 2.13).
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert sorted(ended.stdout.split("\n")) == ["", "rank 0 began at 2", "rank 1 began at 2"]
    assert ended.stderr.count("resumed from") == 1, "rank 0 alone says it"
    assert hf.Checkpoint(tmp_path / "run" / "step_00000005").manifest.writers == (0, 1)
    assert hf.Checkpoint(tmp_path / "run-alone").verify(deep=True).ok


REPLACED = """
    import os, sys, time, torch
    import holdfast as hf
    rank, count = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    if sys.argv[2] == "group":
        torch.distributed.init_process_group("gloo")
    state = {"w": torch.zeros(3), "r": hf.PerRank(rank)}
    with hf.Checkpointer(sys.argv[1], state, every=2, keep=None, timeout_s=60) as ck:
        begun = ck.global_step
        with open(sys.argv[1] + ".begun", "a") as file:
            file.write(f"{begun} {count}\\n")
        while ck.global_step < (5 if begun else 10**9):
            ck.step()
            if ck.global_step > 3 and not begun:
                ck.wait()
                with open(sys.argv[1] + ".ready", "a") as file:
                    file.write("x")
                while True:
                    time.sleep(0.01)
                    if sys.argv[2] == "group":
                        torch.distributed.all_reduce(state["w"])
                    ck.step()
"""


def descendants(pid: int) -> list[int]:
    """A process and all that it has started, and these, whatever their sessions."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def until(happens, agents, log) -> None:
    deadline = time.monotonic() + 150
    while not happens():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        assert all(agent.poll() is None for agent in agents), log.read_text()[-3000:]
        time.sleep(0.05)


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.mark.long
@pytest.mark.parametrize("how", ["group", "store"])
def test_a_node_of_torchrun_is_replaced(tmp_path, how):
    """Two agents, one of which is killed with its rank; another one takes its place, and both go on from step 4."""
    (tmp_path / "train.py").write_text(textwrap.dedent(REPLACED))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=replaced"]
    command += ["--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"]
    command += [str(tmp_path / "train.py"), str(tmp_path / "run"), how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    if how == "group":
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as above

    def launch(number: int) -> subprocess.Popen[bytes]:
        with (tmp_path / f"log{number}").open("wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    agents = [launch(0)]
    try:
        until(lambda: listens(port), agents, tmp_path / "log0")
        agents.append(launch(1))
        ready = tmp_path / "run.ready"
        until(lambda: ready.exists() and ready.read_text() == "xx", agents, tmp_path / "log0")
        gone = agents.pop()
        for pid in descendants(gone.pid):
            os.kill(pid, signal.SIGKILL)
        gone.wait()
        agents.append(launch(2))
        assert [agent.wait(240) for agent in agents] == [0, 0], (tmp_path / "log0").read_text()[-3000:]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()
                agent.wait()
    begun = sorted(line.split() for line in (tmp_path / "run.begun").read_text().splitlines())
    assert [int(step) > 3 for step, _ in begun] == [False, False, True, True], begun
    if how == "group":  # the one that was left saw its rank fail
        assert {count for step, count in begun if step != "0"} == {"0", "1"}, "each agent counts for itself"


def in_the_trainer(config):
    """A worker that keeps a run of its own beside that of the trainer."""
    import torch

    import holdfast as hf

    rank = hf.get_context().get_world_rank()
    model = torch.nn.Linear(2, 2)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    state = {"m": wrapped, "o": optimizer, "rank": hf.PerRank(rank)}
    with hf.Checkpointer(config["root"], state, every=2, keep=None) as ck:
        begun = ck.global_step
        while ck.global_step < 5:
            optimizer.zero_grad()
            wrapped(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            ck.step(loss=1.0)
            if ck.global_step == 3 and begun == 0 and rank == 2:
                ck.wait()
                raise RuntimeError("boom")
    hf.report({"began": begun, "saves": ck.stats.saves})


@pytest.mark.slow
def test_in_the_function_trainer(tmp_path):
    """Four workers, one of which fails: the trainer starts all again, and their `Checkpointer` goes on from step 2."""
    trainer = TorchTrainer(
        in_the_trainer,
        train_loop_config={"root": str(tmp_path / "own")},
        scaling_config=hf.ScalingConfig(num_workers=4),
        run_config=hf.RunConfig(
            storage_path=tmp_path / "results", name="run", failure_config=hf.FailureConfig(max_failures=1)
        ),
    )
    assert trainer.fit().metrics["began"] == 2
    checkpoint = hf.Checkpoint(tmp_path / "own" / "step_00000005")
    assert checkpoint.manifest.writers == (0, 1, 2, 3)
    assert checkpoint.verify(deep=True).ok
