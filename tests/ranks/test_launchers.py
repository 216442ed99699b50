"""`Checkpointer` and `save` with many ranks where others start the processes: torchrun, and the function trainer."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
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
