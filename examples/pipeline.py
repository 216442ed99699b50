"""A model in stages on different processes (torch.distributed.pipelining); FSDP2 inside of a stage if several share it.

    torchrun --nproc-per-node 4 examples/pipeline.py --out runs/stages --stages 2 --steps 200

Each process has the layers of its stage only, under the names they have in the whole model, and saves what it has. All
of it is one checkpoint: kill the run and start it again, with as many stages or with another number (1, 2 or 4).
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import holdfast

LAYERS, WIDTH, CLASSES = 4, 32, 10
BATCH, MICROBATCHES = 16, 4


class Layer(nn.Module):
    """A residual layer with dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map features to features."""
        return x + self.drop(functional.gelu(self.up(self.norm(x))))


class Stage(nn.Module):
    """Some of the layers of the model; the last stage has the head as well."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        # A ModuleDict keeps the numbers: "layers.2.up.weight" is called so on whatever process it is.
        self.layers = nn.ModuleDict({str(number): Layer() for number in layers})
        self.head = nn.Linear(WIDTH, CLASSES) if LAYERS - 1 in layers else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map features to features, or to scores in the last stage."""
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def make_stage(mesh: DeviceMesh) -> Stage:
    """Make the stage of this process, spread over the processes that share it."""
    torch.manual_seed(1234 + mesh["pp"].get_local_rank())
    each = LAYERS // mesh["pp"].size()
    first = mesh["pp"].get_local_rank() * each
    stage = Stage(range(first, first + each))
    if mesh["dp"].size() > 1:
        for weight in stage.parameters():
            dist.broadcast(weight.data, group=mesh.get_group("dp"), group_src=0)
        fully_shard(stage, mesh=mesh["dp"])
    return stage


def train(arguments: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
    """Train, or go on training."""
    stages, at = mesh["pp"].size(), mesh["pp"].get_local_rank()
    stage = make_stage(mesh).to(device)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    pipe = PipelineStage(stage, at, stages, device, group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(pipe, MICROBATCHES, loss_fn=functional.cross_entropy)
    torch.manual_seed(99 + dist.get_rank())

    chooser = torch.Generator().manual_seed(7)
    inputs, labels = torch.randn(960, WIDTH, generator=chooser), torch.randint(CLASSES, (960,), generator=chooser)
    loader = DataLoader(TensorDataset(inputs, labels), BATCH, shuffle=True, drop_last=True)
    split = (mesh["dp"].get_local_rank(), mesh["dp"].size())  # the processes of one pipeline need the same samples

    # Which processes hold the same layers is seen from the mesh where the stage is spread; here they are named.
    state = {"model": stage, "optimizer": optimizer}
    with holdfast.Checkpointer(arguments.out, state, every=arguments.every, alike=mesh["dp"]) as ck:
        for _ in ck.epochs(1000):
            for x, y in ck.batches(loader, split=split):
                if ck.global_step >= arguments.steps:
                    return
                losses: list[torch.Tensor] = []
                first, last = (x.to(device),) if at == 0 else (), {}
                if at == stages - 1:
                    last = {"target": y.to(device), "losses": losses}
                schedule.step(*first, **last)
                optimizer.step()
                optimizer.zero_grad()
                ck.step()
                if losses and ck.global_step % 50 == 0 and mesh["dp"].get_local_rank() == 0:
                    print(f"step {ck.global_step}: loss {torch.stack(losses).mean():.4f}", flush=True)
                if ck.global_step == arguments.die_at and ck.resumed_from is None:
                    ck.wait()
                    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Read the command line, join the other processes, train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="directory of the run; the same one again resumes")
    parser.add_argument("--stages", type=int, default=2, help="1, 2 or 4; the processes are divided among them")
    parser.add_argument("--steps", type=int, default=200, help="steps to train")
    parser.add_argument("--every", default="25ba", help='how often to save: "25ba", "10min"')
    parser.add_argument("--die-at", type=int, help="a fresh start kills itself after this step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        shape = (arguments.stages, dist.get_world_size() // arguments.stages)
        train(arguments, init_device_mesh(kind, shape, mesh_dim_names=("pp", "dp")), device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
