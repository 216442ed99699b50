"""A small training that a job script starts: alone, or as one of several ranks; ends with a digest of all it did."""

import hashlib
import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import holdfast


def main(root: str) -> None:
    """Train to the step that TRAIN_STEPS names."""
    last, pause_s = int(os.environ["TRAIN_STEPS"]), float(os.environ["TRAIN_PAUSE_S"])
    rank, world_size = (int(os.environ.get(name, alone)) for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if world_size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(240, 8), torch.randn(240, 1))
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=int(os.environ.get("TRAIN_WORKERS", "0")))
    state = {"model": model, "optimizer": optimizer, "seen": holdfast.PerRank([])}
    with holdfast.Checkpointer(root, state, every="20ba", deadline=os.environ.get("TRAIN_DEADLINE")) as ck:
        with open(f"{root}.lives", "a") as file:
            job, restarts = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
            life = {"job": job, "restarts": restarts, "rank": rank, "step": ck.global_step, "pid": os.getpid()}
            file.write(json.dumps({**life, "node": os.environ.get("SLURMD_NODENAME")}) + "\n")
        for _ in ck.epochs(10**6):
            for x, y in ck.batches(loader):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                if world_size > 1:
                    for parameter in model.parameters():
                        dist.all_reduce(parameter.grad)
                optimizer.step()
                state["seen"].value.append(float(x.sum()))
                time.sleep(pause_s)
                ck.step()
                if ck.global_step == last:
                    break
            if ck.global_step == last:
                break
    if world_size > 1:
        dist.destroy_process_group()
    told = [*(parameter.tolist() for parameter in model.parameters()), state["seen"].value]
    with open(f"{root}.end-{rank}", "w") as file:
        file.write(hashlib.sha256(json.dumps(told).encode()).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1])
