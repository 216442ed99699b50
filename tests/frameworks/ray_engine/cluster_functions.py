"""What workers of the tests run. Importable on every node."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import holdfast as hf


def attempt() -> int:
    return int(hf.get_context().get_trial_id().rsplit("-", 1)[1])


def note(config: dict[str, Any], **more: Any) -> None:
    """Write down where this worker is; the file is there as a whole or not at all."""
    context = hf.get_context()
    told = {
        "rank": context.get_world_rank(),
        "size": context.get_world_size(),
        "local": context.get_local_rank(),
        "local_size": context.get_local_world_size(),
        "node": context.get_node_rank(),
        "pid": os.getpid(),
        "zygote": os.getppid(),
        "agent": parent(os.getppid()),
        "attempt": attempt(),
        "at": time.time(),
        **more,
    }
    path = Path(config["folder"], f"worker-{attempt()}-{context.get_world_rank()}.json")
    part = path.with_suffix(".part")
    part.write_text(json.dumps(told))
    part.rename(path)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def notes(folder: Path, number: int) -> list[dict[str, Any]]:
    """What the workers of one attempt have written down, by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"worker-{number}-*.json"))]


def digits(config: dict[str, Any]) -> None:
    """Train on scikit-learn's digits, gradients averaged over all ranks; every step reports its state."""
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits

    context = hf.get_context()
    size, rank = context.get_world_size(), context.get_world_rank()
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    note(config)
    print(f"rank {rank} of {size} begins")
    for step in range(3):
        mine = torch.arange(64 * step, 64 * (step + 1))[rank::size]
        loss = torch.nn.functional.cross_entropy(model(x[mine]), y[mine])
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.sub_(parameter.grad / size, alpha=0.1)
        hf.report({"loss": loss.item()}, state={"model": model})


def steps(config: dict[str, Any]) -> None:
    """Sum over all ranks in each step, with a state that tells whether any of it was lost or done twice."""
    import torch
    import torch.distributed as dist

    context = hf.get_context()
    size, rank = context.get_world_size(), context.get_world_rank()
    state: dict[str, Any] = {"total": torch.zeros(1000), "step": 0}
    if (checkpoint := hf.get_checkpoint()) is not None:
        state = hf.load(checkpoint)
    note(config, start=state["step"])
    for step in range(state["step"], config.get("steps", 6)):
        change = torch.full((1000,), float(step + 1)) / size
        dist.all_reduce(change)
        state = {"total": state["total"] + change, "step": step + 1}
        if attempt() == 1 and step == config.get("die_at") and rank == 1:
            Path(config["folder"], "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        hf.report({"step": step + 1, "size": size, "total": state["total"][0].item()}, state=state)
        if attempt() == 1 and step == config.get("wait_at"):
            hf.get_checkpoint()  # what was reported is committed
            Path(config["folder"], f"waiting-{rank}").touch()
            time.sleep(600)
        if attempt() > 1 and step >= config.get("again_at", step + 1):
            Path(config["folder"], f"again-{rank}").touch()
            while not Path(config["folder"], "go-on").exists():
                time.sleep(0.05)


def agreed(config: dict[str, Any]) -> None:
    """Train until there is a second attempt, and a few steps more; save when asked to, and not else."""
    import torch
    import torch.distributed as dist

    context = hf.get_context()
    rank, step = context.get_world_rank(), 0
    if (checkpoint := hf.get_checkpoint()) is not None:
        step = hf.load(checkpoint)["step"]
    note(config, start=step)
    last = None if attempt() == 1 else step + config["go_on"]
    while last is None or step < last:
        if context.get_world_size() > 1:
            dist.all_reduce(torch.ones(1))
        time.sleep(0.02 + 0.02 * rank)
        step += 1
        Path(config["folder"], f"begun-{rank}").touch()
        if config.get("count"):
            Path(config["folder"], f"steps-{attempt()}-{rank}").write_text(str(step))
        if hf.should_save():
            hf.report({"step": step}, state={"step": step})
            Path(config["folder"], f"saved-{attempt()}-{rank}").write_text(str(step))
        else:
            hf.report({"step": step})


def directories(config: dict[str, Any]) -> None:
    """Report a directory of this node's own, from every rank; then metrics, as fast as they are taken."""
    import tempfile

    context = hf.get_context()
    for number in range(2):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"rank-{context.get_world_rank()}.txt").write_text(f"{number}")
            hf.report({"number": number}, checkpoint=hf.Checkpoint.from_directory(folder))
    begun = time.time()
    for number in range(config["count"]):
        hf.report({"number": number})
    note(config, begun=begun)
