"""DeepSpeed in a loop of one's own: both processes are killed, and go on from what they kept.

    python examples/deepspeed_keeper.py [DIRECTORY OR s3://BUCKET/RUN]

The script starts itself with torchrun. The first life is killed by SIGKILL. The second goes on from the newest
checkpoint, into which every process has put its shards.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

PROCESSES, STEPS, EVERY, KILL_AT = 2, 12, 3, 8


def train(run: str, kill: str) -> None:
    """Be one of the processes: train, from where an earlier life of the run was."""
    import deepspeed
    import torch

    import holdfast
    from holdfast.deepspeed import Keeper

    # CPUs only: stay with gloo. DeepSpeed would compile collectives of its own (g++ and two minutes).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = torch.cuda.is_available()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank = torch.distributed.get_rank()

    with Keeper(run, keep=holdfast.Keep(last=2, best=1, metric="loss")) as keeper:
        state = keeper.load(engine)  # the newest that is sound; None at a fresh start
        step = 0 if state is None else state["step"]
        if rank == 0 and state is not None:
            print("goes on after step", step, flush=True)
        while step < STEPS:
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * step + rank)).to(engine.device)
            loss = (engine(x) - x.sum(1, keepdim=True)).pow(2).mean()
            engine.backward(loss)
            engine.step()
            step += 1
            if step % EVERY == 0:
                keeper.save(engine, step=step, metrics={"loss": loss.item()}, client_state={"step": step})
            if kill and step == KILL_AT:
                os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        best = keeper.best()
        print("the best is", best and best.name, "of", [one.name for one in keeper.checkpoints()], flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    """Kill, and go on."""
    with tempfile.TemporaryDirectory() as scratch:
        root = sys.argv[1] if len(sys.argv) > 1 else f"{scratch}/run"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
        for kill in ("kill", ""):
            done = subprocess.run([*launch, __file__, "life", root, kill], check=False)
            print("this life ended with status", done.returncode, flush=True)
        sys.exit(done.returncode)


if __name__ == "__main__":
    if sys.argv[1:2] == ["life"]:
        train(*sys.argv[2:])
    else:
        main()
